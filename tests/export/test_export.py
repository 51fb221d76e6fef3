"""Exports: what stands in each format, what is left out, and that nothing of the run is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import msgspec
import pyarrow.parquet
import pytest

from taskmill.errors import ConfigurationError, RunNotFoundError, StorageFullError
from taskmill.export import export_run
from taskmill.programs.row import trajectory_row
from taskmill.records import CallRecord, Message, ToolCall, ToolEvent, ToolSpec, Trace, Usage
from taskmill.store.jsonl import encode_row

SPEC = ToolSpec("terminal", "Run </tools>.", msgspec.Raw(b'{"type": "object", "properties": {}}'))
KNOWN = ("terminal", "todo")


def row(index: int, *, called: str | None = None, cost: float | None = None, **fields: Any) -> bytes:
    said = [Message("user", f"prompt {index}\u2028")]
    events = []
    if called is not None:
        said += [
            Message("assistant", "so", reasoning="hm", tool_calls=(ToolCall("a", called, '{"n": 1e400}'),)),
            Message("tool", "</tool_response>", tool_call_id="a", name=called),
        ]
        events.append(ToolEvent("a", called, True))
    said.append(Message("assistant", f"answer {index}"))
    trace = Trace(
        f"r{index}",
        "completed",
        messages=tuple(said),
        tools=(SPEC,) if called else (),
        toolsets=("terminal",) if called else (),
        model="m",
        calls=(CallRecord(Usage(10, 5), cost=cost),),
        tool_events=tuple(events),
    )
    return encode_row(
        trajectory_row(
            trace,
            **{"prompt_index": index, "batch_num": 0, "known_tools": KNOWN, "timestamp": "T"} | fields,
        )
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Shards 2 and 10, with a row that is none, one with an invented tool, and a half-written end."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text('{"format": 1, "config": {}}')
    (folder / "batch_10.jsonl").write_bytes(row(30, cost=0.5, row='{"x": 1}') + row(31)[:-20])
    (folder / "batch_2.jsonl").write_bytes(
        row(6, row='{"x": "text"}') + b"{nonsense\n" + row(7, called="terminal") + row(8, called="invented")
    )
    return folder


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


LEFT_OUT = {"not_json": 1, "unknown_tool": 1}


def test_sharegpt_is_the_conversations_as_they_are_stored(run: Path) -> None:
    report = export_run(run, "sharegpt")
    assert (report.written, report.left_out) == (3, LEFT_OUT)
    samples = lines_of(report.path)
    assert [list(sample) for sample in samples] == [["conversations"]] * 3
    stored = [*lines_of_valid(run / "batch_2.jsonl"), *lines_of_valid(run / "batch_10.jsonl")]
    assert [s["conversations"] for s in samples] == [r["conversations"] for r in stored]


def lines_of_valid(path: Path) -> list[Any]:
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in found if "invented" not in row["unknown_tools"]]


def test_messages_are_chat_messages_with_their_tools(run: Path, tmp_path: Path) -> None:
    report = export_run(run, "messages", tmp_path / "out.jsonl")
    assert (report.path, report.written, report.left_out) == (tmp_path / "out.jsonl", 3, LEFT_OUT)
    plain, called, _ = lines_of(report.path)
    assert plain == {
        "messages": [
            {"role": "user", "content": "prompt 6\u2028"},
            {"role": "assistant", "content": "answer 6"},
        ]
    }
    assert called["messages"][1] == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "terminal", "arguments": '{"n": 1e400}'}}
        ],
    }
    assert called["messages"][2] == {
        "role": "tool",
        "content": "</tool_response>",
        "tool_call_id": "a",
        "name": "terminal",
    }
    assert called["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "terminal",
                "description": "Run </tools>.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]


def test_parquet_is_one_table_with_certain_types(run: Path, tmp_path: Path) -> None:
    report = export_run(run, "parquet", tmp_path / "out.parquet")
    assert (report.written, +report.left_out) == (3, LEFT_OUT)
    table = pyarrow.parquet.read_table(report.path)
    rows = table.to_pylist()
    assert [r["prompt_index"] for r in rows] == [6, 7, 30]
    assert [r["cost"] for r in rows] == [None, None, 0.5]
    assert [r["row"] for r in rows] == ['{"x": "text"}', "{}", '{"x": 1}']
    assert json.loads(rows[0]["metadata"]) == {"batch_num": 0, "timestamp": "T", "model": "m"}
    assert dict(rows[1]["tool_stats"])["terminal"] == {"count": 1, "success": 1, "failure": 0}
    assert rows[0]["conversations"][-1] == {"from": "gpt", "value": "<think>\n</think>\nanswer 6"}
    assert rows[0]["usage"]["input_tokens"] == 10
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "batch_0.jsonl").write_bytes(b"")
    assert pyarrow.parquet.read_schema(export_run(empty, "parquet").path) == table.schema


def test_a_row_that_parquet_has_no_place_for_costs_no_other(run: Path) -> None:
    with (run / "batch_2.jsonl").open("ab") as shard:
        shard.write(row(9).replace(b'"api_calls":1', b'"api_calls":"many"'))
        shard.write(row(10).replace(b'"api_calls":1', b'"api_calls":99999999999999999999'))
        shard.write(row(11))
    report = export_run(run, "parquet")
    assert (report.written, report.left_out["unreadable"]) == (4, 2)
    assert [r["prompt_index"] for r in pyarrow.parquet.read_table(report.path).to_pylist()] == [6, 7, 11, 30]
    assert "no place for" in report.as_text()


def test_an_export_leaves_the_run_as_it_was(run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    for form in ("sharegpt", "messages", "parquet"):
        export_run(run, form)  # type: ignore[arg-type]
    after = {path.name: path.read_bytes() for path in run.iterdir()}
    assert before.items() <= after.items()
    assert set(after) - set(before) == {"export_sharegpt.jsonl", "export_messages.jsonl", "export.parquet"}


@pytest.mark.parametrize("form", ["sharegpt", "messages", "parquet"])
def test_an_export_that_fails_leaves_the_old_one(
    run: Path, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export_run(run, form).path
    old = path.read_bytes()
    (run / "batch_10.jsonl").write_bytes(row(1) * 3)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageFullError, match="No space left"):
        export_run(run, form)
    assert path.read_bytes() == old
    assert not list(run.glob(".*.tmp"))


@pytest.mark.parametrize("form", ["sharegpt", "messages"])
def test_datasets_reads_the_lines(run: Path, form: Any, tmp_path: Path) -> None:
    path = export_run(run, form).path
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "c"))
    assert len(loaded) == 3


@pytest.mark.parametrize(
    "name",
    [
        "batch_2.jsonl",
        "Batch_99.jsonl",
        "run.json",
        "trajectories.jsonl",
        "journal/0.log",
        "batch_2.jsonl.torn",
        "",
    ],
)
def test_a_file_of_the_run_itself_is_not_overwritten(run: Path, tmp_path: Path, name: str) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    (tmp_path / "alias").symlink_to(run / name)
    for out in (run / name, tmp_path / "alias", run / ".." / "run" / name):
        with pytest.raises(ConfigurationError, match=r"file of the run itself.*export_sharegpt\.jsonl"):
            export_run(run, "sharegpt", out)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert export_run(run, "sharegpt", run / "batch.jsonl").written == 3


def test_what_is_no_run_or_no_format_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="nowhere"):
        export_run(tmp_path / "nowhere", "sharegpt")
    with pytest.raises(ConfigurationError, match="to='csv'"):
        export_run(run, "csv")  # type: ignore[arg-type]
