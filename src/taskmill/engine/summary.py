"""What a run came to, computed from what is stored and from nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct, field

from taskmill.records import Usage
from taskmill.store.run import RunDirectory


class ToolCount(Struct):
    """How often a tool was called, and how the calls ended."""

    count: int = 0
    success: int = 0
    failure: int = 0


class ReasoningCount(Struct):
    """Assistant turns of a sample, with and without reasoning."""

    assistant_turns: int = 0
    with_reasoning: int = 0
    without_reasoning: int = 0


class Billed(Struct):
    """What a record adds to the bill: the calls that no earlier record of the same rollout was billed for.

    `cost` is that of the calls whose price is known, the others are `unpriced_calls`.
    """

    calls: int = 0
    usage: Usage = Usage()
    cost: float | None = None
    unpriced_calls: int = 0


class StoredSample(Struct):
    """The fields of a stored row that statistics need; everything else on the line is passed over."""

    state: str = ""
    reason: str = ""
    completed: bool = False
    partial: bool = False
    stop_reason: str = ""
    api_calls: int = 0
    usage: Usage = Usage()
    cost: float | None = None
    billed: Billed | None = None
    tool_stats: dict[str, ToolCount] = field(default_factory=dict)
    reasoning: ReasoningCount = field(default_factory=ReasoningCount)
    error: Mapping[str, Any] | None = None


_decode = msgspec.json.Decoder(StoredSample).decode


def sample_of(line: bytes) -> StoredSample | None:
    """What a stored line says of its sample; `None` for a line that is no record, or whose counts can't be read."""
    try:
        return _decode(line)
    except msgspec.DecodeError:
        return None


def shard_samples(run: RunDirectory) -> Iterator[StoredSample]:
    """The samples in the shards of a run, as far as they can be read: the merge counts the others."""
    for shard in run.shard_numbers():
        for _, line in run.read_shard(shard):
            sample = sample_of(line)
            if sample is not None:
                yield sample


def outcome_samples(run: RunDirectory) -> Iterator[StoredSample | None]:
    """The attempts that gave no row, `None` for a line that is none."""
    return (sample_of(line) for _, line in run.read_outcomes())


class Totals:
    """Adds samples up. Memory: one counter for each tool, stop reason and error class."""

    def __init__(self) -> None:
        self.samples = 0
        self.tools: dict[str, ToolCount] = {}
        self.reasoning = ReasoningCount()
        self.stop_reasons: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.calls = 0
        self.usage = Usage()
        self.cost: float = 0.0
        self.unpriced_calls = 0

    def add(self, sample: StoredSample) -> None:
        """Count one stored record. Failed attempts count for the bill, not for tools and reasoning."""
        self._bill(sample)
        if sample.error is not None:
            self.errors[str(sample.error.get("type", "unknown"))] += 1
        if sample.state in ("failed", "cancelled"):
            return
        self.samples += 1
        if sample.stop_reason:
            self.stop_reasons[sample.stop_reason] += 1
        for name, seen in sample.tool_stats.items():
            total = self.tools.get(name)
            if total is None:
                total = self.tools[name] = ToolCount()
            if seen.count or seen.success or seen.failure:
                total.count += seen.count
                total.success += seen.success
                total.failure += seen.failure
        self.reasoning.assistant_turns += sample.reasoning.assistant_turns
        self.reasoning.with_reasoning += sample.reasoning.with_reasoning
        self.reasoning.without_reasoning += sample.reasoning.without_reasoning

    def _bill(self, sample: StoredSample) -> None:
        billed = sample.billed
        if billed is None:
            unpriced = sample.api_calls if sample.cost is None else 0
            billed = Billed(sample.api_calls, sample.usage, sample.cost, unpriced)
        self.calls += billed.calls
        self.usage = self.usage + billed.usage
        self.cost += billed.cost or 0.0
        self.unpriced_calls += billed.unpriced_calls

    def tool_statistics(self, known_tools: Iterable[str]) -> dict[str, dict[str, float]]:
        """For every known tool: count, success, failure, and the two rates (0.0 when it was never called)."""
        return {
            name: {
                "count": seen.count,
                "success": seen.success,
                "failure": seen.failure,
                "success_rate": seen.success / seen.count if seen.count else 0.0,
                "failure_rate": seen.failure / seen.count if seen.count else 0.0,
            }
            for name in sorted({*known_tools, *self.tools})
            for seen in (self.tools.get(name, ToolCount()),)
        }

    def reasoning_statistics(self) -> dict[str, int]:
        """Turns in all, with and without reasoning."""
        return {
            "total_assistant_turns": self.reasoning.assistant_turns,
            "turns_with_reasoning": self.reasoning.with_reasoning,
            "turns_without_reasoning": self.reasoning.without_reasoning,
        }
