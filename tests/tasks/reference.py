"""Rollouts of a task with the model that knows, and with the one that says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskmill.evaluation.solving import Silent, Solver
from taskmill.models.base import Model
from taskmill.models.scripted import ScriptedModel
from taskmill.records import Message, Trace
from taskmill.tasks.rollout import TaskRollout
from taskmill.tasks.task import Task, TaskData


def no_sandbox(rollout_id: str, data: TaskData) -> Any:
    raise AssertionError("nothing asked for a sandbox")


async def rolled(task: Task[Any], model: Model) -> Trace:
    rollout = TaskRollout(task, rollout_id="r", model=model, make_sandbox=no_sandbox)
    if isinstance(model, Solver):
        model.rollout = rollout
    await rollout.run()
    return rollout.trace()


async def solved(task: Task[Any]) -> Trace:
    return await rolled(task, Solver(task))


async def untouched(task: Task[Any]) -> Trace:
    return await rolled(task, Silent())


async def answered(task: Task[Any], answers: Sequence[str]) -> Trace:
    return await rolled(task, ScriptedModel(list(answers)))


def said(*answers: str) -> Trace:
    """A trace in which the model said this, and nothing else is known."""
    return Trace(
        id="r", state="completed", messages=tuple(Message("assistant", answer) for answer in answers)
    )
