"""The files under `data/<run_name>/`."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from taskmill import tool
from taskmill.errors import StorageFullError
from taskmill.models.base import Completion, Request
from taskmill.records import Message, Usage
from taskmill.store import files
from taskmill.tools import known_tools
from tests.batch.mill import (
    Mill,
    add,
    answering,
    asks,
    prompt_of,
    prompts_of,
    read_lines,
    says,
    strict,
    turn_of,
)


def adding(request: Request) -> Completion:
    return asks("add", {"a": 1, "b": 2}) if turn_of(request) == 0 else says()


# -- shards ---------------------------------------------------------------------------------------------------


async def test_a_row_of_a_shard_has_the_fields_of_the_contract_first(mill: Mill) -> None:
    mill.prompts({"prompt": "a", "id": 3})
    stored = await mill.run(answering(adding, name="the/model"), tools=[add])

    (row,) = stored.shard(0)
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
    assert row["prompt_index"] == 0
    assert row["metadata"]["batch_num"] == 0
    assert row["metadata"]["model"] == "the/model"
    assert datetime.fromisoformat(row["metadata"]["timestamp"]).utcoffset() is not None
    assert (row["completed"], row["partial"], row["api_calls"]) == (True, False, 2)
    assert row["usage"]["input_tokens"] == 20
    assert row["timing"]["total"] >= 0
    assert json.loads(row["row"]) == {"id": 3}


async def test_shards_are_append_only(mill: Mill) -> None:
    mill.prompts("a", "b", "c")
    stored = await mill.run(max_samples=1, batch_size=3)
    before = stored.path.joinpath("batch_0.jsonl").read_bytes()
    inode = stored.path.joinpath("batch_0.jsonl").stat().st_ino

    await mill.run(resume=True, batch_size=3)

    after = stored.path.joinpath("batch_0.jsonl")
    assert after.read_bytes().startswith(before)
    assert after.stat().st_ino == inode


async def test_every_row_counts_every_tool_the_product_knows(mill: Mill) -> None:
    mill.prompts("uses", "uses none", "fails")

    def script(request: Request) -> Completion:
        match prompt_of(request), turn_of(request):
            case "uses", 0:
                return asks("add", {"a": 1, "b": 2})
            case "fails", 0:
                return asks("todo", {"nothing": "it takes"})
        return says()

    stored = await mill.run(answering(script), tools=[add], distribution="default")

    names = sorted({*known_tools(), "add"})
    for row in stored.rows:
        assert list(row["tool_stats"]) == names
        assert list(row["tool_error_counts"]) == names
        for name in names:
            counts = row["tool_stats"][name]
            assert list(counts) == ["count", "success", "failure"]
            assert counts["count"] == counts["success"] + counts["failure"]
            assert row["tool_error_counts"][name] == counts["failure"]
    by_prompt = dict(zip(prompts_of(stored.rows), stored.rows, strict=True))
    assert by_prompt["uses"]["tool_stats"]["add"] == {"count": 1, "success": 1, "failure": 0}
    assert by_prompt["fails"]["tool_stats"]["todo"] == {"count": 1, "success": 0, "failure": 1}


@pytest.mark.parametrize("reader", ["shards", "trajectories"])
async def test_datasets_loads_a_run_whose_rows_used_different_tools(
    mill: Mill, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(mill.folder / "cache"))
    monkeypatch.setenv("HF_HOME", str(mill.folder / "home"))
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    mill.prompts(
        "plain",
        {"prompt": "adds", "id": 1},
        {"prompt": "echoes", "id": "one", "tags": ["a", 1]},
        "too long",
        {"prompt": "todo", "id": None},
    )

    def script(request: Request) -> Completion:
        prompt, turn = prompt_of(request), turn_of(request)
        match prompt, turn:
            case "adds", 0:
                return asks("add", {"a": 1, "b": 2})
            case "echoes", 0:
                return asks("terminal", {"command": "echo hello"})
            case "todo", 0:
                return asks("todo", {})
            case "too long", _:
                return asks("add", {"a": 1, "b": "x"})
        return says(f"answer to {prompt}")

    stored = await mill.run(
        answering(script), tools=[add], distribution="default", batch_size=1, max_iterations=2
    )
    assert stored.outcome_counts() == {"completed": 4, "partial": 1}
    paths = sorted(map(str, stored.path.glob("batch_*.jsonl")))
    if reader == "trajectories":
        paths = [str(stored.path / "trajectories.jsonl")]

    for given in (paths, paths[::-1]):
        table = datasets.load_dataset(
            "json", data_files=given, split="train", cache_dir=str(mill.folder / f"cache{given[0][-7]}")
        )
        assert table.num_rows == 5
        assert sorted(prompts_of(table)) == ["adds", "echoes", "plain", "todo", "too long"]
        counts = {prompts_of([row])[0]: row["tool_stats"]["add"] for row in table}
        assert counts["adds"] == {"count": 1, "success": 1, "failure": 0}
        assert counts["plain"] == {"count": 0, "success": 0, "failure": 0}


@tool
def odd(kind: str) -> Any:
    """Give something JSON has no word for.

    Args:
        kind: what.
    """
    return {
        "nan": {"value": float("nan"), "list": [1, float("inf")]},
        "surrogate": "half \ud83d of it",
        "nul": "a\0b",
        "lines": "a\u2028b\u0085c\rd\ne",
        "huge": {"value": 10**40},
    }[kind]


async def test_every_file_is_json_for_a_strict_reader_whatever_tools_say(mill: Mill) -> None:
    kinds = ["nan", "surrogate", "nul", "lines", "huge"]
    mill.prompts(*kinds)

    def script(request: Request) -> Completion:
        kind = prompt_of(request)
        if turn_of(request) == 0:
            return asks("odd", {"kind": kind})
        return says(f"it said {request.messages[-1].content}", reasoning="a\0b \u2028")

    stored = await mill.run(answering(script), tools=[odd])

    assert stored.outcome_counts() == {"completed": 5}
    assert len(stored.trajectories) == 5
    for name, content in stored.content().items():
        if name.endswith(".jsonl"):
            read_lines(stored.path / name)
        else:
            strict(content)
    assert all(b"\0" not in content for content in stored.content().values())


# -- trajectories.jsonl ---------------------------------------------------------------------------------------


async def test_the_merged_file_has_shard_2_before_shard_10_and_the_order_of_each_shard(mill: Mill) -> None:
    prompts = [f"{number:02}" for number in range(24)]
    mill.prompts(*prompts)

    async def script(request: Request) -> Completion:
        for _ in range(24 - int(prompt_of(request))):  # the last ones are quickest
            await asyncio.sleep(0)
        return says()

    stored = await mill.run(answering(script), batch_size=2, num_workers=12)

    assert prompts_of(stored.trajectories) == prompts
    assert stored.path.joinpath("trajectories.jsonl").read_bytes() == b"".join(
        stored.path.joinpath(f"batch_{number}.jsonl").read_bytes() for number in range(12)
    )


async def test_left_out_and_counted_are_lines_that_are_no_json_and_rows_that_call_invented_tools(
    mill: Mill,
) -> None:
    mill.prompts("good", "invents", "good too")

    def script(request: Request) -> Completion:
        if prompt_of(request) == "invents" and turn_of(request) == 0:
            return asks("imagine")
        return says()

    stored = await mill.run(answering(script), tools=[add], batch_size=3)
    shard = stored.path / "batch_0.jsonl"
    shard.write_bytes(b'{"half": \n' + shard.read_bytes() + b"\x00\xff\n")

    stored = await mill.run(answering(script), tools=[add], batch_size=3, resume=True)

    trajectories = stored.path.joinpath("trajectories.jsonl").read_bytes()
    assert prompts_of([strict(line) for line in trajectories.splitlines()]) == ["good", "good too"]
    found = stored.statistics["trajectories"]
    assert found["written"] == 2
    assert found["left_out"] == {"not_json": 2, "unknown_tool": 1}
    assert stored.outcome_counts() == {"completed": 3}, "it is done all the same, and not run again"


@pytest.mark.parametrize("name", ["trajectories.jsonl", "checkpoint.json", "statistics.json"])
async def test_a_file_is_replaced_as_a_whole_or_not_at_all(
    mill: Mill, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is written and synced under another name first, then renamed, then the folder is synced."""
    mill.prompts("a", "b")
    stored = await mill.run(max_samples=1)
    path = stored.path / name
    os.chmod(path, 0o640)
    before = path.read_bytes()
    steps: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        target = os.readlink(f"/proc/self/fd/{fd}") if Path("/proc/self/fd").exists() else ""
        steps.append("sync folder" if Path(target).is_dir() else "sync file")
        real_fsync(fd)

    def rename(old: Any, new: Any, **options: Any) -> None:
        if Path(new).name == name:
            assert path.read_bytes() == before
            steps.append("rename")
        real_replace(old, new, **options)

    monkeypatch.setattr(files, "os", patched(os, fsync=fsync, replace=rename, rename=rename))
    await mill.run(resume=True)

    place = steps.index("rename")
    assert steps[place - 1] == "sync file"
    assert steps[place + 1] == "sync folder"
    assert path.read_bytes() != before
    assert path.stat().st_mode & 0o777 == 0o640


class patched:  # noqa: N801 - stands in for a module
    def __init__(self, module: Any, **functions: Any) -> None:
        self._module = module
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


async def test_a_merge_that_fails_leaves_the_old_file_and_no_temporary_one(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill.prompts("a", "b")
    stored = await mill.run(max_samples=1)
    before = stored.path.joinpath("trajectories.jsonl").read_bytes()

    def full(path: Path, data: Any) -> None:
        if path.name == "trajectories.jsonl":
            real(path, failing(data))
        else:
            real(path, data)

    def failing(data: Any) -> Any:
        yield from data
        raise StorageFullError("no room")

    from taskmill.store import run as store_run

    real = store_run.replace
    monkeypatch.setattr(store_run, "replace", full)
    with pytest.raises(StorageFullError, match="no room"):
        await mill.run(resume=True)

    assert stored.path.joinpath("trajectories.jsonl").read_bytes() == before
    assert not [path.name for path in stored.path.iterdir() if path.name.endswith(".tmp")]
    assert len(stored.rows) == 2


# -- checkpoint.json ------------------------------------------------------------------------------------------


async def test_the_checkpoint_lists_what_is_done_and_counts_each_batch(mill: Mill) -> None:
    mill.prompts("0", "1", "2", "3", "4")

    def script(request: Request) -> Any:
        match prompt_of(request):
            case "1":
                return says(reasoning=None)
            case "3":
                return RuntimeError("no")
        return says()

    stored = await mill.run(answering(script), max_failures=1.0)
    checkpoint = stored.checkpoint
    assert checkpoint["run_name"] == "run"
    assert checkpoint["completed_prompts"] == [0, 1, 2, 4]
    assert checkpoint["batch_stats"] == {
        "0": {"processed": 2, "skipped": 0, "discarded_no_reasoning": 1},
        "1": {"processed": 2, "skipped": 0, "discarded_no_reasoning": 0},
        "2": {"processed": 1, "skipped": 0, "discarded_no_reasoning": 0},
    }
    first = datetime.fromisoformat(checkpoint["last_updated"])

    checkpoint = (await mill.run(resume=True)).checkpoint
    assert checkpoint["completed_prompts"] == [0, 1, 2, 3, 4]
    assert checkpoint["batch_stats"]["1"] == {"processed": 1, "skipped": 1, "discarded_no_reasoning": 0}
    assert datetime.fromisoformat(checkpoint["last_updated"]) > first


async def test_the_checkpoint_is_rewritten_rarely_and_each_row_costs_the_same(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill.prompts(*[str(number) for number in range(2000)])
    written: Counter[str] = Counter()
    sizes: list[int] = []
    real = files.replace

    def replace(path: Path, data: Any) -> None:
        written[path.name] += 1
        real(path, data)
        if path.name == "checkpoint.json":
            sizes.append(path.stat().st_size)

    monkeypatch.setattr("taskmill.store.run.replace", replace)
    model = answering(lambda _: says())

    stored = await mill.run(model, batch_size=50, num_workers=10, on_event=None)

    assert 2 <= written["checkpoint.json"] <= 25
    assert sum(sizes) < 8 * sizes[-1], "all checkpoints together cost a few times the last"
    assert written["trajectories.jsonl"] == written["statistics.json"] == written["run.json"] == 1
    assert stored.checkpoint["completed_prompts"] == list(range(2000))


async def test_the_checkpoint_is_behind_the_rows_and_never_ahead_of_them(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row stands in it only once its own record is on disk."""
    mill.prompts(*[str(number) for number in range(300)])
    synced: dict[Path, int] = {}
    real_sync, real_replace = files.AppendFile.datasync, files.replace

    def datasync(self: Any) -> None:
        size = self.path.stat().st_size
        real_sync(self)
        synced[self.path] = max(size, synced.get(self.path, 0))

    checked = 0

    def replace(path: Path, data: Any) -> None:
        nonlocal checked
        if path.name != "checkpoint.json":
            return real_replace(path, data)
        pieces = list(data)
        on_disk = set()
        for shard, size in list(synced.items()):
            if shard.name.startswith("batch_"):
                on_disk |= {
                    json.loads(line)["prompt_index"] for line in shard.read_bytes()[:size].splitlines()
                }
        claimed = set(json.loads(b"".join(pieces))["completed_prompts"])
        assert claimed <= on_disk
        checked += len(claimed)
        return real_replace(path, pieces)

    monkeypatch.setattr(files.AppendFile, "datasync", datasync)
    monkeypatch.setattr("taskmill.store.run.replace", replace)

    await mill.run(batch_size=30, num_workers=10)

    assert checked > 300


# -- statistics.json ------------------------------------------------------------------------------------------


async def test_the_statistics_have_the_fields_of_the_contract(mill: Mill) -> None:
    mill.prompts("a", "b", b"123", "c")

    def script(request: Request) -> Completion:
        arguments = {"a": 1, "b": 2} if prompt_of(request) != "b" else {"a": 1}
        return asks("add", arguments) if turn_of(request) == 0 else says(reasoning=None)

    stored = await mill.run(answering(script, name="m"), tools=[add])

    found = stored.statistics
    assert (found["run_name"], found["distribution"], found["model"]) == ("run", "none", "m")
    assert (found["total_prompts"], found["total_batches"], found["batch_size"]) == (3, 2, 2)
    assert datetime.fromisoformat(found["completed_at"])
    assert 0 <= found["duration_seconds"] < 60
    assert found["tool_statistics"]["add"] == {
        "count": 3,
        "success": 2,
        "failure": 1,
        "success_rate": pytest.approx(2 / 3),
        "failure_rate": pytest.approx(1 / 3),
    }
    assert found["tool_statistics"]["terminal"] == {
        "count": 0,
        "success": 0,
        "failure": 0,
        "success_rate": 0.0,
        "failure_rate": 0.0,
    }
    assert set(found["tool_statistics"]) == {*known_tools(), "add"}
    assert found["reasoning_statistics"] == {
        "total_assistant_turns": 6,
        "turns_with_reasoning": 3,
        "turns_without_reasoning": 3,
    }
    assert found["skipped_lines"] == 1
    assert sum(found["outcomes"].values()) == 3


async def test_tokens_and_cost_are_exact_and_cached_tokens_are_billed_once(mill: Mill) -> None:
    mill.prompts("a", "b", "c")
    usage = Usage(input_tokens=1000, output_tokens=50, cached_tokens=900, reasoning_tokens=20)

    def script(request: Request) -> Completion:
        return Completion(Message("assistant", "x", reasoning="y"), usage, cost=0.125)

    stored = await mill.run(answering(script))

    assert stored.statistics["tokens"] == {
        "input_tokens": 3000,
        "output_tokens": 150,
        "cached_tokens": 2700,
        "reasoning_tokens": 60,
    }
    assert stored.statistics["cost"] == 0.375
    assert stored.statistics["unpriced_calls"] == 0


async def test_a_cost_nobody_knows_is_null_and_not_nothing(mill: Mill) -> None:
    mill.prompts("a", "b")
    stored = await mill.run()
    assert stored.statistics["cost"] is None
    assert stored.statistics["unpriced_calls"] == 2


async def test_the_statistics_are_computed_from_what_is_stored(mill: Mill) -> None:
    """Not from counters: what is written into a shard by hand is in the next sums."""
    mill.prompts("a", "b")
    stored = await mill.run(batch_size=1)
    shard = stored.path / "batch_1.jsonl"
    row = stored.shard(1)[0]
    row["tool_stats"]["terminal"] = {"count": 7, "success": 4, "failure": 3}
    row["billed"]["usage"]["input_tokens"] = 1_000_000
    shard.write_text(json.dumps(row) + "\n")

    stored = await mill.run(batch_size=1, resume=True)

    assert stored.statistics["tool_statistics"]["terminal"]["failure"] == 3
    assert stored.statistics["tokens"]["input_tokens"] == 1_000_010


async def test_the_duration_is_the_time_worked_in_all_sessions(mill: Mill) -> None:
    mill.prompts("a")
    stored = await mill.run()
    sessions = stored.path / "sessions.jsonl"
    lines = [
        {"event": "start", "at": "2026-01-01T00:00:00+00:00", "pid": 1, "host": "h"},
        {"event": "end", "at": "2026-01-01T01:00:00+00:00", "outcome": "finished"},
        {"event": "start", "at": "2026-01-02T00:00:00+00:00", "pid": 2, "host": "h"},
        # killed; its last byte was written after half an hour
        {
            "event": "start",
            "at": "2026-01-03T00:00:00+00:00",
            "pid": 3,
            "host": "h",
            "last_write": "2026-01-02T00:30:00+00:00",
        },
        {"event": "end", "at": "2026-01-03T00:15:00+00:00", "outcome": "cancelled"},
    ]
    sessions.write_text("".join(json.dumps(line) + "\n" for line in lines))

    stored = await mill.run(resume=True)

    assert stored.statistics["duration_seconds"] == pytest.approx(3600 + 1800 + 900, abs=30)
