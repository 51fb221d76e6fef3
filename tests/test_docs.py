"""The documentation is true: its examples run, its links lead somewhere, its lists are complete.

How the blocks of a page are worked through is said in `tests/docpages.py`.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from taskmill import AIAgent, BatchRunner, Message, errors
from taskmill.batch.settings import POLICY_FIELDS, BatchSettings
from taskmill.cli import COMMANDS, main
from taskmill.records import ToolCall
from taskmill.testing import ScriptedModel
from taskmill.testing.endpoint import Step, answer, call
from taskmill.tools import known_tools
from tests.batch.serving import serving
from tests.docpages import ROOT, blocks, pages

KEY = "docs-key"
LONGEST = 120.0
"""Seconds after which a page that is still being worked through is stuck."""

RUN = frozenset({"python", "console", "toml", "json", "jsonl"})
WALKED = [page for page in pages() if any(block.language in RUN for block in blocks(page))]


def short(page: Path) -> str:
    return str(page.relative_to(ROOT))


# -- examples -------------------------------------------------------------------------------------------------


def obliging(body: Mapping[str, Any]) -> Step:
    """What the pages' endpoint says: first a call of a tool, a user's own if there is one, and then an answer."""
    offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body.get("tools", ())}
    if not offered or body["messages"][-1]["role"] != "user":
        return answer("All done.", reasoning="Nothing is left to do.")
    own = [name for name in offered if name not in known_tools()]
    name = own[0] if own else "terminal" if "terminal" in offered else next(iter(offered))
    shape = offered[name]
    arguments = {field: an_example(shape["properties"][field]) for field in shape.get("required", ())}
    if name == "terminal":
        arguments = {"command": "echo hello"}
    return answer(calls=[call(name, arguments)], reasoning="A job for a tool.")


def an_example(shape: Mapping[str, Any]) -> Any:
    if "enum" in shape:
        return shape["enum"][0]
    known: dict[Any, Any] = {"integer": 2, "number": 2.5, "boolean": True, "array": [], "object": {}}
    return known.get(shape.get("type"), "hello")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., dict[str, str | None]]]:
    """Work pages through in a process of their own, with a model behind the usual variables."""
    home = tmp_path_factory.mktemp("home")
    hidden = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "TAVILY_API_KEY", "EXA_API_KEY")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    with serving(obliging, key=KEY) as endpoint:
        environment |= {
            "MODEL_ID": "my-model",
            "MODEL_BASE_URL": endpoint.url,
            "MODEL_API_KEY": KEY,
            "LAB_KEY": KEY,
            "WIKI_TOKEN": "token",
            "CLOCK_KEY": "key",
            "TASKMILL_HOME": str(home),
            "HF_HOME": str(home / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

        def read(folder: Path, *given: Path) -> dict[str, str | None]:
            done = subprocess.run(
                [sys.executable, "-m", "tests.docpages", str(folder), *map(str, given)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LONGEST,
            )
            told = [json.loads(line) for line in done.stdout.splitlines()]
            assert len(told) == len(given), done.stderr
            return {line["page"]: line["fault"] for line in told}

        yield read


@pytest.fixture(scope="module")
def walks(
    request: pytest.FixtureRequest, reader: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[Path, Future[dict[str, str | None]]]]:
    """All pages that this session asks for, two at a time: most of their time is that of starting Python."""
    asked = [
        item.callspec.params["page"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_a_page_does_what_it_says
    ]
    pool = ThreadPoolExecutor(2)
    yield {page: pool.submit(reader, tmp_path_factory.mktemp("page"), page) for page in asked}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("page", WALKED, ids=short)
def test_a_page_does_what_it_says(page: Path, walks: Mapping[Path, Future[dict[str, str | None]]]) -> None:
    (fault,) = walks[page].result().values()
    assert fault is None, f"\n{fault}"


BROKEN = {
    "code that raises": "```python\nx = 1\nassert x == 2\n```\n",
    "code that is none": "```python\nx = = 1\n```\n",
    "a test that fails": "```python\nasync def test_it(tmp_path):\n    assert not tmp_path.exists()\n```\n",
    "code with a name that is gone": "```python\nfrom taskmill import BatchRuner\n```\n",
    "output of code": "```python\nprint('one')\n```\n<!-- output -->\n```text\ntwo\n```\n",
    "a command that is refused": "```console\n$ taskmill batch gone.jsonl\n```\n",
    "an option that is gone": "```console\n$ taskmill distributions --yaml\n```\n",
    "output of a command": "```console\n$ taskmill distributions\nminimal  web 100%\n```\n",
    "an exit code": "<!-- exit: 1 -->\n```console\n$ taskmill distributions\n```\n",
    "a setting that is gone": '```toml\nbatchsize = 8\nrun_name = "a"\n```\n',
    "a setting's value": "```toml\nbatch_size = 0\n```\n",
    "a toolset that is gone": "```toml\n[mine]\nshell = 100\n```\n",
    "a price": '```toml\n[prices."m"]\ninput = 1.0\n```\n',
    "a setting of an evaluation": '```toml\n[taskset]\nname = "reverse_text"\n[limits]\nturns = 1\n```\n',
    "a server's field": '```toml\n[mcp.a]\ncomand = "x"\n```\n',
    "JSON": '```json\n{"a": 1,}\n```\n',
    "JSON lines": '```jsonl\n{"a": 1}\n{"a": NaN}\n```\n',
    "a mark": "<!-- fil: a.txt -->\n```text\na\n```\n",
}


def test_a_broken_example_is_noticed_and_its_line_named(tmp_path: Path, reader: Any) -> None:
    given = {}
    for number, (what, text) in enumerate(BROKEN.items()):
        given[what] = tmp_path / f"page-{number}.md"
        given[what].write_text(f"# A page\n\n{text}")
    sound = tmp_path / "sound.md"
    sound.write_text("# A page\n\n```python\nprint(1)\n```\n<!-- output -->\n```text\n2\n```\n")

    faults = reader(tmp_path / "walk", *given.values(), sound)

    assert [what for what, page in given.items() if faults[str(page)] is None] == []
    assert re.search(r"line [3-5]\b", faults[str(given["code that raises"])] or "")
    assert faults[str(sound)] is None


# -- links and names ------------------------------------------------------------------------------------------

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_PLACE = re.compile(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]*)`")


def prose(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", pages(), ids=short)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    lost = []
    for target in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            lost.append(target)
    lost += [path for path in _PLACE.findall(prose(page)) if not (ROOT / path).exists()]
    assert lost == []


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in _LINK.findall(prose(index))}
    assert [short(page) for page in pages() if page.is_relative_to(index.parent) and page not in linked] == [
        "docs/index.md"
    ]


def test_extras_and_make_targets_that_are_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for extras in re.findall(r"pip install '(?:\.|taskmill)\[([\w,]+)\]'", text):
            assert set(extras.split(",")) <= project["optional-dependencies"].keys(), short(page)
        assert set(re.findall(r"`make (\w+)`|^\$ make (\w+)", text, re.MULTILINE)) <= {
            pair for target in targets for pair in ((target, ""), ("", target))
        }, short(page)


def test_messages_that_are_explained_are_messages_of_the_code() -> None:
    """Each heading of the page quotes a message, with `…` for what varies."""
    said = [
        node.value
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    page = prose(ROOT / "docs" / "guide" / "troubleshooting.md")
    quoted = [
        piece.strip()
        for heading in re.findall(r"^### (.*)$", page, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", heading)
        for piece in message.split("…")
        if len(piece.strip()) > 3
    ]
    assert len(quoted) > 20
    unsaid = [piece for piece in quoted if not any(piece in " ".join(text.split()) for text in said)]
    assert [piece for piece in unsaid if not piece.endswith(".jsonl")] == []


# -- the reference --------------------------------------------------------------------------------------------


def section(page: str, heading: str) -> str:
    """What stands under a heading, up to the next one."""
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no heading {heading!r}"
    return found[1]


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The table under a heading: the cells of each row, by the first code word of the row."""
    rows = {}
    for line in section(page, heading).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and (name := re.match(r"\[?`([^`]+)`", cells[0])):
            assert name[1] not in rows, f"{page}, {heading}: {name[1]} stands there twice"
            rows[name[1]] = cells
    return rows


def code_words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


class HelpText:
    """What `--help` says of a command: options with their short names, and their defaults."""

    def __init__(self, text: str) -> None:
        self.names: dict[str, list[str]] = {}
        self.defaults: dict[str, str] = {}
        for line in text.splitlines():
            cells = re.split(r" {2,}", line.strip())
            words = [word.rstrip(",") for word in cells[0].split()]
            option = next((word for word in words if word.startswith("--")), None)
            if option is None or not re.match(r" +-", line):
                continue
            self.names[option] = sorted(
                (word for word in words if word.startswith("-")), key=lambda word: not word.startswith("--")
            )
            default = re.search(r"\[default: ([^\]]*)\]$", line)
            self.defaults[option] = "" if default is None else default[1]


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_option_of_a_command_is_listed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    main([command, "--help"])
    real = HelpText(capsys.readouterr().out)
    told = table("command-line.md", f"taskmill {command}")

    assert {option: code_words(cells[0]) for option, cells in told.items()} == real.names
    assert {option: cells[1] for option, cells in told.items()} == real.defaults


def test_every_command_is_listed() -> None:
    assert list(table("command-line.md", "Command line")) == list(COMMANDS)


def test_every_setting_is_listed_with_its_default_and_what_a_resume_may_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = table("settings.md", "Settings")
    fields = BatchSettings.model_fields
    assert list(told) == list(fields)

    defaults = {
        name: "required"
        if field.default is PydanticUndefined
        else f"`{field.default}`"
        if isinstance(field.default, Path)
        else f"`{json.dumps(field.default)}`"
        if isinstance(field.default, str)
        else f"`{field.default!r}`"
        for name, field in fields.items()
    }
    assert {name: cells[1] for name, cells in told.items()} == defaults

    settings = BatchSettings(dataset_file=Path("p"), batch_size=1, run_name="r")
    decisive = settings.stored().keys() - POLICY_FIELDS
    assert {name for name, cells in told.items() if cells[2] == "same"} == decisive
    assert {name for name, cells in told.items() if cells[2] == "free"} == fields.keys() - decisive

    monkeypatch.setenv("COLUMNS", "400")
    main(["batch", "--help"])
    options = HelpText(capsys.readouterr().out).names.keys() | {"PROMPTS"}
    assert {option for cells in told.values() for option in code_words(cells[3])} <= options


@pytest.mark.parametrize("made", [BatchRunner, AIAgent], ids=lambda made: made.__name__)
def test_every_argument_is_listed_with_its_default(made: Any) -> None:
    told = table("python.md", made.__name__)
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(made).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    members = code_words("".join(f"`{name}`" for name in told))
    assert [name for name in members if name in parameters] == list(parameters)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty:
            assert told[name][1] == "required"
        elif not callable(parameter.default):
            shown = json.dumps(parameter.default) if isinstance(parameter.default, str) else None
            assert told[name][1] == f"`{shown or repr(parameter.default)}`", name


@pytest.mark.parametrize(
    "module",
    [
        "taskmill",
        "taskmill.tasks",
        "taskmill.conversations",
        "taskmill.evaluation",
        "taskmill.tools",
        "taskmill.models",
        "taskmill.sandbox",
        "taskmill.export",
        "taskmill.testing",
    ],
)
def test_every_public_name_is_listed(module: str) -> None:
    assert sorted(table("python.md", module)) == sorted(import_module(module).__all__)


def test_every_error_is_listed_under_its_parent() -> None:
    told: list[tuple[str, str | None]] = []
    parents: list[str] = []
    for line in section("python.md", "taskmill.errors").splitlines():
        if found := re.match(r"(?P<indent> *)(?P<name>\w+Error|WorkerDied)\b", line):
            del parents[len(found["indent"]) // 2 :]
            told.append((found["name"], parents[-1] if parents else None))
            parents.append(found["name"])
    real = [
        (name, None if kind is errors.TaskmillError else kind.__mro__[1].__name__)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.TaskmillError)
    ]
    assert sorted(told, key=str) == sorted(real, key=str)


# -- files ----------------------------------------------------------------------------------------------------

NESTED = (
    "metadata",
    "reasoning",
    "usage",
    "timing",
    "billed",
    "tokens",
    "trajectories",
    "reasoning_statistics",
)


def flat(value: Mapping[str, Any], nested: tuple[str, ...] = NESTED) -> list[str]:
    """The fields of a record, those of its parts as `part.field`."""
    names: list[str] = []
    for name, part in value.items():
        if name in nested and isinstance(part, Mapping):
            names += [f"{name}.{inner}" for inner in flat(part, nested)]
        else:
            names.append(name)
    return names


class Kept:
    """A small run with every kind of end, and the events it told."""

    def __init__(self, folder: Path, events: list[dict[str, Any]]) -> None:
        self.folder = folder
        self.events = events

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_bytes().splitlines()]

    def json(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_bytes())
        return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("run")
    prompts = folder / "p.jsonl"
    prompts.write_text('{"prompt": "good"}\n{"prompt": "thoughtless"}\n{"prompt": "bad"}\nnonsense\n')
    events: list[dict[str, Any]] = []

    def script(request: Any) -> Any:
        said = request.messages[-1].content
        if said == "bad":
            raise errors.BadRequestError("no")
        if said == "good":
            return Message("assistant", reasoning="Yes.", tool_calls=(ToolCall("1", "todo"),))
        return Message("assistant", "An answer.")

    runner = BatchRunner(
        prompts, 3, "kept", "balanced", model=ScriptedModel(script), output_dir=folder, on_event=events.append
    )
    asyncio.run(runner.run())
    return Kept(runner.path, events)


def test_every_file_of_a_run_is_listed(kept: Kept) -> None:
    told = table("files.md", "Files")
    patterns = [re.escape(name).replace("<k>", r"\d+").replace(r"\*", ".*") for name in told]
    made = [f"{path.name}/" if path.is_dir() else path.name for path in kept.folder.iterdir()]
    assert [name for name in made if not any(re.fullmatch(pattern, name) for pattern in patterns)] == []


def test_every_field_of_a_row_is_listed(kept: Kept) -> None:
    told = list(table("files.md", "Rows"))
    assert told == flat(kept.lines("batch_0.jsonl")[0])
    assert told == flat(kept.lines("trajectories.jsonl")[0])


def test_every_field_of_an_outcome_is_listed(kept: Kept) -> None:
    told = [*table("files.md", "Outcomes"), *table("files.md", "Rows")]
    discarded, failed = sorted(kept.lines("outcomes.jsonl"), key=lambda line: str(line["state"]))
    assert told == flat(discarded) == flat(failed)
    assert (discarded["state"], discarded["reason"], failed["state"]) == (
        "discarded",
        "no_reasoning",
        "failed",
    )


def test_every_field_of_statistics_and_checkpoint_is_listed(kept: Kept) -> None:
    statistics = kept.json("statistics.json")
    assert list(table("files.md", "Statistics")) == flat(statistics, (*NESTED, "outcomes"))
    checkpoint = kept.json("checkpoint.json")
    assert set(table("files.md", "Checkpoint")) == set(checkpoint)
    (counts,) = checkpoint["batch_stats"].values()
    assert counts.keys() <= set(code_words(section("files.md", "Checkpoint")))


def test_every_field_of_run_and_sessions_is_named(kept: Kept) -> None:
    named = set(code_words(section("files.md", "Run and sessions"))) | BatchSettings.model_fields.keys()
    stored = kept.json("run.json")
    start, end = kept.lines("sessions.jsonl")
    assert {*stored, *stored["config"], *start, *end} <= named


def test_every_stop_reason_is_listed() -> None:
    tree = ast.parse((ROOT / "src" / "taskmill" / "programs" / "agent.py").read_text(encoding="utf-8"))
    given = {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Ending"
        and isinstance(node.args[1], ast.Constant)
    }
    from taskmill.programs.agent import CUT_OFF

    assert set(table("files.md", "Stop reasons")) == given | CUT_OFF


def test_every_event_is_listed_with_its_fields(
    kept: Kept, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {name: code_words(cells[1]) for name, cells in table("command-line.md", "Events").items()}
    monkeypatch.setenv("MODEL_ID", "embedded")
    dataset = kept.folder.parent / "p.jsonl"
    main(["batch", str(dataset), "--output-dir", str(kept.folder.parent), "--run-name", "kept", "--json"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["error"]["type"] == "RunExistsError"

    real = {event["event"]: [name for name in event if name != "event"] for event in (*kept.events, last)}
    assert told == real
