"""A run as a Parquet table, with one schema for every run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct, field

from taskmill.errors import ConfigurationError
from taskmill.export import UNREADABLE, ExportReport, Rows, Traces, as_text, scores_of
from taskmill.programs.sharegpt import to_sharegpt
from taskmill.records import Timing, Trace, Usage
from taskmill.store.files import replacing

ROW_GROUP_BYTES = 32 * 1024 * 1024
"""JSON of the rows that are held in memory and become one row group."""


class Said(Struct, rename={"speaker": "from"}):
    """One entry of a conversation."""

    speaker: str
    value: str


class Counts(Struct):
    """How the calls of one tool ended."""

    count: int = 0
    success: int = 0
    failure: int = 0


class Reasoned(Struct):
    """Assistant turns with and without reasoning."""

    assistant_turns: int = 0
    with_reasoning: int = 0
    without_reasoning: int = 0


class Stored(Struct):
    """The columns of the table. Decoding a row into this is what makes its types certain.

    Tool counts are maps from the name, because the names differ from run to run. `metadata` and `row` are JSON.
    """

    prompt_index: int
    conversations: list[Said]
    metadata: Raw = Raw(b"{}")
    completed: bool = False
    partial: bool = False
    api_calls: int = 0
    toolsets_used: list[str] = field(default_factory=list)
    tool_stats: dict[str, Counts] = field(default_factory=dict)
    tool_error_counts: dict[str, int] = field(default_factory=dict)
    rollout_id: str = ""
    task_key: str = ""
    task_detail: str = ""
    stop_reason: str = ""
    truncated: bool = False
    reasoning: Reasoned = field(default_factory=Reasoned)
    usage: Usage = Usage()
    cost: float | None = None
    timing: Timing = Timing()
    started_at: str = ""
    notes: str = ""
    row: str = "{}"


_decode = msgspec.json.Decoder(Stored).decode


def write(rows: Rows) -> None:
    """Write `rows` to the path of their report. Raises `ConfigurationError` where pyarrow is missing."""
    pa = _pyarrow()
    _write(pa, table_schema(pa), _groups(rows), rows.report)


def write_traces(traces: Traces) -> None:
    """Write the `traces` of a taskset's run, with their scores. Raises `ConfigurationError` without pyarrow."""
    pa = _pyarrow()
    _write(
        pa,
        trace_schema(pa),
        _in_groups((_trace_columns(trace), size) for trace, size in traces),
        traces.report,
    )


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigurationError(
            "Parquet needs the package pyarrow: pip install 'taskmill[parquet]'"
        ) from None
    return pyarrow


def _write(pa: Any, schema: Any, groups: Iterable[list[dict[str, Any]]], report: ExportReport) -> None:
    with (
        replacing(report.path) as file,
        pa.parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for group in groups:
            table = _table(pa, schema, group)
            report.written += table.num_rows
            report.left_out[UNREADABLE] += len(group) - table.num_rows
            writer.write_table(table)


def table_schema(pa: Any) -> Any:
    """The columns and their Arrow types; `pa` is pyarrow."""
    text, number, real, flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()

    def record(kind: type[Struct], of: Any) -> Any:
        return pa.struct([(name, of) for name in kind.__struct_fields__])

    types = {
        "prompt_index": number,
        "conversations": pa.list_(pa.struct([("from", text), ("value", text)])),
        "completed": flag,
        "partial": flag,
        "api_calls": number,
        "toolsets_used": pa.list_(text),
        "tool_stats": pa.map_(text, record(Counts, number)),
        "tool_error_counts": pa.map_(text, number),
        "truncated": flag,
        "reasoning": record(Reasoned, number),
        "usage": record(Usage, number),
        "cost": real,
        "timing": record(Timing, real),
    }
    return pa.schema([(name, types.get(name, text)) for name in Stored.__struct_fields__])


def trace_schema(pa: Any) -> Any:
    """The columns of a taskset's run and their Arrow types; those that are not named here are texts."""
    text, number, real, flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()

    def record(kind: type[Struct], of: Any) -> Any:
        return pa.struct([(name, of) for name in kind.__struct_fields__])

    types = {
        "idx": number,
        "number": number,
        "reward": real,
        "conversations": pa.list_(pa.struct([("from", text), ("value", text)])),
        "attempt": number,
        "group_size": number,
        "api_calls": number,
        "toolsets_used": pa.list_(text),
        "truncated": flag,
        "usage": record(Usage, number),
        "cost": real,
        "timing": record(Timing, real),
    }
    return pa.schema([(name, types.get(name, text)) for name in _trace_columns(Trace("", "completed"))])


def _trace_columns(trace: Trace) -> dict[str, Any]:
    return {
        **scores_of(trace),
        "conversations": to_sharegpt(trace.messages, trace.tools),
        "state": trace.state,
        "stop_reason": trace.stop_reason,
        "truncated": trace.truncated,
        "attempt": trace.attempt,
        "group_size": trace.group_size,
        "model": trace.model,
        "sampling": as_text(trace.sampling),
        "toolsets_used": list(trace.toolsets),
        "api_calls": len(trace.calls),
        "calls": as_text(trace.calls),
        "usage": msgspec.structs.asdict(trace.usage),
        "cost": trace.cost,
        "timing": msgspec.structs.asdict(trace.timing),
        "started_at": trace.started_at,
        "judgements": as_text(trace.judgements),
        "task_state": as_text(trace.task_state),
        "errors": as_text(trace.errors),
        "notes": "\n".join(trace.notes),
    }


def _table(pa: Any, schema: Any, group: list[dict[str, Any]]) -> Any:
    """The rows of a group that fit the schema; one that does not (a count beyond 64 bits) costs no other."""
    try:
        return pa.Table.from_pylist(group, schema=schema)
    except (pa.ArrowException, OverflowError):
        if len(group) == 1:
            return schema.empty_table()
    return pa.concat_tables([_table(pa, schema, [row]) for row in group])


def _groups(rows: Rows) -> Iterator[list[dict[str, Any]]]:
    return _in_groups(_readable(rows))


def _readable(rows: Rows) -> Iterator[tuple[dict[str, Any], int]]:
    for line in rows:
        try:
            yield _as_columns(_decode(line)), len(line)
        except msgspec.MsgspecError:
            rows.report.left_out[UNREADABLE] += 1


def _in_groups(sized: Iterable[tuple[dict[str, Any], int]]) -> Iterator[list[dict[str, Any]]]:
    """The rows as Arrow takes them, in lists of about `ROW_GROUP_BYTES`."""
    group: list[dict[str, Any]] = []
    total = 0
    for columns, size in sized:
        group.append(columns)
        total += size
        if total >= ROW_GROUP_BYTES:
            yield group
            group, total = [], 0
    if group:
        yield group


def _as_columns(stored: Stored) -> dict[str, Any]:
    columns: dict[str, Any] = msgspec.structs.asdict(stored)
    columns["conversations"] = [{"from": said.speaker, "value": said.value} for said in stored.conversations]
    columns["metadata"] = bytes(stored.metadata).decode()
    columns["tool_stats"] = [
        (name, msgspec.structs.asdict(counts)) for name, counts in stored.tool_stats.items()
    ]
    columns["tool_error_counts"] = list(stored.tool_error_counts.items())
    for name in ("reasoning", "usage", "timing"):
        columns[name] = msgspec.structs.asdict(columns[name])
    return columns
