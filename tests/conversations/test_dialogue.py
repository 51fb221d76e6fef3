"""One conversation: who sees what, what is kept of a turn, when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from taskmill.conversations import (
    Conversation,
    DropOldest,
    Message,
    Participant,
    SlidingWindow,
    Summarise,
    TextPattern,
    TokenBudget,
    Turns,
    When,
    dataset_field,
)
from taskmill.errors import BadRequestError, ConfigurationError, ContextWindowError
from taskmill.models.base import Completion, Request
from taskmill.records import Message as Sent
from taskmill.records import ToolCall, Usage
from taskmill.testing import ScriptedModel


def ten_tokens(request: Request) -> Completion:
    return Completion(Sent("assistant", "ten"), usage=Usage(20, min(10, request.sampling.max_tokens or 10)))


def listening(*lines: Any) -> ScriptedModel:
    return ScriptedModel(lines or (lambda request: "ok"))


def shown(model: ScriptedModel, call: int = -1) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in model.requests[call].messages]


async def test_each_speaker_sees_the_conversation_from_its_own_side() -> None:
    ann, bob = listening("a1", "a2"), listening("b1", "b2")
    talk = Conversation(
        [
            Participant("ann", ann, system_prompt="Be Ann."),
            Participant("bob", bob, context="Only Bob knows."),
        ],
        "The topic.",
        "Be brief.",
    )

    await talk.arun(4)

    assert shown(ann) == [
        ("system", "Be Ann.\n\nBe brief."),
        ("user", "The topic."),
        ("assistant", "a1"),
        ("user", "b1"),
    ]
    assert shown(bob) == [
        ("system", "Be brief."),
        ("user", "The topic.\n\nOnly Bob knows.\n\na1"),
        ("assistant", "b1"),
        ("user", "a2"),
    ]


async def test_with_more_than_two_the_others_are_named_and_turns_alternate() -> None:
    models = {name: listening(f"{name}1", f"{name}2") for name in ("ann", "bob", "cat")}
    talk = Conversation([Participant(name, model) for name, model in models.items()], "Go.")

    await talk.arun(6)

    assert shown(models["ann"]) == [
        ("user", "moderator: Go."),
        ("assistant", "ann1"),
        ("user", "bob: bob1\n\ncat: cat1"),
    ]


async def test_who_speaks_first_may_be_chosen() -> None:
    talk = Conversation([Participant("ann", ["a"]), Participant("bob", ["b"])], "Go.", first="bob")

    assert [message.author for message in await talk.arun(2)] == ["bob", "ann"]


class Loudest:
    """Ann speaks until she has said three things; nobody sees what she said first."""

    def next_speaker(self, said: Any) -> str | None:
        return "ann" if len(said.transcript) < 3 else None

    def seen_by(self, speaker: str, said: Any) -> Sequence[Message]:
        return said.transcript[1:]


async def test_a_policy_decides_who_speaks_and_who_sees_what() -> None:
    ann = listening("1", "2", "3")
    talk = Conversation([Participant("ann", ann), Participant("bob", ["-"])], "Go.", order=Loudest())

    said = await talk.arun(10)

    assert [message.content for message in said] == ["1", "2", "3"]
    assert shown(ann) == [("user", "Go."), ("assistant", "2")]


@pytest.mark.parametrize(
    ("visibility", "own", "others"),
    [
        ("none", None, "said"),
        ("speaker", "thought", "said"),
        ("all", "thought", "<think>\nthought\n</think>\n\nsaid"),
    ],
)
async def test_thinking_is_kept_and_shown_to_those_who_may_see_it(
    visibility: Any, own: str | None, others: str
) -> None:
    ann, bob = listening("<think>thought</think>said", "again"), listening("b")
    talk = Conversation(
        [Participant("ann", ann), Participant("bob", bob)], "Go.", reasoning_visibility=visibility
    )

    said = await talk.arun(3)

    assert (said[0].content, said[0].metadata["parsed_think"]) == ("said", "thought")
    assert ann.requests[-1].messages[1].reasoning == own
    assert shown(bob)[0][1] == f"Go.\n\n{others}"


async def test_thinking_that_was_cut_off_is_not_shown_to_the_other() -> None:
    bob = listening("b")
    cut = Completion(Sent("assistant", "<think>on and on"), finish_reason="length")
    talk = Conversation([Participant("ann", listening(cut)), Participant("bob", bob)], "Go.")

    said = await talk.arun(2)

    assert (said[0].content, said[0].think) == ("", "on and on")
    assert "on and on" not in shown(bob)[0][1]


# -- windows --------------------------------------------------------------------------------------------------


def long_talk(policy: Any, **fields: Any) -> tuple[Conversation, ScriptedModel]:
    ann = listening()
    talk = Conversation(
        [
            Participant("ann", ann, system_prompt="Framing.", context_window=60, **fields),
            Participant("bob", ["b"] * 99),
        ],
        "Topic.",
        context=policy,
        transcript=[("ann" if n % 2 == 0 else "bob", f"turn {n} " + "x" * 32) for n in range(8)],
    )
    return talk, ann


async def test_a_view_over_the_window_fails_naming_participant_tokens_and_limit() -> None:
    talk, ann = long_talk(Conversation([Participant("x", ["y"])]).lineup.context)

    with pytest.raises(ContextWindowError, match=r"'ann'.*\d+ tokens.*window 60"):
        await talk.astep()
    assert ann.calls == 0
    assert len(talk.transcript) == 8


async def test_the_oldest_turns_are_dropped_and_the_framing_never() -> None:
    talk, ann = long_talk(DropOldest())

    said = await talk.astep()

    assert said is not None
    dropped = said.metadata["view"]["dropped"]
    assert shown(ann)[0] == ("system", "Framing.")
    assert shown(ann)[1][1].startswith("Topic.")
    assert f"turn {dropped - 1} " not in str(shown(ann))
    assert "turn 7" in shown(ann)[-1][1]


async def test_an_endpoint_that_refuses_the_length_is_asked_again_with_less() -> None:
    def strict(request: Request) -> Any:
        return ContextWindowError("too long") if len(request.messages) > 3 else "fits"

    talk = Conversation(
        [Participant("ann", ScriptedModel(strict)), Participant("bob", ["b"])],
        "Topic.",
        context=DropOldest(),
        transcript=[("ann" if n % 2 == 0 else "bob", str(n)) for n in range(6)],
    )

    said = await talk.astep()

    assert said is not None
    assert said.content == "fits"
    assert said.metadata["view"]["dropped"] > 0


async def test_a_sliding_window_shows_the_last_turns() -> None:
    ann = listening()
    talk = Conversation(
        [Participant("ann", ann), Participant("bob", ["b"])],
        "Topic.",
        context=SlidingWindow(2),
        transcript=[("ann" if n % 2 == 0 else "bob", str(n)) for n in range(6)],
    )

    await talk.astep()

    assert shown(ann) == [("user", "Topic."), ("assistant", "4"), ("user", "5")]


async def test_what_does_not_fit_is_summed_up_and_the_summary_goes_on_to_be_used() -> None:
    talk, ann = long_talk(Summarise(keep=2))

    first = await talk.astep()
    await talk.astep()
    second = await talk.astep()

    assert first is not None
    assert second is not None
    assert first.metadata["view"] == {"dropped": 6, "summary": "ok"}
    assert first.metadata["calls"] == 2
    assert "summed up: ok" in shown(ann)[1][1]
    assert second.metadata["view"]["summary"] == "ok"


# -- the end --------------------------------------------------------------------------------------------------


def two(**fields: Any) -> Conversation:
    return Conversation([Participant("ann", ten_tokens), Participant("bob", ten_tokens)], "Go.", **fields)


async def test_conditions_are_put_together() -> None:
    assert len(await two(until=Turns(3) | Turns(5)).arun()) == 3
    assert len(await two(until=Turns(3) & Turns(5)).arun()) == 5
    assert len(await two(until=TokenBudget(per_conversation=35)).arun()) == 4
    assert len(await two(until=When(lambda said: len(said.transcript) == 2)).arun()) == 2
    assert len(await two(until=TextPattern("^TEN$", ignore_case=True, by="bob") & Turns(1)).arun()) == 2


async def test_a_token_budget_bounds_every_turn_and_is_not_overdrawn() -> None:
    said = await two(until=TokenBudget(per_conversation=25, per_turn=7)).arun()

    assert [message.n_tokens for message in said] == [7, 7, 7, 4]


async def test_a_condition_around_a_block_holds_for_the_runs_in_it() -> None:
    talk = two(turns=9)
    with TokenBudget(per_conversation=20):
        inside = await talk.branch().arun()
        report = await talk.arollout(2)

    assert len(inside) == 2
    assert [len(said) for said in report.transcripts().values()] == [2, 2]
    assert len(await talk.arun()) == 9


async def test_nothing_that_would_end_it_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="how many turns"):
        await two().arun()


# -- hooks, tools, answers ------------------------------------------------------------------------------------


async def test_a_hook_changes_a_message_before_anybody_sees_it() -> None:
    bob = listening("b")

    async def shout(message: Message, conversation: Any) -> str | None:
        return message.content.upper() if message.author == "ann" else None

    talk = Conversation([Participant("ann", ["quiet"]), Participant("bob", bob)], "Go.", hooks=[shout])
    said = await talk.arun(2)

    assert said[0].content == "QUIET"
    assert said[0].metadata["hooked"]
    assert shown(bob)[0][1] == "Go.\n\nQUIET"


def double(number: int) -> int:
    """Double a number.

    Args:
        number: any.
    """
    return 2 * number


async def test_a_participant_uses_its_tools_before_it_speaks() -> None:
    call = Sent("assistant", tool_calls=(ToolCall("c1", "double", '{"number": 21}'),))
    ann, bob = ScriptedModel([call, "it is 42", "bye"]), listening("b")
    talk = Conversation([Participant("ann", ann, tools=[double]), Participant("bob", bob)], "Ask.")

    said = await talk.arun(3)

    assert said[0].content == "it is 42"
    assert [step["role"] for step in said[0].metadata["steps"]] == ["assistant", "tool"]
    assert said[0].metadata["steps"][1]["content"] == "42"
    assert [message.role for message in ann.requests[-1].messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert shown(bob) == [("user", "Ask.\n\nit is 42")]


async def test_a_participant_with_a_shell_has_a_workspace_of_its_own(tmp_path: Path) -> None:
    write = Sent(
        "assistant", tool_calls=(ToolCall("c1", "terminal", '{"command": "echo hidden > x; cat x"}'),)
    )
    look = Sent("assistant", tool_calls=(ToolCall("c2", "terminal", '{"command": "ls"}'),))
    talk = Conversation(
        [
            Participant("ann", ScriptedModel([write, "done"]), tools=["terminal"]),
            Participant("bob", ScriptedModel([look, "done"]), tools=["terminal"]),
        ],
        "Work.",
    )

    said = await talk.arun(2)

    assert "hidden" in said[0].metadata["steps"][1]["content"]
    assert "x" not in said[1].metadata["steps"][1]["content"].split()


async def test_scripted_answers_go_on_after_a_branch_and_end_with_an_error() -> None:
    talk = Conversation([Participant("ann", ["1", "2"])], "Go.")
    await talk.arun(1)
    branch = talk.branch()

    assert (await branch.arun(1))[-1].content == "2"
    with pytest.raises(BadRequestError, match="'ann' has no answer left"):
        await branch.arun(1)
    assert len(branch.transcript) == 2
    assert len(talk.transcript) == 1


async def test_a_column_that_is_missing_is_named_with_the_row() -> None:
    talk = Conversation([Participant("ann", ["1"])], ("Q: ", dataset_field("question")), turns=1)

    report = await talk.data([{"question": "why"}, {"q": "why"}]).arollout()

    assert report.failed == ["row_00001"]
    assert "row 1 has no field 'question'" in (report.results["row_00001"].error or "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Conversation([]), "at least one participant"),
        (
            lambda: Conversation([Participant("a", ["x"]), Participant("a", ["x"])]),
            "two participants are called 'a'",
        ),
        (lambda: Conversation([Participant("moderator", ["x"])]), "as the moderator is"),
        (lambda: Conversation([Participant("a", ["x"])], first="b"), "none of the participants"),
        (lambda: Conversation([Participant("a", ["x"])], shared_context=3), "shared_context is a text"),  # type: ignore[arg-type]
        (lambda: Conversation([Participant("a", ["x"])]).set(turn=3), "did you mean 'turns'"),
        (lambda: Conversation([Participant("a", ["x"])], turns=0), "at least 1"),
        (lambda: Participant("a", 3), "the name of a model"),
        (lambda: Participant("a", ["x"], base_url="http://x"), "base_url goes with the name"),
        (lambda: Participant("a", "m", base_url="http://me:secret@host/v1"), "api_key_env"),
        (lambda: Participant("a", ["x"], temprature=1), "no field 'temprature'"),
        (lambda: Participant(" ", ["x"]), "not blank"),
        (lambda: TokenBudget(), "per_conversation="),
        (lambda: TextPattern("("), "no regular expression"),
    ],
)
def test_what_can_not_be_meant_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
