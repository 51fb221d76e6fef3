"""Notes an agent keeps over many conversations, in one Markdown file that people may read and change.

    # Notes
    - the tests need a database

    # User
    - likes short answers

Two targets, because they are used differently: what the agent found out, and what it knows about its user.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Literal

from taskmill.errors import ToolArgumentsError, ToolRefusedError
from taskmill.tools.base import ToolContext
from taskmill.tools.function import tool

LONGEST = {"memory": 8_000, "user": 4_000}
"""Characters each target may hold: all of it is part of every prompt."""

_HEADINGS = {"memory": "Notes", "user": "User"}
_HEADING = re.compile(r"#+\s*(?P<title>.+?)\s*\Z")
# Notes are read, changed and written in threads; two agents of one process may share a file.
_changing = threading.Lock()

Target = Literal["memory", "user"]


def read_notes(path: str | Path) -> dict[str, list[str]]:
    """The notes of each target; none where there is no file."""
    notes: dict[str, list[str]] = {target: [] for target in _HEADINGS}
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return notes
    titles = {title.lower(): target for target, title in _HEADINGS.items()}
    current = notes["memory"]
    is_open = False
    for line in text.split("\n"):
        heading = _HEADING.match(line)
        if heading:
            current = notes[titles.get(heading["title"].lower(), "memory")]
            is_open = False
        elif line.startswith("- "):
            current.append(line[2:].strip())
            is_open = True
        elif line.strip():
            # A line a person wrote without a dash is a note, too.
            if is_open and line.startswith("  "):
                current[-1] += "\n" + line[2:].rstrip()
            else:
                current.append(line.strip())
                is_open = True
        else:
            is_open = False
    return notes


def notes_text(path: str | Path) -> str:
    """The notes as they stand in a system prompt; empty where there are none."""
    return _rendered(read_notes(path)).strip()


def _rendered(notes: dict[str, list[str]]) -> str:
    parts = []
    for target, title in _HEADINGS.items():
        if notes[target]:
            lines = ["- " + note.replace("\n", "\n  ") for note in notes[target]]
            parts.append(f"# {title}\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


@tool(exclusive=True, timeout=30)
def memory(
    action: Literal["add", "replace", "remove", "read"],
    target: Target = "memory",
    content: str | None = None,
    old_text: str | None = None,
    *,
    context: ToolContext,
) -> dict[str, object]:
    """Keep notes that you will see in later conversations.

    Write down what will be of use again: how things are done here, what went wrong and why, what the user
    wants. Not what only matters now. The notes at the start of this conversation do not change while it lasts.

    Args:
        action: `add` a note, `replace` or `remove` the one that contains old_text, or `read` them.
        target: `memory` for what you found out, `user` for what you know about the user.
        content: The note, for add and replace.
        old_text: A part of exactly one note, for replace and remove.
    """
    if context.memory_path is None:
        raise ToolRefusedError("there is no memory in this conversation; nothing is kept")
    path = Path(context.memory_path)
    if action == "read":
        return _answer(read_notes(path), target)
    note = (content or "").strip()
    if action in ("add", "replace") and not note:
        raise ToolArgumentsError(f"argument 'content' is missing or blank: action {action} needs it")
    if action in ("replace", "remove") and not (old_text or "").strip():
        raise ToolArgumentsError(f"argument 'old_text' is missing or blank: action {action} needs it")
    note = re.sub(r"\s*\n\s*", "\n", note)
    with _changing:
        notes = read_notes(path)
        entries = notes[target]
        if action == "add":
            if note in entries:
                return _answer(notes, target)
            entries.append(note)
        else:
            place = _only(entries, (old_text or "").strip(), target)
            entries[place : place + 1] = [note] if action == "replace" else []
        size = sum(map(len, entries))
        if action != "remove" and size > LONGEST[target]:
            raise ToolRefusedError(
                f"the notes would have {size:,} characters and may have {LONGEST[target]:,}; "
                "remove or shorten some first"
            )
        _write(path, _rendered(notes).encode())
    return _answer(notes, target)


def _only(entries: list[str], part: str, target: str) -> int:
    places = [number for number, entry in enumerate(entries) if part in entry]
    if len(places) == 1:
        return places[0]
    exact = [number for number in places if entries[number] == part]
    if len(exact) == 1:
        return exact[0]
    raise ToolRefusedError(
        f"{len(places) or 'no'} notes of {target!r} contain {part!r}; give a part of exactly one of them"
    )


def _write(path: Path, data: bytes) -> None:
    from taskmill.store import files

    files.make_directory(path.parent)
    files.replace(path, data)


def _answer(notes: dict[str, list[str]], target: str) -> dict[str, object]:
    used = sum(map(len, notes[target]))
    return {"target": target, "notes": notes[target], "characters": used, "limit": LONGEST[target]}
