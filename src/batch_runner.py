"""The batch runner under the module name that scripts written for such runners import."""

from taskmill.batch import BatchRunner

__all__ = ["BatchRunner"]
