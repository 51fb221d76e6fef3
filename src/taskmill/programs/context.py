"""What a conversation's system prompt is told about the place it happens in."""

from __future__ import annotations

import os
from pathlib import Path

CONTEXT_FILES = ("AGENTS.md", "CLAUDE.md", "GEMINI.md", ".cursorrules", ".github/copilot-instructions.md")
"""Names under which projects keep what an agent working on them should know."""

LONGEST_FILE = 20_000
"""Characters of one file that become part of a prompt; a longer one is cut there, and said so."""


def context_text(directory: Path) -> str:
    """The context files of `directory`, each under its name; empty where there are none.

    A file that says the same as one before it (a link, a copy under another tool's name) is left out.
    """
    told: list[str] = []
    seen: set[str] = set()
    for name in CONTEXT_FILES:
        path = directory / name
        if not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                text = file.read(4 * LONGEST_FILE + 1).decode("utf-8-sig", errors="replace").strip()
            size = path.stat().st_size
        except OSError:
            continue
        if text and text not in seen:
            seen.add(text)
            told.append(f"# {name}\n\n{_shortened(text, size)}")
    if not told:
        return ""
    return "The project you work in says this about itself.\n\n" + "\n\n".join(told)


def _shortened(text: str, size: int) -> str:
    if len(text) <= LONGEST_FILE:
        return text
    return f"{text[:LONGEST_FILE]}\n[… the rest of this file of {size:,} bytes is left out …]"


def data_home() -> Path:
    """Where what outlives a conversation is kept: `TASKMILL_HOME`, else the user's folder for data."""
    if home := os.environ.get("TASKMILL_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "taskmill"
