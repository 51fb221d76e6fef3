"""Many conversations in one run: ids, seeds, failures kept apart, what is stored, and going on."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskmill.conversations import (
    Conversation,
    Participant,
    RunReport,
    arun,
    arun_jobs,
    dataset_field,
    register_analyzer,
    run,
    run_jobs,
)
from taskmill.errors import (
    AuthenticationError,
    ConfigurationError,
    ContextWindowError,
    RunAbortedError,
    RunChangedError,
    RunExistsError,
)
from taskmill.models.base import Completion, Request
from taskmill.records import Message, Usage
from taskmill.testing import FakeEndpoint, ScriptedModel
from taskmill.testing.endpoint import answer
from tests.conversations.cast import babble, echo, lengths, pair, picky, rows, seat, stern, texts


def stored(folder: Path, name: str = "conversations.jsonl") -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


# -- what a run is --------------------------------------------------------------------------------------------


async def test_jobs_are_called_by_row_copy_and_name() -> None:
    with_rows, without = pair().data(rows(2)), pair(shared_context="Go.").name("free")

    assert list((await with_rows.arollout()).results) == ["row_00000", "row_00001"]
    assert list((await with_rows.arollout(2)).results)[1:3] == ["row_00000/0001", "row_00001/0000"]
    assert list((await without.arollout(2)).results) == ["rollout_0000", "rollout_0001"]
    report = await arun([with_rows, without], n=1)
    assert list(report.results) == ["conv0/row_00000/0000", "conv0/row_00001/0000", "free/rollout_0000"]


async def test_copies_have_seeds_of_their_own_the_same_ones_every_time() -> None:
    talk = pair(shared_context="Go.", seed=5)

    first, again = await talk.arollout(16), await talk.arollout(16, batched=False)

    assert texts(first) == texts(again)
    assert len({tuple(said) for said in texts(first).values()}) == 16
    assert [result.record.seed for result in first.results.values()] == list(range(5, 21))
    alone = await talk.seed(9).arollout(1)
    assert texts(alone)["rollout_0000"] == texts(first)["rollout_0004"]


async def test_a_row_has_the_same_text_in_any_order_and_any_company() -> None:
    data = rows(12)
    shuffled = random.Random(3).sample(data, len(data))
    slow = Conversation([seat("ann", dawdling), seat("bob", echo)], dataset_field("text"), turns=4)

    one = await slow.data(data).arollout(analyzer_free := None)
    other = await slow.data(shuffled).arollout(batched=False)

    assert analyzer_free is None
    by_row = [
        {
            result.row["text"]: [said.content for said in result.transcript]
            for result in report.results.values()
        }
        for report in (one, other)
    ]
    assert by_row[0] == by_row[1]


async def dawdling(request: Request) -> str:
    """Answers after a number of turns of the loop that has nothing to do with what it says."""
    for _ in range(random.randint(0, 20)):
        await asyncio.sleep(0)
    return f"{request.sampling.seed}"


async def test_equal_rows_are_rows_of_their_own() -> None:
    report = await pair().data([{"text": "a"}, {"text": "b"}, {"text": "a"}]).arollout()

    said = texts(report)
    assert said["row_00000"] != said["row_00002"]


async def test_a_conversation_that_has_turns_is_continued() -> None:
    talk = pair(shared_context="Go.")
    await talk.arun(2)

    report = await talk.arollout(3)

    begun = [message.content for message in talk.transcript]
    assert all(said[:2] == begun and len(said) == 6 for said in texts(report).values())
    assert len({said[2] for said in texts(report).values()}) == 3
    assert len(talk.transcript) == 2


async def test_settings_of_one_lineup_are_not_those_of_another_on_the_same_model() -> None:
    model = ScriptedModel(lambda request: Completion(Message("assistant", "x"), usage=Usage(1, 1)))
    lineups = [
        Conversation([Participant("a", model, temperature=t, max_tokens=m)], "Go.", turns=1)
        for t, m in ((0.1, 5), (1.5, 15))
    ]

    await arun(lineups, n=3)

    asked = {(request.sampling.temperature, request.sampling.max_tokens) for request in model.requests}
    assert asked == {(0.1, 5), (1.5, 15)}


async def test_endpoints_are_asked_side_by_side() -> None:
    at_once = most = 0
    release = asyncio.Event()

    async def waits(request: Request) -> str:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 8:
            release.set()
        await release.wait()
        at_once -= 1
        return "x"

    await Conversation([Participant("a", waits)], "Go.", turns=1).arollout(8)

    assert most == 8


# -- data -----------------------------------------------------------------------------------------------------


async def test_an_endless_iterator_is_drawn_from_as_there_is_a_place() -> None:
    drawn = []

    def forever() -> Iterator[dict[str, str]]:
        for number in itertools.count():
            drawn.append(number)
            yield {"text": str(number)}

    report = await pair().data(forever()).arollout(limit=10)

    assert len(report.results) == 10
    assert len(drawn) <= 11


async def test_an_iterator_that_was_used_up_is_an_error_and_no_empty_run() -> None:
    talk = pair().data(iter(rows(2)))
    await talk.arollout()

    with pytest.raises(ConfigurationError, match="drawn from"):
        await talk.arollout()


async def test_a_conversation_about_a_row_needs_one() -> None:
    with pytest.raises(ConfigurationError, match=r"\.data\(rows\)"):
        await pair().arollout()


# -- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (lambda talk: run([talk.name("a"), talk.name("a")]), "two conversations .* called 'a'"),
        (lambda talk: run_jobs([("a", talk), ("b", talk), ("a", talk)]), "two jobs .* called 'a'"),
        (lambda talk: run([]), "no conversation"),
        (lambda talk: run(["talk"]), "takes conversations"),
        (lambda talk: run_jobs([("a", talk.data([1]))]), "has data"),
        (lambda talk: talk.rollout(0), "n=0"),
        (lambda talk: talk.rollout(resume=True), "out_dir"),
        (lambda talk: talk.rollout(devices=[]), r"devices=\[\]"),
        (lambda talk: talk.rollout(device="cpu"), "no option 'device'"),
        (lambda talk: talk.turns(None).rollout(), "how many turns"),
    ],
)
def test_what_can_not_be_meant_is_refused_before_anything_runs(begin: Any, message: str) -> None:
    model = ScriptedModel(lambda request: "x")
    talk = Conversation([Participant("a", model)], "Go.", turns=1)

    with pytest.raises(ConfigurationError, match=message):
        begin(talk)
    assert model.calls == 0


async def test_an_id_that_comes_twice_out_of_a_generator_ends_the_run() -> None:
    talk = Conversation([Participant("a", ["x"])], "Go.", turns=1)

    with pytest.raises(ConfigurationError, match="two jobs of this run are called 'a'"):
        await arun_jobs((name, talk) for name in ("a", "b", "a"))


# -- failures -------------------------------------------------------------------------------------------------


async def test_failures_are_kept_apart(tmp_path: Path) -> None:
    data = [{"text": f"row {number}", "kind": ""} for number in range(32)]
    data[3]["text"] = "RAISE"
    data[17]["text"] = "too long " * 100
    data[29]["kind"] = "unanalysable"
    talk = Conversation(
        [seat("ann", stern, context_window=100), seat("bob", echo)],
        dataset_field("text"),
        turns=3,
        analyzer=picky,
    )

    report = await talk.data(data).arollout(out_dir=tmp_path / "run")

    assert report.failed == ["row_00003", "row_00017", "row_00029"]
    errors = [report.results[id].error or "" for id in report.failed]
    assert errors[0] == "ValueError: I will not answer that"
    assert errors[1].startswith(f"{ContextWindowError.__name__}: participant 'ann'")
    assert "the analyzer 'picky' failed: RuntimeError: this one I can't look at" in errors[2]
    assert len(report.transcripts()) == len(report.analyses()) == 29
    assert report.results["row_00003"].tokens_generated == 0


async def test_an_analyzer_that_says_what_is_no_json_fails_its_job() -> None:
    report = await pair(analyzer=lambda conversation: object()).data(rows(1)).arollout()

    assert "not JSON" in (report.results["row_00000"].error or "")


async def test_a_wrong_key_ends_the_run_early() -> None:
    model = ScriptedModel(lambda request: AuthenticationError("401: wrong key"))
    talk = Conversation([Participant("a", model)], "Go.", turns=1)

    with pytest.raises(RunAbortedError, match="wrong key"):
        await talk.arollout(500)
    assert model.calls < 200


async def test_an_analyzer_may_ask_the_participants() -> None:
    async def interview(conversation: Any) -> str:
        return str((await conversation.asample("bob", "How was it?")).content)

    def blocking(conversation: Any) -> str:
        return str(conversation.sample("bob", "How was it?").content)

    for analyzer in (interview, blocking):
        report = await pair(analyzer=analyzer).data(rows(1)).arollout()
        assert "How was it?" in report.analyses()["row_00000"]
        assert len(report.transcripts()["row_00000"]) == 4


async def test_an_analyzer_may_have_a_name() -> None:
    register_analyzer("tests-lengths", lengths)

    report = await pair(analyzer="tests-lengths").data(rows(1)).arollout()

    assert report.analyses()["row_00000"] == {"turns": 4, "row": {"text": "row 0"}}
    with pytest.raises(ConfigurationError, match="registered as 'tests-lengths'"):
        register_analyzer("tests-lengths", picky)
    failed = await pair(analyzer="nobody").data(rows(1)).arollout()
    assert "no analyzer is registered as 'nobody'" in (failed.results["row_00000"].error or "")


# -- what is stored, and going on -----------------------------------------------------------------------------


async def test_each_conversation_is_on_disk_as_soon_as_it_ends(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(event: Any) -> None:
        if event["event"] == "recorded":
            seen.append(len(stored(tmp_path / "run")))

    await (
        pair(analyzer=lengths).data(rows(5)).arollout(out_dir=tmp_path / "run", batched=False, on_event=look)
    )

    assert len(seen) == 5
    row = stored(tmp_path / "run")[0]
    expected = {
        "transcript",
        "analysis",
        "row",
        "stream",
        "device",
        "started_at",
        "seconds",
        "usage",
        "versions",
    }
    assert expected <= row.keys()
    assert row["transcript"][0]["metadata"]["seed"]


async def test_a_resume_runs_what_is_missing_and_reports_the_whole(tmp_path: Path) -> None:
    talk, folder = pair(analyzer=lengths), tmp_path / "run"
    await talk.data(rows(4)).arollout(out_dir=folder)
    moved = [{"text": "new"}, *reversed(rows(4))]

    report = await talk.data(moved).arollout(out_dir=folder, resume=True)

    assert report.skipped == [f"row_{number:05d}" for number in range(1, 5)]
    assert len(report.analyses()) == 5
    assert report.results["row_00001"].row == {"text": "row 3"}
    assert [report.results[f"row_{n:05d}"].job_id for n in range(5)] == list(report.results)
    assert len(stored(folder)) == 5
    assert texts(report) == texts(await talk.data(moved).arollout())


async def test_an_extended_run_has_the_same_first_copies(tmp_path: Path) -> None:
    talk = pair(shared_context="Go.")

    four = texts(await talk.arollout(4, out_dir=tmp_path / "run"))
    eight = await talk.arollout(8, out_dir=tmp_path / "run", resume=True)

    assert {id: said for id, said in texts(eight).items() if id in four} == four
    assert texts(eight) == texts(await talk.arollout(8))
    assert len(eight.skipped) == 4


async def test_what_failed_runs_again(tmp_path: Path) -> None:
    broken = True

    class Moody(ScriptedModel):
        pass

    model = Moody(
        lambda request: ValueError("moody") if broken and "row 1" in request.messages[0].content else "x"
    )
    global MODEL
    MODEL = model
    talk = Conversation([seat("ann", ask_moody)], dataset_field("text"), turns=2)
    first = await talk.data(rows(3)).arollout(out_dir=tmp_path / "run")
    failed = first.failed
    broken = False
    second = await talk.data(rows(3)).arollout(out_dir=tmp_path / "run", resume=True)

    assert (failed, second.failed) == (["row_00001"], [])
    assert not [result for result in first.results.values() if result.error], "it reads what is there now"
    assert len(second.skipped) == 2
    assert [row["attempt"] for row in stored(tmp_path / "run") if row["job_id"] == "row_00001"] == [2]
    assert [row["state"] for row in stored(tmp_path / "run", "attempts.jsonl")] == ["failed"]


MODEL: Any = None


async def ask_moody(request: Request) -> Completion:
    return await MODEL.complete(request)  # type: ignore[no-any-return]


async def test_another_recipe_is_refused_with_the_difference(tmp_path: Path) -> None:
    talk = pair().data(rows(2))
    await talk.arollout(out_dir=tmp_path / "run")

    with pytest.raises(RunChangedError, match=r"lineup\.turns: stored 4, now 5"):
        await talk.turns(5).arollout(out_dir=tmp_path / "run", resume=True)
    with pytest.raises(RunExistsError):
        await talk.arollout(out_dir=tmp_path / "run")
    assert len(stored(tmp_path / "run")) == 2


async def test_a_ladder_may_be_extended_by_another_lineup(tmp_path: Path) -> None:
    one, other = pair().data(rows(2)).name("one"), pair(echo, babble).data(rows(2)).name("other")
    await arun([one], out_dir=tmp_path / "run")

    report = await arun([one, other], out_dir=tmp_path / "run", resume=True)

    assert len(report.skipped) == 2
    assert len(report.results) == 4


async def test_jobs_that_were_made_by_hand_go_on_and_keep_their_recipes(tmp_path: Path) -> None:
    jobs = [("a", pair(shared_context="A")), ("b", pair(shared_context="B"))]
    await arun_jobs(jobs[:1], out_dir=tmp_path / "run")

    report = await arun_jobs(jobs, out_dir=tmp_path / "run", resume=True)

    assert (report.skipped, list(report.results)) == (["a"], ["a", "b"])
    assert report.results["b"].conversation.lineup.shared_context == "B"
    with pytest.raises(RunChangedError, match="job 'a'"):
        await arun_jobs([("a", pair(shared_context="C"))], out_dir=tmp_path / "run", resume=True)


@pytest.mark.parametrize("damage", [b"", b'{"id": "x", "sta', b"\0\0\0\n"])
async def test_a_row_that_is_damaged_is_held_again_and_said(damage: bytes, tmp_path: Path) -> None:
    talk, folder, heard = pair().data(rows(3)), tmp_path / "run", []
    whole = texts(await talk.arollout(out_dir=folder))
    lines = (folder / "conversations.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "conversations.jsonl").write_bytes(lines[0] + lines[1] + damage)

    report = await talk.arollout(out_dir=folder, resume=True, on_event=heard.append)

    assert texts(report) == whole
    assert len(report.skipped) == 2
    assert bool(damage) == any(event["event"] == "warning" for event in heard)


async def test_a_half_finished_conversation_pays_for_no_call_twice(tmp_path: Path) -> None:
    def reply(body: Any) -> Any:
        return answer(f"call {len(asked)}") if not asked.append(1) else None  # type: ignore[func-returns-value]

    asked: list[int] = []
    async with FakeEndpoint(reply) as endpoint:
        far = Participant("far", "m", base_url=endpoint.url)
        talk = Conversation([far, seat("near", sometimes)], "Go.", turns=6)
        global BROKEN
        BROKEN = True
        first = await talk.arollout(out_dir=tmp_path / "run")
        failed, before = first.failed, len(asked)
        BROKEN = False
        second = await talk.arollout(out_dir=tmp_path / "run", resume=True)

    assert failed == ["rollout_0000"]
    assert before == 2
    assert len(asked) == 3
    assert [said.content for said in second.transcripts()["rollout_0000"].by("far")] == [
        "call 1",
        "call 2",
        "call 3",
    ]
    assert second.results["rollout_0000"].record.billed_calls == 3


async def test_scripted_answers_go_on_where_they_were_after_a_failure(tmp_path: Path) -> None:
    global BROKEN
    BROKEN = True
    talk = Conversation([seat("ann", ["1", "2", "3"]), seat("near", sometimes)], "Go.", turns=6)
    await talk.arollout(out_dir=tmp_path / "run")
    BROKEN = False

    report = await talk.arollout(out_dir=tmp_path / "run", resume=True)

    assert [said.content for said in report.transcripts()["rollout_0000"].by("ann")] == ["1", "2", "3"]


async def test_one_job_of_a_generator_that_can_not_be_saved_fails_alone(tmp_path: Path) -> None:
    jobs = [("a", pair(shared_context="A")), ("b", pair(lambda request: "x", shared_context="B"))]

    report = await arun_jobs(iter(jobs), out_dir=tmp_path / "run")

    assert report.failed == ["b"]
    assert "can't be saved" in (report.results["b"].error or "")


async def test_rows_of_a_hugging_face_dataset_are_drawn_one_by_one() -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(rows(3))

    for data in (whole, whole.to_iterable_dataset()):
        report = await pair(analyzer=lengths).data(data).arollout()
        assert [said["row"]["text"] for said in report.analyses().values()] == ["row 0", "row 1", "row 2"]


BROKEN = False


def sometimes(request: Request) -> str:
    if BROKEN and len(request.messages) > 1:
        raise ValueError("not now")
    return "near"


async def test_a_run_can_be_read_without_running_it_and_its_conversations_go_on(tmp_path: Path) -> None:
    await pair(analyzer=lengths).data(rows(2)).arollout(out_dir=tmp_path / "run")

    report = RunReport.read(tmp_path / "run")
    talk = report.conversations()["row_00001"]

    assert talk.row == {"text": "row 1"}
    assert len(await talk.arun(2)) == 6
    assert len(report.analyses()) == 2


async def test_cancelling_keeps_what_is_recorded(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def stuck(request: Request) -> str:
        if "row 2" in request.messages[0].content and len(request.messages) > 1:
            reached.set()
            await asyncio.Event().wait()
        return "x"

    global MODEL
    MODEL = ScriptedModel(stuck)
    talk = Conversation([seat("ann", ask_moody), seat("bob", echo)], dataset_field("text"), turns=4)
    work = asyncio.ensure_future(talk.data(rows(3)).arollout(out_dir=tmp_path / "run", batched=False))
    await reached.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work

    states = {row["job_id"]: row["state"] for row in stored(tmp_path / "run")}
    assert states == {"row_00000": "completed", "row_00001": "completed", "row_00002": "cancelled"}
    assert len(stored(tmp_path / "run")[-1]["transcript"]) == 2


async def test_health_is_counted_by_participant_and_round_and_nothing_is_filled_in(tmp_path: Path) -> None:
    cut = Completion(Message("assistant", "and then"), finish_reason="length")
    talk = Conversation(
        [
            Participant("ann", ScriptedModel(["fine", ""])),
            Participant("bob", ScriptedModel(["I'm sorry, I can't do that.", cut])),
            Participant("cat", ["Dear [Your Name],", "fine"]),
        ],
        "Go.",
        turns=6,
    )

    report = await talk.arollout()

    assert {name: {kind: c for kind, c in counts.items() if c} for name, counts in report.health.items()} == {
        "ann": {"turns": 2, "silent": 1, "rounds": {"silent": {"2": 1}}},
        "bob": {"turns": 2, "cut": 1, "refusals": 1, "rounds": {"cut": {"2": 1}, "refusals": {"1": 1}}},
        "cat": {"turns": 2, "placeholders": 1, "rounds": {"placeholders": {"1": 1}}},
    }
    assert report.transcripts()["rollout_0000"][3].content == ""
    assert "ann: 2 turns, 1 silent (silent in round 2)" in str(report)
