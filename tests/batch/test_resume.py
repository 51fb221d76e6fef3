"""What a resume does again and what it does not: decided by what is stored."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from taskmill.batch.status import status_of
from taskmill.errors import RunAbortedError, RunChangedError, RunLockedError
from taskmill.models.base import Request
from taskmill.store.jsonl import encode_row
from tests.batch.mill import (
    Mill,
    add,
    answering,
    asks,
    cancelled,
    prompt_of,
    prompts_of,
    says,
    turn_of,
    until,
)


def only(*prompts: str) -> Any:
    """A script that answers these prompts and fails all others."""

    def script(request: Request) -> Any:
        prompt = prompt_of(request)
        return says(f"answer to {prompt}") if prompt in prompts else RuntimeError("not yet")

    return answering(script)


async def test_three_equal_rows_and_one_stored_sample_leave_two_to_run(mill: Mill) -> None:
    mill.prompts("A", "A", "A")
    await mill.run(max_samples=1)
    model = answering()

    stored = await mill.run(model, resume=True)

    assert model.calls == 2
    assert mill.told("started")[0] == {"event": "started", "total": 3, "reused": 1}
    assert prompts_of(stored.rows) == ["A", "A", "A"]
    assert len({row["rollout_id"] for row in stored.rows}) == 3


async def test_of_a_a_b_with_one_a_done_exactly_one_a_and_one_b_are_run(mill: Mill) -> None:
    mill.prompts("A", "A", "B")
    killed = asyncio.Event()

    async def script(request: Request) -> Any:
        if model.calls == 1:
            return says()
        killed.set()
        return await asyncio.Event().wait()

    model = answering(script)
    run = asyncio.ensure_future(mill.run(model, batch_size=3))
    await until(killed, run)
    await cancelled(run)
    again = answering()

    stored = await mill.run(again, batch_size=3, resume=True)

    assert sorted(prompt_of(request) for request in again.requests) == ["A", "B"]
    assert sorted(prompts_of(stored.rows)) == ["A", "A", "B"]
    assert stored.outcome_counts() == {"completed": 3}


async def test_a_reordered_dataset_runs_nothing_again(mill: Mill) -> None:
    mill.prompts("a", "b", "c", "d")
    await mill.run()
    mill.prompts("d", "b", "a", "c")
    model = answering()

    stored = await mill.run(model, resume=True)

    assert model.calls == 0
    assert stored.outcome_counts() == {"completed": 4}
    assert stored.checkpoint["completed_prompts"] == [0, 1, 2, 3]


async def test_a_shortened_dataset_keeps_what_is_stored_and_says_what_belongs_to_no_row(mill: Mill) -> None:
    mill.prompts("a", "b", "c", "d")
    await mill.run()
    mill.prompts("b", "c")

    stored = await mill.run(resume=True)

    assert stored.statistics["total_prompts"] == 2
    assert stored.outcome_counts() == {"completed": 2}
    assert stored.statistics["stored_but_not_in_dataset"] == 2
    assert prompts_of(stored.trajectories) == ["a", "b", "c", "d"]


async def test_an_extended_dataset_runs_what_is_new(mill: Mill) -> None:
    mill.prompts("a", "b")
    await mill.run()
    mill.prompts("a", "b", "c", "d", "e")
    model = answering()

    stored = await mill.run(model, resume=True)

    assert [prompt_of(request) for request in model.requests] == ["c", "d", "e"]
    assert stored.outcome_counts() == {"completed": 5}


async def test_a_row_inserted_at_the_top_moves_every_index_and_only_it_is_run(mill: Mill) -> None:
    mill.prompts("a", "b", "c")
    await mill.run()
    mill.prompts("new", "a", "b", "c")
    model = answering()

    stored = await mill.run(model, resume=True)

    assert [prompt_of(request) for request in model.requests] == ["new"]
    assert stored.outcome_counts() == {"completed": 4}
    assert sorted(prompts_of(stored.trajectories)) == ["a", "b", "c", "new"]


async def test_a_row_is_the_same_by_text_image_and_working_directory(mill: Mill) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"prompt": "a", "image": "x:1"},
        {"prompt": "a", "cwd": "sub"},
        {"prompt": "a", "image": "x:1", "cwd": "sub"},
    ]
    mill.prompts(rows[0], rows[2])
    await mill.run()
    mill.prompts(*rows)
    model = answering()

    stored = await mill.run(model, resume=True)

    assert model.calls == 2
    assert stored.outcome_counts() == {"completed": 4}
    again = answering()
    mill.prompts({"prompt": "a", "docker_image": "x:1", "note": "changed"}, rows[3], rows[2], rows[0])
    await mill.run(again, resume=True)
    assert again.calls == 0


async def test_among_rows_of_one_text_a_sample_goes_to_the_row_whose_other_fields_it_carries(
    mill: Mill,
) -> None:
    mill.prompts({"prompt": "a", "id": 2})
    await mill.run()
    mill.prompts({"prompt": "a", "id": 1}, {"prompt": "a", "id": 2})

    stored = await mill.run(resume=True)

    assert [json.loads(row["row"])["id"] for row in stored.rows] == [2, 1]
    assert stored.outcome_counts() == {"completed": 2}


async def test_where_no_row_carries_its_fields_a_sample_goes_to_the_first(mill: Mill) -> None:
    mill.prompts({"prompt": "a", "id": 7})
    await mill.run()
    mill.prompts({"prompt": "a", "id": 1}, {"prompt": "a", "id": 2})

    stored = await mill.run(resume=True)

    assert [json.loads(row["row"])["id"] for row in stored.rows] == [7, 2]
    assert stored.outcome_counts() == {"completed": 2}


async def test_failed_and_cancelled_rows_run_again_and_done_ones_do_not(mill: Mill) -> None:
    mill.prompts("a", "b", "c")
    await mill.run(only("b"), max_failures=1.0)
    model = answering()

    stored = await mill.run(model, resume=True)

    assert [prompt_of(request) for request in model.requests] == ["a", "c"]
    assert sorted(prompts_of(stored.rows)) == ["a", "b", "c"]


async def test_shards_are_looked_at_and_not_counters(mill: Mill) -> None:
    """The checkpoint and the statistics may say what they like, or be gone."""
    mill.prompts("a", "b", "c")
    stored = await mill.run(batch_size=1)
    (stored.path / "batch_1.jsonl").unlink()
    checkpoint = stored.checkpoint
    assert checkpoint["completed_prompts"] == [0, 1, 2]
    model = answering()

    await mill.run(model, batch_size=1, resume=True)
    assert [prompt_of(request) for request in model.requests] == ["b"]

    for name in ("checkpoint.json", "statistics.json", "trajectories.jsonl"):
        (stored.path / name).unlink()
    stored = await mill.run(model, batch_size=1, resume=True)
    assert model.calls == 1
    assert stored.checkpoint["completed_prompts"] == [0, 1, 2]
    assert stored.outcome_counts() == {"completed": 3}


async def test_a_shard_made_by_another_runner_counts_by_its_prompts(mill: Mill) -> None:
    """Rows without any of our own fields: the first human turn is the prompt."""
    mill.prompts("a", "b", "c")
    path = mill.stored.path
    path.mkdir(parents=True)
    rows = [
        {"prompt_index": 0, "conversations": said("a"), "completed": True, "partial": False},
        {"prompt_index": 1, "conversations": said("b"), "completed": False, "partial": False},
        {"prompt_index": 9, "conversations": "not a list", "completed": True, "cost": "free", "usage": None},
    ]
    (path / "batch_0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = answering()

    stored = await mill.run(model, resume=True)

    assert [prompt_of(request) for request in model.requests] == ["b", "c"]
    assert stored.outcome_counts() == {"completed": 3}


def said(prompt: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": prompt}, {"from": "gpt", "value": "<think>\nx\n</think>\nyes"}]


@pytest.mark.parametrize(
    "damage",
    [
        {"conversations": "gone"},
        {"conversations": [{"from": "human"}]},
        {"conversations": [{"from": "human", "value": None}]},
        {"unknown_tools": "["},
        {"completed": "yes"},
        {"rollout_id": 7},
    ],
)
async def test_a_row_that_is_json_and_no_row_any_more_runs_again_and_the_good_one_is_merged(
    mill: Mill, damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    mill.prompts("a", "b")
    stored = await mill.run()
    rows = stored.shard(0)
    (stored.path / "batch_0.jsonl").write_bytes(encode_row({**rows[0], **damage}) + encode_row(rows[1]))
    model = answering()

    stored = await mill.run(model, resume=True)

    assert [prompt_of(request) for request in model.requests] == ["a"]
    assert "1 lines of batch_0.jsonl can't be read" in caplog.text
    assert prompts_of(stored.trajectories) == ["b", "a"]
    assert stored.statistics["trajectories"]["left_out"] == {"not_json": 1}
    again = answering()
    await mill.run(again, resume=True)
    assert again.calls == 0


async def test_a_row_of_another_runner_with_fields_we_cannot_read_stops_no_merge(mill: Mill) -> None:
    mill.prompts("a")
    stored = await mill.run()
    shard = stored.path / "batch_7.jsonl"
    odd = {"conversations": said("z"), "completed": True, "usage": None, "tool_stats": {"x": 1}, "cost": "0"}
    shard.write_text(json.dumps(odd) + "\n")

    stored = await mill.run(resume=True)

    assert prompts_of(stored.trajectories) == ["a", "z"]
    assert stored.statistics["trajectories"]["written"] == 2


# -- torn and unfinished ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "torn", [b'{"a": 1', b"{", '{"prompt_index": 1, "conversations": "ü'.encode()[:-1], b"garbage\xff"]
)
async def test_a_torn_last_line_is_cut_off_kept_aside_and_said_with_file_and_byte(
    mill: Mill, torn: bytes
) -> None:
    mill.prompts("a", "b", "c")
    stored = await mill.run(only("a"), batch_size=3, max_failures=1.0)
    shard = stored.path / "batch_0.jsonl"
    whole = shard.read_bytes()
    shard.write_bytes(whole + torn)

    stored = await mill.run(resume=True, batch_size=3)

    assert prompts_of(stored.rows) == ["a", "b", "c"]
    assert prompts_of(stored.trajectories) == ["a", "b", "c"]
    warning = next(text for text in mill.warnings() if "batch_0.jsonl" in text)
    assert str(len(whole)) in warning
    assert (stored.path / "batch_0.jsonl.torn").read_bytes().strip() == torn


async def test_a_last_line_that_only_lacks_its_newline_is_kept_and_said(mill: Mill) -> None:
    mill.prompts("a", "b")
    stored = await mill.run(only("a"), max_failures=1.0)
    shard = stored.path / "batch_0.jsonl"
    shard.write_bytes(shard.read_bytes()[:-1])
    model = answering()

    stored = await mill.run(model, resume=True)

    assert model.calls == 1
    assert prompts_of(stored.rows) == ["a", "b"]
    assert any("batch_0.jsonl" in text for text in mill.warnings())
    assert not (stored.path / "batch_0.jsonl.torn").exists()


async def test_wherever_a_shard_is_cut_its_last_row_is_all_that_is_run_again(mill: Mill) -> None:
    mill.prompts("a", "b", "c")
    stored = await mill.run(batch_size=3)
    shard = stored.path / "batch_0.jsonl"
    whole = shard.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for cut in (1, 2, 3, 17, 101, len(whole) - last - 1, len(whole) - last):
        shard.write_bytes(whole[:-cut])
        model = answering()
        stored = await mill.run(model, batch_size=3, resume=True)
        assert model.calls == (0 if cut == 1 else 1), cut
        assert prompts_of(stored.rows) == ["a", "b", "c"]


async def test_a_torn_line_of_outcomes_is_repaired_as_well(mill: Mill) -> None:
    mill.prompts("a", "b")
    silent = answering(lambda _: says(reasoning=None))
    stored = await mill.run(silent)
    path = stored.path / "outcomes.jsonl"
    path.write_bytes(path.read_bytes()[:-20])

    stored = await mill.run(silent, resume=True)

    assert silent.calls == 3
    assert stored.outcome_counts() == {"discarded": 2}
    assert any("outcomes.jsonl" in text for text in mill.warnings())


# -- one writer -----------------------------------------------------------------------------------------------

HOLD = """
import asyncio, sys
from tests.batch.mill import Mill, answering
from pathlib import Path

async def script(request):
    print("running", flush=True)
    await asyncio.Event().wait()

asyncio.run(Mill(Path(sys.argv[1])).run(answering(script), resume=True))
"""


def holder(mill: Mill) -> subprocess.Popen[str]:
    """A process that is at work on the run, and stays."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(mill.folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


async def test_a_second_process_is_refused_while_the_first_lives_and_a_dead_ones_lock_is_taken_over(
    mill: Mill,
) -> None:
    mill.prompts("a")
    process = holder(mill)
    try:
        before = mill.stored.content()
        for resume in (False, True):
            with pytest.raises(RunLockedError) as refused:
                await mill.run(resume=resume)
            assert str(process.pid) in str(refused.value)
            assert socket.gethostname() in str(refused.value)
        assert mill.stored.content() == before
    finally:
        process.kill()
        process.communicate()

    stored = await mill.run(resume=True)
    assert stored.outcome_counts() == {"completed": 1}


async def test_two_runners_of_one_process_do_not_share_a_run_either(mill: Mill) -> None:
    mill.prompts("a")
    started = asyncio.Event()

    async def script(request: Request) -> Any:
        started.set()
        await asyncio.Event().wait()

    first = asyncio.ensure_future(mill.run(answering(script)))
    await until(started, first)
    with pytest.raises(RunLockedError, match=str(os.getpid())):
        await mill.runner().run(resume=True)
    await cancelled(first)


# -- between the rows and the end -----------------------------------------------------------------------------


def _run_and_die_before_the_merge(folder: str) -> None:
    from taskmill.batch import run

    def die(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    run.merge = die  # type: ignore[assignment]
    asyncio.run(Mill(Path(folder)).run())


async def test_killed_between_the_last_row_and_the_merge_a_resume_merges_without_a_call(mill: Mill) -> None:
    mill.prompts("a", "b", "c")
    process = multiprocessing.get_context("fork").Process(
        target=_run_and_die_before_the_merge, args=(str(mill.folder),)
    )
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert len(mill.stored.rows) == 3
    assert not (mill.stored.path / "trajectories.jsonl").exists()
    model = answering()

    stored = await mill.run(model, resume=True)

    assert model.calls == 0
    assert prompts_of(stored.trajectories) == ["a", "b", "c"]
    assert stored.outcome_counts() == {"completed": 3}
    assert stored.statistics["api_calls"] == 3


async def test_with_nothing_left_to_do_merge_and_statistics_are_brought_up_to_date(mill: Mill) -> None:
    mill.prompts("a", "b")
    stored = await mill.run()
    (stored.path / "trajectories.jsonl").write_bytes(b"stale\n")
    first = stored.statistics["completed_at"]
    model = answering()

    stored = await mill.run(model, resume=True)

    assert model.calls == 0
    assert prompts_of(stored.trajectories) == ["a", "b"]
    assert stored.statistics["completed_at"] > first


# -- half-finished rollouts -----------------------------------------------------------------------------------


def two_turns(gate: asyncio.Event | None = None) -> Any:
    """A tool call and an answer; with a gate, the second call never returns and says that it was reached."""

    async def script(request: Request) -> Any:
        if turn_of(request) == 0:
            return asks("add", {"a": 1, "b": int(prompt_of(request))})
        if gate is not None:
            gate.set()
            await asyncio.Event().wait()
        return says(f"{request.messages[-1].content}")

    return answering(script)


async def interrupted(mill: Mill, **settings: Any) -> None:
    """Run until the second call of the first row is under way, and cancel."""
    gate = asyncio.Event()
    run = asyncio.ensure_future(mill.run(two_turns(gate), **settings))
    await until(gate, run)
    await cancelled(run)


async def test_a_half_finished_rollout_replays_its_calls_and_pays_for_none_twice(mill: Mill) -> None:
    mill.prompts("1", "2")
    settings: dict[str, Any] = {"tools": [add], "batch_size": 2}
    await interrupted(mill, **settings)
    model = two_turns()

    stored = await mill.run(model, resume=True, **settings)

    assert model.calls == 3
    assert [row["api_calls"] for row in stored.rows] == [2, 2]
    assert stored.statistics["api_calls"] == 4
    assert stored.statistics["tokens"]["input_tokens"] == 40
    assert '"sum"' in stored.rows[0]["conversations"][3]["value"]


async def test_at_the_first_request_that_differs_a_replay_goes_on_live(mill: Mill) -> None:
    """The tool gives something else than before, so the second call is another one and is made."""
    from taskmill import tool

    given = ["first"]

    @tool
    def look() -> str:
        """Look."""
        return given[0]

    mill.prompts("p")
    reached = asyncio.Event()

    async def script(request: Request) -> Any:
        turn = turn_of(request)
        if turn < 2:
            return asks("look", reasoning=f"{request.messages[-1].content}")
        if given[0] == "first":
            reached.set()
            await asyncio.Event().wait()
        return says("end")

    settings: dict[str, Any] = {"tools": [look]}
    run = asyncio.ensure_future(mill.run(answering(script), **settings))
    await until(reached, run)
    await cancelled(run)
    given[0] = "second"
    model = answering(script)

    stored = await mill.run(model, resume=True, **settings)

    assert [turn_of(request) for request in model.requests] == [1, 2]
    assert [m.content for m in model.requests[-1].messages if m.role == "tool"] == ["second", "second"]
    assert stored.statistics["api_calls"] == 4, "two before the interrupt and two after it were paid for"
    assert "first" not in str(stored.rows[0]["conversations"][1:])


def _run_and_die(folder: str, last: int, tells: str) -> None:
    asyncio.run(looking(Mill(Path(folder)), last, tells, end="kill"))


async def looking(mill: Mill, last: int, tells: str, end: str) -> Any:
    """A session that replays what it can and makes calls up to number `last`; its tool says `tells`."""
    from taskmill import tool

    @tool
    def look() -> str:
        """Look."""
        return tells

    reached = asyncio.Event()

    async def script(request: Request) -> Any:
        turn = turn_of(request)
        if turn < last:
            return asks("look", id=f"{tells}{turn}")
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "fail":
            return RuntimeError("no")
        if end == "cancel":
            reached.set()
            await asyncio.Event().wait()
        return says("end")

    model = answering(script)
    run = asyncio.ensure_future(mill.run(model, tools=[look], resume=True))
    if end == "cancel":
        await until(reached, run)
        await cancelled(run)
    else:
        await run
    return model


async def killed(mill: Mill, last: int, tells: str) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_run_and_die, args=(str(mill.folder), last, tells)
    )
    process.start()
    await asyncio.to_thread(process.join, 30)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("sessions", "calls"),
    [
        (["kill 2 same"], 3),  # two replayed, then the answer
        (["kill 2 old"], 4),  # one replayed, one let go, one anew, and the answer
        (["kill 3 old", "kill 2 old"], 5),
        (["kill 3 old", "kill 3 new"], 6),  # two anew take the place of two
        (["kill 3 old", "kill 3 other", "kill 3 new"], 8),
        (["fail 2 old"], 4),
        (["cancel 3 old", "kill 3 new"], 6),  # three recorded; two anew; then all replayed but the answer
        (["cancel 3 old", "kill 3 new", "fail 3 new"], 6),
        (["cancel 3 old", "cancel 3 new", "cancel 3 new"], 6),
        (["kill 3 old", "cancel 1 old", "kill 3 new"], 6),
    ],
)
async def test_every_call_that_was_paid_for_is_in_the_bill_once(
    mill: Mill, sessions: list[str], calls: int
) -> None:
    """Also one that no conversation holds in the end, because a tool said something else after a kill."""
    mill.prompts("p")
    for session in sessions:
        end, last, tells = session.split()
        if end == "kill":
            await killed(mill, int(last), tells)
        else:
            await looking(mill, int(last), tells, end)
    tells = sessions[-1].split()[2] if sessions[-1].split()[2] != "old" else "new"

    await looking(mill, 2 if "2" in sessions[-1] else 3, tells, "answer")

    statistics = mill.stored.statistics
    assert statistics["outcomes"]["completed"] == 1
    assert statistics["api_calls"] == calls
    assert statistics["tokens"]["input_tokens"] == 10 * calls


async def test_the_journal_of_a_rollout_goes_when_the_rollout_is_recorded(mill: Mill) -> None:
    mill.prompts("1", "2")
    await interrupted(mill, tools=[add])
    assert journal(mill), "a cancelled rollout keeps its calls"

    await mill.run(two_turns(), tools=[add], resume=True)

    assert journal(mill) == []


async def test_the_journal_of_a_failed_rollout_stays(mill: Mill) -> None:
    mill.prompts("1")
    await mill.run(answering([asks("add", {"a": 1, "b": 1}), RuntimeError("no")]), tools=[add])
    assert len(journal(mill)) == 1


def journal(mill: Mill) -> list[Path]:
    return sorted((mill.stored.path / "journal").glob("*"))


# -- settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("temperature", 0.1, 0.9),
        ("sampling_seed", None, 0),
        ("max_tokens", 100, 200),
        ("max_iterations", 10, 3),
        ("seed", 0, 1),
        ("distribution", "none", "terminal_only"),
        ("ephemeral_system_prompt", "be brief", None),
        ("prefill_messages", None, [{"role": "user", "content": "x"}]),
        ("reasoning_config", {"effort": "low"}, {"effort": "high"}),
        ("tool_result_limit", 50_000, 1000),
        ("network", False, True),
        ("providers_order", ["a"], ["b"]),
    ],
)
async def test_a_resume_with_settings_that_change_results_is_refused_with_the_difference(
    mill: Mill, name: str, before: Any, after: Any
) -> None:
    mill.prompts("a", "b")
    await mill.run(only("a"), max_failures=1.0, **{name: before})
    stored = mill.stored.content()
    model = answering()

    with pytest.raises(RunChangedError, match=name) as refused:
        await mill.run(model, resume=True, **{name: after})

    assert "stored" in str(refused.value)
    assert mill.stored.content() == stored
    assert model.calls == 0
    await mill.run(model, resume=True, **{name: before})


async def test_another_model_is_refused_by_name(mill: Mill) -> None:
    mill.prompts("a")
    await mill.run(answering(name="old"))
    with pytest.raises(RunChangedError, match=r"model: stored 'old', now 'new'"):
        await mill.run(answering(name="new"), resume=True)


async def test_settings_that_change_no_result_may_differ(mill: Mill) -> None:
    mill.prompts("a", "b", "c")
    await mill.run(only("a"), batch_size=2, num_workers=1, max_failures=1.0, sync="each", max_samples=2)
    other = mill.folder / "other.jsonl"
    other.write_bytes((mill.folder / "prompts.jsonl").read_bytes())

    stored = await mill.run(
        answering(),
        resume=True,
        dataset_file=other,
        batch_size=1,
        num_workers=8,
        max_failures=0.9,
        sync="none",
        max_samples=None,
        sandbox="plain",
        call_timeout=5.0,
        total_timeout=9.0,
        max_attempts=1,
        verbose=True,
        log_prefix_chars=3,
        discard_without_reasoning=False,
    )

    assert stored.outcome_counts() == {"completed": 3}
    assert stored.config["batch_size"] == 1


async def test_a_run_that_gave_up_resumes(mill: Mill) -> None:
    mill.prompts(*[str(number) for number in range(60)])
    with pytest.raises(RunAbortedError):
        await mill.run(only(), batch_size=10)
    model = answering()
    stored = await mill.run(model, batch_size=10, resume=True)
    assert stored.outcome_counts() == {"completed": 60}
    assert model.calls == 60


async def test_statistics_and_outcomes_add_up_over_many_sessions(mill: Mill) -> None:
    """Ten sessions, each of which gets some rows done and fails the rest; the sums are those of one."""
    prompts = [str(number) for number in range(12)]
    mill.prompts(*prompts)
    for session in range(5):
        await mill.run(only(*prompts[: 3 * session]), resume=True, max_failures=1.0)
        statistics = mill.stored.statistics
        assert sum(statistics["outcomes"].values()) == 12
        assert statistics["outcomes"]["completed"] == 3 * session
        assert statistics["api_calls"] == 3 * session
        assert statistics["tokens"]["output_tokens"] == 5 * 3 * session
        batches = mill.stored.checkpoint["batch_stats"].values()
        assert sum(batch["processed"] + batch["skipped"] for batch in batches) == 12
        assert sum(batch["skipped"] for batch in batches) == max(0, 3 * (session - 1))
    assert mill.stored.statistics["errors"] == {"RuntimeError": 12 + 9 + 6 + 3}
    assert len(mill.stored.rows) == 12


async def test_damaged_lines_are_passed_over_with_a_warning_that_counts_them(
    mill: Mill, caplog: pytest.LogCaptureFixture
) -> None:
    mill.prompts("a", "b", "fail")
    stored = await mill.run(only("a", "b"), max_failures=1)
    sessions, outcomes, shard = (stored.path / f"{n}.jsonl" for n in ("sessions", "outcomes", "batch_0"))
    sessions.write_bytes(b"\0" * 40 + b"\n" + sessions.read_bytes() + b'{"event": "end", "at": "now"}\n')
    [failed] = stored.outcomes
    outcomes.write_bytes(outcomes.read_bytes() + encode_row({**failed, "task_key": "no hash"}) + b"\0\n")
    lines = stored.shard(0)
    shard.write_bytes(b"".join(encode_row({**row, "task_key": "no hash"}) for row in lines) + b"[]\n")

    model = answering()
    resumed = await mill.run(model, resume=True, max_failures=1)

    assert [prompt_of(request) for request in model.requests] == ["fail"]
    assert resumed.outcome_counts() == {"completed": 3}
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        "1 lines of batch_0.jsonl can't be read and are passed over",
        "2 lines of outcomes.jsonl can't be read and are passed over",
        "2 lines of sessions.jsonl can't be read and are passed over",
    ]
    found = await status_of(stored.path)
    assert (found.outcomes, found.sessions) == ({"completed": 3}, 2)
