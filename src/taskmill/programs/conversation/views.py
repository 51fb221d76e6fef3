"""A conversation from one speaker's side, as the messages that its model is sent."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from taskmill import records
from taskmill.programs.conversation.context import View
from taskmill.programs.conversation.participant import Visibility
from taskmill.programs.conversation.transcript import Message

SUMMED_UP = "(The conversation so far, summed up: {summary})"


class Framing(Struct, frozen=True):
    """What stands before the turns: one system block, and what the moderator says, to all and to this one alone."""

    system: str | None
    moderator: tuple[str, ...]
    name: str


def framed(
    *, private: str | None, shared: str | None, told: str | None, context: str | None, name: str
) -> Framing:
    """The framing of a speaker: private before shared in the system block, shared before private in what is said."""
    system = "\n\n".join(part for part in (private, shared) if part)
    return Framing(system or None, tuple(part for part in (told, context) if part), name)


def rendered(
    framing: Framing, view: View, *, named: bool, thinking: Visibility
) -> tuple[records.Message, ...]:
    """The messages of a request. `named` puts the author's name before what others said.

    Turns of others that follow each other become one, as many models take nothing but turns about.
    """
    messages: list[records.Message] = []
    heard: list[str] = []

    def hear() -> None:
        if heard:
            messages.append(records.Message("user", "\n\n".join(heard)))
            heard.clear()

    if framing.system is not None:
        messages.append(records.Message("system", framing.system))
    heard.extend(_named(framing.name, text) if named else text for text in framing.moderator)
    if view.summary is not None:
        heard.append(SUMMED_UP.format(summary=view.summary))
    for message in view.turns:
        if message.author != view.speaker:
            text = _with_thinking(message) if thinking == "all" else message.content
            heard.append(_named(message.author, text) if named else text)
            continue
        hear()
        messages.extend(msgspec.convert(step, records.Message) for step in message.metadata.get("steps", ()))
        messages.append(
            records.Message(
                "assistant", message.content, reasoning=message.think if thinking != "none" else None
            )
        )
    hear()
    return tuple(messages)


def _named(name: str, text: str) -> str:
    return f"{name}: {text}"


def _with_thinking(message: Message) -> str:
    return f"<think>\n{message.think}\n</think>\n\n{message.content}" if message.think else message.content
