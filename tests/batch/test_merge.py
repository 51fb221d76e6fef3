"""What the merge takes, leaves out and counts, line by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from taskmill.batch.finish import merge
from taskmill.engine.summary import sample_of
from taskmill.programs.row import NOT_JSON, RowHead, row_fault
from taskmill.store.run import RunDirectory

SAID = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
CALLED = [*SAID, {"from": "gpt", "value": '<tool_call>\n{"name": "gone", "arguments": {}}\n</tool_call>'}]
KNOWN = ("terminal",)

LINES: dict[str, bytes] = {
    name: line if isinstance(line, bytes) else json.dumps(line).encode()
    for name, line in {
        "ours": {"conversations": SAID, "unknown_tools": "[]", "api_calls": 2, "completed": True},
        "of another program": {"conversations": SAID},
        "of another program, with a tool nobody has": {"conversations": CALLED},
        "with an invented tool": {"conversations": SAID, "unknown_tools": '["gone"]', "api_calls": 1},
        "with names that are no list": {"conversations": SAID, "unknown_tools": "gone", "api_calls": 1},
        "with counts of another kind": {"conversations": SAID, "unknown_tools": "[]", "api_calls": "two"},
        "with tool counts of another kind": {"conversations": SAID, "tool_stats": {"terminal": 3}},
        "without turns": {"unknown_tools": "[]", "api_calls": 1},
        "with turns of another kind": {"conversations": ["hi"], "api_calls": 1},
        "with a number as its rollout": {"conversations": SAID, "rollout_id": 7, "api_calls": 1},
        "with a number as its key": {"conversations": SAID, "task_key": 7, "api_calls": 1},
        "with a number as its detail": {"conversations": SAID, "task_detail": 7, "api_calls": 1},
        "with a word as its state": {"conversations": SAID, "completed": "yes", "api_calls": 1},
        "cut off": b'{"conversations": [{"from": "human", "va',
        "too deep": b'{"conversations": [], "row": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    }.items()
}


@pytest.mark.parametrize("name", LINES)
def test_a_row_is_judged_and_counted_as_each_of_its_readers_would(tmp_path: Path, name: str) -> None:
    line = LINES[name]
    (tmp_path / "batch_0.jsonl").write_bytes(line + b"\n")
    fault = row_fault(line, KNOWN)
    sample: Any = None if fault == NOT_JSON else sample_of(line)

    found = merge(RunDirectory(tmp_path), KNOWN)

    assert dict(found.left_out) == ({} if fault is None else {fault: 1})
    assert found.written == int(fault is None)
    assert found.not_counted == int(fault != NOT_JSON and sample is None)
    assert found.totals.samples == int(sample is not None)
    assert found.totals.calls == (0 if sample is None else sample.api_calls)


def test_the_merge_reads_every_field_that_a_resume_goes_by(tmp_path: Path) -> None:
    """A row that a resume takes for none must not be merged: then it would stand there twice."""
    for field in structs.fields(RowHead):
        row: dict[str, Any] = {"conversations": SAID, field.encode_name: [[]]}
        (tmp_path / "batch_0.jsonl").write_text(json.dumps(row) + "\n")
        assert dict(merge(RunDirectory(tmp_path), KNOWN).left_out) == {NOT_JSON: 1}, field.name
