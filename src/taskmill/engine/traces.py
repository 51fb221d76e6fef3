"""Traces as they are stored by the runs of tasksets, read back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import msgspec

from taskmill.records import Trace

logger = logging.getLogger(__name__)

_decode = msgspec.json.Decoder(Trace).decode


def trace_of(line: bytes) -> Trace | None:
    """The trace on a stored line; `None` for a line that is none."""
    try:
        return _decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None


def read_traces(lines: Iterable[tuple[int, bytes]], name: str = "traces.jsonl") -> Iterator[Trace]:
    """The traces of a file, one at a time. Damaged lines are passed over with a warning that counts them."""
    damaged = 0
    for _, line in lines:
        trace = trace_of(line)
        if trace is None:
            damaged += 1
        else:
            yield trace
    if damaged:
        logger.warning("%d lines of %s can't be read and are passed over", damaged, name)
