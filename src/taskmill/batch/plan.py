"""What a run would do, before it does anything: rows, tools, and an estimate of calls, tokens and cost."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from taskmill.engine.recall import recall
from taskmill.engine.summary import shard_samples
from taskmill.sandbox.choose import describe
from taskmill.store.ledger import Ledger
from taskmill.store.run import RunDirectory

if TYPE_CHECKING:
    from taskmill.batch.runner import BatchRunner

SAMPLED = 200
"""How many stored rows an estimate is taken from."""


class Estimate(Struct, frozen=True):
    """What the pending rows will take.

    With stored rows of the same run, `calls` is their mean carried over and tokens and cost are known likewise;
    without, only the bounds of the calls are, and the rest is `None`.
    """

    calls_least: int
    calls_most: int
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost: float | None = None
    based_on: int = 0


class Plan(Struct, frozen=True):
    """A run before it runs.

    `missing` maps toolsets that can't be offered to what they need. `refused` is why the run would not be started
    over what is stored; empty where it would.
    """

    run: str
    rows: int
    skipped_lines: int
    done: int
    batches: int
    model: str
    distribution: str
    chances: dict[str, float]
    missing: dict[str, str]
    sandbox: str
    estimate: Estimate
    refused: str = ""

    def as_json(self) -> dict[str, Any]:
        """The plan for programs."""
        return {"event": "plan", **msgspec.to_builtins(self)}

    def as_text(self) -> str:
        """The plan for people."""
        left = self.rows - self.done
        chances = ", ".join(f"{name} {chance:g}%" for name, chance in sorted(self.chances.items()))
        lines = [
            f"run           {self.run}",
            f"rows          {self.rows:,} usable, {self.skipped_lines:,} skipped, {self.done:,} done, {left:,} to run",
            f"batches       {self.batches:,}",
            f"model         {self.model}",
            f"distribution  {self.distribution}: {chances or 'no toolsets'}",
            *(f"missing       {name}: {lacks}" for name, lacks in sorted(self.missing.items())),
            f"sandbox       {self.sandbox}",
            f"estimate      {self._estimate_text()}",
        ]
        if self.refused:
            lines.append("refused       " + self.refused.replace("\n", "\n              "))
        return "\n".join(lines)

    def _estimate_text(self) -> str:
        guess = self.estimate
        if not guess.based_on:
            return f"{guess.calls_least:,} to {guess.calls_most:,} model calls"
        cost = "cost unknown" if guess.cost is None else f"about ${guess.cost:,.2f}"
        return (
            f"about {guess.calls_most:,} model calls, {guess.input_tokens or 0:,} tokens in, "
            f"{guess.output_tokens or 0:,} out, {cost} (from {guess.based_on} stored rows)"
        )


async def plan_of(runner: BatchRunner, *, resume: bool) -> Plan:
    """What `runner.run(resume)` would do. Reads the dataset and the stored run; writes nothing, calls nothing."""
    settings = runner.settings
    ledger = Ledger()
    try:
        indexed = await runner.plan(ledger)
        directory = RunDirectory(runner.path)
        await recall(directory, ledger)
        done = ledger.done_count
        pending = ledger.total - done
        toolkit = runner.toolkit({})
        return Plan(
            run=str(runner.path),
            rows=ledger.total,
            skipped_lines=indexed.skipped,
            done=done,
            batches=-(-ledger.total // settings.batch_size),
            model=runner.model_name,
            distribution=settings.distribution,
            chances=dict(toolkit.chances),
            missing=toolkit.missing,
            sandbox=describe(settings.sandbox),
            estimate=_estimate(directory, pending, settings.max_iterations),
            refused=await runner.refusal(resume),
        )
    finally:
        ledger.close()


def _estimate(directory: RunDirectory, pending: int, max_iterations: int) -> Estimate:
    samples = list(itertools.islice(shard_samples(directory), SAMPLED))
    if not samples:
        return Estimate(pending, pending * (max_iterations + 1))
    per_row = pending / len(samples)
    costs = [sample.cost for sample in samples]
    calls = round(per_row * sum(sample.api_calls for sample in samples))
    return Estimate(
        calls_least=calls,
        calls_most=calls,
        input_tokens=round(per_row * sum(sample.usage.input_tokens for sample in samples)),
        output_tokens=round(per_row * sum(sample.usage.output_tokens for sample in samples)),
        cost=None if any(cost is None for cost in costs) else per_row * sum(cost or 0.0 for cost in costs),
        based_on=len(samples),
    )
