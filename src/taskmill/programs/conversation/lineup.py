"""The recipe of conversations: who takes part, what they are told, and by which rules they speak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from dataclasses import replace as replaced
from difflib import get_close_matches
from typing import Any, Self, get_args

from taskmill.errors import ConfigurationError
from taskmill.programs.conversation.context import ContextPolicy, Refuse
from taskmill.programs.conversation.order import InTurn, SpeakingPolicy
from taskmill.programs.conversation.participant import Participant, Visibility
from taskmill.programs.conversation.stop import StopCondition, as_condition, count
from taskmill.programs.conversation.templates import Template, check_template, needs_row
from taskmill.programs.conversation.views import Framing, framed

MODERATOR = "moderator"

Hook = Callable[..., Any]
"""Called with a message before it is part of the conversation, and with the conversation.

It returns a message or a text to be taken instead, or nothing; what it raises fails the conversation. It may be async.
"""


@dataclass(frozen=True)
class Lineup:
    """All that decides how a conversation goes, but for its row of data, its seed's copy, and what was said before.

    `turns` and `until` end it, whichever is met first. `order` says who speaks; without it the participants do, one
    after another, from `first` on. `reasoning_visibility` says who sees the thinking of a turn: nobody, the speaker
    in its own later turns, or all.
    """

    participants: tuple[Participant, ...]
    shared_context: Template | None = None
    shared_system_prompt: Template | None = None
    first: str | None = None
    turns: int | None = None
    until: StopCondition | None = None
    context: ContextPolicy = Refuse()  # noqa: RUF009 - frozen
    order: SpeakingPolicy | None = None
    hooks: tuple[Hook, ...] = ()
    reasoning_visibility: Visibility = "none"
    moderator: str = MODERATOR
    seed: int = 0
    analyzer: Any = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "participants", _tuple("participants", self.participants))
        put(self, "hooks", (self.hooks,) if callable(self.hooks) else _tuple("hooks", self.hooks))
        if self.until is not None:
            put(self, "until", as_condition(self.until))
        self._check_names()
        self._check_rules()
        check_template(self.shared_context, "shared_context")
        check_template(self.shared_system_prompt, "shared_system_prompt")

    def _check_names(self) -> None:
        if not self.participants:
            raise ConfigurationError("a conversation needs at least one participant")
        for participant in self.participants:
            if not isinstance(participant, Participant):
                raise ConfigurationError(
                    f"participants are Participant objects, not {participant!r:.100}: Participant(name, model)"
                )
        names = self.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigurationError(f"two participants are called {twice!r}; give one of them another name")
        if not isinstance(self.moderator, str) or not self.moderator.strip():
            raise ConfigurationError(f"moderator={self.moderator!r} must be a name that is not blank")
        if self.moderator in names:
            raise ConfigurationError(
                f"a participant is called {self.moderator!r}, as the moderator is: rename it, or set moderator="
            )
        if self.first is not None and self.first not in names:
            raise ConfigurationError(f"first={self.first!r} is none of the participants {', '.join(names)}")

    def _check_rules(self) -> None:
        if self.turns is not None:
            count("the conversation", "turns", self.turns)
        if self.until is not None and not isinstance(self.until, StopCondition):
            raise ConfigurationError(
                f"run_until takes a stop condition (Turns, TokenBudget, TextPattern, When) or a function, "
                f"not {self.until!r}"
            )
        if self.reasoning_visibility not in get_args(Visibility):
            raise ConfigurationError(
                f"reasoning_visibility={self.reasoning_visibility!r} is one of none, speaker, all"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigurationError(f"seed={self.seed!r} must be a whole number")
        for hook in self.hooks:
            if not callable(hook):
                raise ConfigurationError(
                    f"a hook is a function of a message and the conversation, not {hook!r:.100}"
                )
        if self.order is not None:
            if self.first is not None:
                raise ConfigurationError("first= goes without order=: a policy of your own says who begins")
            _require(self.order, "order", "next_speaker", "seen_by")
        _require(self.context, "context", "prepare", "shrink")
        if self.analyzer is not None and not callable(self.analyzer) and not isinstance(self.analyzer, str):
            raise ConfigurationError(
                f"an analyzer is a function of the conversation or a registered name, not {self.analyzer!r:.100}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The participants' names, in speaking order."""
        return tuple(participant.name for participant in self.participants)

    @property
    def speaking(self) -> SpeakingPolicy:
        """Who says who speaks."""
        return self.order if self.order is not None else InTurn(self.first)

    @property
    def needs_row(self) -> bool:
        """Whether it can't be held without a row of data."""
        texts = [self.shared_context, self.shared_system_prompt]
        for participant in self.participants:
            texts += [participant.system_prompt, participant.context]
        return any(map(needs_row, texts))

    def participant(self, name: str) -> Participant:
        """The participant of that name. Raises `ConfigurationError` naming those there are."""
        for participant in self.participants:
            if participant.name == name:
                return participant
        raise ConfigurationError(f"there is no participant {name!r}; there are {', '.join(self.names)}")

    def with_fields(self, **changes: Any) -> Self:
        """A copy with other values. Raises `ConfigurationError` for a field there is not, with the nearest one."""
        known = [info.name for info in fields(self)]
        for name in changes:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
                raise ConfigurationError(f"a conversation has no field {name!r}{hint}")
        return replaced(self, **changes)

    def framing(
        self, participant: Participant, fill: Callable[[Template | None, str], str | None]
    ) -> Framing:
        """What one participant is told; `fill` makes a text of a template, named for messages."""
        mine = f"participant {participant.name!r}: "
        return framed(
            private=fill(participant.system_prompt, mine + "system_prompt"),
            shared=fill(self.shared_system_prompt, "shared_system_prompt"),
            told=fill(self.shared_context, "shared_context"),
            context=fill(participant.context, mine + "context"),
            name=self.moderator,
        )


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigurationError(f"{name} must be a list, not {value!r:.100}")
    return tuple(value)


def _require(value: Any, name: str, *methods: str) -> None:
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if missing:
        raise ConfigurationError(f"{name}={value!r:.100} has no method {missing[0]!r}")
