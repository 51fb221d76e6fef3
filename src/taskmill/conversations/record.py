"""The record of one conversation that was held, and holding it: the same in this process and in a worker's."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from importlib import metadata
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from taskmill._version import __version__
from taskmill.conversations.analyzers import analyse, plain
from taskmill.conversations.conversation import Conversation
from taskmill.conversations.jobs import Job
from taskmill.errors import RunAbortedError, StoreError
from taskmill.models.base import Model
from taskmill.models.journaled import Journaled
from taskmill.programs.agent import error_record
from taskmill.programs.conversation.dialogue import Dialogue, Services
from taskmill.programs.conversation.participant import Participant
from taskmill.programs.conversation.transcript import Message
from taskmill.records import CallRecord, ErrorRecord, Usage, moment
from taskmill.store.jsonl import encode_row


class Held(Struct, frozen=True, omit_defaults=True):
    """How a job ended. With the recipe of the run, or its own `recipe`, `row`, `seed` and `stream` decide all of it.

    `state` is completed, failed or cancelled; a failed one has what was said before. `usage` and `cost` (US dollars)
    are of all calls, `billed_calls`, `billed_usage` and `billed_cost` of those that no earlier record was billed for.
    """

    id: str
    job_id: str
    state: str
    transcript: tuple[Message, ...] = ()
    row: Any = None
    analysis: Any = None
    error: ErrorRecord | None = None
    stop_reason: str = ""
    name: str | None = None
    seed: int = 0
    stream: str = ""
    attempt: int = 1
    device: str | None = None
    started_at: str = ""
    seconds: float = 0.0
    new_turns: int = 0
    tokens_generated: int = 0
    usage: Usage = Usage()
    cost: float | None = 0.0
    calls: int = 0
    tool_calls: int = 0
    billed_calls: int = 0
    billed_usage: Usage = Usage()
    billed_cost: float | None = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    recipe: Mapping[str, Any] | None = None


class HeldHead(Struct, frozen=True):
    """The fields of a stored record that a resume needs."""

    id: str
    state: str
    job_id: str = ""
    attempt: int = 1
    recipe: msgspec.Raw = msgspec.Raw(b"null")


decode_held = msgspec.json.Decoder(Held).decode
decode_head = msgspec.json.Decoder(HeldHead).decode


class Journal(Protocol):
    """Where finished calls are kept: the journal of a run, or the way to it from a worker."""

    def recall(self, rollout_id: str) -> Any: ...
    def void(self, rollout_id: str) -> Any: ...
    def record(
        self, rollout_id: str, number: int, digest: str, completion: bytes, attempt: int = 1
    ) -> Any: ...


class Surroundings(Struct, frozen=True):
    """What all jobs of a process are held with."""

    models: Callable[[Participant], Any]
    sandbox: Callable[[str], Any]
    journal: Journal | None = None
    device: str | None = None
    heard: Callable[[str, Message], None] = lambda key, message: None


class Holding:
    """One job under way. `record()` tells at any moment how it stands."""

    def __init__(
        self,
        conversation: Conversation,
        around: Surroundings,
        *,
        key: str,
        job_id: str,
        name: str | None = None,
        recipe: Mapping[str, Any] | None = None,
        attempt: int = 1,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        self._conversation = conversation
        self._around = around
        self._key = key
        self._job_id = job_id
        self._name = name
        self._recipe = recipe
        self._attempt = attempt
        self._clock = clock
        self._now = now
        self._journaled: dict[str, Journaled] = {}
        self._asked: dict[str, list[CallRecord]] = {}
        services = Services(
            models=around.models,
            journaled=self._with_journal,
            sandbox=around.sandbox,
            heard=lambda message: around.heard(key, message),
        )
        self._services = services
        self._dialogue: Dialogue = conversation.dialogue(services, id=key)
        self._error: ErrorRecord | None = None
        self._analysis: Any = None
        self._reason = ""
        self._state = "cancelled"
        self._began = self._clock()
        self._started_at = moment(None if now is None else now())

    def _with_journal(self, name: str, model: Model) -> Model:
        if self._around.journal is None:
            return model
        journal: Any = self._around.journal
        kept = Journaled(model, journal, f"{self._key}#{name}", attempt=self._attempt)
        self._journaled[name] = kept
        return kept

    async def run(self) -> Held:
        """Hold it and look at it. Raises what concerns more than this job: `StoreError`, `RunAbortedError`."""
        try:
            try:
                self._reason = await self._dialogue.run()
                if self._conversation.lineup.analyzer is not None:
                    ended = self._conversation.after(self._dialogue, self._services)
                    self._analysis = await analyse(self._conversation.lineup.analyzer, ended)
                self._state = "completed"
            finally:
                await self._dialogue.close()
        except (StoreError, RunAbortedError):
            raise
        except Exception as error:
            self._state, self._error = "failed", error_record(error)
        except SystemExit as error:  # of a user's function: it has no say over the run
            self._state = "failed"
            self._error = ErrorRecord(
                "SystemExit", f"a function of the conversation left with {error.code!r}"
            )
        return self.record()

    def record(self) -> Held:
        """How it stands now."""
        dialogue = self._dialogue
        calls = dialogue.calls
        billed = self._billed()
        usage, cost = _sum(calls)
        billed_usage, billed_cost = _sum(billed)
        said = dialogue.transcript
        held = self._conversation
        return Held(
            id=self._key,
            job_id=self._job_id,
            state=self._state,
            transcript=tuple(said),
            row=storable(held.row),
            analysis=self._analysis,
            error=self._error,
            stop_reason=self._reason if self._state == "completed" else "",
            name=self._name,
            seed=held.lineup.seed if held._seed is None else held._seed,
            stream=held._stream,
            attempt=self._attempt,
            device=self._around.device,
            started_at=self._started_at,
            seconds=round(self._clock() - self._began, 6),
            new_turns=dialogue.new_turns,
            tokens_generated=said.tokens_generated,
            usage=usage,
            cost=cost,
            calls=len(calls),
            tool_calls=dialogue.tool_calls,
            billed_calls=len(billed),
            billed_usage=billed_usage,
            billed_cost=billed_cost,
            versions=versions(),
            recipe=self._recipe,
        )

    def _billed(self) -> list[CallRecord]:
        """The calls that this record adds to the bill: not those that an earlier attempt's record was billed for."""
        made = self._dialogue.calls
        before = sum(kept.billed_before for kept in self._journaled.values())
        lost = [left.call_record() for kept in self._journaled.values() for left in kept.let_go()]
        replayed = [call for call in made if call.replayed]
        live = [call for call in made if not call.replayed]
        return [*replayed[before:], *live, *lost]


def _sum(calls: list[CallRecord]) -> tuple[Usage, float | None]:
    usage = Usage()
    total: float | None = 0.0
    for call in calls:
        usage = usage + call.usage
        total = None if total is None or call.cost is None else total + call.cost
    return usage, total


def storable(row: Any) -> Any:
    """A row as it is stored: what is no JSON in it becomes what it shows itself as."""
    try:
        msgspec.json.encode(row)
        return row
    except (TypeError, UnicodeEncodeError, ValueError, RecursionError):
        pass
    try:
        return msgspec.to_builtins(plain(row), enc_hook=repr)
    except (TypeError, ValueError, RecursionError):
        return repr(row)


@lru_cache(maxsize=1)
def _fixed_versions() -> dict[str, str]:
    return {"taskmill": __version__, "python": platform.python_version()}


@lru_cache(maxsize=8)
def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def versions() -> dict[str, str]:
    """What the conversation was held with: this package, Python, and what runs local models, where it is in use."""
    found = dict(_fixed_versions())
    for package in ("torch", "transformers"):
        if package in sys.modules:
            found[package] = _version_of(package)
    return found


def encoded(held: Held) -> tuple[Held, bytes]:
    """A record and its line; where something in it is no JSON, a record of a failed job that says so."""
    try:
        return held, encode_row(held)
    except TypeError as error:
        said = tuple(Message(message.author, message.content) for message in held.transcript)
        problem = ErrorRecord("TypeError", f"the conversation can't be recorded: {error}")
        held = replace(held, state="failed", transcript=said, analysis=None, error=problem)
        return held, encode_row(held)


def unheld(
    job: Job,
    attempt: int,
    recipe: Mapping[str, Any] | None,
    state: str,
    error: ErrorRecord | None,
    heard: Sequence[Message] = (),
) -> Held:
    """The record of a job that nobody brought to its end."""
    conversation = job.conversation
    return Held(
        id=job.key,
        job_id=job.id,
        state=state,
        transcript=(*conversation.transcript, *heard),
        row=storable(conversation.row),
        error=error,
        name=job.recipe,
        seed=conversation.lineup.seed if conversation._seed is None else conversation._seed,
        stream=conversation._stream,
        attempt=attempt,
        new_turns=len(heard),
        versions=versions(),
        recipe=recipe,
    )
