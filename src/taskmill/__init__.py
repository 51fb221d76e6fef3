"""taskmill: tasks in, trajectories out.

Everything a user needs is importable from here, and imported only when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from taskmill._version import __version__

_HOMES = {
    "AIAgent": "taskmill.aiagent",
    "BatchRunner": "taskmill.batch",
    "Message": "taskmill.records",
    "Trace": "taskmill.records",
    "tool": "taskmill.tools",
}

__all__ = ["AIAgent", "BatchRunner", "Message", "Trace", "__version__", "tool"]

if TYPE_CHECKING:
    from taskmill.aiagent import AIAgent
    from taskmill.batch import BatchRunner
    from taskmill.records import Message, Trace
    from taskmill.tools import tool


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'taskmill' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
