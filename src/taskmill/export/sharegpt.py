"""A run as ShareGPT: the conversations alone, as they are stored."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Raw, Struct

from taskmill.export import Rows, Traces, scores_of
from taskmill.programs.sharegpt import to_sharegpt
from taskmill.store.files import replace
from taskmill.store.jsonl import encode_row


class _Stored(Struct):
    conversations: Raw


_decode = msgspec.json.Decoder(_Stored).decode


def write(rows: Rows) -> None:
    """Write `rows` to the path of their report."""
    replace(rows.report.path, _lines(rows))


def write_traces(traces: Traces) -> None:
    """Write the `traces` of a taskset's run, with their scores, to the path of their report."""
    replace(traces.report.path, _trace_lines(traces))


def _trace_lines(traces: Traces) -> Iterator[bytes]:
    for trace, _ in traces:
        traces.report.written += 1
        yield encode_row({"conversations": to_sharegpt(trace.messages, trace.tools), **scores_of(trace)})


def _lines(rows: Rows) -> Iterator[bytes]:
    for line in rows:
        rows.report.written += 1
        yield b'{"conversations":%b}\n' % bytes(_decode(line).conversations)
