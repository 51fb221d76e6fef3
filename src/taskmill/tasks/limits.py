"""What bounds a rollout, and what bounds a run: turns, tokens, time, money."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from taskmill.records import CallRecord

Count = Annotated[int, Field(ge=1, strict=True)]
Amount = Annotated[float, Field(gt=0)]


class Limits(BaseModel):
    """What may be spent; `None` is no limit. A rollout that reaches one ends there, and is scored all the same.

    Tokens and money are counted after each call, so the call that reaches a limit is still made. The wall clock
    (`max_seconds`) cuts a call short.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_turns: Count | None = None
    """Turns of the model."""
    max_input_tokens: Count | None = None
    max_output_tokens: Count | None = None
    max_seconds: Amount | None = None
    """Seconds by the clock on the wall."""
    max_working_seconds: Amount | None = None
    """Seconds in the model and in tools, without queues and back-off."""
    max_cost: Amount | None = None
    """US dollars, of calls whose price is known."""


LIMIT_NAMES = tuple(Limits.model_fields)


class Spent:
    """What was spent so far, and whether that is all there is. `what` goes before the name of the limit."""

    def __init__(self, limits: Limits, what: str = "") -> None:
        self._limits = limits
        self._what = what
        self.bounded = any(value is not None for _, value in limits)
        self.turns = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self.cost = 0.0
        self.working_seconds = 0.0
        self.deadline: float | None = None
        """When the wall clock ends it, in the time of the event loop."""

    def begin(self) -> None:
        """Start the clock."""
        if self._limits.max_seconds is not None:
            self.deadline = asyncio.get_running_loop().time() + self._limits.max_seconds

    def add(self, calls: Iterable[CallRecord], *, tool_seconds: float = 0.0) -> None:
        """Count calls that were made."""
        if not self.bounded:
            return
        for call in calls:
            self.turns += 1
            self.input_tokens += call.usage.input_tokens
            self.output_tokens += call.usage.output_tokens
            self.cost += call.cost or 0.0
            self.working_seconds += call.seconds
        self.working_seconds += tool_seconds

    def reached(self) -> str | None:
        """The name of a limit that is reached, or `None`."""
        if not self.bounded:
            return None
        limits = self._limits
        for name, spent, limit in (
            ("max_turns", self.turns, limits.max_turns),
            ("max_input_tokens", self.input_tokens, limits.max_input_tokens),
            ("max_output_tokens", self.output_tokens, limits.max_output_tokens),
            ("max_working_seconds", self.working_seconds, limits.max_working_seconds),
            ("max_cost", self.cost, limits.max_cost),
        ):
            if limit is not None and spent >= limit:
                return self._what + name
        if self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline:
            return self._what + "max_seconds"
        return None
