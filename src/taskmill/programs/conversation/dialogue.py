"""One conversation as it is held: whose turn it is, what that one sees, what it says.

The random stream of a turn is worked out from the seed, the job and the number of the turn, and from nothing else.
What must hold of it, and why, is in `docs/design/conversations.md`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from inspect import isawaitable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from taskmill import records
from taskmill.errors import ConfigurationError, ContextWindowError
from taskmill.models.base import Completion, Model, Request, Sampling
from taskmill.models.reasoning import split_reasoning
from taskmill.programs.agent import AgentRun, AgentSettings
from taskmill.programs.conversation.context import View
from taskmill.programs.conversation.lineup import Lineup
from taskmill.programs.conversation.participant import (
    FunctionAnswers,
    Participant,
    ScriptedAnswers,
    Typist,
)
from taskmill.programs.conversation.stop import StopCondition, Turns, all_of, smallest
from taskmill.programs.conversation.templates import Template, filled
from taskmill.programs.conversation.transcript import Message, Transcript
from taskmill.programs.conversation.views import Framing, rendered
from taskmill.records import CallRecord, Usage
from taskmill.sandbox.base import Sandbox
from taskmill.tools.base import Tool, ToolContext
from taskmill.tools.box import ToolBox

CHARACTERS_A_TOKEN = 4
"""By which a view is measured against a `context_window`: about what English text comes to."""


def turn_seed(seed: int, stream: str, turn: int, own: int | None = None, call: int = 0) -> int:
    """The seed of a call, in 31 bits as some take no more. `own` is the participant's, `call` counts in a turn."""
    text = f"{seed}\n{stream}\n{turn}\n{'' if own is None else own}\n{call}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


async def _no_models(participant: Participant) -> Model:
    raise ConfigurationError(f"participant {participant.name!r} has no model to ask")


def _as_it_is(name: str, model: Model) -> Model:
    return model


class Services(Struct, frozen=True):
    """What a conversation works with.

    `models` gives the model of a participant whose recipe has to be opened. `journaled` wraps the model of a
    participant, named, so that finished calls are kept. `sandbox` makes the sandbox for the tools of one of them.
    `heard` is told of every message that became part of the conversation.
    """

    models: Callable[[Participant], Awaitable[Model]] = _no_models
    journaled: Callable[[str, Model], Model] = _as_it_is
    sandbox: Callable[[str], Sandbox] | None = None
    heard: Callable[[Message], None] = lambda message: None


class Dialogue:
    """A conversation under way. Whatever happens, `transcript` holds what was said so far.

    `seed` and `stream` decide its randomness; `row` is the row it is about, called `place` in messages; `extra` ends it
    beside its own conditions. Used by one caller at a time; `close` ends what its tools started.
    """

    def __init__(
        self,
        lineup: Lineup,
        services: Services,
        *,
        id: str = "conversation",
        transcript: Transcript | None = None,
        row: Any = None,
        place: str = "the row",
        seed: int | None = None,
        stream: str = "",
        extra: StopCondition | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lineup = lineup
        self.id = id
        self.row = row
        self._place = place
        self._services = services
        self._transcript = transcript if transcript is not None else Transcript()
        self._seed = lineup.seed if seed is None else seed
        self._stream = stream
        self._extra = extra
        self._clock = clock
        self.new_turns = 0
        self.calls: list[CallRecord] = []
        """The model calls of this run, in order."""
        self.tool_calls = 0
        self._models: dict[str, Model] = {}
        self._contexts: dict[str, ToolContext] = {}
        self._framings: dict[str, Framing] = {}

    @property
    def transcript(self) -> Transcript:
        """What was said so far."""
        return self._transcript

    @property
    def names(self) -> tuple[str, ...]:
        """The participants, in speaking order."""
        return self.lineup.names

    # -- turns ------------------------------------------------------------------------------------------------

    async def run(self, turns: int | None = None) -> str:
        """Speak until a condition is met; a word for which. `turns` more turns, where that is given.

        Raises `ConfigurationError` where nothing would ever end it, and whatever fails a turn.
        """
        limit = self.lineup.turns if turns is None else turns
        until = all_of(self._extra, self.lineup.until, None if limit is None else Turns(limit))
        if until is None:
            raise ConfigurationError(
                "nothing would end this conversation: say how many turns it has, .turns(6), or when it is over, "
                ".run_until(…)"
            )
        self.new_turns = 0
        while True:
            if (why := await until.reason(self)) is not None:
                return why
            if await self.step(until.token_limit(self)) is None:
                return "nobody_speaks"

    async def step(self, token_limit: int | None = None) -> Message | None:
        """One turn; `None` where nobody is to speak."""
        name = self.lineup.speaking.next_speaker(self)
        if name is None:
            return None
        message = await self._hooked(await self._speak(self.lineup.participant(name), token_limit))
        self._transcript = self._transcript.plus(message)
        self.new_turns += 1
        self._services.heard(message)
        return message

    async def sample(self, name: str, said: str | None = None) -> Message:
        """What a participant would say now, where `said` is a last word of the moderator's; nothing is recorded."""
        before = self._transcript
        if said is not None:
            self._transcript = before.plus(Message(self.lineup.moderator, said))
        try:
            return await self._speak(self.lineup.participant(name), None)
        finally:
            self._transcript = before

    async def _hooked(self, message: Message) -> Message:
        for hook in self.lineup.hooks:
            given = hook(message, self)
            if isawaitable(given):
                given = await given
            if isinstance(given, str):
                given = replace(message, content=given)
            if given is not None and not isinstance(given, Message):
                raise ConfigurationError(
                    f"the hook {getattr(hook, '__name__', hook)!r} returned {given!r:.100}; "
                    "a message, a text or None is needed"
                )
            if given is not None and given != message:
                message = replace(given, metadata={**given.metadata, "hooked": True})
        return message

    # -- one turn ---------------------------------------------------------------------------------------------

    async def _speak(self, participant: Participant, token_limit: int | None) -> Message:
        began = self._clock()
        turn = len(self._transcript)
        asked = _Asked(await self._model(participant), participant, (self._seed, self._stream, turn))
        framing = self._framing(participant)
        seen = tuple(self.lineup.speaking.seen_by(participant.name, self))
        view = self.lineup.context.prepare(View(participant.name, seen))
        sampling = replace(participant.sampling, max_tokens=smallest(participant.max_tokens, token_limit))
        try:
            said = await self._answered(participant, asked, framing, view, sampling)
        finally:
            self.calls.extend(asked.calls)
        return _message(participant, said, asked, self._clock() - began)

    async def _answered(
        self, participant: Participant, asked: _Asked, framing: Framing, view: View, sampling: Sampling
    ) -> _Said:
        """The answer to the largest view that fits."""
        policy = self.lineup.context

        async def ask(prompt: str) -> str:
            request = Request((records.Message("user", prompt),), sampling=sampling)
            completion = await asked.complete(request)
            return split_reasoning(completion.message.content)[1].strip()

        while True:
            messages = rendered(
                framing,
                view,
                named=len(self.lineup.participants) > 2,
                thinking=self.lineup.reasoning_visibility,
            )
            if not messages:
                raise ConfigurationError(
                    f"participant {participant.name!r} would speak to nobody about nothing: give the conversation a "
                    "shared_context, or the participant a system_prompt"
                )
            request = Request(messages, sampling=sampling, reasoning=participant.reasoning)
            # A local model counts for itself, and says so where it does not fit; others are measured.
            window = None if participant.kind == "local" else participant.context_window
            tokens = None if window is None else _tokens(request)
            if window is None or tokens is None or tokens + (sampling.max_tokens or 1) <= window:
                try:
                    return await self._asked_for(participant, asked, request, view)
                except ContextWindowError as error:
                    problem = str(error)
            else:
                room = f" and up to {sampling.max_tokens:,} for its answer" if sampling.max_tokens else ""
                problem = f"what it would be shown has {tokens:,} tokens{room}, and its window {window:,}"
            smaller = await policy.shrink(view, ask)
            if smaller is None:
                raise ContextWindowError(f"participant {participant.name!r} can't go on: {problem}")
            view = smaller

    async def _asked_for(
        self, participant: Participant, asked: _Asked, request: Request, view: View
    ) -> _Said:
        if not participant.tools:
            completion = await asked.complete(request)
            return _Said(completion.message, (), completion.finish_reason, view)
        return await self._with_tools(participant, asked, request, view)

    async def _with_tools(
        self, participant: Participant, asked: _Asked, request: Request, view: View
    ) -> _Said:
        run = AgentRun(
            rollout_id=f"{self.id}#{participant.name}",
            prompt=request.messages,
            model=asked,
            tools=ToolBox(tools_of(participant), self._context(participant)),
            settings=AgentSettings(
                max_iterations=participant.max_tool_rounds,
                sampling=request.sampling,
                reasoning=request.reasoning,
            ),
            clock=self._clock,
        )
        await run.drive()
        if run.failure is not None:
            raise run.failure
        trace = run.trace()
        self.tool_calls += len(trace.tool_events)
        if trace.stop_reason == "context_window":
            raise ContextWindowError(trace.errors[-1].message)
        made = trace.messages[len(request.messages) :]
        spoke = bool(made) and made[-1].role == "assistant" and not made[-1].tool_calls
        last = made[-1] if spoke else records.Message("assistant", "")
        reason = asked.finish_reason if trace.state == "completed" else trace.stop_reason
        return _Said(last, made[:-1] if spoke else made, reason, view)

    # -- what a turn is made with -----------------------------------------------------------------------------

    async def _model(self, participant: Participant) -> Model:
        model = self._models.get(participant.name)
        if model is None:
            model = await self._opened(participant)
            if not isinstance(model, ScriptedAnswers):  # which would not know how many the journal gave
                model = self._services.journaled(participant.name, model)
            self._models[participant.name] = model
        return model

    async def _opened(self, participant: Participant) -> Model:
        kind = participant.kind
        if kind == "scripted":
            own = self._transcript.by(participant.name)
            spoken = sum(int(message.metadata.get("calls", 1)) for message in own)
            return ScriptedAnswers(participant.name, participant.model, spoken)
        if kind == "function":
            return FunctionAnswers(participant.model, participant.model_name)
        if kind == "person":
            return Typist(participant.model, participant.name)
        return await self._services.models(participant)

    def _framing(self, participant: Participant) -> Framing:
        found = self._framings.get(participant.name)
        if found is None:

            def fill(template: Template | None, where: str) -> str | None:
                return filled(template, self.row, where=where, place=self._place)

            found = self._framings[participant.name] = self.lineup.framing(participant, fill)
        return found

    def _context(self, participant: Participant) -> ToolContext:
        context = self._contexts.get(participant.name)
        if context is None:
            make = self._services.sandbox
            id = f"{self.id}#{participant.name}"
            if make is None:
                raise ConfigurationError(
                    f"participant {participant.name!r} has tools, and there is no sandbox for them"
                )
            context = self._contexts[participant.name] = ToolContext(id, lambda: make(id))
        return context

    async def close(self) -> None:
        """End what the participants' tools started. May be called twice."""
        contexts, self._contexts = self._contexts, {}
        for context in contexts.values():
            await context.close()


def tools_of(participant: Participant) -> list[Tool]:
    """The tools of a participant. Raises `ConfigurationError` for what is none, or can't be had."""
    from taskmill.tools.function import tool
    from taskmill.tools.toolsets import offer

    tools: list[Tool] = []
    for entry in participant.tools:
        if isinstance(entry, str):
            offered = offer([entry])
            if offered.left_out:
                name, lacks = next(iter(offered.left_out.items()))
                raise ConfigurationError(
                    f"participant {participant.name!r}: the toolset {name!r} can't be had: {lacks}"
                )
            tools.extend(offered.tools)
        elif hasattr(entry, "spec"):
            tools.append(entry)
        elif callable(entry):
            tools.append(tool(entry))
        else:
            raise ConfigurationError(f"participant {participant.name!r}: {entry!r:.100} is no tool")
    return tools


class _Said(Struct, frozen=True):
    """What came of a turn's calls."""

    message: records.Message
    steps: tuple[records.Message, ...]
    finish_reason: str
    view: View


class _Asked:
    """The model of one turn: every call of it has a seed of its own and is noted."""

    def __init__(self, model: Model, participant: Participant, stream: tuple[int, str, int]) -> None:
        self.model = model
        self._own = participant.seed
        self._stream = stream
        self._asked = 0
        self.calls: list[CallRecord] = []
        self.finish_reason = "stop"
        self.answered_by = ""
        self.notes: list[str] = []

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def seed(self) -> int:
        """The seed of the turn's first call."""
        return turn_seed(*self._stream, self._own)

    async def complete(self, request: Request) -> Completion:
        seed = turn_seed(*self._stream, self._own, self._asked)
        self._asked += 1
        completion = await self.model.complete(
            replace(request, sampling=replace(request.sampling, seed=seed))
        )
        self.calls.append(completion.call_record())
        self.finish_reason = completion.finish_reason
        self.answered_by = completion.model or self.model.name
        self.notes.extend(completion.notes)
        return completion

    async def close(self) -> None:
        """Nothing: the model is not this turn's."""


def _tokens(request: Request) -> int:
    """About how many tokens a request has."""
    return math.ceil(sum(len(message.content) / CHARACTERS_A_TOKEN + 4 for message in request.messages))


def _message(participant: Participant, said: _Said, asked: _Asked, seconds: float) -> Message:
    turn = said.message
    thought, content = split_reasoning(turn.content)
    think = "\n\n".join(part for part in (turn.reasoning, thought) if part)
    usage = Usage()
    for call in asked.calls:
        usage = usage + call.usage
    costs = [call.cost for call in asked.calls]
    metadata: dict[str, Any] = {
        "n_tokens": usage.output_tokens,
        "calls": len(asked.calls),
        "finish_reason": said.finish_reason,
        "model": asked.answered_by,
        "seed": asked.seed,
        "seconds": round(seconds, 6),
        "usage": msgspec.to_builtins(usage),
    }
    if None not in costs:
        metadata["cost"] = sum(cost for cost in costs if cost is not None)
    if think:
        metadata["parsed_think"] = think
    if said.steps:
        metadata["steps"] = [msgspec.to_builtins(step) for step in said.steps]
    if said.view.dropped:
        metadata["view"] = _left_out(said.view)
    if any(call.replayed for call in asked.calls):
        metadata["replayed"] = sum(call.replayed for call in asked.calls)
    if asked.notes:
        metadata["notes"] = asked.notes
    tokens = [id for call in asked.calls for id in call.token_ids or ()]
    if tokens:
        metadata["token_ids"] = tokens
    return Message(participant.name, content.strip() if thought else content, metadata)


def _left_out(view: View) -> Mapping[str, Any]:
    left = {"dropped": view.dropped}
    return left if view.summary is None else {**left, "summary": view.summary}
