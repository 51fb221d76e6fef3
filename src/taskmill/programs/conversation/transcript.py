"""What was said in a conversation, seen from nobody's side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from msgspec import Struct, field
from msgspec.structs import replace

from taskmill.errors import ConfigurationError


class Message(Struct, frozen=True):
    """One turn: who said what. `metadata` tells how it came about.

    For a turn that a model made: `n_tokens`, `calls`, `finish_reason`, `model`, `seed`, `seconds`, `usage`, `cost`;
    `parsed_think` is its thinking, `steps` are the calls of tools and their results on the way to it, `view` what of
    the conversation it was not made from, where a context policy left something out.
    """

    author: str
    content: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def think(self) -> str | None:
        """The thinking of the turn, where it has some."""
        found = self.metadata.get("parsed_think")
        return found if isinstance(found, str) else None

    @property
    def n_tokens(self) -> int:
        """Tokens that were generated for it."""
        return int(self.metadata.get("n_tokens", 0))


class Transcript(Sequence[Message]):
    """The messages of a conversation in order. It is never changed: what changes a conversation makes another one."""

    __slots__ = ("_messages",)

    def __init__(self, messages: Iterable[Message | Mapping[str, Any] | tuple[str, str]] = ()) -> None:
        self._messages = tuple(_message(value) for value in messages)

    @overload
    def __getitem__(self, place: int) -> Message: ...
    @overload
    def __getitem__(self, place: slice) -> Transcript: ...
    def __getitem__(self, place: int | slice) -> Message | Transcript:
        found = self._messages[place]
        return found if isinstance(found, Message) else Transcript(found)

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transcript) and self._messages == other._messages

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Transcript of {len(self)} turns>"

    def __str__(self) -> str:
        return "\n\n".join(f"{message.author}: {message.content}" for message in self)

    @property
    def tokens_generated(self) -> int:
        """Tokens that models generated for all of it."""
        return sum(message.n_tokens for message in self)

    def by(self, author: str) -> list[Message]:
        """What one participant said."""
        return [message for message in self if message.author == author]

    def plus(self, message: Message) -> Transcript:
        """This and one message more."""
        return Transcript((*self._messages, message))

    def with_content(self, place: int, content: str) -> Transcript:
        """The same with another text at a place, marked as edited. Raises `IndexError` for a turn there is not."""
        old = self[place]
        changed = {
            name: value for name, value in old.metadata.items() if name not in ("parsed_think", "steps")
        }
        new = replace(old, content=content, metadata={**changed, "edited": True})
        place = place % len(self)
        return Transcript((*self._messages[:place], new, *self._messages[place + 1 :]))


def _message(value: Message | Mapping[str, Any] | tuple[str, str]) -> Message:
    if isinstance(value, Message):
        return value
    if isinstance(value, Mapping):
        value = (value.get("author"), value.get("content"), value.get("metadata", {}))  # type: ignore[assignment]
    if (
        isinstance(value, tuple | list)
        and len(value) in (2, 3)
        and all(isinstance(part, str) for part in value[:2])
    ):
        return Message(*value)
    raise ConfigurationError(f"a transcript holds messages with an author and a content, not {value!r:.200}")
