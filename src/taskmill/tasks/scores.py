"""The scores of one rollout: rewards, metrics and grades, of a live one or of a stored trace."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from taskmill.errors import JudgeError, RewardError, TaskError
from taskmill.programs.agent import error_record
from taskmill.records import ErrorRecord, Judgement, State, Trace
from taskmill.store.jsonl import encode_row
from taskmill.tasks.limits import LIMIT_NAMES
from taskmill.tasks.scoring import Later, call, explained, named_numbers, scorers
from taskmill.tasks.task import Task

AskJudge = Callable[[str], Awaitable[Judgement]]
"""Has the judge of that name grade the rollout. Raises `JudgeError`."""

SCORING_ERRORS = frozenset(
    {RewardError.__name__, *(kind.__name__ for kind in RewardError.__subclasses__()), "JudgeError"}
)
"""Errors of scoring alone: the conversation before them is whole, and can be scored again."""

PARTIAL_REASONS = frozenset(
    {
        "content_filter",
        "context_window",
        "empty_answer",
        "length",
        "max_iterations",
        "task_timeout",
        "unusable_tool_calls",
    }
    | {prefix + name for name in LIMIT_NAMES for prefix in ("", "run_")}
)
"""Why conversations end as partial ones."""


class Scores:
    """What a rollout is given, as it is had. `offered` is what the task's functions may ask for by name."""

    def __init__(self, task: Task[Any], offered: Mapping[str, Any]) -> None:
        self._task = task
        self._offered = offered
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.judgements: list[Judgement] = []
        self.errors: list[ErrorRecord] = []
        self.total: float | None = None
        """The weighted sum; `None` before it is there, and where a part of it could not be had."""

    async def take(self, ask: AskJudge | None) -> None:
        """Call every reward and metric, then every judge; `None` for `ask` leaves the judges out.

        Whatever fails is an error, and the others are called all the same.
        """
        kind, total = type(self._task), 0.0
        for scorer in scorers(kind, "reward"):
            for value in (await self._numbers(scorer.name, "reward", self.rewards)).values():
                total += scorer.weight * value
        for scorer in scorers(kind, "metric"):
            await self._numbers(scorer.name, "metric", self.metrics)
        if ask is not None:
            for name, config in self._task.config.judges.items():
                total += config.weight * await self._grade(name, ask)
        if not math.isfinite(total):
            self.errors.append(error_record(RewardError(f"the weighted sum of the rewards is {total!r}")))
        if not self.errors:
            self.total = total

    async def _numbers(self, name: str, kind: str, into: dict[str, float]) -> dict[str, float]:
        what = f"{kind} {name!r}"
        try:
            function = getattr(self._task, name)
            value = await call(function, what, self._offered, timeout=self._task.data.timeouts.scoring)
            numbers = named_numbers(name, value, what)
            if taken := numbers.keys() & into.keys():
                raise RewardError(f"{what} returned {min(taken)!r}, and that name is taken by another")
        except Exception as error:
            self.errors.append(error_record(explained(what, error, RewardError)))
            return {}
        into.update(numbers)
        return numbers

    async def _grade(self, name: str, ask: AskJudge) -> float:
        try:
            said = await ask(name)
            self.judgements.append(said)
            if said.score is None:
                raise JudgeError(f"judge {name!r} gave no grade: its answer ends with {said.said[-100:]!r}")
            if name in self.rewards:
                raise JudgeError(f"judge {name!r} has the name of another reward")
        except JudgeError as error:
            self.errors.append(error_record(error))
            return 0.0
        self.rewards[name] = said.score
        return said.score


async def score_again(task: Task[Any], trace: Trace) -> Trace:
    """A stored trace with today's scores. Its judges' grades stay as they are, its calls add nothing to the bill.

    The functions get the stored state, as far as it was storable; a sandbox is not there any more, and a function that
    asks for it is an error of the trace. A trace whose conversation failed can't be scored and comes back as it was.
    """
    trace = replace(
        trace,
        billed_before=len(trace.calls),
        lost_calls=(),
        judgements=tuple(replace(said, call=replace(said.call, replayed=True)) for said in trace.judgements),
    )
    if not can_be_scored(trace):
        return trace
    had = replace(
        trace,
        state=trace.state if trace.state != "failed" else _state_of(trace),
        errors=tuple(error for error in trace.errors if error.type not in SCORING_ERRORS),
        rewards={},
        metrics={},
        reward=None,
        judgements=(),
        group_size=0,
    )
    state = dict(trace.task_state)

    def no_sandbox() -> Any:
        raise TaskError("its sandbox is gone: a stored trace is scored without one")

    scores = Scores(
        task,
        {"task": task, "trace": had, "state": state, "messages": had.messages, "sandbox": Later(no_sandbox)},
    )
    stored = {said.judge: said for said in trace.judgements}

    async def recall(name: str) -> Judgement:
        if name not in stored:
            raise JudgeError(f"judge {name!r} gave no grade when the trace was made, and is not asked now")
        return stored[name]

    await scores.take(recall)
    return replace(
        had,
        state="failed" if scores.errors else had.state,
        errors=(*had.errors, *scores.errors),
        rewards=scores.rewards,
        metrics=scores.metrics,
        reward=scores.total,
        judgements=trace.judgements,
        task_state=storable_state(state),
    )


def can_be_scored(trace: Trace) -> bool:
    """Whether the conversation of a trace came to its end: if it failed, then only in being scored."""
    if trace.state == "cancelled":
        return False
    return trace.state != "failed" or (
        trace.stop_reason != "error" and any(error.type in SCORING_ERRORS for error in trace.errors)
    )


def _state_of(trace: Trace) -> State:
    return "partial" if trace.stop_reason in PARTIAL_REASONS else "completed"


def storable_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of the state is stored: what stands under a text that begins with no underscore.

    What JSON can't say is stored as its `repr`, and what can't be looked at is said to be so: no rollout is lost
    for it.
    """
    stored: dict[str, Any] = {}
    for key in list(state):
        if isinstance(key, str) and not key.startswith("_"):
            stored[key] = _storable(state.get(key))
    return stored


def _storable(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=repr)
        encode_row(plain)
    except Exception as error:  # a cycle, keys that are no text, a thread that still writes to it
        return f"<{type(value).__name__} that can't be stored: {type(error).__name__}>"
    return plain
