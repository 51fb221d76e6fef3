"""By what a run is scored, in a few characters: to tell whether that changed between two of its sessions."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from taskmill.store.files import read_whole
from taskmill.store.jsonl import content_hash
from taskmill.tasks.scoring import scorers
from taskmill.tasks.task import Task
from taskmill.tasks.taskset import Taskset


def scoring_of(taskset: Taskset[Any], task: Task[Any] | None) -> str:
    """A hash over the source of the modules of the taskset's class and of its first `task`'s, and over the task's
    rewards with their weights. What those modules import is not in it."""
    kinds: list[type] = [type(taskset)] if task is None else [type(taskset), type(task)]
    marked = [] if task is None else [*scorers(type(task), "reward"), *scorers(type(task), "group_reward")]
    parts = [
        sorted({_source(kind.__module__) for kind in kinds}),
        [kind.__qualname__ for kind in kinds],
        [[scorer.name, scorer.kind, scorer.weight] for scorer in marked],
    ]
    return content_hash(parts).hex()


def _source(module: str) -> str:
    """The hash of a module's source, or nothing where it has none that can be read."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return "" if file is None else sha256(read_whole(Path(file))).hexdigest()
    except OSError:
        return ""
