"""What earlier sessions stored, read back: from the shards and outcomes themselves, not from counters."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import msgspec
from msgspec import Struct

from taskmill.engine.dataset import sample_key
from taskmill.programs.row import RowHead, row_head
from taskmill.records import State
from taskmill.store.ledger import Ledger, Settlement
from taskmill.store.run import RunDirectory

logger = logging.getLogger(__name__)

YIELD_EVERY = 1000
"""Rows read between two looks at the event loop, so that an interrupt is answered at once."""


class OutcomeRow(Struct):
    """The fields of an outcome line that a resume needs."""

    rollout_id: str
    task_key: str
    task_detail: str
    state: State
    attempt: int = 1


class PriorAttempts:
    """How many attempts are recorded of rollouts that are not done. Memory: a number for each such rollout."""

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}

    def add(self, outcome: OutcomeRow) -> None:
        """Take note of a recorded attempt."""
        self._attempts[outcome.rollout_id] = max(self.of(outcome.rollout_id) + 1, outcome.attempt)

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Forget the rollouts that are not `wanted` any more: those that are done by now."""
        self._attempts = {id: count for id, count in self._attempts.items() if wanted(id)}

    def of(self, rollout_id: str) -> int:
        """How many attempts at that rollout are recorded so far."""
        return self._attempts.get(rollout_id, 0)


_decode_outcome = msgspec.json.Decoder(OutcomeRow).decode


async def recall(directory: RunDirectory, ledger: Ledger) -> tuple[PriorAttempts, Settlement]:
    """Tell the ledger what is stored, and settle it. Reads each byte once and keeps no row.

    Damaged lines are passed over with a warning that counts them; what they recorded will run again.
    """
    prior = PriorAttempts()
    damaged: Counter[str] = Counter()
    seen = 0
    for shard in directory.shard_numbers():
        for _, line in directory.read_shard(shard):
            seen += 1
            if seen % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            if not _recall_row(ledger, line):
                damaged[f"batch_{shard}.jsonl"] += 1
    for _, line in directory.read_outcomes():
        seen += 1
        if seen % YIELD_EVERY == 0:
            await asyncio.sleep(0)
        try:
            outcome = _decode_outcome(line)
            key, detail = bytes.fromhex(outcome.task_key), bytes.fromhex(outcome.task_detail)
        except ValueError:
            damaged["outcomes.jsonl"] += 1
            continue
        ledger.store(key, detail, outcome.rollout_id, outcome.state)
        if outcome.state in ("failed", "cancelled"):
            prior.add(outcome)
    for name, count in damaged.items():
        logger.warning("%d lines of %s can't be read and are passed over", count, name)
    return prior, ledger.settle()


def _recall_row(ledger: Ledger, line: bytes) -> bool:
    """Tell the ledger of one row; false for a line that is none."""
    row = row_head(line)
    if row is None:
        return False
    if row.completed or row.partial:
        key = _hash_of(row.task_key) or _key_of(row)
        if key is not None:
            state: State = "completed" if row.completed else "partial"
            ledger.store(key, _hash_of(row.task_detail) or key, row.rollout_id or None, state)
    return True


def _hash_of(text: str) -> bytes:
    """A hash from its hexadecimal; empty for what is damaged or was never there."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _key_of(row: RowHead) -> bytes | None:
    """The key of a row that is stored without one: its first human turn is its prompt."""
    prompts = (turn.value for turn in row.conversations if turn.said_by == "human")
    prompt = next(prompts, None)
    return None if prompt is None else sample_key(prompt, None, None)
