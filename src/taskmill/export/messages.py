"""A run as chat messages with their tools, the format that fine-tuning of chat models takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from taskmill.export import UNREADABLE, Rows, Traces, scores_of
from taskmill.programs.chat import to_chat, tools_to_chat
from taskmill.programs.sharegpt import from_sharegpt
from taskmill.records import Message, ToolSpec
from taskmill.store.files import replace
from taskmill.store.jsonl import encode_row


class _Stored(Struct):
    conversations: list[dict[str, str]]


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
        yield encode_row({**_sample(trace.messages, trace.tools), **scores_of(trace)})


def _lines(rows: Rows) -> Iterator[bytes]:
    for line in rows:
        try:
            sample = as_chat(_decode(line).conversations)
        except (msgspec.MsgspecError, KeyError):
            rows.report.left_out[UNREADABLE] += 1
            continue
        rows.report.written += 1
        yield encode_row(sample)


def as_chat(conversations: list[dict[str, str]]) -> dict[str, Any]:
    """One sample: its messages, and the tools that were offered (no `tools` where there were none)."""
    said = from_sharegpt(conversations)
    return _sample(said.messages, said.tools)


def _sample(messages: Iterable[Message], tools: Sequence[ToolSpec]) -> dict[str, Any]:
    sample: dict[str, Any] = {"messages": to_chat(messages)}
    if tools:
        sample["tools"] = tools_to_chat(tools)
    return sample
