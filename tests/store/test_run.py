from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from taskmill.errors import RunChangedError, RunExistsError, RunLockedError, RunNotFoundError, StoreError
from taskmill.store.jsonl import encode_row
from taskmill.store.run import OpenResult, RunDirectory

CONFIG = {"model": "m", "seed": 1, "sampling": {"temperature": 0.5, "top_p": None}, "num_workers": 4}
POLICY = frozenset({"num_workers"})


@asynccontextmanager
async def opened(
    path: Path, *, resume: bool = True, config: Mapping[str, Any] = CONFIG
) -> AsyncIterator[tuple[RunDirectory, OpenResult]]:
    run = RunDirectory(path)
    result = run.open_for_writing(config, resume=resume, policy_fields=POLICY)
    try:
        yield run, result
    finally:
        await run.close()


def rows(run: RunDirectory, number: int) -> list[Any]:
    return [json.loads(line) for _, line in run.read_shard(number)]


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_making_and_reading_a_run_directory_touches_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "none")
    assert run.read_config() is None
    assert run.shard_numbers() == []
    assert list(run.read_shard(3)) == list(run.read_outcomes()) == list(run.read_sessions()) == []
    assert run.holder() is None
    with pytest.raises(RunNotFoundError, match="there is no run in"):
        run.require()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resume", [False, True])
async def test_a_first_start_makes_the_folder_and_stores_the_configuration(
    tmp_path: Path, resume: bool
) -> None:
    path = tmp_path / "data" / "new"
    async with opened(path, resume=resume) as (run, result):
        assert result == OpenResult(True, [])
        assert run.read_config() == CONFIG
        run.require()
    assert json.loads((path / "run.json").read_text())["format"] == 1


async def test_what_is_appended_is_read_back_by_shard_in_the_order_of_numbers(tmp_path: Path) -> None:
    async with opened(tmp_path) as (run, _):
        for number in (10, 2, 0):
            await run.append_row(number, encode_row({"n": number}))
        run.close_shard(2)
        run.close_shard(7)
        await run.append_row(2, encode_row({"n": "again"}))
        await run.append_outcome(encode_row({"state": "failed"}))
        await run.append_session(encode_row({"event": "start"}))
    run = RunDirectory(tmp_path)
    for name in ("batch_x.jsonl", "batch_007.jsonl", "batch_1.jsonl.torn"):
        (tmp_path / name).write_bytes(b"{}\n")
    assert run.shard_numbers() == [0, 2, 10]
    assert rows(run, 2) == [{"n": 2}, {"n": "again"}]
    assert [line for _, line in run.read_outcomes()] == [b'{"state":"failed"}']
    assert [line for _, line in run.read_sessions()] == [b'{"event":"start"}']


async def test_a_fresh_start_over_stored_rows_is_refused_and_nothing_touched(tmp_path: Path) -> None:
    async with opened(tmp_path) as (run, _):
        await run.append_row(0, encode_row({"n": 0}))
    with (tmp_path / "batch_0.jsonl").open("ab") as file:
        file.write(b'{"torn')
    before = contents(tmp_path)
    with pytest.raises(RunExistsError, match=r"already has rows.*Resume it"):
        RunDirectory(tmp_path).open_for_writing(
            {**CONFIG, "model": "other"}, resume=False, policy_fields=POLICY
        )
    assert contents(tmp_path) == before
    async with opened(tmp_path) as (_, result):  # and the lock was let go
        assert not result.fresh


async def test_a_run_that_only_failed_counts_as_recorded(tmp_path: Path) -> None:
    async with opened(tmp_path) as (run, _):
        await run.append_outcome(encode_row({"state": "failed"}))
    with pytest.raises(RunExistsError):
        RunDirectory(tmp_path).open_for_writing(CONFIG, resume=False, policy_fields=POLICY)


async def test_a_start_that_recorded_nothing_may_be_started_again_with_other_settings(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    async with opened(tmp_path, resume=False, config={**CONFIG, "seed": 2}) as (run, result):
        assert result.fresh
        assert run.read_config() == {**CONFIG, "seed": 2}


async def test_a_resume_with_settings_that_change_results_is_refused_with_the_difference(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as (run, _):
        await run.append_row(0, encode_row({"n": 0}))
    before = contents(tmp_path)
    changed = {
        "model": "m2",
        "seed": 1,
        "sampling": {"temperature": 0.5, "top_p": 0.9},
        "num_workers": 9,
        "new": True,
    }
    with pytest.raises(RunChangedError) as refused:
        RunDirectory(tmp_path).open_for_writing(changed, resume=True, policy_fields=POLICY)
    message = str(refused.value)
    for line in (
        "model: stored 'm', now 'm2'",
        "sampling.top_p: stored None, now 0.9",
        "new: stored None, now True",
    ):
        assert line in message
    assert "num_workers" not in message
    assert "seed" not in message
    assert contents(tmp_path) == before


async def test_settings_that_change_no_result_may_change_and_are_stored(tmp_path: Path) -> None:
    async with opened(tmp_path) as (run, _):
        await run.append_row(0, encode_row({"n": 0}))
    async with opened(tmp_path, config={**CONFIG, "num_workers": 16, "later_option": None}) as (run, result):
        assert not result.fresh
        assert run.read_config() == {**CONFIG, "num_workers": 16, "later_option": None}


async def test_a_setting_that_reads_back_equal_is_equal(tmp_path: Path) -> None:
    async with opened(tmp_path, config={"order": ("a", "b")}) as (run, _):
        await run.append_row(0, encode_row({"n": 0}))
    async with opened(tmp_path, config={"order": ["a", "b"]}) as (_, result):
        assert not result.fresh


async def test_rows_made_before_there_was_a_configuration_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "batch_0.jsonl").write_bytes(b'{"n":0}\n')
    with pytest.raises(RunExistsError):
        RunDirectory(tmp_path).open_for_writing(CONFIG, resume=False, policy_fields=POLICY)
    async with opened(tmp_path) as (run, result):
        assert not result.fresh
        assert run.read_config() == CONFIG
        assert rows(run, 0) == [{"n": 0}]


async def test_all_logs_are_put_in_order_and_it_is_said(tmp_path: Path) -> None:
    async with opened(tmp_path) as (run, _):
        await run.append_row(3, encode_row({"n": 0}))
        await run.append_outcome(encode_row({"state": "failed"}))
        await run.append_session(encode_row({"event": "start"}))
    for name, end in (("batch_3", b'{"n":1}'), ("outcomes", b'{"st'), ("sessions", b"\xf0\x9f")):
        with (tmp_path / f"{name}.jsonl").open("ab") as file:
            file.write(end)
    (tmp_path / ".checkpoint.json.99-0.tmp").write_bytes(b"left by a killed process")
    async with opened(tmp_path) as (run, result):
        assert [(repair.path.name, repair.kind, repair.dropped_bytes) for repair in result.repairs] == [
            ("batch_3.jsonl", "unterminated", 0),
            ("outcomes.jsonl", "torn", 4),
            ("sessions.jsonl", "torn", 2),
        ]
        assert rows(run, 3) == [{"n": 0}, {"n": 1}]
    assert sorted(path.name for path in tmp_path.glob("*.torn")) == [
        "outcomes.jsonl.torn",
        "sessions.jsonl.torn",
    ]
    assert not (tmp_path / ".checkpoint.json.99-0.tmp").exists()


async def test_one_writer_and_any_number_of_readers(tmp_path: Path) -> None:
    async with opened(tmp_path) as (run, _):
        await run.append_row(0, encode_row({"n": 0}))
        reader = RunDirectory(tmp_path)
        assert rows(reader, 0) == [{"n": 0}]
        holder = reader.holder()
        assert holder is not None
        assert holder.pid == os.getpid()
        with pytest.raises(RunLockedError, match=f"process {os.getpid()} on host"):
            reader.open_for_writing(CONFIG, resume=True, policy_fields=POLICY)
        await run.append_row(0, encode_row({"n": 1}))
    assert rows(reader, 0) == [{"n": 0}, {"n": 1}]
    assert reader.holder() is None


async def test_closing_twice_is_fine(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.open_for_writing(CONFIG, resume=False, policy_fields=POLICY)
    run.append_row(0, encode_row({"n": 0}))
    await run.close()
    await run.close()
    assert rows(run, 0) == [{"n": 0}]


async def test_files_that_are_worked_out_are_replaced_whole(tmp_path: Path) -> None:
    async with opened(tmp_path) as (run, _):
        for n in range(2):
            run.write_checkpoint(iter([b'{"completed_prompts":[', b"%d" % n, b"]}\n"]))
            run.write_statistics({"n": n, "rate": float("nan")})
            run.write_trajectories(encode_row({"n": k}) for k in range(n + 1))
    assert json.loads((tmp_path / "checkpoint.json").read_text()) == {"completed_prompts": [1]}
    assert json.loads((tmp_path / "statistics.json").read_text()) == {
        "n": 1,
        "rate": None,
        "rate__nonfinite": "nan",
    }
    assert (tmp_path / "trajectories.jsonl").read_bytes() == b'{"n":0}\n{"n":1}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not the configuration of a run"),
        ("[]", "not the configuration of a run"),
        ('{"format": 1}', "not the configuration of a run"),
        ('{"format": 1, "config": []}', "not the configuration of a run"),
        ('{"format": 1, "config": null}', "not the configuration of a run"),
        ('{"format": "new", "config": {}}', "not the configuration of a run"),
        ('{"format": null, "config": {}}', "not the configuration of a run"),
        ("[" * 100_000, "not the configuration of a run"),
        ("", "not the configuration of a run"),
        ('{"format": 99, "config": {}}', "format 99.*Update taskmill"),
    ],
)
async def test_a_configuration_we_cannot_read_stops_the_start(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(StoreError, match=message):
        RunDirectory(tmp_path).open_for_writing(CONFIG, resume=True, policy_fields=POLICY)
    assert (tmp_path / "run.json").read_text() == text


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
async def test_a_configuration_that_is_no_file_stops_the_start(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "run.json")
    with pytest.raises(StoreError, match=r"run\.json' is not the configuration of a run"):
        RunDirectory(tmp_path).open_for_writing(CONFIG, resume=True, policy_fields=POLICY)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
async def test_a_lock_or_a_log_that_is_no_file_is_an_error_and_not_waited_for(
    tmp_path: Path, make: Any
) -> None:
    make(tmp_path / "lock")
    run = RunDirectory(tmp_path)
    assert run.holder() is None
    with pytest.raises(StoreError, match="lock' is not a regular file"):
        run.open_for_writing(CONFIG, resume=True, policy_fields=POLICY)
    make(tmp_path / "batch_0.jsonl")
    with pytest.raises(StoreError, match="batch_0"):
        await run.append_row(0, b"{}\n")


@pytest.mark.parametrize("kept", ["batch_0.jsonl", "outcomes.jsonl", "sessions.jsonl"])
async def test_rows_of_ours_without_a_configuration_are_not_resumed_with_another(
    tmp_path: Path, kept: str
) -> None:
    async with opened(tmp_path) as (run, _):
        await run.append_row(0, encode_row({"rollout_id": "r"}))
        await run.append_outcome(encode_row({"state": "failed"}))
        await run.append_session(encode_row({"event": "start"}))
    for path in tmp_path.iterdir():
        if path.is_file() and path.name not in ("lock", kept):
            path.unlink()
    if kept == "sessions.jsonl":
        (tmp_path / "batch_0.jsonl").write_bytes(b'{"n": 0}\n')
    before = contents(tmp_path)
    with pytest.raises(RunChangedError, match=r"'run\.json' is gone.*Put 'run\.json' back"):
        RunDirectory(tmp_path).open_for_writing(CONFIG, resume=True, policy_fields=POLICY)
    assert contents(tmp_path) == before


async def test_a_run_that_was_moved_is_the_same_run(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as (run, _):
        await run.append_row(0, encode_row({"n": 0}))
        run.journal.record("r", 0, "d", b"{}")
    shutil.move(tmp_path / "a", tmp_path / "b")
    async with opened(tmp_path / "b") as (run, result):
        assert not result.fresh
        await run.journal.open(lambda rollout_id: True)
        assert len(run.journal.recall("r")) == 1
