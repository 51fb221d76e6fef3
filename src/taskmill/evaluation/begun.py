"""The tasks of a run, begun to be drawn: what is wrong with a taskset shows before anything is written."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from taskmill.tasks.task import Task
from taskmill.tasks.taskset import Draw, Taskset, require_packages


class Begun(NamedTuple):
    """The tasks of a run, the first of them built already (`None` where there is none), and what is warned of."""

    tasks: Draw[Any]
    first: Task[Any] | None
    warnings: Sequence[str] = ()


def begin_draw(taskset: Taskset[Any], num_tasks: int | None, shuffle: bool, seed: int) -> Begun:
    """Begin to draw the tasks of a run.

    Raises `TasksetError` where a package is missing, `load` fails, or the first task can't be built.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tasks = taskset.draw(num_tasks, shuffle, seed)
    first = tasks.begin()
    require_packages(taskset)  # after that: what `load` itself says of a package it misses tells more
    return Begun(tasks, first, [str(warning.message) for warning in caught])
