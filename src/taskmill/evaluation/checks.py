"""What is found of one task when it is validated, and how it is found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from taskmill.errors import RunAbortedError, StoreError
from taskmill.evaluation.solving import Silent, Solver
from taskmill.models.base import Model
from taskmill.records import DONE_STATES, ErrorRecord, Trace
from taskmill.store.run import RunDirectory
from taskmill.tasks.groups import has_group_rewards, score_group
from taskmill.tasks.rollout import MakeSandbox, RolloutSettings, TaskRollout
from taskmill.tasks.scoring import scorers
from taskmill.tasks.task import Task

logger = logging.getLogger(__name__)


class Reason(Struct, frozen=True):
    """Why a task is not valid: the kind in a word, and a sentence."""

    kind: str
    message: str


class Tried(Struct, frozen=True, omit_defaults=True):
    """How a rollout of the task ended: with the reference solution, or untouched."""

    reward: float | None = None
    rewards: Mapping[str, float] = {}
    metrics: Mapping[str, float] = {}
    stop_reason: str = ""
    turns: int = 0
    errors: tuple[ErrorRecord, ...] = ()


class TaskCheck(Struct, frozen=True, omit_defaults=True):
    """What was found of a task. `id` is the hash of its data, `attempt` counts the times it was looked at."""

    id: str
    state: Literal["valid", "invalid"]
    idx: int
    name: str | None = None
    reasons: tuple[Reason, ...] = ()
    reference: Tried | None = None
    untouched: Tried | None = None
    seconds: float = 0.0
    attempt: int = 1


_decode = msgspec.json.Decoder(TaskCheck).decode


def read_checks(directory: RunDirectory) -> Iterator[TaskCheck]:
    """The rows of a validation. Damaged lines are passed over with a warning that counts them."""
    damaged = 0
    for _, line in directory.read_validation():
        try:
            yield _decode(line)
        except (msgspec.DecodeError, RecursionError):
            damaged += 1
    if damaged:
        logger.warning("%d lines of validation.jsonl can't be read and are passed over", damaged)


def is_superseded(line: bytes) -> bool:
    """Whether a stored row is of a task that is looked at again."""
    try:
        return _decode(line).state != "valid"
    except (msgspec.DecodeError, RecursionError):
        return True


async def check_task(
    task: Task[Any],
    *,
    id: str,
    attempt: int,
    pass_reward: float,
    settings: RolloutSettings,
    make_sandbox: MakeSandbox,
    clock: Callable[[], float],
) -> TaskCheck:
    """Roll out the reference solution and nothing at all, and call the task's own `validate`.

    The reference solution must reach `pass_reward` with every reward and metric given; the untouched rollout must
    be scored as well, and stay below. Judges are models, so none is asked: each counts as if it gave the reference
    solution its best grade, and the untouched rollout none. Group rewards are called on the two rollouts and must give
    numbers, which count only where the task has no other reward. `clock` gives the seconds this took.
    """
    attempts = _Attempts(task, id, settings, make_sandbox)
    reasons: list[Reason] = []
    reference = untouched = None
    try:
        if task.solve is not None:
            solver = Solver(task)
            reference = await attempts.make(solver, 0)
        elif task.validate is None:
            reasons.append(Reason("no_solution", "has no reference solution"))
        untouched = await attempts.make(Silent(), 1)
        if task.validate is not None:
            reasons += await attempts.own_check()
    except (StoreError, RunAbortedError):
        raise
    except Exception as error:
        reasons.append(Reason("not_run", f"can't be run: {type(error).__name__}: {error}"))
    own = [reference, untouched]
    if reference is not None and untouched is not None and has_group_rewards(task):
        reference, untouched, problem = await _grouped(task, reference, untouched)
        reasons += problem
        if not problem and not scorers(type(task), "reward") and not task.config.judges:
            own = [reference, untouched]
    if own[0] is not None:
        reasons += _reference_faults(task, own[0], pass_reward)
    if own[1] is not None:
        reasons += _untouched_faults(own[1], pass_reward)
    return TaskCheck(
        id=id,
        state="invalid" if reasons else "valid",
        idx=task.data.idx,
        name=task.data.name,
        reasons=tuple(reasons),
        reference=_tried(reference),
        untouched=_tried(untouched),
        seconds=round(clock(), 6),
        attempt=attempt,
    )


class _Attempts:
    """The rollouts that a check makes. They are numbered, so that each has a sandbox of its own."""

    def __init__(
        self, task: Task[Any], id: str, settings: RolloutSettings, make_sandbox: MakeSandbox
    ) -> None:
        self._task = task
        self._id = id
        self._settings = settings
        self._make_sandbox = make_sandbox

    def _start(self, model: Model, number: int) -> TaskRollout:
        return TaskRollout(
            self._task,
            rollout_id=f"{self._id}-{number}",
            number=number,
            model=model,
            make_sandbox=self._make_sandbox,
            settings=self._settings,
        )

    async def make(self, model: Model, number: int) -> Trace:
        rollout = self._start(model, number)
        if isinstance(model, Solver):
            model.rollout = rollout
        await rollout.run()
        return rollout.trace()

    async def own_check(self) -> list[Reason]:
        rollout = self._start(Silent(), 2)
        await rollout.check()
        return [Reason("validate", _told(error)) for error in rollout.trace().errors]


async def _grouped(task: Task[Any], reference: Trace, untouched: Trace) -> tuple[Trace, Trace, list[Reason]]:
    if reference.state not in DONE_STATES or untouched.state not in DONE_STATES:
        return reference, untouched, []
    scored = await score_group(task, [reference, untouched])
    failed = [error for error in scored[0].errors[len(reference.errors) :] if scored[0].state == "failed"]
    if failed:
        return reference, untouched, [Reason("group_reward", _told(error)) for error in failed]
    return scored[0], scored[1], []


def _reference_faults(task: Task[Any], trace: Trace, pass_reward: float) -> list[Reason]:
    if trace.state not in DONE_STATES:
        return [
            Reason("reference_failed", f"its reference solution failed: {_told(error)}")
            for error in trace.errors
        ]
    judged = sum(max(config.weight, 0.0) for config in task.config.judges.values())
    reward = (trace.reward or 0.0) + judged
    if reward >= pass_reward:
        return []
    parts = ", ".join(f"{name} {value:g}" for name, value in trace.rewards.items()) or "it has no rewards"
    told = (
        f"its reference solution got {reward:g}, and {pass_reward:g} is needed ({parts}; {trace.stop_reason})"
    )
    return [Reason("reference_reward", told)]


def _untouched_faults(trace: Trace, pass_reward: float) -> list[Reason]:
    if trace.state not in DONE_STATES:
        return [
            Reason("untouched_failed", f"an untouched rollout can't be scored: {_told(error)}")
            for error in trace.errors
        ]
    if trace.reward is None or trace.reward < pass_reward:
        return []
    told = f"is solved by doing nothing: an untouched rollout got {trace.reward:g}, and must stay below {pass_reward:g}"
    return [Reason("untouched_reward", told)]


def _tried(trace: Trace | None) -> Tried | None:
    if trace is None:
        return None
    return Tried(
        reward=trace.reward,
        rewards=trace.rewards,
        metrics=trace.metrics,
        stop_reason=trace.stop_reason,
        turns=len(trace.calls),
        errors=trace.errors,
    )


def _told(error: ErrorRecord) -> str:
    return f"{error.type}: {error.message}"
