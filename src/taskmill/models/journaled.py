"""Calls that were paid for once are not paid for again: replay from the call journal of a run."""

from __future__ import annotations

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
    conversation that did not take place this time. Every live answer is written before it is returned; its
    sync to disk is grouped with others and not waited for, because a call that a power cut loses is only paid
    for again, and nobody was told it was safe.
    """

    def __init__(self, model: Model, journal: CallJournal, rollout_id: str) -> None:
        self._model = model
        self._journal = journal
        self._rollout_id = rollout_id
        self._number = 0
        self._recorded: list[JournalEntry] | None = None
        self._live = False

    @property
    def name(self) -> str:
        """The model's name, as it stands in records."""
        return self._model.name

    async def complete(self, request: Request) -> Completion:
        """Answer `request` from the journal, or by asking the model. A replayed completion says so."""
        digest = request.digest(self._model.name)
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
        self._journal.record(self._rollout_id, self._number, digest, encoded)
        self._number += 1
        return completion

    async def close(self) -> None:
        """Nothing: the model is shared by all rollouts of a run, and closed by whoever opened it."""

    def _replay(self, digest: str) -> bytes | None:
        if self._recorded is None:
            self._recorded = self._journal.recall(self._rollout_id)
        if self._number < len(self._recorded):
            entry = self._recorded[self._number]
            if entry.number == self._number and entry.digest == digest:
                self._number += 1
                return entry.completion
        self._live = True
        self._recorded = None
        return None
