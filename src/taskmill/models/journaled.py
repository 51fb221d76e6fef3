"""Calls that were paid for once are not paid for again: replay from the call journal of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from taskmill.models.base import Completion, Model, Request
from taskmill.models.mending import storable

if TYPE_CHECKING:
    from taskmill.store.journal import CallJournal, JournalEntry

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Completion).decode


class Journaled:
    """`model` for one rollout: answers from `journal` as long as the requests are the recorded ones, then live.

    The first request that differs ends the replay for good: what was recorded after it belongs to a
    conversation that did not take place this time. Every live answer is written by the end of the turn of the
    event loop in which it is returned, and its sync to disk is grouped with others. Neither is waited for: a call
    that a kill takes within that turn, or a power cut before the sync, is only paid for again, and nobody was told
    it was safe.

    `attempt` numbers the attempts at the rollout that end in a record. The record of one is billed the calls that
    were answered here but for the first `billed_before`, and those of `let_go()`. `on_answer` hears of each live
    answer.
    """

    def __init__(
        self,
        model: Model,
        journal: CallJournal,
        rollout_id: str,
        *,
        attempt: int = 1,
        on_answer: Callable[[Completion], None] | None = None,
    ) -> None:
        self._model = model
        self._name = model.name
        self._journal = journal
        self._rollout_id = rollout_id
        self._attempt = attempt
        self._on_answer = on_answer
        self._number = 0
        self.billed_before = 0
        """How many of the answered calls an earlier attempt was billed; they come first."""
        self._left: deque[JournalEntry] | None = None
        self._void: list[JournalEntry] = []
        self._live = False

    @property
    def name(self) -> str:
        """The model's name, as it stands in records."""
        return self._name

    async def complete(self, request: Request) -> Completion:
        """Answer `request` from the journal, or by asking the model. A replayed completion says so."""
        digest = request.digest(self._name)
        if not self._live:
            kept = self._replay(digest)
            if kept is not None:
                return replace(_decode(kept), replayed=True)
        completion = await self._model.complete(request)
        try:
            encoded = _encode(completion)
        except UnicodeEncodeError:
            # An unpaired surrogate can't be stored; what is returned has to be what is replayed later.
            encoded = _encode(storable(msgspec.to_builtins(completion)))
            completion = _decode(encoded)
        self._journal.record(self._rollout_id, self._number, digest, encoded, self._attempt)
        self._number += 1
        if self._on_answer is not None:
            self._on_answer(completion)
        return completion

    def let_go(self) -> list[Completion]:
        """Calls that were paid for in this attempt, before a kill, and are not among those answered since."""
        left = (*self._void, *(self._left or ()))
        return [_decode(entry.completion) for entry in left if entry.attempt == self._attempt]

    async def close(self) -> None:
        """Nothing: the model is shared by all rollouts of a run, and closed by whoever opened it."""

    def _replay(self, digest: str) -> bytes | None:
        if self._left is None:
            self._left = deque(self._journal.recall(self._rollout_id))
            self._void = self._journal.void(self._rollout_id)
        if self._left and self._left[0].number == self._number and self._left[0].digest == digest:
            entry = self._left.popleft()
            self._number += 1
            self.billed_before += entry.attempt < self._attempt
            return entry.completion
        self._live = True
        return None
