"""What earlier sessions stored, read back: from the shards and outcomes themselves, not from counters."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from taskmill.engine.dataset import sample_key
from taskmill.records import State
from taskmill.store.ledger import Ledger, Settlement
from taskmill.store.run import RunDirectory

logger = logging.getLogger(__name__)

YIELD_EVERY = 1000
"""Rows read between two looks at the event loop, so that an interrupt is answered at once."""


class ShardRow(Struct):
    """The fields of a shard row that a resume needs; a row made elsewhere may lack all of ours."""

    rollout_id: str = ""
    task_key: str = ""
    task_detail: str = ""
    completed: bool = False
    partial: bool = False
    conversations: Raw = Raw(b"[]")


class OutcomeRow(Struct):
    """The fields of an outcome line that a resume needs."""

    rollout_id: str
    task_key: str
    task_detail: str
    state: State
    attempt: int = 1
    api_calls: int = 0


class Prior(NamedTuple):
    """What is recorded of a rollout that will run again: how many attempts, and how many calls they had."""

    attempts: int
    calls: int


class PriorAttempts:
    """Attempts of rollouts that are not done, by rollout id. Memory: one entry for each such rollout."""

    def __init__(self) -> None:
        self._prior: dict[str, Prior] = {}

    def add(self, outcome: OutcomeRow) -> None:
        """Take note of a recorded attempt."""
        before = self._prior.get(outcome.rollout_id, Prior(0, 0))
        self._prior[outcome.rollout_id] = Prior(
            max(before.attempts + 1, outcome.attempt), max(before.calls, outcome.api_calls)
        )

    def of(self, rollout_id: str) -> Prior:
        """What is recorded of that rollout so far."""
        return self._prior.get(rollout_id, Prior(0, 0))


class _Turn(Struct):
    said_by: str = msgspec.field(name="from", default="")
    value: str = ""


_decode_row = msgspec.json.Decoder(ShardRow).decode
_decode_outcome = msgspec.json.Decoder(OutcomeRow).decode
_decode_turns = msgspec.json.Decoder(list[_Turn]).decode


async def recall(directory: RunDirectory, ledger: Ledger) -> tuple[PriorAttempts, Settlement]:
    """Tell the ledger what is stored, and settle it. Reads each byte once and keeps no row."""
    prior = PriorAttempts()
    seen = 0
    for shard in directory.shard_numbers():
        for _, line in directory.read_shard(shard):
            seen += 1
            if seen % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            _recall_row(ledger, line, shard)
    for _, line in directory.read_outcomes():
        seen += 1
        if seen % YIELD_EVERY == 0:
            await asyncio.sleep(0)
        try:
            outcome = _decode_outcome(line)
        except msgspec.DecodeError as problem:
            logger.warning("a line of outcomes.jsonl can't be read and is passed over: %s", problem)
            continue
        ledger.store(
            bytes.fromhex(outcome.task_key),
            bytes.fromhex(outcome.task_detail),
            outcome.rollout_id,
            outcome.state,
            "outcomes",
        )
        if outcome.state in ("failed", "cancelled"):
            prior.add(outcome)
    return prior, ledger.settle()


def _recall_row(ledger: Ledger, line: bytes, shard: int) -> None:
    try:
        row = _decode_row(line)
    except msgspec.DecodeError:
        return  # the merge leaves such a line out and counts it
    if not (row.completed or row.partial):
        return
    key = bytes.fromhex(row.task_key) if row.task_key else _key_of(row.conversations)
    if key is not None:
        state: State = "completed" if row.completed else "partial"
        detail = bytes.fromhex(row.task_detail) if row.task_detail else key
        ledger.store(key, detail, row.rollout_id or None, state, f"batch_{shard}")


def _key_of(conversations: Raw) -> bytes | None:
    """The key of a row that was stored without one: its first human turn is its prompt."""
    try:
        turns = _decode_turns(conversations)
    except msgspec.DecodeError:
        return None
    prompts = (turn.value for turn in turns if turn.said_by == "human")
    prompt = next(prompts, None)
    return None if prompt is None else sample_key(prompt, None, None)
