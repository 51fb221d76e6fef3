"""What `make demo` shows: commands that work as they are printed, and lines that say where they were cut."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

DEMO = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "demo.py"))


def test_a_command_is_shown_as_it_works_from_here() -> None:
    first, _, rest = DEMO["shown"](DEMO["taskmill"]("export", "demo/run-1")).partition(" ")
    assert Path(first).resolve().parent == Path(sys.executable).parent.resolve()
    assert rest == "export demo/run-1"


def test_a_long_line_shows_that_it_was_cut() -> None:
    assert DEMO["cut"]("a" * 100) == "a" * 100
    assert DEMO["cut"]("a" * 101) == "a" * 99 + "…"
