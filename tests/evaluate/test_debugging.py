"""Debugging: one rollout, told step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from taskmill.errors import BadRequestError
from taskmill.evaluation.debugging import Answers, Typist, debug_task
from taskmill.evaluation.solving import Solver
from taskmill.models.scripted import ScriptedModel
from taskmill.records import Message, ToolCall, Trace
from taskmill.sandbox.base import Sandbox
from taskmill.tasks import JudgeConfig, Task, TaskConfig, group_reward, metric, reward, stop
from tests.evaluate.lab import SumData, SumTask


class Talk(SumTask):
    """Two questions, a tool, and a function of every kind."""

    def setup(self, state: dict[str, Any]) -> None:
        state["asked"] = 1

    def tools(self) -> list[Callable[..., Any]]:
        def double(number: int) -> int:
            """Double a number."""
            return 2 * number

        return [double]

    def user(self, state: dict[str, Any]) -> str | None:
        state["asked"] += 1
        return "and twice that?" if state["asked"] == 2 else None

    @stop
    async def enough(self, messages: tuple[Message, ...]) -> bool:
        return len(messages) > 20

    async def finalize(self, sandbox: Sandbox) -> None:
        await sandbox.write_bytes("seen", b"1")

    @metric
    def turns(self, trace: Trace) -> int:
        return len(trace.calls)

    @group_reward(weight=0.5)
    def place(self, traces: list[Trace]) -> list[float]:
        return [1.0 for _ in traces]

    async def solve(self, messages: tuple[Message, ...]) -> str | Message:
        if messages[-1].content == "and twice that?":
            return Message(
                "assistant",
                "Let me see.",
                reasoning="2*2",
                tool_calls=(ToolCall("1", "double", '{"number": 2}'),),
            )
        return messages[-1].content if messages[-1].role == "tool" else str(self.data.answer)

    @reward
    def right(self, trace: Trace) -> float:
        return float(trace.messages[-1].content == "4")


def a_task(kind: type[Task[Any]] = SumTask, **judges: JudgeConfig) -> Task[Any]:
    return kind(SumData(idx=7, prompt="1+1=", answer=2), TaskConfig(judges=judges))


async def events_of(task: Task[Any], model: Any, **options: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    await debug_task(task, model, lambda event: events.append(dict(event)), sandbox="plain", **options)
    return json.loads(json.dumps(events))


def of(events: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] in kinds]


async def test_every_step_is_told_in_order() -> None:
    task = a_task(Talk)
    events = await events_of(task, Solver(task))
    steps = [
        (event["event"], event.get("name") or [message["content"] for message in event.get("messages", ())])
        for event in of(events, "sent", "answered", "called", "ended")
    ]
    assert steps == [
        ("called", "setup"),
        ("sent", ["1+1="]),
        ("answered", []),
        ("called", "enough"),
        ("called", "user"),
        ("sent", ["and twice that?"]),
        ("answered", []),
        ("called", "enough"),
        ("sent", ["4"]),
        ("answered", []),
        ("called", "enough"),
        ("called", "user"),
        ("called", "finalize"),
        ("called", "right"),
        ("called", "length"),
        ("called", "turns"),
        ("called", "place"),
        ("ended", []),
    ]


async def test_what_is_told_of_each_step() -> None:
    task = a_task(Talk)
    events = await events_of(task, Solver(task))
    (begun,) = of(events, "task")
    assert (begun["idx"], begun["tools"], begun["model"]) == (7, ["double"], "reference")
    assert begun["data"]["answer"] == 2
    first, _, third = of(events, "sent")
    assert first["tools"][0]["name"] == "double"
    assert (third["messages"][0]["role"], third["messages"][0]["success"]) == ("tool", True)
    called = of(events, "answered")[1]["message"]
    assert (called["content"], called["reasoning"]) == ("Let me see.", "2*2")
    assert called["tool_calls"] == [{"id": "1", "name": "double", "arguments": '{"number": 2}'}]
    by_name = {event["name"]: event for event in of(events, "called")}
    assert by_name["setup"]["inputs"] == {"state": "{}"}
    assert by_name["finalize"]["inputs"] == {"sandbox": "<sandbox: plain>"}
    right = by_name["right"]
    assert (right["kind"], right["weight"], right["value"]) == ("reward", 1.0, "1.0")
    assert right["inputs"] == {"trace": "<trace: 6 messages, answer>"}
    assert by_name["place"]["inputs"] == {"traces": "<1 traces>"}
    (ended,) = of(events, "ended")
    assert (ended["reward"], ended["rewards"], ended["metrics"]) == (
        1.5,
        {"right": 1.0, "place": 1.0},
        {"length": 1.0, "turns": 3.0},
    )
    assert ended["task_state"] == {"asked": 3}


async def test_the_task_is_left_as_it_was() -> None:
    task = a_task(Talk)
    before = dict(vars(task))
    await events_of(task, Solver(task))
    assert vars(task) == before


async def test_answers_that_are_given_are_said_and_then_the_rollout_is_scored() -> None:
    task = a_task(Talk)
    events = await events_of(task, Answers(["2"]))
    assert [event["message"]["content"] for event in of(events, "answered")] == ["2"]
    (rest,) = of(events, "said")
    assert rest["messages"] == [{"role": "user", "content": "and twice that?"}]
    (ended,) = of(events, "ended")
    assert (ended["state"], ended["stop_reason"]) == ("partial", "no_more_answers")
    assert ended["rewards"]["right"] == 0.0


async def test_what_somebody_types_is_the_answer_until_the_input_ends() -> None:
    typed = iter(["2", None])

    async def read() -> str | None:
        return next(typed)

    events = await events_of(a_task(Talk), Typist(read))
    assert [event["message"].get("content", "") for event in of(events, "answered")] == ["2", ""]
    assert of(events, "ended")[0]["stop_reason"] in ("no_more_answers", "empty_answer")


async def test_a_reward_that_raises_is_told_with_its_inputs() -> None:
    class Broken(SumTask):
        @reward
        def right(self, state: dict[str, Any]) -> float:
            return float(state["gold"])

    events = await events_of(a_task(Broken), Answers(["2"]))
    (called,) = [event for event in of(events, "called") if event["name"] == "right"]
    assert (called["inputs"], called["error"]) == ({"state": "{}"}, "KeyError: 'gold'")
    (ended,) = of(events, "ended")
    assert ended["state"] == "failed"
    assert ended["errors"][0]["message"] == "reward 'right' failed: KeyError: 'gold'"


async def test_a_model_that_fails_is_told() -> None:
    events = await events_of(a_task(), ScriptedModel([BadRequestError("no such model")]))
    assert of(events, "model_failed") == [
        {"event": "model_failed", "type": "BadRequestError", "message": "no such model"}
    ]
    assert of(events, "ended")[0]["state"] == "failed"


async def test_a_judges_grade_and_words_are_told() -> None:
    grader = ScriptedModel(["Fine.\nGRADE: 0.5"], name="grader")
    task = a_task(style=JudgeConfig(model=grader))
    events = await events_of(task, Answers(["2"]), judges={"style": grader})
    (judged,) = of(events, "judged")
    assert (judged["judge"], judged["score"], judged["said"]) == ("style", 0.5, "Fine.\nGRADE: 0.5")
    assert of(events, "ended")[0]["reward"] == 1.5


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Odd(), "{'_it': <Odd instance at"),
        ("x" * 1000, f"{{'_it': '{'x' * 77}...{'x' * 78}'}}"),
        (list(range(1000)), "{'_it': [0, 1, 2, 3, 4, 5, 6, 7, ...]}"),
    ],
)
async def test_inputs_are_told_in_a_few_words(value: Any, shown: str) -> None:
    class Stated(SumTask):
        def setup(self, state: dict[str, Any]) -> None:
            state["_it"] = value

        @reward
        def right(self, state: dict[str, Any]) -> float:
            return float("_it" in state)

    events = await events_of(a_task(Stated), Answers(["2"]))
    (called,) = [event for event in of(events, "called") if event["name"] == "right"]
    assert called["inputs"]["state"].startswith(shown)
