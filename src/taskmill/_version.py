"""The version, alone in its module so that any room may say it."""

__version__ = "0.1.0"
