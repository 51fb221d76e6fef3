"""What is said, stored and sent: messages, tool calls, usage, and the trace of one rollout.

All records are frozen `msgspec` structs: they encode to JSON in microseconds, and a stored record stays what
it was. Times are seconds (durations) or ISO 8601 in UTC (moments); money is US dollars.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

from msgspec import Raw, Struct, field

Role = Literal["system", "user", "assistant", "tool"]
State = Literal["completed", "partial", "discarded", "failed", "cancelled"]
"""How a rollout ended. `completed`, `partial` and `discarded` are done; the others run again on resume."""

DONE_STATES: frozenset[str] = frozenset({"completed", "partial", "discarded"})


def moment(at: datetime | None = None) -> str:
    """A moment as records write it, in UTC to the millisecond; this one, where none is given."""
    if at is not None:
        return at.astimezone(UTC).isoformat(timespec="milliseconds")
    seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{_to_the_second(seconds)}.{milliseconds:03d}+00:00"


@lru_cache(maxsize=8)
def _to_the_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class ToolCall(Struct, frozen=True, omit_defaults=True):
    """One call a model asked for. `arguments` is the text exactly as the model wrote it, JSON or not."""

    id: str
    name: str
    arguments: str = "{}"


class Message(Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation, in the shape every room shares.

    `reasoning` is the thinking of an assistant turn, parsed out of the text; `reasoning_details` is what the
    endpoint gave in a structure of its own and wants back unchanged. A `tool` message answers `tool_call_id`;
    `success` is known where the tool ran and never guessed from the text.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    reasoning_details: list[Any] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    success: bool | None = None


class ToolSpec(Struct, frozen=True):
    """A tool as a model is told about it. `parameters` is the JSON Schema of its arguments, already encoded."""

    name: str
    description: str
    parameters: Raw


class Usage(Struct, frozen=True, omit_defaults=True):
    """Tokens of one or more calls. `cached_tokens` is part of `input_tokens`, `reasoning_tokens` of `output_tokens`."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


class CallRecord(Struct, frozen=True, omit_defaults=True):
    """One model call of a rollout: what it used, cost and took.

    `seconds` is the time the model worked on the attempt that answered, `waiting` what was spent before it in
    queues and back-off. `replayed` calls came from the call journal: `usage` and `cost` are those of the call when it
    was made, though nothing was paid for it this time. `token_ids` and `logprobs` (one for each token of the answer)
    are there when the endpoint gives them.
    """

    usage: Usage = Usage()
    cost: float | None = None
    seconds: float = 0.0
    waiting: float = 0.0
    attempts: int = 1
    finish_reason: str = "stop"
    replayed: bool = False
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None


class Judgement(Struct, frozen=True, omit_defaults=True):
    """What a judge said of a rollout: its grade, its words, and what asking it used and cost."""

    judge: str
    model: str
    score: float | None = None
    said: str = ""
    call: CallRecord = CallRecord()


class ToolEvent(Struct, frozen=True, omit_defaults=True):
    """One tool call as it ended: exactly one success or failure for each call a model made.

    `error` is what went wrong, in words; `error_type` the class of it (`UnknownToolError`,
    `ToolArgumentsError`, `ToolTimeoutError`, …), so that nobody has to guess it from the words.
    `note` is what was mended in arguments that were not quite JSON before the tool saw them.
    """

    call_id: str
    name: str
    success: bool
    seconds: float = 0.0
    error: str | None = None
    error_type: str | None = None
    note: str | None = None


class ErrorRecord(Struct, frozen=True, omit_defaults=True):
    """An error as it is stored: class name, message, attempts made, and the traceback where one helps."""

    type: str
    message: str
    attempts: int = 1
    traceback: str | None = None


class Timing(Struct, frozen=True, omit_defaults=True):
    """Where the time of a rollout went, in seconds."""

    total: float = 0.0
    model: float = 0.0
    tools: float = 0.0
    waiting: float = 0.0


class Trace(Struct, frozen=True, omit_defaults=True):
    """The record of one rollout, the same for every way in.

    Only what the user, the model and the tools said stands in `messages`: no reminder, retry, prefill or
    ephemeral system prompt. `notes` says what was mended on the way (a null call skipped, an id made unique).

    For a rollout of a taskset: `number` says which of its task's rollouts this is, from 0; `attempt` which try at it,
    from 1; `reward` is the weighted sum of the `rewards` and group rewards, `None` where it could not be had;
    `task_state` is what the task's functions kept for this rollout. With group rewards, `group_size` says how many
    rollouts were scored together.

    The bill: the first `billed_before` of the `calls` stand in the record of an earlier attempt, and are not paid for
    again; `lost_calls` were paid for and are part of no conversation, because a crash came between.
    """

    id: str
    state: State
    messages: tuple[Message, ...] = ()
    task: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = ()
    toolsets: tuple[str, ...] = ()
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[CallRecord, ...] = ()
    tool_events: tuple[ToolEvent, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    truncated: bool = False
    errors: tuple[ErrorRecord, ...] = ()
    timing: Timing = Timing()
    started_at: str = ""
    notes: tuple[str, ...] = ()
    number: int = 0
    attempt: int = 1
    reward: float | None = None
    judgements: tuple[Judgement, ...] = ()
    task_state: Mapping[str, Any] = field(default_factory=dict)
    group_size: int = 0
    billed_before: int = 0
    lost_calls: tuple[CallRecord, ...] = ()

    @property
    def billed(self) -> list[CallRecord]:
        """The calls that this record adds to the bill of its run, those of judges among them."""
        judged = [said.call for said in self.judgements if not said.call.replayed]
        return [*self.calls[self.billed_before :], *self.lost_calls, *judged]

    @property
    def usage(self) -> Usage:
        """Tokens of all calls together."""
        sent = received = cached = thought = 0
        for call in self.calls:
            used = call.usage
            sent += used.input_tokens
            received += used.output_tokens
            cached += used.cached_tokens
            thought += used.reasoning_tokens
        return Usage(sent, received, cached, thought)

    @property
    def cost(self) -> float | None:
        """US dollars of all calls, or `None` as soon as one price is unknown."""
        total = 0.0
        for call in self.calls:
            if call.cost is None:
                return None
            total += call.cost
        return total

    @property
    def has_reasoning(self) -> bool:
        """Whether any assistant turn carries reasoning that is not blank."""
        return any(m.role == "assistant" and m.reasoning and m.reasoning.strip() for m in self.messages)
