"""The row of a shard: its fields, one schema for all rows, and which rows may be merged."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pyarrow.json
import pytest

from taskmill.programs.row import row_fault, trajectory_row
from taskmill.programs.sharegpt import to_sharegpt
from taskmill.records import CallRecord, Message, Timing, ToolCall, ToolEvent, ToolSpec, Trace, Usage, moment
from taskmill.store.jsonl import encode_row

KNOWN = ("terminal", "todo", "read_file")
SPEC = ToolSpec("terminal", "Run.", msgspec.Raw(b'{"type":"object"}'))


def trace_of(**fields: Any) -> Trace:
    return Trace(**{"id": "r", "state": "completed", "messages": (Message("user", "hi"),), **fields})


RICH = trace_of(
    messages=(
        Message("user", "hi"),
        Message("assistant", reasoning="hm", tool_calls=(ToolCall("a", "terminal"), ToolCall("b", "nope"))),
        Message("tool", "x", tool_call_id="a"),
        Message("tool", "no", tool_call_id="b"),
        Message("assistant", "done", reasoning="  "),
    ),
    tools=(SPEC,),
    toolsets=("terminal",),
    calls=(CallRecord(Usage(10, 5, 2, 1), cost=0.5), CallRecord(Usage(20, 5), cost=0.25)),
    tool_events=(
        ToolEvent("a", "terminal", True),
        ToolEvent("b", "nope", False),
        ToolEvent("c", "terminal", False),
    ),
    timing=Timing(2, 1, 1, 0),
    model="m",
    stop_reason="answer",
)
POOR = trace_of(state="partial", calls=(CallRecord(cost=1.0),))


def row_of(trace: Trace, **fields: Any) -> dict[str, Any]:
    return trajectory_row(
        trace, **{"prompt_index": 0, "batch_num": 0, "known_tools": KNOWN, "timestamp": "T", **fields}
    )


def test_the_fields_of_a_row_and_their_order() -> None:
    row = row_of(RICH, prompt_index=7, batch_num=2, row='{"x": 1}', mine=3)
    assert list(row)[:9] == [
        "prompt_index",
        "conversations",
        "metadata",
        "completed",
        "partial",
        "api_calls",
        "toolsets_used",
        "tool_stats",
        "tool_error_counts",
    ]
    assert row["prompt_index"] == 7
    assert row["conversations"] == to_sharegpt(RICH.messages, RICH.tools)
    assert row["metadata"] == {"batch_num": 2, "timestamp": "T", "model": "m"}
    assert (row["completed"], row["partial"], row["api_calls"]) == (True, False, 2)
    assert row["toolsets_used"] == ["terminal"]
    assert row["reasoning"] == {"assistant_turns": 2, "with_reasoning": 1, "without_reasoning": 1}
    assert row["usage"] == {
        "input_tokens": 30,
        "output_tokens": 10,
        "cached_tokens": 2,
        "reasoning_tokens": 1,
    }
    assert row["cost"] == 0.75
    assert (row["row"], row["mine"]) == ('{"x": 1}', 3)


def test_every_known_tool_is_counted_called_or_not() -> None:
    row = row_of(RICH)
    assert row["tool_stats"] == {
        "read_file": {"count": 0, "success": 0, "failure": 0},
        "terminal": {"count": 2, "success": 1, "failure": 1},
        "todo": {"count": 0, "success": 0, "failure": 0},
    }
    assert row["tool_error_counts"] == {"read_file": 0, "terminal": 1, "todo": 0}
    assert json.loads(row["unknown_tools"]) == ["nope"]


def test_all_rows_have_one_schema() -> None:
    """Each row read by itself gives the same Arrow types, so it does not matter which comes first."""

    def schema(row: dict[str, Any]) -> Any:
        return pyarrow.json.read_json(io.BytesIO(encode_row(row))).schema.remove_metadata()

    rich, poor = schema(row_of(RICH)), schema(row_of(POOR, row='{"a": [1, "x"]}'))
    assert rich.names == poor.names
    differing = [name for name in rich.names if rich.field(name) != poor.field(name)]
    assert differing == ["toolsets_used"]  # an empty list has no type of its own; every offer has a toolset
    assert row_of(POOR)["cost"] == 1.0
    assert row_of(trace_of(calls=(CallRecord(),)))["cost"] is None


def test_sound_rows_are_usable_and_those_with_invented_tools_are_not() -> None:
    assert row_fault(encode_row(row_of(POOR)), KNOWN) is None
    assert row_fault(encode_row(row_of(RICH)), KNOWN) == "unknown_tool"


def test_rows_that_do_not_say_it_are_searched_for_invented_tools() -> None:
    said = to_sharegpt([Message("assistant", tool_calls=(ToolCall("a", "nope"),))], [])
    line = json.dumps({"prompt_index": 0, "conversations": said}).encode()
    assert row_fault(line, KNOWN) == "unknown_tool"
    assert row_fault(line, [*KNOWN, "nope"]) is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"12",
        b"\xff",
        b'{"a": 1}',
        b'{"conversations": 3}',
        b'{"conversations": [1]}',
        b'{"conversations": [{"from": "gpt"}]}',
        b'{"conversations": [], "x": NaN}',
        b'{"conversations": []} x',
    ],
)
def test_what_is_no_row_is_left_out(line: bytes) -> None:
    assert row_fault(line, KNOWN) == "not_json"


def test_a_moment_is_written_in_utc_to_the_millisecond() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    written = moment()
    assert before <= datetime.fromisoformat(written) <= datetime.now(UTC)
    given = datetime(2024, 1, 2, 5, 4, 5, 6789, tzinfo=timezone(timedelta(hours=2)))
    assert moment(given) == "2024-01-02T03:04:05.006+00:00"
    assert len(written) == len(moment(given))
