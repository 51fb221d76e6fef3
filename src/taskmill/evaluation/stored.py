"""Which rollouts of a run are done, and what is recorded of the others: read back from the traces themselves."""

from __future__ import annotations

import asyncio
import logging

from taskmill.engine.traces import trace_of
from taskmill.records import DONE_STATES, Trace
from taskmill.store.run import RunDirectory
from taskmill.tasks.limits import Spent

logger = logging.getLogger(__name__)

YIELD_EVERY = 1000
"""Rows read between two looks at the event loop, so that an interrupt is answered at once."""


MOST_ROLLOUTS = 1_000_000
"""Rollouts of one task that a stored number may speak of; a larger one was not written by a run."""


class StoredRollouts:
    """The rollouts of a run that are done. Memory: an integer for each task, a number for each rollout that is not."""

    def __init__(self) -> None:
        self._done: dict[str, int] = {}
        self._attempts: dict[str, int] = {}
        self._seen: set[str] | None = None
        self.count = 0

    async def read(self, directory: RunDirectory, *, num_rollouts: int, spent: Spent) -> None:
        """Read what is stored, and move what will be made anew out of the way."""
        groups: dict[str, int] = {}
        damaged = 0
        for place, (_, line) in enumerate(directory.read_traces()):
            if place % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            head = _row(line)
            if head is None:
                damaged += 1
                continue
            spent.add(head.billed)
            task = _task_of(head.id)
            if head.group_size:
                groups[task] = head.group_size
            if head.state in DONE_STATES:
                self._done[task] = self._done.get(task, 0) | 1 << head.number
            self._note(head)
        if damaged:
            logger.warning("%d lines of traces.jsonl can't be read; what they recorded runs again", damaged)
        for place, (_, line) in enumerate(directory.read_attempts()):
            if place % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            head = _row(line)
            if head is not None:
                spent.add(head.billed)
                self._note(head)
        for task, size in groups.items():
            if size != num_rollouts or self._done.get(task, 0).bit_count() != size:
                self._done.pop(task, None)
        self.count = sum(done.bit_count() for done in self._done.values())
        self._attempts = {id: count for id, count in self._attempts.items() if not self.has(id)}
        directory.set_aside(self._is_superseded)
        self._seen = set() if self._done else None

    def _note(self, head: Trace) -> None:
        self._attempts[head.id] = max(self._attempts.get(head.id, 0), head.attempt)

    def _is_superseded(self, line: bytes) -> bool:
        head = _row(line)
        return head is None or not self.has(head.id)

    def has(self, rollout_id: str) -> bool:
        """Whether that rollout is done."""
        task, _, number = rollout_id.rpartition("-")
        return number.isdecimal() and len(number) < 8 and bool(self._done.get(task, 0) >> int(number) & 1)

    def missing(self, task: str, num_rollouts: int) -> list[int]:
        """The numbers of the rollouts of a task that are not done."""
        if self._seen is not None and task in self._done:
            self._seen.add(task)
        done = self._done.get(task, 0)
        return [number for number in range(num_rollouts) if not done >> number & 1]

    def attempt(self, rollout_id: str) -> int:
        """Which try the next one at that rollout is, from 1."""
        return self._attempts.get(rollout_id, 0) + 1

    def done(self, task: str) -> int:
        """How many rollouts of a task are done."""
        return self._done.get(task, 0).bit_count()

    def has_surplus(self, undrawn: int) -> bool:
        """Whether some stored tasks can't be among the `undrawn` ones that may still come."""
        return self._seen is not None and len(self._done) - len(self._seen) > undrawn

    def surplus(self) -> frozenset[str]:
        """Hashes of the stored tasks which were not drawn this time. Memory: one for each, and nothing without them."""
        if self._seen is None or len(self._seen) == len(self._done):
            return frozenset()
        return frozenset(task for task in self._done if task not in self._seen)


def rollout_id(task: str, number: int) -> str:
    """The id of one rollout of the task with that hash (hexadecimal)."""
    return f"{task}-{number}"


def _task_of(id: str) -> str:
    return id.rpartition("-")[0]


def _row(line: bytes) -> Trace | None:
    """A stored trace, looked at whole, so that what counts as done here can be read by everything else."""
    trace = trace_of(line)
    if trace is None or not 0 <= trace.number < MOST_ROLLOUTS:
        return None
    return trace if trace.id.rpartition("-")[2] == str(trace.number) else None
