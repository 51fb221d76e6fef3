"""The examples of conversations run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def ran(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("debate.py", "--- rollout_0002: {'for': 20, 'against': 15}"),
        ("ladder.py", "purse of 7 meets purse of 10"),
        ("interview.py", "[search_archive: In 1987 the lighthouse"),
    ],
)
def test_an_example_runs(name: str, expected: str, tmp_path: Path) -> None:
    assert expected in ran(str(EXAMPLES / name), folder=tmp_path)


def test_the_solver_is_graded_and_goes_on_where_it_was(tmp_path: Path) -> None:
    first = ran(str(EXAMPLES / "solver.py"), folder=tmp_path)
    again = ran(str(EXAMPLES / "solver.py"), folder=tmp_path)

    assert "first answer right: 6 of 8\nlast answer right: 8 of 8" in first
    assert again == first.replace("0 of them from before", "8 of them from before")


def test_the_lineup_file_runs(tmp_path: Path) -> None:
    program = "import sys; from taskmill.cli import main; sys.exit(main())"

    said = ran("-c", program, "converse", str(EXAMPLES / "debate.toml"), "-n", "2", folder=tmp_path)

    assert "4 conversations, 0 of them from before, 0 failed" in said
