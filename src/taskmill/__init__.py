"""taskmill: tasks in, trajectories out.

Everything a user needs is importable from here, and imported only when it is used.
"""

from __future__ import annotations

from taskmill._version import __version__

TYPE_CHECKING = False  # for type checkers alone: importing `typing` would be most of what this import costs

_HOMES = {
    "AIAgent": "taskmill.aiagent",
    "BatchRunner": "taskmill.batch",
    "Message": "taskmill.records",
    "Trace": "taskmill.records",
    "tool": "taskmill.tools",
}

__all__ = ["AIAgent", "BatchRunner", "Message", "Trace", "__version__", "tool"]

if TYPE_CHECKING:
    from typing import Any

    from taskmill.aiagent import AIAgent
    from taskmill.batch import BatchRunner
    from taskmill.records import Message, Trace
    from taskmill.tools import tool


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'taskmill' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
