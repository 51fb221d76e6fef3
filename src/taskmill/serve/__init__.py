"""The environment server: rollouts by number, for trainers and other machines."""

from taskmill.serve.server import EnvServer

__all__ = ["EnvServer"]
