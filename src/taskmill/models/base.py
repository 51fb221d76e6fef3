"""The one thing every model is: a service that turns a request into a completion.

Programs await `model.complete(request)` and know nothing else, so a scripted model in a test, an endpoint and
a local model that batches inside itself are interchangeable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from taskmill.records import CallRecord, Message, ToolSpec, Usage

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


_encode = msgspec.json.Encoder(order="deterministic").encode


def _raw_as_text(value: object) -> str:
    if isinstance(value, Raw):
        return bytes(value).decode("utf-8", "surrogateescape")
    raise NotImplementedError(f"{type(value).__name__} is not part of a request")


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How to sample. `None` leaves the choice to the model; `seed` is dropped, with one warning, where unsupported.

    `logprobs` asks for the log-probability of each token of the answer, and for the tokens' ids where the endpoint has
    a way to. It is dropped in the same way.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False

    def for_rollout(self, rollout_id: str) -> Sampling:
        """The same with a seed of that rollout's own, made of this one: 31 bits, as some endpoints take no more."""
        if self.seed is None:
            return self
        digest = blake2b(f"{self.seed}:{rollout_id}".encode(), digest_size=4).digest()
        return replace(self, seed=int.from_bytes(digest, "big") >> 1)


class Reasoning(Struct, frozen=True, omit_defaults=True):
    """Whether and how hard the model should think before it answers."""

    enabled: bool = True
    effort: Effort | None = None


class Request(Struct, frozen=True, omit_defaults=True):
    """All that decides an answer, and nothing else: two equal requests are the same call.

    `provider` is the routing object of endpoints that route; others never see it.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    sampling: Sampling = Sampling()
    reasoning: Reasoning | None = None
    provider: Mapping[str, Any] | None = None

    def digest(self, model: str) -> str:
        """Hash of the request to `model`: 32 hex digits, the same in every process."""
        try:
            encoded = _encode((model, self))
        except UnicodeEncodeError:
            # An unpaired surrogate (a tool may print one) has no UTF-8 form; escaped, it hashes like the rest.
            plain = msgspec.to_builtins((model, self), builtin_types=(), enc_hook=_raw_as_text)
            encoded = json.dumps(plain, sort_keys=True).encode()
        return blake2b(encoded, digest_size=16).hexdigest()


class Completion(Struct, frozen=True, omit_defaults=True):
    """What a model answered.

    `finish_reason` is `stop`, `tool_calls`, `length` or `content_filter`. `cost` is US dollars, `None` when no
    price is known. `seconds` is the answering attempt, `waiting` the time before it. `token_ids` and
    `logprobs` are there when the endpoint gives them. `notes` says what had to be mended in the answer as it
    came (a null among the calls, say). `counted` is false where the endpoint did not say how many tokens it took:
    `usage` is then no ground for a price.
    """

    message: Message
    usage: Usage = Usage()
    finish_reason: str = "stop"
    model: str = ""
    cost: float | None = None
    seconds: float = 0.0
    waiting: float = 0.0
    attempts: int = 1
    replayed: bool = False
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    notes: tuple[str, ...] = ()
    counted: bool = True

    def call_record(self) -> CallRecord:
        """This completion's line in a trace."""
        return CallRecord(
            usage=self.usage,
            cost=self.cost,
            seconds=self.seconds,
            waiting=self.waiting,
            attempts=self.attempts,
            finish_reason=self.finish_reason,
            replayed=self.replayed,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
        )


class Model(Protocol):
    """Who answers.

    `complete` raises `taskmill.errors.ModelError` and nothing else of its own; cancelling it abandons the call.
    `close` may be called twice.
    """

    @property
    def name(self) -> str:
        """The model's name, as it stands in records."""
        ...

    async def complete(self, request: Request) -> Completion:
        """Answer `request`."""
        ...

    async def close(self) -> None:
        """Let go of connections, memory, processes."""
        ...
