"""What a hostile file, endpoint or hand can't do to a run."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from taskmill import BatchRunner
from taskmill.cli.display import harmless
from taskmill.engine.dataset import BREATH, index_rows
from taskmill.errors import RunLockedError, StoreError
from taskmill.export import export_run
from taskmill.models.wire import decode_answer
from taskmill.store.lock import RunLock
from taskmill.testing import ScriptedModel


def dataset(folder: Path, *prompts: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def runner(folder: Path, **settings: object) -> BatchRunner:
    return BatchRunner(
        dataset(folder, "a", "b"),
        2,
        "run",
        distribution="none",
        model=ScriptedModel(lambda request: "yes"),
        output_dir=folder,
        discard_without_reasoning=False,
        **settings,
    )


def test_removing_the_lock_file_lets_nobody_in_while_its_holder_lives(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path / "lock"), RunLock(tmp_path / "lock")
    first.acquire()
    (tmp_path / "lock").unlink()
    with pytest.raises(RunLockedError):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


async def test_the_hidden_prompts_stand_in_no_file_and_are_compared_at_a_resume(tmp_path: Path) -> None:
    hidden = {
        "ephemeral_system_prompt": "TOPSECRET",
        "prefill_messages": [{"role": "user", "content": "HIDDENTURN"}],
    }
    await runner(tmp_path, **hidden).run()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert b"TOPSECRET" not in path.read_bytes()
            assert b"HIDDENTURN" not in path.read_bytes()

    await runner(tmp_path, **hidden).run(resume=True)
    with pytest.raises(ValueError, match="ephemeral_system_prompt"):
        await runner(tmp_path, **{**hidden, "ephemeral_system_prompt": "another"}).run(resume=True)


async def test_an_export_replaces_no_pipe_and_no_device(tmp_path: Path) -> None:
    await runner(tmp_path).run()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="not a regular file"):
        export_run(tmp_path / "run", "sharegpt", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


async def test_a_shard_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    await runner(tmp_path).run()
    os.mkfifo(tmp_path / "run" / "batch_7.jsonl")
    async with asyncio.timeout(30):
        report = await asyncio.to_thread(export_run, tmp_path / "run", "messages", tmp_path / "out.jsonl")
    assert report.written == 2


def test_reading_a_file_of_nothing_but_odd_lines_looks_up_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\n" * (3 * BREATH) + b"123\n" * (3 * BREATH))
    assert list(index_rows(path)).count(None) >= 5


def test_control_characters_are_written_out_and_text_is_left_alone() -> None:
    assert harmless("\x1b]0;OWNED\x07\x1b[2J red\r\x9b") == r"\x1b]0;OWNED\x07\x1b[2J red\r\x9b"
    assert harmless("two lines\n\tä 🙂") == "two lines\n\tä 🙂"


@pytest.mark.parametrize("count", [-1, -(10**30), 10**30])
def test_a_count_of_tokens_that_can_not_be_is_no_count(count: int) -> None:
    answer = {
        "choices": [{"message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": count},
    }
    completion = decode_answer(json.dumps(answer).encode())
    assert completion.usage.output_tokens == 0
    assert not completion.counted
