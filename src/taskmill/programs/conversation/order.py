"""Who speaks next, and who sees what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from taskmill.programs.conversation.stop import Said
from taskmill.programs.conversation.transcript import Message


class SpeakingPolicy(Protocol):
    """The order of a conversation. Both methods see the conversation as it stands and decide the next turn from it."""

    def next_speaker(self, said: Said) -> str | None:
        """The name of who speaks next; `None` ends the conversation."""
        ...

    def seen_by(self, speaker: str, said: Said) -> Sequence[Message]:
        """The messages of the transcript that `speaker` gets to see."""
        ...


class InTurn(Struct, frozen=True):
    """One participant after another, in their order, from the one called `first` on; everybody sees everything."""

    first: str | None = None

    def next_speaker(self, said: Said) -> str | None:
        """The participant whose turn it is, counted over the whole transcript."""
        names = said.names
        start = names.index(self.first) if self.first is not None else 0
        return names[(start + len(said.transcript)) % len(names)]

    def seen_by(self, speaker: str, said: Said) -> Sequence[Message]:
        """All messages."""
        return said.transcript
