"""Where a run stands, counted only from what is on disk."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from taskmill.records import State

RECENT = 64
"""How many finished rollouts the rate is taken from: the tail of a run is not like its start."""


class Progress:
    """Counts for a display, and a hook for whoever wants every event.

    `total` is what was planned, `reused` what earlier sessions had done, `states` what this session recorded.
    `on_event` gets a mapping with `event` and what belongs to it, as each thing happens.
    """

    def __init__(
        self,
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_event = on_event
        self._clock = clock
        self.in_flight = 0
        self._reset(0, 0)

    def _reset(self, total: int, reused: int) -> None:
        self.total = total
        self.reused = reused
        self.states: Counter[State] = Counter()
        self.calls = 0
        self.tool_calls = 0
        self.tokens = 0
        self.cost: float | None = 0.0
        self.first_error: str | None = None
        self._started = self._clock()
        self._recent: deque[float] = deque(maxlen=RECENT)

    def tell(self, event: str, **fields: Any) -> None:
        """Pass an event on, and nothing else."""
        if self._on_event is not None:
            self._on_event({"event": event, **fields})

    def begin(self, total: int, reused: int) -> None:
        """Work starts, and counting with it: `total` planned, `reused` of them done before."""
        self._reset(total, reused)
        self.tell("started", total=total, reused=reused)

    def recorded(
        self, state: State, *, calls: int, tool_calls: int, tokens: int, cost: float | None, **fields: Any
    ) -> None:
        """A rollout's record is on disk."""
        self.states[state] += 1
        self.calls += calls
        self.tool_calls += tool_calls
        self.tokens += tokens
        if cost is None or self.cost is None:
            self.cost = None
        else:
            self.cost += cost
        self._recent.append(self._clock())
        self.tell("recorded", state=state, calls=calls, tokens=tokens, cost=cost, **fields)

    @property
    def finished(self) -> int:
        """Rollouts of this session that ended in some state."""
        return sum(self.states.values())

    @property
    def elapsed(self) -> float:
        """Seconds since work started."""
        return self._clock() - self._started

    @property
    def rate(self) -> float:
        """Rollouts a second, from the most recent ones."""
        if len(self._recent) < 2:
            return self.finished / self.elapsed if self.elapsed > 0 else 0.0
        span = self._clock() - self._recent[0]
        return len(self._recent) / span if span > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the recent rate; `None` before there is one."""
        left = self.total - self.reused - self.finished
        return left / self.rate if self.rate > 0 and self.finished else None
