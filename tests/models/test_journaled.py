from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from taskmill.errors import TransientModelError
from taskmill.models import Completion, ScriptedModel
from taskmill.models.journaled import Journaled
from taskmill.records import Message, ToolCall, Usage
from taskmill.store.commit import GroupCommit
from taskmill.store.journal import CallJournal
from tests.models.semantics import asking


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[CallJournal]:
    async with GroupCommit("none") as commit:
        journal = CallJournal(folder, commit)
        await journal.open(lambda rollout: True)
        yield journal
        await commit.flush()
        journal.close()


async def ask(folder: Path, model: ScriptedModel, *texts: str, rollout: str = "r") -> list[Completion]:
    """One process's life: open the journal, ask, close."""
    async with opened(folder) as journal:
        service = Journaled(model, journal, rollout)
        return [await service.complete(asking(text)) for text in texts]


async def test_only_live_answers_are_told(tmp_path: Path) -> None:
    await ask(tmp_path, ScriptedModel(["one"]), "1")
    told: list[Completion] = []
    async with opened(tmp_path) as journal:
        service = Journaled(ScriptedModel(["two"]), journal, "r", on_answer=told.append)
        await service.complete(asking("1"))
        live = await service.complete(asking("2"))
    assert told == [live]


RICH = Completion(
    Message("assistant", "a", "hm", [{"type": "x", "n": 1}], (ToolCall("c", "ls", '{"a'),)),
    usage=Usage(10, 5, 3, 1),
    finish_reason="tool_calls",
    model="m",
    cost=0.25,
    seconds=1.5,
    waiting=0.5,
    attempts=3,
    token_ids=(1, 2),
    logprobs=(-0.5, 0.0),
    notes=("mended",),
)


async def test_what_was_answered_once_is_not_asked_again(tmp_path: Path) -> None:
    first = await ask(tmp_path, ScriptedModel([RICH, "two"]), "1", "2")
    model = ScriptedModel(["three"])
    second = await ask(tmp_path, model, "1", "2", "3")
    assert model.calls == 1
    assert [c.replayed for c in second] == [True, True, False]
    assert [c.message for c in second[:2]] == [c.message for c in first]
    kept = second[0]
    assert (kept.usage, kept.cost, kept.attempts, kept.notes) == (RICH.usage, 0.25, 3, ("mended",))


async def test_the_first_request_that_differs_ends_the_replay_for_good(tmp_path: Path) -> None:
    await ask(tmp_path, ScriptedModel(["one", "two", "three"]), "1", "2", "3")
    model = ScriptedModel(["other two", "other three"])
    replayed = await ask(tmp_path, model, "1", "2, but otherwise", "3")
    assert [c.message.content for c in replayed] == ["one", "other two", "other three"]
    assert model.calls == 2

    # What was recorded after the fork counts from now on; what the old branch held beyond it is void.
    model = ScriptedModel([])
    again = await ask(tmp_path, model, "1", "2, but otherwise", "3")
    assert [c.message.content for c in again] == ["one", "other two", "other three"]


async def test_another_model_s_calls_are_not_replayed(tmp_path: Path) -> None:
    await ask(tmp_path, ScriptedModel(["one"], name="small"), "1")
    assert not (await ask(tmp_path, ScriptedModel(["uno"], name="large"), "1"))[0].replayed


async def test_rollouts_don_t_share_calls(tmp_path: Path) -> None:
    await ask(tmp_path, ScriptedModel(["one"]), "1", rollout="r")
    assert (await ask(tmp_path, ScriptedModel(["uno"]), "1", rollout="s"))[0].message.content == "uno"


async def test_a_call_that_failed_leaves_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(TransientModelError):
        await ask(tmp_path, ScriptedModel(["one", TransientModelError("away")]), "1", "2")
    model = ScriptedModel(["two"])
    assert [c.replayed for c in await ask(tmp_path, model, "1", "2")] == [True, False]


async def test_an_answer_that_can_t_be_stored_as_it_is_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    live = await ask(tmp_path, ScriptedModel([Message("assistant", "a\ud83d")]), "1")
    later = await ask(tmp_path, ScriptedModel([]), "1")
    assert live[0].message == later[0].message == Message("assistant", "a\\ud83d")


async def test_closing_a_rollout_s_view_leaves_the_shared_model_open(tmp_path: Path) -> None:
    model = ScriptedModel(["one"])
    async with opened(tmp_path) as journal:
        await Journaled(model, journal, "r").close()
    assert not model.closed
