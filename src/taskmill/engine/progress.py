"""Where a run stands, counted only from what is on disk."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from taskmill.models.base import Completion

NOT_DONE = frozenset({"failed", "cancelled"})
"""States that leave a rollout to be done by a later session."""

WINDOW_SECONDS = 30.0
WINDOW_ROLLOUTS = 20
"""The rate is taken from so long ago, and from so many rollouts, at least: that of an instant says nothing."""

MARK_SECONDS = 0.5
"""The time between two moments that are kept for the rate."""


class Progress:
    """Counts for a display, and a hook for whoever wants every event.

    `total` is what was planned (0 where that is not known), `reused` what earlier sessions had done, `states` what
    this session recorded.
    `on_event` gets a mapping with `event` and what belongs to it, as each thing happens.
    """

    def __init__(
        self,
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_event = on_event
        self._clock = clock
        self.begun = False
        self.in_flight = 0
        self._reset(0, 0)

    def _reset(self, total: int, reused: int) -> None:
        self.total = total
        self.reused = reused
        self.states: Counter[str] = Counter()
        self.calls = 0
        self.tool_calls = 0
        self.tokens = 0
        self.cost: float | None = 0.0
        self.first_error: str | None = None
        self.scored = 0
        self.rewards = 0.0
        self.turns: int | None = None
        self.generated = 0
        self._rows: dict[int, int] = {}
        self._started = self._clock()
        self._marks: deque[tuple[float, int]] = deque([(self._started, 0)])
        self._latest = self._started
        self.calls_made = 0
        self.tokens_made = 0
        self._cost_made = 0.0
        self._unpriced = False

    def tell(self, event: str, **fields: Any) -> None:
        """Pass an event on, and nothing else."""
        if self._on_event is not None:
            self._on_event({"event": event, **fields})

    def begin(self, total: int, reused: int) -> None:
        """Work starts, and counting with it: `total` planned, `reused` of them done before."""
        self._reset(total, reused)
        self.begun = True
        self.tell("started", total=total, reused=reused)

    def recorded(
        self, state: str, *, calls: int, tool_calls: int, tokens: int, cost: float | None, **fields: Any
    ) -> None:
        """A rollout's record is on disk. A `reward` among its fields counts for `reward`."""
        if (reward := fields.get("reward")) is not None:
            self.scored += 1
            self.rewards += reward
        self.states[state] += 1
        self.calls += calls
        self.tool_calls += tool_calls
        self.tokens += tokens
        if cost is None or self.cost is None:
            self.cost = None
        else:
            self.cost += cost
        self._mark()
        self.tell("recorded", state=state, calls=calls, tokens=tokens, cost=cost, **fields)

    def answered(self, completion: Completion) -> None:
        """A model call was answered and paid for; the record of its rollout comes later."""
        self.calls_made += 1
        self.tokens_made += completion.usage.input_tokens + completion.usage.output_tokens
        if completion.cost is None:
            self._unpriced = True
        else:
            self._cost_made += completion.cost

    @property
    def spent(self) -> tuple[int, int, float | None]:
        """Calls, tokens and cost of this session: of what was answered, or recorded where answers are not told."""
        if self.calls_made >= self.calls:
            return self.calls_made, self.tokens_made, None if self._unpriced else self._cost_made
        return self.calls, self.tokens, self.cost

    def heard(self, tokens: int, *, rows: int | None = None, worker: int = 0) -> None:
        """A turn of a conversation was said, of so many tokens; its record comes later.

        `rows` are in the running batch of the process that said it, number `worker`, where there is one.
        """
        self.turns = (self.turns or 0) + 1
        self.generated += tokens
        if rows is not None:
            self._rows[worker] = rows

    @property
    def rows(self) -> int | None:
        """Rows in running batches, when last heard of; `None` where no model runs here."""
        return sum(self._rows.values()) if self._rows else None

    @property
    def token_rate(self) -> float:
        """Tokens a second that were generated in turns of conversations."""
        return self.generated / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def reward(self) -> float | None:
        """The mean reward of this session's rollouts, as far as they have one."""
        return self.rewards / self.scored if self.scored else None

    @property
    def finished(self) -> int:
        """Rollouts of this session that ended in some state."""
        return sum(self.states.values())

    @property
    def done(self) -> int:
        """Rollouts that no later session has to do, those of earlier sessions among them."""
        return self.reused + sum(count for state, count in self.states.items() if state not in NOT_DONE)

    @property
    def elapsed(self) -> float:
        """Seconds since work started."""
        return self._clock() - self._started

    @property
    def mean_rate(self) -> float:
        """Rollouts a second, of the whole session; cancelled ones came to no end of their own."""
        return (self.finished - self.states["cancelled"]) / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def rate(self) -> float:
        """Rollouts a second, of late."""
        began, before = self._marks[0]
        span = self._clock() - began
        return (self.finished - before) / span if span > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the recent rate; `None` before there is one, and where the total is not known.

        It counts down until the next rollout is overdue, and grows from then on.
        """
        began, before = self._marks[0]
        count = self.finished - before
        if not self.total or count <= 0:
            return None
        left = max(0, self.total - self.reused - self.finished)
        gap = (self._latest - began) / count
        waited = self._clock() - self._latest
        return max(0.0, left * gap - min(waited, gap) + max(0.0, waited - gap) * left / count)

    def _mark(self) -> None:
        """Keep this moment, and let go of those that are no longer needed for the rate."""
        now, finished, marks = self._clock(), self.finished, self._marks
        self._latest = now
        if now - marks[-1][0] >= MARK_SECONDS:
            marks.append((now, finished))
        while (
            len(marks) > 1
            and now - marks[1][0] >= WINDOW_SECONDS
            and finished - marks[1][1] >= WINDOW_ROLLOUTS
        ):
            marks.popleft()


def logged(
    line_of: Callable[[Mapping[str, Any]], str | None], logger: logging.Logger
) -> Callable[[Mapping[str, Any]], None]:
    """A listener for runs that have none: what went wrong as warnings, the rest as information."""

    def log(event: Mapping[str, Any]) -> None:
        line = line_of(event)
        if line is not None:
            wrong = event["event"] in ("warning", "first_error")
            logger.log(logging.WARNING if wrong else logging.INFO, "%s", line)

    return log
