"""When a conversation is over: conditions on what was said, put together with `|` and `&`.

    until = TextPattern(r"\\bagreed\\b") & Turns(4) | TokenBudget(per_conversation=2_000)

A condition is also a `with` block: every conversation that is begun in it is held to it as well.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar, Token
from inspect import isawaitable
from types import TracebackType
from typing import Any, Protocol, Self

from taskmill.errors import ConfigurationError
from taskmill.programs.conversation.transcript import Message, Transcript


class Said(Protocol):
    """A conversation as conditions, hooks and policies see it."""

    @property
    def transcript(self) -> Transcript:
        """All that was said."""
        ...

    @property
    def new_turns(self) -> int:
        """How many turns the run under way has added."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The participants, in speaking order."""
        ...

    @property
    def row(self) -> Any:
        """The row of data the conversation is about."""
        ...


_ambient: ContextVar[tuple[StopCondition, ...]] = ContextVar("taskmill_stop", default=())


def ambient() -> tuple[StopCondition, ...]:
    """The conditions of the `with` blocks around this place."""
    return _ambient.get()


class StopCondition(ABC):
    """Something that ends a conversation. Asked after every turn; kept in recipes by the values of `fields`."""

    fields: tuple[str, ...] = ()
    _token: Token[tuple[StopCondition, ...]] | None = None

    @abstractmethod
    async def reason(self, said: Said) -> str | None:
        """A word for why it is over; `None` while it is not."""

    def token_limit(self, said: Said) -> int | None:
        """How many tokens the next turn may have, where the condition bounds them."""
        return None

    def __or__(self, other: StopCondition) -> StopCondition:
        return Either(self, _condition(other))

    def __and__(self, other: StopCondition) -> StopCondition:
        return Both(self, _condition(other))

    def __enter__(self) -> Self:
        if self._token is not None:
            raise ConfigurationError(
                "this condition is around a block already; make another one for the inner block"
            )
        self._token = _ambient.set((*_ambient.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        _ambient.reset(self._token)
        self._token = None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(
            getattr(self, name) == getattr(other, name) for name in self.fields
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.fields)
        return f"{type(self).__name__}({shown})"


class Either(StopCondition):
    """Over as soon as one of two conditions is."""

    fields = ("left", "right")

    def __init__(self, left: StopCondition, right: StopCondition) -> None:
        self.left = left
        self.right = right

    async def reason(self, said: Said) -> str | None:
        """See `StopCondition`."""
        return await self.left.reason(said) or await self.right.reason(said)

    def token_limit(self, said: Said) -> int | None:
        """The smaller of both."""
        return smallest(self.left.token_limit(said), self.right.token_limit(said))


class Both(StopCondition):
    """Over when two conditions are at once."""

    fields = ("left", "right")

    def __init__(self, left: StopCondition, right: StopCondition) -> None:
        self.left = left
        self.right = right

    async def reason(self, said: Said) -> str | None:
        """See `StopCondition`."""
        one, other = await self.left.reason(said), await self.right.reason(said)
        return f"{one} and {other}" if one and other else None

    def token_limit(self, said: Said) -> int | None:
        """The larger of both, as neither ends it alone."""
        left, right = self.left.token_limit(said), self.right.token_limit(said)
        return None if left is None or right is None else max(left, right)


class Turns(StopCondition):
    """Over after that many turns of a run."""

    fields = ("turns",)

    def __init__(self, turns: int) -> None:
        self.turns = count("Turns", "turns", turns)

    async def reason(self, said: Said) -> str | None:
        """See `StopCondition`."""
        return "turns" if said.new_turns >= self.turns else None


class TokenBudget(StopCondition):
    """Over when so many tokens were generated in the conversation, by the counts in its transcript.

    `per_turn` bounds every turn. What is left of `per_conversation` bounds the next turn too, so a budget is not
    overdrawn; a turn of several calls (of tools) is bounded call by call.
    """

    fields = ("per_conversation", "per_turn")

    def __init__(self, per_conversation: int | None = None, per_turn: int | None = None) -> None:
        if per_conversation is None and per_turn is None:
            raise ConfigurationError("TokenBudget needs per_conversation=, per_turn=, or both")
        self.per_conversation = per_conversation and count(
            "TokenBudget", "per_conversation", per_conversation
        )
        self.per_turn = per_turn and count("TokenBudget", "per_turn", per_turn)

    async def reason(self, said: Said) -> str | None:
        """See `StopCondition`."""
        budget = self.per_conversation
        return "token_budget" if budget is not None and said.transcript.tokens_generated >= budget else None

    def token_limit(self, said: Said) -> int | None:
        """See `StopCondition`."""
        if self.per_conversation is None:
            return self.per_turn
        left = max(1, self.per_conversation - said.transcript.tokens_generated)
        return smallest(left, self.per_turn)


class TextPattern(StopCondition):
    """Over when the last turn matches a regular expression, said by one participant (`by`) or by anybody."""

    fields = ("pattern", "by", "ignore_case")

    def __init__(self, pattern: str, *, by: str | None = None, ignore_case: bool = False) -> None:
        try:
            self._compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
        except re.error as error:
            raise ConfigurationError(f"TextPattern({pattern!r}) is no regular expression: {error}") from None
        self.pattern = pattern
        self.by = by
        self.ignore_case = ignore_case

    async def reason(self, said: Said) -> str | None:
        """See `StopCondition`."""
        if not said.new_turns:
            return None
        last: Message = said.transcript[-1]
        if self.by is not None and last.author != self.by:
            return None
        return "text_pattern" if self._compiled.search(last.content) else None


class When(StopCondition):
    """Over when a function of the conversation says so: true, or a word for why. It may be async."""

    fields = ("function",)

    def __init__(self, function: Callable[[Said], Any]) -> None:
        if not callable(function):
            raise ConfigurationError(f"When({function!r}) needs a function of the conversation")
        self.function = function

    async def reason(self, said: Said) -> str | None:
        """See `StopCondition`."""
        found = self.function(said)
        if isawaitable(found):
            found = await found
        if not found:
            return None
        return found if isinstance(found, str) else getattr(self.function, "__name__", "function")


def as_condition(value: Any) -> StopCondition:
    """A condition from what a caller may give: one, or a function of the conversation."""
    return value if isinstance(value, StopCondition) or not callable(value) else When(value)


def all_of(*conditions: StopCondition | None) -> StopCondition | None:
    """Conditions of which the first to be met ends the conversation."""
    met: StopCondition | None = None
    for condition in conditions:
        if condition is not None:
            met = condition if met is None else Either(met, condition)
    return met


def _condition(value: Any) -> StopCondition:
    if not isinstance(value, StopCondition):
        raise TypeError(f"a stop condition is put together with another one, not with {value!r}")
    return value


def smallest(*limits: int | None) -> int | None:
    """The smallest of the limits there are."""
    return min((limit for limit in limits if limit is not None), default=None)


def count(owner: str, name: str, value: Any) -> int:
    """A whole number of at least 1. Raises `ConfigurationError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{owner}: {name}={value!r} must be a whole number of at least 1")
    return value
