"""Conversations between models, and running many of them: `Conversation`, `run`, `run_jobs`."""

from __future__ import annotations

from taskmill.conversations.analyzers import register_analyzer
from taskmill.conversations.conversation import Conversation
from taskmill.conversations.devices import available_devices
from taskmill.conversations.report import RunReport, RunResult
from taskmill.conversations.runner import arun, arun_jobs, run, run_jobs
from taskmill.programs.conversation import (
    ContextPolicy,
    DropOldest,
    InTurn,
    Message,
    Participant,
    Person,
    Refuse,
    SlidingWindow,
    SpeakingPolicy,
    StopCondition,
    Summarise,
    TextPattern,
    TokenBudget,
    Transcript,
    Turns,
    When,
    dataset_field,
)

__all__ = [
    "ContextPolicy",
    "Conversation",
    "DropOldest",
    "InTurn",
    "Message",
    "Participant",
    "Person",
    "Refuse",
    "RunReport",
    "RunResult",
    "SlidingWindow",
    "SpeakingPolicy",
    "StopCondition",
    "Summarise",
    "TextPattern",
    "TokenBudget",
    "Transcript",
    "Turns",
    "When",
    "arun",
    "arun_jobs",
    "available_devices",
    "dataset_field",
    "register_analyzer",
    "run",
    "run_jobs",
]
