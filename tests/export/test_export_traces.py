"""Exports of a taskset's run: the conversations with their scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taskmill.errors import BadRequestError
from taskmill.evaluation import evaluate
from taskmill.export import export_run
from taskmill.models.base import Request
from taskmill.models.scripted import ScriptedModel
from taskmill.programs.sharegpt import from_sharegpt
from taskmill.records import Message, ToolCall
from tests.evaluate.lab import SumData, SumsTaskset, SumTask, rows


class Tooled(SumTask):
    def tools(self) -> list[Callable[..., Any]]:
        def add(first: int, second: int) -> int:
            """Add two numbers."""
            return first + second

        return [add]


class ToolSums(SumsTaskset):
    task_class = Tooled


def script(request: Request) -> Any:
    """Uses a tool and answers; fails at the third task, invents a tool at the fourth."""
    last = request.messages[-1]
    if last.content == "2+1=":
        raise BadRequestError("no")
    if last.role == "tool":
        return last.content
    first = int(last.content.partition("+")[0])
    name = "guess" if first == 3 else "add"
    call = ToolCall(f"c{first}", name, json.dumps({"first": first, "second": 1}))
    return Message("assistant", reasoning="A sum.", tool_calls=(call,))


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    result = await evaluate(
        ToolSums, model=ScriptedModel(script), num_tasks=4, output_dir=tmp_path, max_failures=1.0
    )
    return result.path


SCORES = {
    "idx": 0,
    "number": 0,
    "reward": 1.0,
    "rewards": '{"right":1.0}',
    "metrics": '{"length":1.0}',
    "task": '{"idx":0,"prompt":"0+1=","answer":1}',
}


def by_idx(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(samples, key=lambda sample: sample["idx"])


def test_sharegpt_has_the_scores_beside_each_conversation(run: Path) -> None:
    report = export_run(run, "sharegpt")
    assert report.written == 2
    assert report.left_out == {"failed": 1, "unknown_tool": 1}
    assert "left out: 1 (the rollout failed)" in report.as_text()
    first = by_idx(rows(run, "export_sharegpt.jsonl"))[0]
    conversations = first.pop("conversations")
    assert first.pop("id").endswith("-0")
    assert first == SCORES
    said = from_sharegpt(conversations)
    assert [message.role for message in said.messages] == ["user", "assistant", "tool", "assistant"]
    assert said.tools[0].name == "add"


def test_messages_have_the_scores_beside_them(run: Path) -> None:
    assert export_run(run, "messages").written == 2
    first = by_idx(rows(run, "export_messages.jsonl"))[0]
    messages, tools = first.pop("messages"), first.pop("tools")
    assert first.pop("id")
    assert first == SCORES
    assert messages[1]["tool_calls"][0]["function"]["name"] == "add"
    assert messages[1]["reasoning_content"] == "A sum."
    assert messages[-1] == {"role": "assistant", "content": "1"}
    assert tools[0]["function"]["parameters"]["required"] == ["first", "second"]


def test_parquet_has_one_schema_for_every_run(run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export_run(run, "parquet").written == 2
    table = parquet.read_table(run / "export.parquet")
    first = by_idx(table.to_pylist())[0]
    assert {name: first[name] for name in SCORES} == SCORES
    assert first["state"] == "completed"
    assert first["stop_reason"] == "answer"
    assert first["api_calls"] == 2
    assert len(json.loads(first["calls"])) == 2
    assert first["conversations"][1]["from"] == "human"

    import pyarrow

    from taskmill.export.parquet import trace_schema

    assert table.schema.equals(trace_schema(pyarrow))


async def test_runs_with_other_tasks_and_rewards_have_the_same_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")

    class Other(SumTask):
        right = None  # type: ignore[assignment]
        length = None  # type: ignore[assignment]

    class OtherSums(SumsTaskset):
        def load(self) -> Any:
            yield Other(SumData(idx=0, prompt="1+1=", answer=2, name="first"))

    schemas = []
    for kind in (OtherSums, SumsTaskset):
        result = await evaluate(kind, model=ScriptedModel(lambda r: "1"), num_tasks=1, output_dir=tmp_path)
        assert export_run(result.path, "parquet").written == 1
        schemas.append(parquet.read_table(result.path / "export.parquet").schema)
    assert schemas[0].equals(schemas[1])


def test_a_damaged_row_is_counted(run: Path) -> None:
    with (run / "traces.jsonl").open("ab") as file:
        file.write(b'{"id": 1}\n')
    report = export_run(run, "messages")
    assert (report.written, report.left_out["not_json"]) == (2, 1)


def test_a_files_own_name_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="a file of the run itself"):
        export_run(run, "messages", run / "traces.jsonl")
