"""Participants, analyzers and faults that the tests of conversations share; importable by worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from taskmill.conversations import Conversation, Participant, dataset_field, register_analyzer
from taskmill.models.base import Completion, Request
from taskmill.records import Message, Usage


def babble(request: Request) -> Completion:
    """A different text for each seed, of as many tokens as the limit allows."""
    seed = request.sampling.seed or 0
    text = f"{seed:x} after {len(request.messages)}"
    return Completion(Message("assistant", text), usage=Usage(10, request.sampling.max_tokens or 5))


def echo(request: Request) -> str:
    return f"you said {request.messages[-1].content!r}"


def stern(request: Request) -> str:
    """Fails at the rows that say so."""
    if "RAISE" in request.messages[-1].content:
        raise ValueError("I will not answer that")
    return f"fine {request.sampling.seed}"


def deadly(request: Request) -> str:
    """Ends its process at the rows that say so; at others that name a file, only the first time."""
    said = request.messages[0].content
    if "POISON" in said:
        os.kill(os.getpid(), signal.SIGKILL)
    if "ONCE:" in said:
        mark = Path(said.partition("ONCE:")[2])
        if not mark.exists():
            mark.write_text("was here")
            os.kill(os.getpid(), signal.SIGKILL)
    return f"alive {request.sampling.seed}"


async def slow(request: Request) -> str:
    await asyncio.sleep(0.02)
    return f"slowly {request.sampling.seed}"


def lengths(conversation: Any) -> dict[str, Any]:
    return {"turns": len(conversation.transcript), "row": conversation.row}


def picky(conversation: Any) -> int:
    if conversation.row and conversation.row.get("kind") == "unanalysable":
        raise RuntimeError("this one I can't look at")
    return len(conversation.transcript)


@register_analyzer("tests-count-words")
def count_words(conversation: Any) -> int:
    return sum(len(message.content.split()) for message in conversation.transcript)


def refuse_to_start() -> None:
    raise RuntimeError("no licence on this machine")


def note_start() -> None:
    with Path(os.environ["TASKMILL_TEST_STARTS"]).open("a") as file:
        file.write(f"{os.getpid()}\n")


def seat(name: str, model: Any, **fields: Any) -> Participant:
    return Participant(name, model, **fields)


def pair(first: Any = babble, second: Any = echo, **fields: Any) -> Conversation:
    """Two who talk about the text of a row for four turns."""
    fields = {"shared_context": dataset_field("text"), "turns": 4} | fields
    return Conversation([seat("ann", first), seat("bob", second)], **fields)


def rows(count: int) -> list[dict[str, Any]]:
    return [{"text": f"row {number}"} for number in range(count)]


def texts(report: Any) -> dict[str, list[str]]:
    return {id: [message.content for message in said] for id, said in report.transcripts().items()}
