"""Every file of a run, cut off by every number of bytes: what was whole stays, and going on harms nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from taskmill.store.jsonl import encode_row
from taskmill.store.run import RunDirectory

LONGEST_CUT = 200
TEXT = 'é😀\u2028"\\\0 ' * 6


def make_run(path: Path) -> None:
    async def work() -> None:
        run = RunDirectory(path, sync="none")
        run.open_for_writing({"seed": 1}, resume=False)
        for n in range(4):
            run.append_row(0, encode_row({"n": n, "text": TEXT}))
            run.append_outcome(encode_row({"n": n, "error": TEXT}))
            run.append_session(encode_row({"n": n, "event": TEXT}))
            run.journal.record("r", n, f"d{n}", encode_row({"n": n, "text": TEXT})[:-1])
        await run.close()

    asyncio.run(work())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    make_run(path)
    return path


def parsed(lines: list[bytes]) -> list[Any]:
    return [json.loads(line) for line in lines]


def rows_left(data: bytes) -> list[bytes]:
    """The rows of a cut log that nothing is missing from, worked out without the product."""
    *complete, end = data.split(b"\n")
    try:
        json.loads(end)
    except ValueError:
        return complete
    return [*complete, end]


def append_to(run: RunDirectory, name: str, row: bytes) -> None:
    if name == "outcomes.jsonl":
        run.append_outcome(row)
    elif name == "sessions.jsonl":
        run.append_session(row)
    else:
        run.append_row(0, row)


def lines_of(run: RunDirectory, name: str) -> list[bytes]:
    read = {"outcomes.jsonl": run.read_outcomes, "sessions.jsonl": run.read_sessions}.get(name)
    return [line for _, line in (read() if read else run.read_shard(0))]


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of openings, and no power cut among them."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("name", ["batch_0.jsonl", "outcomes.jsonl", "sessions.jsonl"])
async def test_a_cut_log_keeps_its_whole_rows_and_takes_new_ones(
    whole: Path, tmp_path: Path, name: str
) -> None:
    data = (whole / name).read_bytes()
    assert len(data) > 2 * LONGEST_CUT
    for cut in range(1, LONGEST_CUT + 1):
        path = tmp_path / str(cut)
        path.mkdir()
        shutil.copy(whole / "run.json", path)
        (path / name).write_bytes(data[:-cut])
        expected = rows_left(data[:-cut])

        run = RunDirectory(path, sync="none")
        repairs = run.open_for_writing({"seed": 1}, resume=True).repairs
        append_to(run, name, encode_row({"n": "new"}))
        await run.close()

        assert parsed(lines_of(run, name)) == [*parsed(expected), {"n": "new"}]
        tail = data[:-cut].rpartition(b"\n")[2]
        if not tail:
            assert repairs == []
        elif tail in expected:
            assert [repair.kind for repair in repairs] == ["unterminated"]
        else:
            assert [(repair.kind, repair.dropped_bytes) for repair in repairs] == [("torn", len(tail))]
            assert (path / f"{name}.torn").read_bytes() == tail + b"\n"
            assert (path / name).read_bytes()[: repairs[0].offset] == data[: repairs[0].offset]
        shutil.rmtree(path)


async def test_a_cut_journal_keeps_its_whole_calls_and_takes_new_ones(whole: Path, tmp_path: Path) -> None:
    name = "journal/calls_000001.jsonl"
    data = (whole / name).read_bytes()
    for cut in range(1, LONGEST_CUT + 1):
        path = tmp_path / str(cut)
        (path / "journal").mkdir(parents=True)
        (path / name).write_bytes(data[:-cut])
        count = len(rows_left(data[:-cut]))
        for session in range(2):
            run = RunDirectory(path, sync="none")
            await run.journal.open(lambda rollout_id: True)
            expected = [f"d{n}" for n in range(count)] + ["new"] * session
            assert [entry.digest for entry in run.journal.recall("r")] == expected
            if not session:
                run.journal.record("r", count, "new", b"{}")
            await run.close()
        shutil.rmtree(path)


@pytest.mark.parametrize("name", ["checkpoint.json", "statistics.json", "trajectories.jsonl", "run.json"])
async def test_a_crash_while_a_file_is_replaced_leaves_the_old_one(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    run = RunDirectory(path, sync="none")
    run.open_for_writing({"seed": 1, "num_workers": 1}, resume=True, policy_fields=frozenset({"num_workers"}))

    def write(value: int) -> None:
        if name == "run.json":
            again = RunDirectory(path)
            again.open_for_writing(
                {"seed": 1, "num_workers": value}, resume=True, policy_fields=frozenset({"num_workers"})
            )
            again._lock.release()
        else:
            run.write_checkpoint([b"%d\n" % value])
            run.write_statistics({"n": value})
            run.write_trajectories([b"%d\n" % value])

    await run.close()
    write(1)
    old = (path / name).read_bytes()

    class Killed(BaseException):
        pass

    def die(*arguments: object) -> None:
        raise Killed

    for call in ("taskmill.store.files._keep_owner", "os.fsync", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", lambda name: None)  # a killed process tidies up nothing
            patch.setattr(call, die)
            with pytest.raises(Killed):
                write(2)
        assert (path / name).read_bytes() == old
    assert list(path.glob(".*.tmp"))
    run = RunDirectory(path)
    run.open_for_writing({"seed": 1}, resume=True, policy_fields=frozenset({"num_workers"}))
    await run.close()
    assert not list(path.glob(".*.tmp"))
