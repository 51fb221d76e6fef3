"""Counts of a server, as the text that Prometheus reads."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds of the buckets of request times, in seconds."""

TYPE = "text/plain; version=0.0.4"


class Metrics:
    """What was asked, how it was answered and how long that took. No address, name or key of a client is in it."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.rollouts: Counter[str] = Counter()
        self._times: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self.requests[route, status] += 1
        counts = self._times.setdefault(route, [0] * (len(BOUNDS) + 1))
        counts[bisect_left(BOUNDS, seconds)] += 1
        self._sums[route] = self._sums.get(route, 0.0) + seconds

    def text(self, gauges: dict[str, tuple[str, str, float]]) -> str:
        """The text. `gauges` are further numbers by name: their kind, what they are, and the number."""
        return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: dict[str, tuple[str, str, float]]) -> Iterator[str]:
        yield from _head(
            "taskmill_requests_total", "counter", "Requests by route and status (499: the client went away)."
        )
        for (route, status), count in sorted(self.requests.items()):
            yield f'taskmill_requests_total{{route="{route}",status="{status}"}} {count}'
        yield from _head("taskmill_request_seconds", "histogram", "Time from a request to its answer.")
        for route, counts in sorted(self._times.items()):
            total = 0
            for bound, count in zip((*BOUNDS, "+Inf"), counts, strict=True):
                total += count
                yield f'taskmill_request_seconds_bucket{{route="{route}",le="{bound}"}} {total}'
            yield f'taskmill_request_seconds_sum{{route="{route}"}} {self._sums[route]:.6f}'
            yield f'taskmill_request_seconds_count{{route="{route}"}} {total}'
        yield from _head("taskmill_rollouts_total", "counter", "Rollouts by the state they ended in.")
        for state, count in sorted(self.rollouts.items()):
            yield f'taskmill_rollouts_total{{state="{state}"}} {count}'
        for name, (kind, what, number) in gauges.items():
            yield from _head(name, kind, what)
            yield f"{name} {number:g}"


def _head(name: str, kind: str, what: str) -> Iterator[str]:
    yield f"# HELP {name} {what}"
    yield f"# TYPE {name} {kind}"
