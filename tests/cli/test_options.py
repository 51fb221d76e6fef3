from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from taskmill.cli.options import Grammar, Parsed, as_typed, layered, overlaid, parse, resolve
from taskmill.errors import ConfigurationError, TasksetError
from taskmill.evaluation.settings import EvalSettings

GRAMMAR = Grammar("eval", EvalSettings)


def given(*words: str) -> dict[str, Any]:
    return parse(words, GRAMMAR).given


def file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def settled(*words: str, **environment: str) -> Any:
    return resolve(parse(words, GRAMMAR), GRAMMAR, environment=environment)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["-n", "5", "-r", "2", "-c", "3"], {"num_tasks": 5, "num_rollouts": 2, "concurrency": 3}),
        (["-n5"], {"num_tasks": 5}),
        (["-n", "-1"], {"num_tasks": -1}),
        (["--num-tasks", "5"], {"num_tasks": 5}),
        (["--num_tasks=5"], {"num_tasks": 5}),
        (["--sampling.top-p", "0.5"], {"sampling": {"top_p": 0.5}}),
        (["--sampling.top_p", "1", "--sampling.seed", "-3"], {"sampling": {"top_p": 1, "seed": -3}}),
        (["--sampling.stop", '["a", "b"]'], {"sampling": {"stop": ["a", "b"]}}),
        (["--sampling", "{temperature = 0.0}"], {"sampling": {"temperature": 0.0}}),
        (["--shuffle"], {"shuffle": True}),
        (["--shuffle", "false"], {"shuffle": False}),
        (["--shuffle=false"], {"shuffle": False}),
        (["--dry-run", "--json", "-v"], {"dry_run": True, "json": True, "verbose": True}),
        (["--taskset.min-turns", "2"], {"taskset": {"min_turns": 2}}),
        (["--taskset.strict"], {"taskset": {"strict": True}}),
        (["--taskset.strict", "--json"], {"taskset": {"strict": True}, "json": True}),
        (["--taskset.label", "two words"], {"taskset": {"label": "two words"}}),
        (["--taskset.label", '"5"'], {"taskset": {"label": "5"}}),
        (["--taskset.day", "2020-01-01"], {"taskset": {"day": "2020-01-01"}}),
        (["--taskset.label=-x"], {"taskset": {"label": "-x"}}),
        (["--taskset.label", "1\nother = 2"], {"taskset": {"label": "1\nother = 2"}}),
        (["--task.power", "2"], {"taskset": {"task": {"power": 2}}}),
        (["--taskset.task.power", "2"], {"taskset": {"task": {"power": 2}}}),
        (["--task.judges.tone.model", "x"], {"taskset": {"task": {"judges": {"tone": {"model": "x"}}}}}),
        (["-m", "7"], {"model": "7"}),
        (["--run-name", "1e3"], {"run_name": "1e3"}),
        (["-n", "5", "-n", "6"], {"num_tasks": 6}),
    ],
)
def test_options_become_nested_values(words: list[str], values: dict[str, Any]) -> None:
    assert given(*words) == values


def test_words_that_are_no_options_are_positional_and_flags_take_none_of_them() -> None:
    parsed = parse(["--shuffle", "gsm8k", "@", "a.toml", "--json", "@b.toml"], GRAMMAR)
    assert parsed.positional == ("gsm8k",)
    assert parsed.files == (Path("a.toml"), Path("b.toml"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-task", "5"], r"unknown option --num-task; did you mean --num-tasks\?"),
        (["--temperature", "1"], r"unknown option --temperature; did you mean --sampling\.temperature\?"),
        (["--limit.max-turns", "1"], r"did you mean --limits\.max-turns\?"),
        (["--zzz"], "unknown option --zzz; see 'taskmill eval --help'"),
        (["-x"], "there is no option '-x'; there are -m"),
        (["-m"], "--model needs a value"),
        (["--model", "--json"], "--model needs a value"),
        (["@"], "'@' is followed by a TOML file"),
        (["--sampling..seed", "1"], "no name of a field"),
        (["--sampling.seed", "1", "--sampling.seed.deep", "2"], "'seed' was given a value of its own"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse(words, GRAMMAR)


def test_later_files_win_and_the_command_line_wins_over_all(tmp_path: Path) -> None:
    first = file(
        tmp_path / "1.toml", "num_tasks = 1\nseed = 1\n[sampling]\ntemperature = 0.1\ntop_p = 0.1\nseed = 1\n"
    )
    second = file(tmp_path / "2.toml", "num_tasks = 2\n[sampling]\ntop_p = 0.2\nseed = 2\n")
    values = layered(parse(["@", first, "--sampling.seed", "3", "@", second], GRAMMAR), GRAMMAR)
    assert values == {"num_tasks": 2, "seed": 1, "sampling": {"temperature": 0.1, "top_p": 0.2, "seed": 3}}


def test_the_table_of_the_task_is_that_in_the_table_of_the_taskset(tmp_path: Path) -> None:
    name = file(tmp_path / "1.toml", "[taskset]\nname = 'x'\n[task]\npower = 2\n")
    assert layered(parse(["@", name], GRAMMAR), GRAMMAR) == {"taskset": {"name": "x", "task": {"power": 2}}}


def test_dashes_of_a_name_in_a_file_are_met_by_underscores() -> None:
    assert overlaid({"my-judge": {"model": "a"}}, {"my_judge": {"weight": 2}}) == {
        "my-judge": {"model": "a", "weight": 2}
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_task = 1", "unknown setting 'num_task'; did you mean 'num_tasks'?"),
        ("model = 5", "write model as a text"),
        ("taskset = 'gsm8k'", "write taskset as a table, [taskset]"),
        ("num_tasks = ", "is not TOML"),
    ],
)
def test_a_file_that_will_not_do_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    name = file(tmp_path / "s.toml", text)
    with pytest.raises(ConfigurationError) as caught:
        layered(parse(["@", name], GRAMMAR), GRAMMAR)
    assert message in str(caught.value)
    assert "s.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no settings file 'nowhere\.toml'"):
        layered(parse(["@", "nowhere.toml"], GRAMMAR), GRAMMAR)


def test_a_text_field_gets_what_was_typed() -> None:
    class Inner(BaseModel):
        label: str = ""
        size: int = 0

    class Outer(BaseModel):
        inner: Inner = Inner()
        by_name: dict[str, Inner] = {}

    typed = {("inner", "label"): "007", ("inner", "size"): "007", ("by_name", "x", "label"): "1.50"}
    values = {"inner": {"label": 7, "size": 7}, "by_name": {"x": {"label": 1.5}}}
    assert as_typed(Outer, values, typed) == {
        "inner": {"label": "007", "size": 7},
        "by_name": {"x": {"label": "1.50"}},
    }


def test_everything_is_settled_together() -> None:
    found = settled(
        "alphabet_sort", "-n", "3", "--taskset.min-turns", "2", "--task.similarity-power", "1", "-m", "m",
        "--base-url", "http://localhost:1/v1", "--api-key", "sk-1", "--output-dir", "out",
    )  # fmt: skip
    assert found.reference == "alphabet_sort"
    assert (found.taskset.config.min_turns, found.taskset.config.task.similarity_power) == (2, 1.0)
    assert found.settings == {"num_tasks": 3}
    assert found.options == {"output_dir": "out"}
    assert (found.endpoint.model, found.endpoint.api_key) == ("m", "sk-1")


def test_a_field_of_a_judge_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError) as caught:
        settled("alphabet_sort", "--task.judges.tone.modle", "x")
    assert "'task.judges.tone.modle'; did you mean 'task.judges.tone.model'?" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ([], ConfigurationError, "name a taskset: taskmill eval TASKSET"),
        (
            ["reverse_text", "jsonl"],
            ConfigurationError,
            "one taskset is needed, and there are 'reverse_text', 'jsonl'",
        ),
        (["gsm9k"], TasksetError, "there is no taskset 'gsm9k'; did you mean 'gsm8k'?"),
        (["--taskset", "gsm8k"], ConfigurationError, "name a taskset by its own word"),
        (["reverse_text", "--json=often"], ConfigurationError, "json='often' is true or false"),
    ],
)
def test_what_cannot_be_settled(words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        settled(*words)
    assert message in str(caught.value)


def test_a_taskset_in_a_file_is_named_so_that_it_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file(tmp_path / "mine.py", "from taskmill import Taskset\nclass Mine(Taskset):\n    'One.'\n")
    monkeypatch.chdir(tmp_path)
    assert settled("mine.py").reference == str(tmp_path / "mine.py")
    assert settled("mine.py:Mine").reference == f"{tmp_path / 'mine.py'}:Mine"
    assert settled("taskmill.tasks.builtin.reverse_text:ReverseTextTaskset").reference == (
        "taskmill.tasks.builtin.reverse_text:ReverseTextTaskset"
    )


def stored(base_url: str | None, **rest: Any) -> dict[str, Any]:
    return {
        "taskset": {"name": "alphabet_sort", "min_turns": 2},
        "model": "kept",
        "base_url": base_url,
        **rest,
    }


def resumed(config: dict[str, Any], *words: str, **environment: str) -> Any:
    return resolve(parse(words, GRAMMAR), GRAMMAR, stored=config, environment=environment)


def test_a_stored_configuration_stands_under_the_rest() -> None:
    config = stored(
        "http://a/v1", num_tasks=4, sampling={"temperature": 0.5, "seed": None}, limits={"max_turns": 3}
    )
    found = resumed(config, "-n", "9", "--sampling.seed", "1")
    assert found.settings == {
        "num_tasks": 9,
        "sampling": {"temperature": 0.5, "seed": 1},
        "limits": {"max_turns": 3},
    }
    assert found.taskset.config.min_turns == 2


def test_a_stored_model_is_asked_where_it_was_whatever_the_environment_says() -> None:
    found = resumed(
        stored("http://a/v1"), MODEL_ID="other", MODEL_BASE_URL="http://b/v1", MODEL_API_KEY="sk-2"
    )
    assert (found.endpoint.model, found.endpoint.base_url) == ("kept", "http://a/v1")
    found = resumed(stored(None), MODEL_ID="other", MODEL_BASE_URL="http://b/v1")
    assert (found.endpoint.model, found.endpoint.base_url) == ("kept", None)


def test_an_address_that_was_stored_without_its_secret_gets_it_from_the_environment() -> None:
    found = resumed(stored("http://a/v1"), MODEL_BASE_URL="http://me:pw@a/v1")
    assert found.endpoint.base_url == "http://me:pw@a/v1"


def test_a_new_address_may_be_given_on_resume() -> None:
    found = resumed(stored("http://a/v1"), "--base-url", "http://c/v1", "--api-key", "sk-3")
    assert (found.endpoint.base_url, found.endpoint.api_key) == ("http://c/v1", "sk-3")


def test_flags_are_asked_by_name() -> None:
    assert parse(["--json"], GRAMMAR).has("json")
    assert not Parsed((), {"json": False}).has("json")
