"""An interviewer who looks things up before it asks: a participant with tools.

python examples/interview.py
MODEL_BASE_URL=http://localhost:8000/v1 python examples/interview.py my-model
"""

from __future__ import annotations

import os
import sys
from typing import Any

from taskmill import Conversation, Message, Participant, tool
from taskmill.models.base import Request
from taskmill.records import ToolCall

ARCHIVE = {"storm": "In 1987 the lighthouse went dark for one night, in the great storm."}


@tool
def search_archive(word: str) -> str:
    """Look a word up in the archive of the local newspaper.

    Args:
        word: one word in lower case.
    """
    return ARCHIVE.get(word, f"Nothing about {word!r}.")


def interviewer(request: Request) -> Message | str:
    """Stands in for a model: looks up what it has not looked up yet, and asks about what it found."""
    said = request.messages[-1]
    if said.role == "tool":
        return f"The archive says: {said.content} What happened?"
    if any(message.role == "tool" for message in request.messages):
        return "Thank you. Would you do it again?"
    return Message("assistant", tool_calls=(ToolCall("", "search_archive", '{"word": "storm"}'),))


def keeper(request: Request) -> str:
    """Stands in for a model."""
    return (
        "The lamp broke. I lit a fire on the rocks."
        if "1987" in request.messages[-1].content
        else "Any time."
    )


def main(model: str | None = None) -> None:
    """Hold one interview, step by step."""
    asks: Any = interviewer if model is None else model
    answers: Any = keeper if model is None else model
    endpoint = {} if model is None else {"base_url": os.environ["MODEL_BASE_URL"], "max_tokens": 200}
    interview = Conversation(
        [
            Participant(
                "interviewer",
                asks,
                tools=[search_archive],
                system_prompt="You interview a lighthouse keeper. Look up the storm before you ask.",
                **endpoint,
            ),
            Participant(
                "keeper", answers, system_prompt="You kept a lighthouse for forty years.", **endpoint
            ),
        ],
        shared_context="An interview for the local newspaper.",
    )
    for _ in range(4):
        message = interview.step()
        assert message is not None
        for step in message.metadata.get("steps", ()):
            if step["role"] == "tool":
                print(f"    [{step['name']}: {step['content']}]")
        print(f"{message.author}: {message.content}")
    aside = interview.sample("keeper", "Off the record: were you afraid?")
    print(f"    (not recorded) {aside.author}: {aside.content}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
