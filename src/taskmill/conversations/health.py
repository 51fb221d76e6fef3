"""What is odd about the turns of a run, counted by participant and round, also when all is well."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from taskmill.programs.conversation.transcript import Message

KINDS = ("silent", "cut", "refusals", "placeholders")
"""A turn without text, one that ended at its token limit, one that declines, one with a blank left to be filled in."""

_REFUSAL = re.compile(
    r"\b(?:I(?:['’]m| am) (?:sorry|unable)|I (?:can(?:no|['’])t|cannot|won['’]t|must decline)|as an AI\b)",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"\[(?:your|insert|name|date|company|address|topic|placeholder|redacted|todo|blank)\b[^\]\n]{0,60}\]"
    r"|<(?:insert|your|placeholder)\b[^>\n]{0,60}>|\{\{\s*\w+\s*\}\}|\blorem ipsum\b|\bTODO\b",
    re.IGNORECASE,
)
_OPENING = 200
"""Characters at the start of a turn in which it declines, if it does."""


def oddities(message: Message) -> list[str]:
    """Which of `KINDS` a turn is."""
    text = message.content
    found = []
    if not text.strip():
        found.append("silent")
    if message.metadata.get("finish_reason") == "length":
        found.append("cut")
    if _REFUSAL.search(text[:_OPENING]):
        found.append("refusals")
    if _PLACEHOLDER.search(text):
        found.append("placeholders")
    return found


class Health:
    """Counts over many conversations. Memory: a few numbers for each participant and round."""

    def __init__(self) -> None:
        self._turns: Counter[str] = Counter()
        self._kinds: Counter[tuple[str, str]] = Counter()
        self._rounds: Counter[tuple[str, str, int]] = Counter()

    def add(self, transcript: Iterable[Message]) -> None:
        """Count the turns of a conversation. A participant's round is how often it has spoken, from 1."""
        spoken: Counter[str] = Counter()
        for message in transcript:
            author = message.author
            spoken[author] += 1
            self._turns[author] += 1
            for kind in oddities(message):
                self._kinds[author, kind] += 1
                self._rounds[author, kind, spoken[author]] += 1

    def summary(self) -> dict[str, Any]:
        """By participant: turns, each of `KINDS`, and in which rounds those were."""
        return {
            author: {
                "turns": turns,
                **{kind: self._kinds[author, kind] for kind in KINDS},
                "rounds": {
                    kind: {
                        str(round): count
                        for (who, what, round), count in sorted(self._rounds.items())
                        if who == author and what == kind
                    }
                    for kind in KINDS
                    if self._kinds[author, kind]
                },
            }
            for author, turns in sorted(self._turns.items())
        }


def health_lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary for people, a line for each participant."""
    lines = []
    for author, counts in summary.items():
        odd = [f"{counts[kind]:,} {_WORDS[kind]}" for kind in KINDS if counts[kind]]
        told = ", ".join(odd) or "nothing odd"
        where = [
            f"{_WORDS[kind]} in round {', '.join(rounds)}"
            for kind, rounds in counts["rounds"].items()
            if rounds
        ]
        lines.append(
            f"{author}: {counts['turns']:,} turns, {told}" + (f" ({'; '.join(where)})" if where else "")
        )
    return lines


_WORDS = {
    "silent": "silent",
    "cut": "cut at the limit",
    "refusals": "refusals",
    "placeholders": "placeholders",
}
