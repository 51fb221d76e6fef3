"""How one conversation between models is held: participants, their views of it, and the rules it follows."""

from __future__ import annotations

from taskmill.programs.conversation.context import (
    ContextPolicy,
    DropOldest,
    Refuse,
    SlidingWindow,
    Summarise,
)
from taskmill.programs.conversation.dialogue import Dialogue, Services
from taskmill.programs.conversation.lineup import Lineup
from taskmill.programs.conversation.order import InTurn, SpeakingPolicy
from taskmill.programs.conversation.participant import Participant, Person
from taskmill.programs.conversation.stop import (
    StopCondition,
    TextPattern,
    TokenBudget,
    Turns,
    When,
)
from taskmill.programs.conversation.templates import Field, dataset_field
from taskmill.programs.conversation.transcript import Message, Transcript

__all__ = [
    "ContextPolicy",
    "Dialogue",
    "DropOldest",
    "Field",
    "InTurn",
    "Lineup",
    "Message",
    "Participant",
    "Person",
    "Refuse",
    "Services",
    "SlidingWindow",
    "SpeakingPolicy",
    "StopCondition",
    "Summarise",
    "TextPattern",
    "TokenBudget",
    "Transcript",
    "Turns",
    "When",
    "dataset_field",
]
