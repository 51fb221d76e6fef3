"""The end of a run: one pass over what is stored makes the merged file and the statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from taskmill.batch.settings import BatchSettings
from taskmill.engine.sessions import now
from taskmill.engine.summary import StoredSample, Totals, outcome_samples, sample_of
from taskmill.errors import RunAbortedError
from taskmill.models.base import Model
from taskmill.programs.row import NOT_JSON, Turn, head_fault, row_fault, usage_fields
from taskmill.store.ledger import Ledger
from taskmill.store.run import RunDirectory

CHUNK_BYTES = 1 << 14

OUTCOMES = ("completed", "partial", "discarded", "failed", "cancelled", "pending")


class Merge(Struct):
    """What the pass over a run found.

    `left_out` counts by reason the shard rows that are in no merged file; `not_counted` are in it, but made by
    another program whose counts can't be read.
    """

    totals: Totals
    written: int = 0
    not_counted: int = 0
    left_out: Counter[str] = msgspec.field(default_factory=Counter)
    discard_reasons: Counter[str] = msgspec.field(default_factory=Counter)


class _StoredRow(StoredSample, kw_only=True):
    """All that a merge needs of a row, the fields of `RowHead` among them, for one pass over its line."""

    conversations: list[Turn]
    unknown_tools: str | None = None
    rollout_id: str = ""
    task_key: str = ""
    task_detail: str = ""


_decode_row = msgspec.json.Decoder(_StoredRow).decode


def _sample_and_fault(line: bytes, known_tools: Collection[str]) -> tuple[StoredSample | None, str | None]:
    """`sample_of` and `row_fault` of a stored row."""
    try:
        row = _decode_row(line)
    except (msgspec.DecodeError, RecursionError):  # at least one of the two can't be had
        fault = row_fault(line, known_tools)
        return None if fault == NOT_JSON else sample_of(line), fault
    return row, head_fault(row, known_tools)


def merge(
    run: RunDirectory, known_tools: Iterable[str], given_up: Callable[[], bool] = lambda: False
) -> Merge:
    """Write `trajectories.jsonl` anew and add up everything stored. Reads each byte once, keeps no row.

    Raises `RunAbortedError`, and leaves the file as it was, once `given_up()` is true.
    """
    known = frozenset(known_tools)
    result = Merge(Totals())

    def valid_rows() -> Iterator[bytes]:
        for shard in run.shard_numbers():
            for _, line in run.read_shard(shard):
                if given_up():
                    raise RunAbortedError("the merge was interrupted; a resume makes it anew")
                sample, fault = _sample_and_fault(line, known)
                if fault != NOT_JSON:
                    if sample is None:
                        result.not_counted += 1
                    else:
                        result.totals.add(sample)
                if fault is None:
                    result.written += 1
                    yield line + b"\n"
                else:
                    result.left_out[fault] += 1

    run.write_trajectories(valid_rows())
    for outcome in outcome_samples(run):
        if outcome is None:
            result.left_out[NOT_JSON] += 1
            continue
        if outcome.state == "discarded":
            result.discard_reasons[outcome.reason] += 1
        result.totals.add(outcome)
    return result


def statistics(
    found: Merge,
    *,
    settings: BatchSettings,
    model: str,
    counts: Mapping[str, int],
    surplus: int,
    skipped_lines: int,
    known_tools: Iterable[str],
    seconds: float,
    endpoint: Sequence[Mapping[str, Any]],
    sandbox: str,
) -> dict[str, Any]:
    """The statistics file: the whole run, earlier sessions included. `outcomes` adds up to `total_prompts`."""
    totals = found.totals
    planned = sum(counts.values())
    return {
        "run_name": settings.run_name,
        "distribution": settings.distribution,
        "total_prompts": planned,
        "total_batches": -(-planned // settings.batch_size),
        "batch_size": settings.batch_size,
        "model": model,
        "completed_at": now(),
        "duration_seconds": round(seconds, 3),
        "tool_statistics": totals.tool_statistics(known_tools),
        "reasoning_statistics": totals.reasoning_statistics(),
        "outcomes": {state: counts.get(state, 0) for state in OUTCOMES},
        "discarded": dict(found.discard_reasons),
        "stop_reasons": dict(totals.stop_reasons),
        "errors": dict(totals.errors),
        "api_calls": totals.calls,
        "tokens": usage_fields(totals.usage),
        "cost": None if totals.calls and totals.unpriced_calls == totals.calls else round(totals.cost, 9),
        "unpriced_calls": totals.unpriced_calls,
        "skipped_lines": skipped_lines,
        "stored_but_not_in_dataset": surplus,
        "trajectories": {
            "written": found.written,
            "left_out": dict(found.left_out),
            "not_counted": found.not_counted,
        },
        "sandbox": sandbox,
        "endpoint": list(endpoint),
    }


def checkpoint(run_name: str, ledger: Ledger, batch_size: int) -> Iterator[bytes]:
    """The checkpoint as pieces of one JSON object, so that its long lists are never held whole.

    `processed` are the rows of a batch with a recorded end that were not done before this start.
    """
    head = {"run_name": run_name, "last_updated": now(), "outcomes": ledger.counts()}
    yield msgspec.json.encode(head)[:-1] + b',\n"completed_prompts":['
    yield from _joined(b"%d" % index for index in ledger.done_indices())
    yield b'],\n"batch_stats":{'
    yield from _joined(
        b'\n"%d":{"processed":%d,"skipped":%d,"discarded_no_reasoning":%d}'
        % (count.batch, count.recorded - count.reused, count.reused, count.discarded)
        for count in ledger.batches(batch_size)
    )
    yield b"}}\n"


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces with commas between them, in chunks worth writing."""
    chunk, separator = bytearray(), b""
    for piece in pieces:
        chunk += separator + piece
        separator = b","
        if len(chunk) > CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)


def endpoint_history(model: Model) -> dict[str, Any]:
    """How many calls the endpoint was given at once and why that changed, where the model keeps count."""
    limit = getattr(model, "limit", None)
    return {} if limit is None else dict(msgspec.to_builtins(limit.snapshot()))
