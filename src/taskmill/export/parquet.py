"""A run as a Parquet table, with one schema for every run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct, field

from taskmill.errors import ConfigurationError
from taskmill.export import UNREADABLE, Rows
from taskmill.records import Timing, Usage
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
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigurationError(
            "Parquet needs the package pyarrow: pip install 'taskmill[parquet]'"
        ) from None
    schema = table_schema(pyarrow)
    with (
        replacing(rows.report.path) as file,
        pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for group in _groups(rows):
            table = _table(pyarrow, schema, group)
            rows.report.written += table.num_rows
            rows.report.left_out[UNREADABLE] += len(group) - table.num_rows
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


def _table(pa: Any, schema: Any, group: list[dict[str, Any]]) -> Any:
    """The rows of a group that fit the schema; one that does not (a count beyond 64 bits) costs no other."""
    try:
        return pa.Table.from_pylist(group, schema=schema)
    except (pa.ArrowException, OverflowError):
        if len(group) == 1:
            return schema.empty_table()
    return pa.concat_tables([_table(pa, schema, [row]) for row in group])


def _groups(rows: Rows) -> Iterator[list[dict[str, Any]]]:
    """The rows as Arrow takes them, in lists of about `ROW_GROUP_BYTES`."""
    group: list[dict[str, Any]] = []
    size = 0
    for line in rows:
        try:
            group.append(_as_columns(_decode(line)))
        except msgspec.MsgspecError:
            rows.report.left_out[UNREADABLE] += 1
            continue
        size += len(line)
        if size >= ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
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
