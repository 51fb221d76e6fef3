"""The loop: how a conversation goes on, how it ends, and what stands in its record."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from taskmill.errors import (
    BadRequestError,
    ContextWindowError,
    StorageFullError,
    TransientModelError,
)
from taskmill.models.base import Completion, Reasoning, Request, Sampling
from taskmill.models.journaled import Journaled
from taskmill.models.scripted import ScriptedModel
from taskmill.programs.agent import LAST_REQUEST, AgentRun, AgentSettings
from taskmill.records import Message, ToolCall, Trace, Usage
from taskmill.store.commit import GroupCommit
from taskmill.store.journal import CallJournal
from taskmill.tools import ToolBox, ToolContext, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def broken() -> str:
    """Never works."""
    raise RuntimeError("no luck")


def calling(*calls: ToolCall | None, text: str = "", reasoning: str | None = None) -> Message:
    return Message("assistant", text, reasoning=reasoning, tool_calls=calls)  # type: ignore[arg-type]


def adding(call_id: str = "c1") -> Message:
    return calling(ToolCall(call_id, "add", '{"a": 1, "b": 2}'))


def run_of(script: Any, *, tools: Sequence[Any] | None = (add, broken), **options: Any) -> AgentRun:
    model = script if hasattr(script, "complete") else ScriptedModel(script)
    box = None if tools is None else ToolBox(tools, ToolContext("r", None))  # type: ignore[arg-type]
    return AgentRun(rollout_id="r", prompt=options.pop("prompt", "1+2?"), model=model, tools=box, **options)


async def trace_of(script: Any, **options: Any) -> Trace:
    run = run_of(script, **options)
    await run.drive()
    return run.trace()


def roles(trace: Trace) -> list[str]:
    return [message.role for message in trace.messages]


async def test_goes_on_until_a_turn_without_calls() -> None:
    trace = await trace_of([adding(), "<think>easy</think>3"])
    assert (trace.state, trace.stop_reason) == ("completed", "answer")
    assert roles(trace) == ["user", "assistant", "tool", "assistant"]
    assert trace.messages[2].content == "3"
    assert trace.messages[3] == Message("assistant", "3", reasoning="easy")
    assert len(trace.calls) == 2
    assert [(event.call_id, event.name, event.success) for event in trace.tool_events] == [
        ("c1", "add", True)
    ]
    assert [spec.name for spec in trace.tools] == ["add", "broken"]


async def test_several_calls_of_a_turn_are_answered_in_their_order() -> None:
    turn = calling(*(ToolCall(f"c{n}", "add", json.dumps({"a": n, "b": 0})) for n in range(3)))
    trace = await trace_of([turn, "done"])
    assert [(m.tool_call_id, m.content) for m in trace.messages if m.role == "tool"] == [
        ("c0", "0"),
        ("c1", "1"),
        ("c2", "2"),
    ]


async def test_each_request_carries_everything_before_it_and_the_settings() -> None:
    model = ScriptedModel([adding(), "3"])
    settings = AgentSettings(
        sampling=Sampling(temperature=0.5, seed=7),
        reasoning=Reasoning(effort="low"),
        provider={"sort": "price"},
    )
    trace = await trace_of(model, settings=settings)
    first, second = model.requests
    assert first.messages == trace.messages[:1]
    assert second.messages == trace.messages[:3]
    for request in (first, second):
        assert request.tools == trace.tools
        assert (request.sampling, request.reasoning, request.provider) == (
            settings.sampling,
            settings.reasoning,
            settings.provider,
        )
    assert trace.sampling == {"temperature": 0.5, "seed": 7}


async def test_what_is_only_sent_is_never_recorded() -> None:
    model = ScriptedModel(["yes"])
    prefill = [Message("user", "example"), Message("assistant", "of an answer")]
    trace = await trace_of(
        model, system="given", hidden_system="hidden", prefill=prefill, history=[Message("user", "before")]
    )
    assert [(m.role, m.content) for m in model.requests[0].messages] == [
        ("system", "hidden\n\ngiven"),
        ("user", "example"),
        ("assistant", "of an answer"),
        ("user", "before"),
        ("user", "1+2?"),
    ]
    assert [(m.role, m.content) for m in trace.messages] == [
        ("system", "given"),
        ("user", "before"),
        ("user", "1+2?"),
        ("assistant", "yes"),
    ]


# -- limits ---------------------------------------------------------------------------------------------------


async def test_at_the_iteration_limit_one_last_call_that_may_call_no_tool_asks_for_the_answer() -> None:
    model = ScriptedModel([adding("a"), adding("b"), "I had to stop; 3."])
    trace = await trace_of(model, settings=AgentSettings(max_iterations=2))
    assert (trace.state, trace.stop_reason) == ("partial", "max_iterations")
    assert roles(trace) == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trace.messages[-1].content == "I had to stop; 3."
    assert len(trace.calls) == 3
    last = model.requests[-1]
    assert (last.tools, last.tool_choice) == (trace.tools, "none")
    assert last.messages[-1] == Message("user", LAST_REQUEST)
    assert LAST_REQUEST not in [message.content for message in trace.messages]


async def test_a_model_that_always_calls_a_tool_ends_partial_with_its_last_observation() -> None:
    ids = itertools.count()
    trace = await trace_of(lambda _: adding(f"c{next(ids)}"), settings=AgentSettings(max_iterations=1))
    assert trace.state == "partial"
    assert roles(trace) == ["user", "assistant", "tool"]
    assert len(trace.tool_events) == 1
    assert "left out" in trace.notes[-1]


async def test_an_answer_in_the_last_turn_allowed_needs_no_further_call() -> None:
    trace = await trace_of([adding(), "3"], settings=AgentSettings(max_iterations=2))
    assert (trace.state, len(trace.calls)) == ("completed", 2)


async def test_the_last_answer_is_paid_for_once_where_a_conversation_with_calls_must_declare_tools(
    tmp_path: Path,
) -> None:
    def script(request: Request) -> Any:
        if any(m.tool_calls for m in request.messages) and not request.tools:
            return BadRequestError("tools must be defined")
        return "fine" if request.tool_choice == "none" else adding()

    model = ScriptedModel(script)
    for _process in range(2):
        async with GroupCommit("none") as commit:
            journal = CallJournal(tmp_path, commit)
            await journal.open(lambda _rollout: True)
            trace = await trace_of(Journaled(model, journal, "r"), settings=AgentSettings(max_iterations=1))
            journal.close()
        assert (trace.state, trace.stop_reason) == ("partial", "max_iterations")
        assert trace.messages[-1].content == "fine"
    assert model.calls == 2


async def test_a_turn_cut_by_length_is_recorded_as_truncated_and_not_continued() -> None:
    cut = Completion(Message("assistant", "One, two, thr"), usage=Usage(5, 9), finish_reason="length")
    trace = await trace_of([cut])
    assert (trace.state, trace.stop_reason, trace.truncated) == ("partial", "length", True)
    assert trace.messages[-1].content == "One, two, thr"


async def test_half_written_arguments_of_a_cut_turn_are_called_truncated_not_malformed() -> None:
    half = calling(ToolCall("a", "add", '{"a": 1, "b": 2}'), ToolCall("b", "add", '{"a": 1, '))
    trace = await trace_of([Completion(half, usage=Usage(5, 77), finish_reason="length")])
    assert (trace.state, trace.stop_reason) == ("partial", "length")
    assert [(m.tool_call_id, m.success) for m in trace.messages[-2:]] == [("a", False), ("b", False)]
    for event in trace.tool_events:
        assert event.error_type == "ToolNotRunError"
        assert "cut off at 77 tokens" in str(event.error)


async def test_the_content_filter_ends_a_sample_as_partial() -> None:
    trace = await trace_of([Completion(Message("assistant", "I"), finish_reason="content_filter")])
    assert (trace.state, trace.stop_reason, trace.truncated) == ("partial", "content_filter", False)


@pytest.mark.parametrize("content", ["", " \n"])
async def test_an_answer_of_nothing_is_no_completed_sample(content: str) -> None:
    trace = await trace_of([Message("assistant", content, reasoning="hm")])
    assert (trace.state, trace.stop_reason) == ("partial", "empty_answer")


async def test_a_conversation_that_outgrows_the_window_is_partial() -> None:
    trace = await trace_of([adding(), ContextWindowError("too long")])
    assert (trace.state, trace.stop_reason) == ("partial", "context_window")
    assert trace.errors[0].type == "ContextWindowError"


async def test_a_prompt_that_never_fitted_the_window_is_failed() -> None:
    trace = await trace_of([ContextWindowError("too long")])
    assert (trace.state, trace.stop_reason) == ("failed", "error")


# -- calls that can't be run ----------------------------------------------------------------------------------

MALFORMED = [
    '{"a": 1, "b": ',
    '{"a": 1',
    "[1, 2]",
    '"text"',
    "7",
    "a=1, b=2",
    '{"a": 1, "b": NaN}',
    '{"a": 1}',
    '{"a": "x", "b": 2}',
    '{"a": 1, "b": 2, "c": 3}',
]


@pytest.mark.parametrize("arguments", MALFORMED)
async def test_unusable_arguments_come_back_as_the_calls_error(arguments: str) -> None:
    trace = await trace_of([calling(ToolCall("c", "add", arguments)), adding("d"), "3"])
    assert trace.state == "completed"
    assert trace.messages[1].tool_calls[0].arguments == arguments
    assert trace.messages[2].success is False
    assert [(event.success, event.error_type) for event in trace.tool_events] == [
        (False, "ToolArgumentsError"),
        (True, None),
    ]


async def test_an_unknown_tool_is_answered_with_the_tools_there_are() -> None:
    trace = await trace_of([calling(ToolCall("c", "add", '{"a":1,"b":2}'), ToolCall("d", "sum")), "3"])
    good, bad = trace.messages[2:4]
    assert (good.success, bad.success) == (True, False)
    assert "add" in bad.content
    assert [event.error_type for event in trace.tool_events] == [None, "UnknownToolError"]


async def test_three_turns_in_a_row_of_unusable_calls_end_the_sample() -> None:
    bad = [calling(ToolCall("", "nope")), calling(ToolCall("", "add", "{")), calling(ToolCall("", "nope"))]
    trace = await trace_of([*bad, "never asked"])
    assert (trace.state, trace.stop_reason) == ("partial", "unusable_tool_calls")
    assert roles(trace) == ["user", *["assistant", "tool"] * 3]
    assert len(trace.tool_events) == 3


async def test_a_usable_call_in_between_starts_the_count_anew() -> None:
    bad = calling(ToolCall("", "nope"))
    mixed = calling(ToolCall("", "nope"), ToolCall("", "broken"))
    trace = await trace_of([bad, bad, mixed, bad, bad, "3"])
    assert trace.state == "completed"


async def test_a_tool_that_fails_is_no_unusable_call() -> None:
    trace = await trace_of([*[calling(ToolCall("", "broken"))] * 4, "I give up."])
    assert trace.state == "completed"
    assert [event.success for event in trace.tool_events] == [False] * 4


async def test_calls_where_no_tools_are_offered_are_answered_too() -> None:
    trace = await trace_of([adding(), "3"], tools=None)
    assert trace.state == "completed"
    assert trace.messages[2].success is False
    assert "no tools are offered" in trace.messages[2].content


async def test_nulls_among_the_calls_are_skipped_with_a_note() -> None:
    trace = await trace_of([calling(None, ToolCall("c", "add", '{"a":1,"b":2}'), None), "3"])
    assert [call.id for call in trace.messages[1].tool_calls] == ["c"]
    assert sum("null" in note for note in trace.notes) == 2


async def test_arguments_that_are_an_object_are_recorded_as_json_with_a_note() -> None:
    trace = await trace_of([calling(ToolCall("c", "add", {"a": 1, "b": 2})), "3"])  # type: ignore[arg-type]
    assert trace.messages[1].tool_calls == (ToolCall("c", "add", '{"a":1,"b":2}'),)
    assert [event.success for event in trace.tool_events] == [True]
    assert "were no text" in trace.notes[0]


async def test_missing_and_repeated_ids_are_made_unique_before_they_are_stored() -> None:
    model = ScriptedModel(
        [calling(*[ToolCall("x", "add", '{"a":1,"b":2}')] * 2), adding("x"), adding(""), "3"]
    )
    trace = await trace_of(
        model, history=[adding("old"), Message("tool", "3", tool_call_id="old"), adding("x")]
    )
    ids = [call.id for message in trace.messages for call in message.tool_calls]
    assert len(set(ids)) == len(ids) == 6
    assert all(ids)
    assert ids[:2] == ["old", "x"]
    answered = [message.tool_call_id for message in trace.messages if message.role == "tool"]
    assert answered == ["old", *ids[2:]]
    assert [event.call_id for event in trace.tool_events] == ids[2:]


# -- errors and cancellation ----------------------------------------------------------------------------------


async def test_an_endpoint_that_fails_makes_a_failed_run_with_what_was_had() -> None:
    error = TransientModelError("server away")
    error.attempts = 4
    trace = await trace_of([adding(), error])
    assert (trace.state, trace.stop_reason) == ("failed", "error")
    assert roles(trace) == ["user", "assistant", "tool"]
    assert [(e.type, e.message, e.attempts, e.traceback) for e in trace.errors] == [
        ("TransientModelError", "server away", 4, None)
    ]
    assert len(trace.calls) == 1


async def test_an_error_in_the_last_call_is_a_failure_as_well() -> None:
    script = [adding(), TransientModelError("away")]
    assert (await trace_of(script, settings=AgentSettings(max_iterations=1))).state == "failed"


async def test_an_unforeseen_error_is_recorded_with_its_traceback() -> None:
    trace = await trace_of([ZeroDivisionError("oops")])
    assert trace.state == "failed"
    assert trace.errors[0].type == "ZeroDivisionError"
    assert "Traceback" in str(trace.errors[0].traceback)


async def test_a_full_disk_is_not_this_runs_own_trouble() -> None:
    run = run_of([StorageFullError("no space")])
    with pytest.raises(StorageFullError):
        await run.drive()
    assert run.trace().state == "cancelled"


async def test_a_cancelled_run_tells_what_it_had_and_what_got_no_answer() -> None:
    reached = asyncio.Event()

    @tool
    async def endless() -> str:
        """Wait."""
        reached.set()
        await asyncio.Event().wait()
        return ""

    run = run_of([adding(), calling(ToolCall("e", "endless"))], tools=[add, endless])
    driving = asyncio.create_task(run.drive())
    await reached.wait()
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving
    trace = run.trace()
    assert (trace.state, trace.stop_reason) == ("cancelled", "cancelled")
    assert roles(trace) == ["user", "assistant", "tool", "assistant"]
    assert [(event.call_id, event.success) for event in trace.tool_events] == [("c1", True), ("e", False)]


async def test_a_trace_may_be_had_before_and_during_the_run() -> None:
    seen: list[Trace] = []

    def script(request: Request) -> str:
        seen.append(run.trace())
        return "3"

    run = run_of(script)
    assert run.trace().messages == (Message("user", "1+2?"),)
    await run.drive()
    assert seen[0].state == "cancelled"
    assert run.final_response == "3"


async def test_time_and_tokens_are_added_up() -> None:
    ticks = itertools.count()
    calls = [
        Completion(adding(), usage=Usage(10, 2), seconds=1.5, waiting=0.5, cost=0.25),
        Completion(Message("assistant", "3"), usage=Usage(20, 3, 10), seconds=2.0, cost=0.5),
    ]
    trace = await trace_of(
        calls, clock=lambda: float(next(ticks)), now=lambda: datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    )
    assert trace.usage == Usage(30, 5, 10)
    assert trace.cost == 0.75
    assert (trace.timing.model, trace.timing.waiting, trace.timing.tools) == (3.5, 0.5, 1.0)
    assert trace.timing.total == 3.0
    assert trace.started_at == "2024-01-02T03:04:05.000+00:00"
