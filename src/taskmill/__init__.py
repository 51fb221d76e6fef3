"""taskmill: tasks in, trajectories out.

Everything a user needs is importable from here, and imported only when it is used.
"""

from __future__ import annotations

from taskmill._version import __version__

TYPE_CHECKING = False  # for type checkers alone: importing `typing` would be most of what this import costs

_HOMES = {
    "AIAgent": "taskmill.aiagent",
    "BatchRunner": "taskmill.batch",
    "Conversation": "taskmill.conversations",
    "EnvClient": "taskmill.engine.envclient",
    "EnvServer": "taskmill.serve",
    "Message": "taskmill.records",
    "Participant": "taskmill.conversations",
    "RunReport": "taskmill.conversations",
    "RunResult": "taskmill.conversations",
    "Task": "taskmill.tasks",
    "TaskData": "taskmill.tasks",
    "Taskset": "taskmill.tasks",
    "TokenBudget": "taskmill.conversations",
    "Trace": "taskmill.records",
    "Transcript": "taskmill.conversations",
    "available_devices": "taskmill.conversations",
    "dataset_field": "taskmill.conversations",
    "evaluate": "taskmill.evaluation",
    "group_reward": "taskmill.tasks",
    "metric": "taskmill.tasks",
    "register_analyzer": "taskmill.conversations",
    "reward": "taskmill.tasks",
    "run": "taskmill.conversations",
    "run_jobs": "taskmill.conversations",
    "stop": "taskmill.tasks",
    "tool": "taskmill.tools",
}

__all__ = [
    "AIAgent",
    "BatchRunner",
    "Conversation",
    "EnvClient",
    "EnvServer",
    "Message",
    "Participant",
    "RunReport",
    "RunResult",
    "Task",
    "TaskData",
    "Taskset",
    "TokenBudget",
    "Trace",
    "Transcript",
    "__version__",
    "available_devices",
    "dataset_field",
    "evaluate",
    "group_reward",
    "metric",
    "register_analyzer",
    "reward",
    "run",
    "run_jobs",
    "stop",
    "tool",
]

if TYPE_CHECKING:
    from typing import Any

    from taskmill.aiagent import AIAgent
    from taskmill.batch import BatchRunner
    from taskmill.conversations import (
        Conversation,
        Participant,
        RunReport,
        RunResult,
        TokenBudget,
        Transcript,
        available_devices,
        dataset_field,
        register_analyzer,
        run,
        run_jobs,
    )
    from taskmill.engine.envclient import EnvClient
    from taskmill.evaluation import evaluate
    from taskmill.records import Message, Trace
    from taskmill.serve import EnvServer
    from taskmill.tasks import Task, TaskData, Taskset, group_reward, metric, reward, stop
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
