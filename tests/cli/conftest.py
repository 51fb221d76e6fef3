from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from taskmill.cli import main
from tests.batch.mill import Stored, write_prompts

ENDPOINT_VARIABLES = ("MODEL_ID", "MODEL_BASE_URL", "MODEL_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_KEY")
PROGRAM = "import sys; from taskmill.cli import main; sys.exit(main())"


class Said(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Place:
    """A folder to run commands in, in this process or in one of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prompts(self, *rows: Any) -> Path:
        return write_prompts(self.folder / "p.jsonl", rows)

    def run(self, name: str = "p") -> Stored:
        return Stored(self.folder / "data" / name)

    def start(self, *arguments: str, program: str = PROGRAM, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=self.folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def finish(self, *arguments: str, **environment: str) -> Said:
        """Run a command in a process of its own, to its end."""
        return ended(self.start(*arguments, **environment))


def ended(process: subprocess.Popen[str]) -> Said:
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"did not end:\n{out}\n{err}") from None
    return Said(process.returncode, out, err)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Commands run in `tmp_path`, with no endpoint named by the environment."""
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


@pytest.fixture
def taskmill(place: Place, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run a command in this process. Faster than one of its own, and the same but for the interpreter's start."""

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        out, err = capsys.readouterr()
        return Said(code, out, err)

    return run
