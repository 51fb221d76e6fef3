"""The examples of README and docs work as they stand: what a reader pastes does what the page says.

A fence's first line says what happens to it: ```` ```python ```` is run, and the blocks of one page share their names;
```` ```python name.py ````, ```` ```jsonl name.jsonl ```` and the like are written to that file; in
```` ```console run ```` the lines after `$` are run by a shell. Anything else is only shown. Where a page says
`http://localhost:8000/v1`, an endpoint answers that calls the terminal once and then is done.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from taskmill.testing.endpoint import EndpointProcess

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)(?P<target>[^)#\s]+)(?:#(?P<anchor>[^)\s]+))?\)")
PLACEHOLDER = "http://localhost:8000/v1"
SECONDS = 120


class Block(NamedTuple):
    language: str
    argument: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    source = page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(source):
        language, _, argument = fence["info"].strip().partition(" ")
        yield Block(language, argument.strip(), fence["text"], source.count("\n", 0, fence.start()) + 2)


def runs(block: Block) -> bool:
    return block.language == "python" or (block.language, block.argument) == ("console", "run")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with EndpointProcess(
        "--script", "tool_then_answer", "--arguments", '{"command": "echo hello"}'
    ) as server:
        yield server.url


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(map(runs, blocks(p)))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_examples_of_a_page_work(
    page: Path, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASKMILL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("MODEL_ID", "MODEL_BASE_URL", "MODEL_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for number, block in enumerate(blocks(page)):
        text = block.text.replace(PLACEHOLDER, endpoint)
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if "." in block.argument:
            Path(block.argument).write_text(text, encoding="utf-8")
        elif block.language == "python":
            # A file of its own on a path that is kept, so that inspect finds the source and errors name the page.
            script = tmp_path / f"example_{number}.py"
            script.write_text("\n" * (block.line - 1) + text, encoding="utf-8")
            run([sys.executable, str(script)], where)
        elif (block.language, block.argument) == ("console", "run"):
            for line in text.splitlines():
                if line.startswith("$ "):
                    run(["sh", "-c", line[2:]], where)


def run(command: list[str], where: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{where}: {command[-1]}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.finditer(page.read_text(encoding="utf-8")):
        target = (page.parent / link["target"]).resolve()
        assert target.exists(), f"{page.name}: {link['target']}"
        if link["anchor"]:
            assert link["anchor"] in headings(target), f"{page.name}: {link['target']}#{link['anchor']}"


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_option_of_the_command_is_in_the_reference() -> None:
    told = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    for command in ("batch", "status", "export", "distributions", "tools", "models"):
        shown = subprocess.run(
            [Path(sys.executable).with_name("taskmill"), command, "--help"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
            env=os.environ | {"COLUMNS": "200"},
        ).stdout
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown)) - {"--help", "--version"}
        assert f"## taskmill {command}" in told
        missing = {option for option in options if f"`{option}" not in told and f" {option}`" not in told}
        assert not missing, f"taskmill {command}"


def test_every_setting_is_in_the_reference() -> None:
    from taskmill.batch.settings import BatchSettings

    told = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert not [name for name in BatchSettings.model_fields if f"`{name}`" not in told]
