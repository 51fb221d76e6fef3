"""What is to be done: tasks with rewards, and the tasksets they come from."""

from __future__ import annotations

from taskmill.tasks.judge import JudgeConfig
from taskmill.tasks.registry import find_taskset
from taskmill.tasks.scoring import group_reward, metric, reward, stop
from taskmill.tasks.task import Resources, Task, TaskConfig, TaskData, TaskTimeouts
from taskmill.tasks.taskset import Taskset, TasksetConfig

__all__ = [
    "JudgeConfig",
    "Resources",
    "Task",
    "TaskConfig",
    "TaskData",
    "TaskTimeouts",
    "Taskset",
    "TasksetConfig",
    "find_taskset",
    "group_reward",
    "metric",
    "reward",
    "stop",
]
