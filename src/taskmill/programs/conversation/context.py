"""What to do when what a participant would be shown no longer fits its model's window. Framing is never left out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from taskmill.errors import ConfigurationError
from taskmill.programs.conversation.stop import count
from taskmill.programs.conversation.transcript import Message

SUMMARY_PROMPT = (
    "Summarise the conversation below in at most ten sentences, so that somebody who did not hear it can go on with "
    "it. Keep names, numbers, decisions and open questions. Write nothing but the summary."
)


class View(Struct, frozen=True):
    """The part of a transcript that a speaker is shown: without `dropped` turns before it, of which `summary` tells."""

    speaker: str
    turns: tuple[Message, ...]
    dropped: int = 0
    summary: str | None = None

    def without(self, turns: int) -> View:
        """The same without its first so many turns."""
        return replace(self, turns=self.turns[turns:], dropped=self.dropped + turns)


Ask = Callable[[str], Awaitable[str]]
"""Asks the speaker's own model something that is no turn of the conversation."""


class ContextPolicy(Protocol):
    """How a view is kept within a window. Policies are values: what they are told stands in their fields."""

    def prepare(self, view: View) -> View:
        """The view to begin with, before it is known whether it fits."""
        ...

    async def shrink(self, view: View, ask: Ask) -> View | None:
        """A smaller view than one that does not fit; `None` where there is none, which fails the conversation."""
        ...


class Refuse(Struct, frozen=True):
    """The conversation fails, naming the participant, the tokens and the limit."""

    def prepare(self, view: View) -> View:
        """All of it."""
        return view

    async def shrink(self, view: View, ask: Ask) -> View | None:
        """Nothing else will do."""
        return None


class DropOldest(Struct, frozen=True):
    """Leave out the oldest turns, as many as need be; the last one stays."""

    def prepare(self, view: View) -> View:
        """All of it."""
        return view

    async def shrink(self, view: View, ask: Ask) -> View | None:
        """Without the oldest turns: one in eight at a time, so that a long conversation is not asked about often."""
        return view.without(max(1, len(view.turns) // 8)) if len(view.turns) > 1 else None


class SlidingWindow(Struct, frozen=True):
    """Show the last `turns` turns and no more, whether the others would fit or not."""

    turns: int

    def __post_init__(self) -> None:
        count("SlidingWindow", "turns", self.turns)

    def prepare(self, view: View) -> View:
        """The last turns."""
        return view.without(max(0, len(view.turns) - self.turns))

    async def shrink(self, view: View, ask: Ask) -> View | None:
        """Nothing else will do."""
        return None


class Summarise(Struct, frozen=True):
    """Have the speaker's own model sum up what does not fit, and show that in its place; `keep` turns stay as they are.

    A summary stands in the metadata of the turn that was made with it, and goes on to be used in the speaker's later
    turns until that does not fit either.
    """

    keep: int = 4
    prompt: str = SUMMARY_PROMPT

    def __post_init__(self) -> None:
        count("Summarise", "keep", self.keep)
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise ConfigurationError("Summarise needs a prompt that is not blank")

    def prepare(self, view: View) -> View:
        """With the summary that the speaker's last turn was made with."""
        own = (message for message in reversed(view.turns) if message.author == view.speaker)
        before = next(own, None)
        told = before.metadata.get("view") if before is not None else None
        if not told or not told.get("summary") or told["dropped"] > len(view.turns):
            return view
        return replace(view.without(told["dropped"]), summary=told["summary"])

    async def shrink(self, view: View, ask: Ask) -> View | None:
        """With the older turns summed up, together with the summary of those before them."""
        if len(view.turns) <= self.keep:
            return None
        old = view.turns[: len(view.turns) - self.keep]
        summary = await ask(f"{self.prompt}\n\n{_told(view.summary, old)}")
        return replace(view.without(len(old)), summary=summary)


def _told(before: str | None, turns: Sequence[Message]) -> str:
    parts = [f"(What was said before, summed up: {before})"] if before else []
    return "\n\n".join([*parts, *(f"{message.author}: {message.content}" for message in turns)])
