"""A conversation as a recipe and as a live dialogue: copies, branches, saving, blocking calls."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from taskmill.conversations import (
    Conversation,
    Participant,
    Summarise,
    TextPattern,
    TokenBudget,
    Turns,
    When,
    dataset_field,
)
from taskmill.errors import ConfigurationError, StoreError
from taskmill.models.base import Model, Request
from taskmill.testing import FakeEndpoint, ScriptedModel
from taskmill.testing.endpoint import answer
from tests.conversations.cast import babble, count_words, echo, lengths, pair


class Importable(Participant):
    """A participant that brings its own model."""

    def open(self) -> Model:
        return ScriptedModel(lambda request: f"I am {self.name}")


def over(said: Any, turns: int = 3) -> bool:
    return len(said.transcript) >= turns


def test_changes_make_copies() -> None:
    talk = pair()

    changed = talk.turns(2).seed(9).name("other").data([{"text": "x"}]).analyzer(lengths).run_until(Turns(1))

    assert talk == pair()
    assert changed != talk
    assert (changed.lineup.turns, changed.lineup.seed, talk.lineup.turns) == (2, 9, 4)


def test_a_live_dialogue_is_stepped_edited_rewound_and_branched() -> None:
    talk = pair(shared_context="Go.")

    first = talk.step()
    talk.run(2)
    branch = talk.branch_from(1)
    talk.edit(1, "something else").rewind()

    assert first is not None
    assert [message.author for message in talk.transcript] == ["ann", "bob"]
    assert talk.transcript[1].content == "something else"
    assert talk.transcript[1].metadata["edited"]
    assert list(branch.transcript) == [first]
    heard = f"Go.\n\n{first.content}"
    assert branch.run(2)[1].content == f"you said {heard!r}"


def test_a_sample_is_recorded_nowhere() -> None:
    talk = pair(shared_context="Go.")
    talk.run(2)

    said = talk.sample("bob", "What do you really think?")

    assert "really think" in said.content
    assert len(talk.transcript) == 2


def test_the_same_seed_gives_the_same_dialogue_whether_run_or_stepped() -> None:
    one, other = pair(shared_context="Go."), pair(shared_context="Go.")

    one.run(4)
    for _ in range(4):
        other.step()

    said = [message.content for message in one.transcript]
    assert said == [message.content for message in other.transcript]
    assert said != [message.content for message in pair(shared_context="Go.", seed=1).run(4)]


async def test_blocking_calls_work_where_a_loop_is_running() -> None:
    talk = pair(shared_context="Go.")

    talk.run(2)
    report = talk.rollout(2)

    assert len(talk.transcript) == 2
    assert len(report.results) == 2


async def test_an_endpoint_takes_part_and_its_key_is_stored_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_KEY", "secret-key")
    async with FakeEndpoint(
        answer("from afar", usage={"prompt_tokens": 5, "completion_tokens": 3}), key="secret-key"
    ) as endpoint:
        far = Participant("far", "m", base_url=endpoint.url, api_key_env="LAB_KEY", temperature=0.5)
        talk = Conversation([far, Participant("near", echo)], "Go.", turns=2)
        report = await talk.arollout(2, out_dir=tmp_path / "run")
        sent = [received.body for received in endpoint.requests]

    assert [result.tokens_generated for result in report.results.values()] == [3, 3]
    assert {body["temperature"] for body in sent} == {0.5}
    assert len({body["seed"] for body in sent}) == 2
    stored = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"secret-key" not in stored


# -- saving ---------------------------------------------------------------------------------------------------


def test_saving_and_loading_give_the_same_back(tmp_path: Path) -> None:
    talk = Conversation(
        [
            Participant(
                "ann",
                babble,
                system_prompt=("You know ", dataset_field("secret")),
                max_tokens=9,
                tools=["todo", echo_tool],
            ),
            Importable("bob", "anything", seed=4),
        ],
        dataset_field("text"),
        until=(TextPattern("x", by="ann") | TokenBudget(per_turn=5)) & When(over),
        context=Summarise(keep=2),
        hooks=[shout],
        reasoning_visibility="speaker",
        analyzer=count_words,
        seed=3,
        name="pair",
        data=[{"text": "a", "secret": "b"}],
        transcript=[("ann", "hello")],
    )

    talk.save(tmp_path / "talk.json")
    loaded = Conversation.load(tmp_path / "talk.json")

    assert loaded == talk
    assert loaded.recipe() == talk.recipe()
    assert json.loads((tmp_path / "talk.json").read_text())["format"] == 1
    report = loaded.turns(2).rollout()
    assert [message.content for message in report.transcripts()["row_00000"]][1:] == [
        "I AM BOB",
        *rest(report),
    ]


def rest(report: Any) -> list[str]:
    return [message.content for message in report.transcripts()["row_00000"]][2:]


def shout(message: Any, conversation: Any) -> str:
    return str(message.content).upper()


def echo_tool(text: str) -> str:
    """Say it again.

    Args:
        text: what.
    """
    return text


def test_a_function_that_should_know_something_is_saved_as_a_partial_one(tmp_path: Path) -> None:
    pair(shared_context="Go.", until=When(functools.partial(over, turns=2))).save(tmp_path / "talk.json")

    assert len(Conversation.load(tmp_path / "talk.json").run()) == 2


@pytest.mark.parametrize(
    ("talk", "what"),
    [
        (lambda: pair(lambda request: "x"), "participants.0..model can't be saved"),
        (lambda: pair(ScriptedModel(["x"])), "participants.0..model can't be saved"),
        (lambda: pair(analyzer=lambda conversation: 1), "analyzer can't be saved"),
        (lambda: pair(until=When(lambda said: True)), "until.function can't be saved"),
        (lambda: pair().data(row for row in [1]), "only a list can"),
    ],
)
def test_what_can_not_be_saved_says_so_when_it_is(talk: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=what):
        talk().save(tmp_path / "talk.json")
    assert not (tmp_path / "talk.json").exists()


def test_a_run_that_is_stored_refuses_what_can_not_be_saved_before_it_begins(tmp_path: Path) -> None:
    calls = []

    def local(request: Request) -> str:
        calls.append(request)
        return "x"

    with pytest.raises(ConfigurationError, match="can't be saved"):
        pair(local).data([{"text": "x"}]).rollout(out_dir=tmp_path / "run")
    assert not calls
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99, "lineup": {}}'])
def test_a_file_that_is_no_conversation_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text(text)

    with pytest.raises(StoreError):
        Conversation.load(tmp_path / "talk.json")


async def test_a_blocking_call_from_the_conversations_own_loop_is_refused_and_does_not_hang() -> None:
    def nosy(message: Any, conversation: Any) -> None:
        pair(shared_context="x").run(1)

    talk = pair(shared_context="Go.", hooks=[nosy])
    with pytest.raises(ConfigurationError, match="await the form"):
        await asyncio.to_thread(talk.run, 1)
