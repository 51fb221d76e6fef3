"""Rewards that are given to all rollouts of a task together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from msgspec.structs import replace

from taskmill.errors import GroupRewardError
from taskmill.programs.agent import error_record
from taskmill.records import DONE_STATES, Trace
from taskmill.tasks.scoring import call, explained, scorers
from taskmill.tasks.task import Task


def has_group_rewards(task: Task[Any]) -> bool:
    """Whether the rollouts of `task` are scored together."""
    return bool(scorers(type(task), "group_reward"))


async def score_group(task: Task[Any], traces: Sequence[Trace], of: int | None = None) -> list[Trace]:
    """The traces of all rollouts of `task`, in order of number, with its group rewards. `of` is how many it has in all.

    Where one of them failed or is missing, or a group reward fails, none can be scored: all are failed then, and run
    again on resume.
    """
    size = len(traces)
    if of is not None and size != of:
        error = GroupRewardError(
            f"the group rewards can't be given: there are {size} of {of} rollouts of the task"
        )
        return [_failed(trace, error, size) if trace.state in DONE_STATES else trace for trace in traces]
    bad = next((trace for trace in traces if trace.state not in DONE_STATES), None)
    if bad is not None:
        error = GroupRewardError(
            f"the group rewards can't be given: rollout {bad.number} of the task ended {bad.state}"
        )
        return [
            _failed(trace, error, size) if trace.state in DONE_STATES else replace(trace, group_size=size)
            for trace in traces
        ]
    rewards: list[dict[str, float]] = [dict(trace.rewards) for trace in traces]
    totals = [trace.reward or 0.0 for trace in traces]
    for scorer in scorers(type(task), "group_reward"):
        what = f"group reward {scorer.name!r}"
        try:
            offered = {"task": task, "traces": list(traces)}
            function = getattr(task, scorer.name)
            said = await call(function, what, offered, timeout=task.data.timeouts.scoring)
            numbers = _numbers(said, size, what)
            if scorer.name in rewards[0]:
                raise GroupRewardError(f"{what} has the name of another reward")
        except Exception as problem:
            error = explained(what, problem, GroupRewardError)  # type: ignore[assignment]
            return [_failed(trace, error, size) for trace in traces]
        for place, number in enumerate(numbers):
            rewards[place][scorer.name] = number
            totals[place] += scorer.weight * number
    for total in totals:
        if not math.isfinite(total):
            error = GroupRewardError(f"the weighted sum of the rewards is {total!r}")
            return [_failed(trace, error, size) for trace in traces]
    return [
        replace(trace, rewards=had, reward=total, group_size=size)
        for trace, had, total in zip(traces, rewards, totals, strict=True)
    ]


def _failed(trace: Trace, error: GroupRewardError, size: int) -> Trace:
    errors = (*trace.errors, error_record(error))
    return replace(trace, state="failed", reward=None, errors=errors, group_size=size)


def _numbers(said: Any, size: int, what: str) -> list[float]:
    if not isinstance(said, Sequence) or isinstance(said, str):
        raise GroupRewardError(f"{what} returned a {type(said).__name__}; a list of {size} numbers is needed")
    if len(said) != size:
        raise GroupRewardError(
            f"{what} returned {len(said)} numbers for {size} rollouts; one for each is needed"
        )
    for number in said:
        if not isinstance(number, Real) or not math.isfinite(number):
            raise GroupRewardError(f"{what} returned {number!r}; finite numbers are needed")
    return [float(number) for number in said]
