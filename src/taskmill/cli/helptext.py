"""How `--help` lists the options of a command: in plain columns, as the commands that parse their own words do."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.text import Text

NAMES_WIDTH = 27
"""Longer names push their text to the right."""


class Columns:
    """A help formatter for cyclopts."""

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        """Print one group of options or arguments."""
        rows = [(_names(entry), _text(entry.description)) for entry in panel.entries]
        column = min(max((len(names) for names, _ in rows), default=0), NAMES_WIDTH)
        lines = []
        for names, text in rows:
            lines += textwrap.wrap(
                text,
                options.max_width,
                initial_indent=f"  {names:<{column}}  ",
                subsequent_indent=" " * (column + 4),
                break_long_words=False,
                break_on_hyphens=False,
            ) or [f"  {names}"]
        if lines:
            console.print(Text("\n".join([*lines, ""])), soft_wrap=True)

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:
        """Print how the command is called."""
        if usage:
            console.print(Text(f"Usage: {_text(usage)}\n"), soft_wrap=True)


def _names(entry: Any) -> str:
    if entry.positional_label:
        return str(entry.positional_label)
    shorts, longs = (*entry.positive_shorts,), (*entry.positive_names, *entry.negative_names)
    names = ", ".join((*shorts, *longs))
    value = "|".join(entry.choices) if entry.choices else entry.metavar
    metavar = f" {value}" if value else ""
    return f"{'' if shorts else '    '}{names}{metavar}"


def _text(description: Any) -> str:
    plain = getattr(description, "plain", None)
    if plain is None:
        from rich.console import Console

        console = Console(width=10_000, color_system=None)
        with console.capture() as capture:
            console.print(description)
        plain = capture.get()
    return " ".join(plain.split())
