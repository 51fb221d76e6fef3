"""One rollout of an agent: ask the model, run the tools it calls, until it answers or something ends it.

The run records as it goes, so `trace()` tells what was had whatever happened: an answer, a limit, an error,
a cancellation. What must hold of that record, and why, is in `docs/design/record.md`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from taskmill.errors import (
    ContextWindowError,
    ModelError,
    RunAbortedError,
    StoreError,
    TaskError,
    TaskmillError,
    ToolArgumentsError,
    ToolNotRunError,
    UnknownToolError,
)
from taskmill.models.base import Completion, Model, Reasoning, Request, Sampling
from taskmill.records import (
    CallRecord,
    ErrorRecord,
    Message,
    State,
    Timing,
    ToolCall,
    ToolEvent,
    Trace,
    moment,
)

if TYPE_CHECKING:
    from taskmill.tools.box import ToolBox

LAST_REQUEST = (
    "That was the last of the steps you had; no tool can be called any more. "
    "Give your final answer now, from what you have found so far."
)
"""Sent with the one call after the iteration limit. Nobody said it, so it never stands in a record."""

UNUSABLE = frozenset({UnknownToolError.__name__, ToolArgumentsError.__name__})
CUT_OFF = frozenset({"length", "content_filter"})


class AgentSettings(Struct, frozen=True):
    """What bounds and shapes a run of the loop.

    `max_iterations` counts turns of the model, the call that asks for a last answer not among them.
    `max_bad_turns` is how many turns in a row may consist of calls that can't be run. `last_answer` asks for an
    answer after the iteration limit, as training data needs one; without it the conversation ends there.
    """

    max_iterations: int = 10
    max_bad_turns: int = 3
    last_answer: bool = True
    sampling: Sampling = Sampling()
    reasoning: Reasoning | None = None
    provider: Mapping[str, Any] | None = None


class Ending(NamedTuple):
    """How a run ended: the state it is recorded with, and the reason in a word."""

    state: State
    reason: str


Reply = Callable[["AgentRun"], Awaitable[Sequence[Message]]]
"""Who speaks after an answer, and first where there is no prompt. Nothing said is the end of the conversation."""

Stop = Callable[["AgentRun"], Awaitable[str | None]]
"""Asked after every turn of the model; a word of why ends the conversation as completed."""

Limit = Callable[["AgentRun"], str | None]
"""Asked before every call; the name of a limit that is reached ends the conversation as partial."""


class AgentRun:
    """One conversation between a prompt, a model and its tools.

    Recorded: `system` (only what the user gave as a message), `history`, `prompt`, and what model and tools
    say from there on. Sent but never recorded: `hidden_system` and `prefill`, which stand before the rest.
    `reply`, `stop` and `limit` let a task take part. `clock` gives seconds, `now` the moment the run starts.
    """

    def __init__(
        self,
        *,
        rollout_id: str,
        prompt: str | Sequence[Message],
        model: Model,
        tools: ToolBox | None = None,
        settings: AgentSettings | None = None,
        system: str | None = None,
        hidden_system: str | None = None,
        prefill: Sequence[Message] = (),
        history: Sequence[Message] = (),
        task: Mapping[str, Any] | None = None,
        toolsets: Sequence[str] = (),
        reply: Reply | None = None,
        stop: Stop | None = None,
        limit: Limit | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        self.rollout_id = rollout_id
        self._model = model
        self._tools = tools
        self._specs = tuple(tools.specs) if tools is not None else ()
        self._settings = settings or AgentSettings()
        self._task = task or {}
        self._toolsets = tuple(toolsets)
        self._reply = reply
        self._stop = stop
        self._limit = limit
        self._clock = clock
        self._now = now

        self._system = () if system is None else (Message("system", system),)
        said = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
        self._turns: list[Message] = [*history, *said]
        self._answers_from = len(self._turns)
        sent_system = "\n\n".join(part for part in (hidden_system, system) if part)
        self._lead = (*((Message("system", sent_system),) if sent_system else ()), *prefill)
        self._call_ids = {call.id for turn in self._turns for call in turn.tool_calls}

        self._calls: list[CallRecord] = []
        self._tool_events: list[ToolEvent] = []
        self._unanswered: tuple[ToolCall, ...] = ()
        self._notes: list[str] = []
        self._errors: list[ErrorRecord] = []
        self._truncated = False
        self._ending: Ending | None = None
        self.failure: Exception | None = None
        """What ended the run as failed, once it did."""
        self._tool_seconds = 0.0
        self._began: float | None = None
        self._ended: float | None = None
        self._started_at = ""

    async def drive(self) -> None:
        """Hold the conversation to its end; how it ended is in the trace.

        An error of the model, of a tool's machinery or of the loop itself ends this run as failed and is
        recorded. Raised are only cancellation and what concerns more than this run: `StoreError`,
        `RunAbortedError`.
        """
        self._began = self._clock()
        self._started_at = moment(self._now() if self._now is not None else None)
        try:
            self._ending = await self._converse()
        except (StoreError, RunAbortedError):
            raise
        except ContextWindowError as error:
            # A limit like any other once something was said; a prompt that never fitted is no sample at all.
            if len(self._turns) > self._answers_from:
                self._errors.append(error_record(error))
                self._ending = Ending("partial", "context_window")
            else:
                self._fail(error)
        except Exception as error:
            self._fail(error)
        finally:
            self._ended = self._clock()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._errors.append(error_record(error))
        self._ending = Ending("failed", "error")

    async def _converse(self) -> Ending:
        if not self._turns and not await self._hear():
            return Ending("completed", "nothing_asked")
        bad_turns = 0
        for _ in range(self._settings.max_iterations):
            if self._limit is not None and (reached := self._limit(self)) is not None:
                return Ending("partial", reached)
            completion = await self._ask()
            turn = self._record(completion)
            if completion.finish_reason in CUT_OFF:
                return self._cut_off(turn, completion)
            if turn.tool_calls:
                usable = await self._run_tools(turn.tool_calls)
                bad_turns = 0 if usable else bad_turns + 1
            if self._stop is not None and (why := await self._stop(self)) is not None:
                return Ending("completed", why)
            if bad_turns >= self._settings.max_bad_turns:
                return Ending("partial", "unusable_tool_calls")
            if not turn.tool_calls and not await self._hear():
                return (
                    Ending("completed", "answer")
                    if turn.content.strip()
                    else Ending("partial", "empty_answer")
                )
        if self._settings.last_answer:
            await self._ask_for_answer()
        return Ending("partial", "max_iterations")

    async def _hear(self) -> bool:
        """Let the other side speak; false when it says nothing, or there is none."""
        if self._reply is None:
            return False
        said = await self._reply(self)
        self._turns.extend(said)
        return bool(said)

    async def _ask(self) -> Completion:
        return self._noted(await self._model.complete(self._request((*self._lead, *self._turns))))

    async def _ask_for_answer(self) -> None:
        messages = (*self._lead, *self._turns, Message("user", LAST_REQUEST))
        # The tools go along: some endpoints refuse a conversation that holds calls when no tools are declared.
        completion = await self._model.complete(replace(self._request(messages), tool_choice="none"))
        answer = self._noted(completion).message
        if answer.tool_calls:
            self._notes.append("the last answer asked for tools again; those calls were left out")
            answer = replace(answer, tool_calls=())
        if answer.content.strip():
            self._turns.append(answer)

    def _request(self, messages: tuple[Message, ...]) -> Request:
        settings = self._settings
        return Request(
            messages=messages,
            tools=self._specs,
            sampling=settings.sampling,
            reasoning=settings.reasoning,
            provider=settings.provider,
        )

    def _noted(self, completion: Completion) -> Completion:
        self._calls.append(completion.call_record())
        self._notes.extend(completion.notes)
        if completion.finish_reason == "length":
            self._truncated = True
        return completion

    def _record(self, completion: Completion) -> Message:
        turn = completion.message
        if turn.tool_calls:
            own = self._own_ids(turn.tool_calls)
            if own != turn.tool_calls:
                turn = replace(turn, tool_calls=own)
        self._turns.append(turn)
        self._unanswered = turn.tool_calls
        return turn

    def _own_ids(self, calls: Sequence[ToolCall | None]) -> tuple[ToolCall, ...]:
        """The calls, each under an id that no other call of the conversation has.

        What is no call, or has arguments that are no text, is mended here and nowhere after: an endpoint's answers
        never hold such, but a model of somebody's own may.
        """
        unique = []
        for call in calls:
            if call is None:
                self._notes.append("a null among the tool calls was skipped")
                continue
            arguments: Any = call.arguments
            if not isinstance(arguments, str):
                self._notes.append(
                    f"the arguments of a call of {call.name!r} were no text; they are JSON now"
                )
                call = replace(call, arguments=msgspec.json.encode(arguments).decode())
            if not call.id or call.id in self._call_ids:
                mended = fresh_call_id(self._call_ids)
                self._notes.append(f"tool call id {call.id!r} was missing or taken; it is {mended!r} now")
                call = replace(call, id=mended)
            self._call_ids.add(call.id)
            unique.append(call)
        return tuple(unique)

    async def _run_tools(self, calls: tuple[ToolCall, ...]) -> bool:
        """Run one turn's calls and record what they gave; false if not one of them could be run."""
        if self._tools is None:
            offered = UnknownToolError("no tools are offered in this conversation; answer in text")
            return self._answer([refusal(call, offered) for call in calls])
        started = self._clock()
        try:
            outcomes = await self._tools.run(calls)
        finally:
            self._tool_seconds += self._clock() - started
        return self._answer(outcomes)

    def _answer(self, outcomes: Sequence[tuple[Message, ToolEvent]]) -> bool:
        for observation, event in outcomes:
            self._turns.append(observation)
            self._tool_events.append(event)
        self._unanswered = ()
        return any(event.error_type not in UNUSABLE for _, event in outcomes)

    def _cut_off(self, turn: Message, completion: Completion) -> Ending:
        """End at a turn that the model could not finish. Its calls may be half written, so none is run."""
        if completion.finish_reason == "length":
            tokens = completion.usage.output_tokens or self._settings.sampling.max_tokens
            where = f" at {tokens} tokens" if tokens else ""
            why = f"not run: the answer was cut off{where} (finish_reason 'length')"
        else:
            why = "not run: the endpoint's content filter cut the answer off"
        self._answer([refusal(call, ToolNotRunError(why)) for call in turn.tool_calls])
        return Ending("partial", completion.finish_reason)

    def cut(self, reason: str) -> None:
        """End a run that was cancelled from outside because a limit was reached: it is partial, not cancelled."""
        if self._ending is None:
            self._ending = Ending("partial", reason)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said so far, in order."""
        return (*self._system, *self._turns)

    @property
    def calls(self) -> Sequence[CallRecord]:
        """The model calls answered so far."""
        return self._calls

    @property
    def tool_seconds(self) -> float:
        """Seconds spent in tools so far."""
        return self._tool_seconds

    @property
    def final_response(self) -> str:
        """The text the conversation ended with, empty where it did not end with one."""
        answers = self._turns[self._answers_from :]
        return answers[-1].content if answers and answers[-1].role == "assistant" else ""

    def trace(self) -> Trace:
        """The record of what was had so far; a run that was not driven to an end counts as cancelled.

        Calls that got no answer are in `tool_events` as failures.
        """
        ending = self._ending or Ending("cancelled", "cancelled")
        lost = [
            ToolEvent(
                call.id,
                call.name,
                False,
                error="the rollout ended first",
                error_type=ToolNotRunError.__name__,
            )
            for call in self._unanswered
        ]
        return Trace(
            id=self.rollout_id,
            state=ending.state,
            messages=(*self._system, *self._turns),
            task=self._task,
            tools=self._specs,
            toolsets=self._toolsets,
            model=self._model.name,
            sampling=msgspec.to_builtins(self._settings.sampling),
            calls=tuple(self._calls),
            tool_events=(*self._tool_events, *lost),
            stop_reason=ending.reason,
            truncated=self._truncated,
            errors=tuple(self._errors),
            timing=self._timing(),
            started_at=self._started_at,
            notes=tuple(self._notes),
        )

    def _timing(self) -> Timing:
        if self._began is None:
            return Timing()
        until = self._clock() if self._ended is None else self._ended
        return Timing(
            total=until - self._began,
            model=sum([call.seconds for call in self._calls]),
            tools=self._tool_seconds,
            waiting=sum([call.waiting for call in self._calls]),
        )


def fresh_call_id(taken: set[str]) -> str:
    """An id not in `taken`: nine letters and digits, which is what the strictest endpoints accept."""
    number = len(taken) + 1
    while (made := f"call{number:05d}") in taken:
        number += 1
    return made


def refusal(call: ToolCall, error: TaskmillError) -> tuple[Message, ToolEvent]:
    """Observation and event of a call that is answered without running a tool."""
    text, kind = str(error), type(error).__name__
    return (
        Message("tool", f"Error: {text}", tool_call_id=call.id, name=call.name, success=False),
        ToolEvent(call.id, call.name, False, error=text, error_type=kind),
    )


def error_record(error: Exception) -> ErrorRecord:
    """An exception as it is stored: with its traceback where it is none that taskmill raises on purpose.

    What a task's own function raised is in the cause of the error that names the function.
    """
    cause = error.__cause__ if isinstance(error, TaskError) and error.__cause__ is not None else error
    return ErrorRecord(
        type=type(error).__name__,
        message=str(error) or repr(error),
        attempts=error.attempts if isinstance(error, ModelError) else 1,
        traceback=None if isinstance(cause, TaskmillError) else "".join(traceback.format_exception(cause)),
    )
