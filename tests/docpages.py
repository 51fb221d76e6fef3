"""The pages of the documentation, read as what they promise: code that runs, commands that work, links that lead.

A page is worked through from top to bottom in one empty folder, as a reader would. What its blocks mean:

- `python` is run; later blocks of the page know the names of earlier ones, and functions called `test_*` are
  called as pytest would call them.
- `console`: the lines `$ taskmill …` are run and must exit with 0. Lines under them are what was written, in
  part: numbers may differ, `…` stands for anything.
- `toml` must be a configuration of `taskmill batch` or, with a table `taskset`, of `taskmill eval`, a file of
  distributions, or with `participants` a lineup; `json` and `jsonl` must parse.
- `text` under `<!-- output -->` is what the block before it wrote.

Comments before a block say more: `<!-- file: NAME -->` writes it to that file (Python is then not run),
`<!-- exit: N -->` expects another exit code of its last command, `<!-- not run: WHY -->` only reads it.

As a program, `python -m tests.docpages FOLDER PAGE…` works through the pages and exits with 1 if one is untrue.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import os
import re
import shlex
import sys
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

_FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)\s*\Z")
_MARK = re.compile(r"\s*<!--\s*(?P<name>[a-z ]+?)\s*(?::\s*(?P<value>.*?)\s*)?-->\s*\Z")
_MARKS = frozenset({"file", "exit", "not run", "output"})
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
_SHELL = frozenset("|><&;`")


class Block(NamedTuple):
    """A fenced block: the line its text starts at, and the comments that stand before it."""

    line: int
    language: str
    text: str
    marks: Mapping[str, str]


class Command(NamedTuple):
    """A line after a prompt, and what is shown under it."""

    line: int
    text: str
    shown: list[str]


class UntrueError(Exception):
    """Something a page says does not hold."""


def pages() -> list[Path]:
    """Every page that people read."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    marks: dict[str, str] = {}
    lines = iter(enumerate(page.read_text(encoding="utf-8").split("\n"), start=1))
    for number, line in lines:
        if mark := _MARK.match(line):
            if mark["name"] not in _MARKS:
                raise UntrueError(f"line {number}: a comment {mark['name']!r} means nothing")
            marks[mark["name"]] = mark["value"] or ""
        elif opening := _FENCE.match(line):
            indent = len(opening["indent"])
            text = []
            for _, inner in lines:
                if inner.strip() == "```":
                    break
                text.append(inner[indent:])
            yield Block(number + 1, opening["language"], "\n".join(text) + "\n", marks)
            marks = {}
        elif line.strip():
            marks = {}


def commands(block: Block) -> list[Command]:
    """The commands of a console block; one that ends with a backslash goes on in the next line."""
    found: list[Command] = []
    text = re.sub(r"[ \t]*\\\n[ \t]*", " ", block.text.rstrip("\n"))
    for offset, line in enumerate(text.split("\n")):
        if line.startswith("$ "):
            found.append(Command(block.line + offset, line[2:], []))
        elif found:
            found[-1].shown.append(line)
    return found


class Walk:
    """One page, worked through block by block in the current folder."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._said = ""

    def take(self, block: Block) -> None:
        """Do what a block says. Raises `UntrueError`, or whatever the code of the block raises."""
        if "file" in block.marks:
            path = Path(block.marks["file"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        read = getattr(self, f"_{block.language}", None)
        if read is not None:
            read(block)

    def _python(self, block: Block) -> None:
        # Lines before it, so that a traceback names the line of the page.
        source = "\n" * (block.line - 1) + block.text
        if "file" in block.marks or "not run" in block.marks:
            ast.parse(source, str(self._page))
            return
        before = dict(self._names)
        with _heard() as heard:
            exec(compile(source, str(self._page), "exec", dont_inherit=True), self._names)
            for name, value in list(self._names.items()):
                if name.startswith("test_") and before.get(name) is not value:
                    _call_test(value)
        self._said = heard.getvalue()

    def _console(self, block: Block) -> None:
        said = commands(block)
        for command in said:
            if _is_ours(command) and "not run" not in block.marks:
                expected = int(block.marks.get("exit", "0")) if command is said[-1] else 0
                self._said = _run(command, expected)
                _require_shown(command.line, command.shown, self._said)

    def _text(self, block: Block) -> None:
        if "output" in block.marks:
            _require_shown(block.line, block.text.split("\n"), self._said)

    def _json(self, block: Block) -> None:
        from taskmill.store.jsonl import strict_loads

        strict_loads(block.text.encode())

    def _jsonl(self, block: Block) -> None:
        from taskmill.store.jsonl import strict_loads

        for line in block.text.splitlines():
            if line.strip():
                strict_loads(line.encode())

    def _toml(self, block: Block) -> None:
        tables = tomllib.loads(block.text)
        if "participants" in tables:
            _check_lineup(tables)
        elif "taskset" in tables:
            _check_evaluation(block.text)
        elif all(isinstance(value, dict) and _is_distribution(value) for value in tables.values()):
            _check_distributions(tables)
        else:
            _check_configuration(block.text)


def _is_distribution(table: Mapping[str, Any]) -> bool:
    return bool(table) and all(type(chance) in (int, float) for chance in table.values())


def _check_distributions(tables: Mapping[str, Mapping[str, float]]) -> None:
    from taskmill.tools import register_distribution

    for name, chances in tables.items():
        register_distribution(name, chances)


def _check_configuration(text: str) -> None:
    from taskmill.batch.settings import check_settings
    from taskmill.cli.config import ENDPOINT_FIELDS, TABLES, read_config
    from taskmill.models.pricing import price_list
    from taskmill.tools.mcp import read_servers

    path = Path("checked.toml")
    path.write_text(text, encoding="utf-8")
    found = read_config(path)
    settings = {name: value for name, value in found.items() if name not in (*ENDPOINT_FIELDS, *TABLES)}
    check_settings({"dataset_file": "p.jsonl", "batch_size": 8, "run_name": "p", **settings})
    price_list(base_url="https://example.org/v1", table=found.get("prices"))
    if servers := found.get("mcp"):
        read_servers(servers)
    _check_distributions(found.get("distributions", {}))


def _check_evaluation(text: str) -> None:
    from taskmill.cli.eval import GRAMMAR
    from taskmill.cli.options import parse, resolve
    from taskmill.evaluation.settings import check_settings

    Path("checked.toml").write_text(text, encoding="utf-8")
    check_settings(resolve(parse(["@", "checked.toml"], GRAMMAR), GRAMMAR).settings)


def _check_lineup(tables: Mapping[str, Any]) -> None:
    from taskmill.conversations.lineup_file import LineupFile

    LineupFile.model_validate(tables)


def _words(command: Command) -> tuple[dict[str, str], list[str]]:
    """The variables set in front of a command, and the command."""
    words = shlex.split(command.text, comments=True)
    assignments = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        assignments[name] = value
    return assignments, words


def _is_ours(command: Command) -> bool:
    return _words(command)[1][:1] == ["taskmill"]


def _run(command: Command, expected: int) -> str:
    from taskmill.cli import main

    if _SHELL & set(command.text):
        raise UntrueError(f"line {command.line}: this is more than one command: {command.text}")
    assignments, words = _words(command)
    before = dict(os.environ)
    os.environ.update(assignments)
    with _heard() as heard:
        try:
            code = main(words[1:])
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        finally:
            os.environ.clear()
            os.environ.update(before)
    if code != expected:
        raise UntrueError(f"line {command.line}: exit code {code}, not {expected}:\n{heard.getvalue()}")
    return heard.getvalue()


@contextmanager
def _heard() -> Iterator[io.StringIO]:
    """What is written to standard output and standard error while the block lasts."""
    both = io.StringIO()
    with redirect_stdout(both), redirect_stderr(both):
        yield both


def _require_shown(line: int, shown: Sequence[str], said: str) -> None:
    heard = [_shape(text) for text in said.splitlines()]
    for text in shown:
        if text.strip() in ("", "…"):
            continue
        pattern = re.compile(".*".join(re.escape(_shape(piece)) for piece in text.split("…")))
        if not any(pattern.fullmatch(candidate) for candidate in heard):
            raise UntrueError(f"line {line}: {text!r} is not among what was written:\n{said}")


def _shape(text: str) -> str:
    return " ".join(_NUMBER.sub("0", text).split())


def _call_test(function: Any) -> None:
    made: dict[str, Any] = {}
    for name in inspect.signature(function).parameters:
        if name != "tmp_path":
            raise UntrueError(f"{function.__name__} wants {name!r}, which no reader has")
        made[name] = Path("tmp_path").absolute()
        made[name].mkdir(exist_ok=True)
    result = function(**made)
    if inspect.isawaitable(result):
        asyncio.run(_awaited(result))


async def _awaited(result: Any) -> None:
    await result


def work_through(page: Path, folder: Path) -> str | None:
    """Work a page through in `folder`; what is untrue about it, or `None`."""
    folder.mkdir(parents=True, exist_ok=True)
    block = None
    with chdir(folder):
        try:
            walk = Walk(page)
            for block in blocks(page):
                walk.take(block)
        except UntrueError as problem:
            return f"{page}: {problem}"
        except BaseException:
            where = f"the block at line {block.line}" if block else "the page"
            return f"{page}: {where} does not hold:\n{traceback.format_exc()}"
    return None


def main(arguments: Sequence[str]) -> int:
    """Work pages through, each in a folder of its own under the first argument; a JSON line for each."""
    folder = Path(arguments[0]).absolute()
    faults = 0
    for number, name in enumerate(arguments[1:]):
        fault = work_through(Path(name).absolute(), folder / str(number))
        faults += fault is not None
        print(json.dumps({"page": name, "fault": fault}), flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
