"""Models that need no weights: one that gives a task's reference solution, and one that does nothing."""

from __future__ import annotations

from typing import Any

from taskmill.errors import RunAbortedError, StoreError, TaskError
from taskmill.models.base import Completion, Request
from taskmill.records import Message
from taskmill.tasks.rollout import TaskRollout
from taskmill.tasks.scoring import call, explained
from taskmill.tasks.task import Task
from taskmill.tasks.words import a


class Solver:
    """Answers with what `task.solve` says. Tell it the rollout it answers in before that is run."""

    def __init__(self, task: Task[Any]) -> None:
        self._task = task
        self.rollout: TaskRollout | None = None

    @property
    def name(self) -> str:
        """The model's name, as it stands in records."""
        return "reference"

    async def complete(self, request: Request) -> Completion:
        """The next turn of the reference solution. Raises `TaskError`, which names `solve`."""
        assert self.rollout is not None
        assert self._task.solve is not None
        timeout = self._task.data.timeouts.scoring
        try:
            said = await call(self._task.solve, "solve", self.rollout.offered, timeout=timeout)
        except (StoreError, RunAbortedError):
            raise
        except Exception as error:
            raise explained("solve", error) from error
        return _completion(_turn(said), self.name)

    async def close(self) -> None:
        """Nothing to let go of."""


class Silent:
    """Answers everything with an empty text: what a rollout comes to when nothing is done."""

    @property
    def name(self) -> str:
        """The model's name, as it stands in records."""
        return "untouched"

    async def complete(self, request: Request) -> Completion:
        """Say nothing."""
        return _completion(Message("assistant", ""), self.name)

    async def close(self) -> None:
        """Nothing to let go of."""


def _turn(said: Any) -> Message:
    if said is None:
        return Message("assistant", "")
    if isinstance(said, str):
        return Message("assistant", said)
    if isinstance(said, Message):
        if said.role != "assistant":
            raise TaskError(f"solve said a message of the role {said.role!r}; it speaks as 'assistant'")
        return said
    raise TaskError(f"solve said {a(said)}; a text, a Message or None is needed")


def _completion(message: Message, model: str) -> Completion:
    reason = "tool_calls" if message.tool_calls else "stop"
    return Completion(message, finish_reason=reason, model=model, cost=0.0)
