"""`taskmill batch`: options, file and environment, exit codes, and what is said to people and to programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taskmill.testing.endpoint import answer, call, refusal
from tests.batch.mill import prompts_of
from tests.batch.serving import serving
from tests.cli.conftest import PROGRAM, Place, Said, ended

Command = Callable[..., Said]


def fine(body: dict[str, Any]) -> Any:
    return answer("fine", reasoning="hm")


def flags(endpoint: Any) -> tuple[str, ...]:
    return ("--model", "m", "--base-url", endpoint.url)


# -- starting, ending -----------------------------------------------------------------------------------------


def test_a_run_that_does_all_exits_with_0_and_says_where_the_trajectories_are(
    place: Place, taskmill: Command
) -> None:
    place.prompts("a", "b")
    with serving(fine) as endpoint:
        said = taskmill("batch", "p.jsonl", *flags(endpoint))

    assert said.code == 0
    assert said.out == "trajectories: data/p/trajectories.jsonl\n"
    assert "2/2" in said.err
    assert "2 completed" in said.err
    assert place.run().outcome_counts() == {"completed": 2}


def test_a_wrong_key_fails_every_row_exits_non_zero_and_the_right_key_resumes_them_all(
    place: Place, taskmill: Command
) -> None:
    place.prompts("a", "b", "c", "d")
    with serving(fine, key="right") as endpoint:
        wrong = taskmill("batch", "p.jsonl", *flags(endpoint), "--api-key", "wrong")
        assert place.run().outcome_counts() == {"failed": 4}
        right = taskmill("batch", "p.jsonl", *flags(endpoint), "--api-key", "right", "--resume")

    assert wrong.code == 1
    assert "row 0 failed, the first: AuthenticationError: the endpoint answered 401" in wrong.err
    assert "gave up after 4 of 4" in wrong.err
    assert "4 rows are left" in wrong.err
    assert right.code == 0
    assert endpoint.answered == 4
    assert place.run().outcome_counts() == {"completed": 4}


def test_rows_that_failed_make_the_exit_code_1(place: Place, taskmill: Command) -> None:
    place.prompts("good", "bad")
    with serving(lambda body: refusal(400) if "bad" in str(body) else fine(body)) as endpoint:
        said = taskmill("batch", "p.jsonl", *flags(endpoint))
    assert said.code == 1
    assert "1 rows are left" in said.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing.jsonl"], "nothing.jsonl"),
        (["empty.jsonl"], "no usable row in 'empty.jsonl'"),
        (["p.jsonl", "--batch-size", "0"], "batch_size=0"),
        (["p.jsonl", "--distribution", "terminal_onl"], "did you mean 'terminal_only'"),
        (["p.jsonl", "--run-name", "../out"], "'../out'"),
        (["p.jsonl", "--model", "m"], "base_url"),
        (["p.jsonl", "--config", "none.toml"], "no file at 'none.toml'"),
        (["p.jsonl", "--prefill", "none.json"], "'none.json'"),
        ([], "name a file of prompts"),
        (["p.jsonl", "--reasoning-effort", "huge"], "reasoning_config.effort"),
        (["p.jsonl", "--temperature", "nan"], "temperature"),
    ],
)
def test_what_cannot_be_started_exits_with_2_and_one_line_that_says_why(
    place: Place, taskmill: Command, arguments: list[str], told: str
) -> None:
    place.prompts("a")
    (place.folder / "empty.jsonl").write_text("\n")

    said = taskmill("batch", *arguments)

    assert said.code == 2
    assert told in said.err
    assert "Traceback" not in said.err
    assert not (place.folder / "data").exists()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("dataset_file = 5", "write dataset_file as a text"),
        ("dataset_file = {a = 1}", "write dataset_file as a text"),
        ('dataset_file = "a\\u0000b"', "NUL"),
        ("run_name = 3", "run_name=3"),
        ("run_name = {a = 1}", "run_name"),
        ("output_dir = []", "output_dir=[]"),
        ("model = {a = 1}", "write model as a text"),
        ("base_url = 1", "write base_url as a text"),
        ("api_key = [1]", "write api_key as a text"),
        ("batch_size = {}", "batch_size"),
        ("max_tokens = " + "9" * 400, "max_tokens"),
        ("max_tokens = " + "9" * 5000, "is not TOML"),
        ("providers_order = " + "[" * 300 + "]" * 300, "providers_order"),
        ("providers_order = " + "[" * 5000 + "]" * 5000, "nested too deep"),
        ("verbose = 2020-13-45", "is not TOML"),
        ("[prices.m]\ninput = 1" + "0" * 400 + "\noutput = 1", "price input"),
    ],
)  # fmt: skip
def test_a_value_of_an_odd_type_in_the_file_is_named_in_one_line(
    place: Place, taskmill: Command, line: str, told: str
) -> None:
    place.prompts("a")
    (place.folder / "odd.toml").write_text(line + "\n")
    prompts = () if line.startswith("dataset_file") else ("p.jsonl",)
    endpoint = ("-m", "m", "--base-url", "http://localhost/v1") if "prices" in line else ()

    said = taskmill("batch", *prompts, "--config", "odd.toml", *endpoint)

    assert said.code == 2
    assert told in said.err
    assert len(said.err) < 700
    assert "Traceback" not in said.err


@pytest.mark.parametrize("option", ["--config", "--prefill"])
def test_a_file_that_is_none_or_is_nested_without_end_is_said_and_not_waited_for(
    place: Place, taskmill: Command, option: str
) -> None:
    place.prompts("a")
    os.mkfifo(place.folder / "pipe")
    (place.folder / "folder").mkdir()
    for name in ("pipe", "folder", os.devnull):
        said = taskmill("batch", "p.jsonl", option, name)
        assert (said.code, said.err) == (
            2,
            f"taskmill: {option}: {name!r} can't be read: it is not a regular file\n",
        )
    (place.folder / "deep").write_text(("x = " if option == "--config" else "") + "[" * 100_000)
    said = taskmill("batch", "p.jsonl", option, "deep")
    assert (said.code, said.err) == (2, f"taskmill: {option}: 'deep' is nested too deep to be read\n")
    (place.folder / "latin").write_bytes(b"\xe4")
    said = taskmill("batch", "p.jsonl", option, "latin")
    assert (said.code, said.err) == (2, f"taskmill: {option}: 'latin' is not UTF-8 (byte 0)\n")


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-", "<&- 2>&-"])
@pytest.mark.parametrize(("status", "display"), [(200, "--json"), (200, "--verbose"), (400, "--verbose")])
def test_a_run_with_its_streams_closed_works_and_its_exit_code_is_true(
    place: Place, closed: str, status: int, display: str
) -> None:
    place.prompts("a", "b")
    with serving(lambda body: fine(body) if status == 200 else refusal(status)) as endpoint:
        words = [sys.executable, "-c", PROGRAM, "batch", "p.jsonl", *flags(endpoint), display]
        done = subprocess.run(
            ["sh", "-c", f'"$@" {closed}', "sh", *words],
            cwd=place.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == (0 if status == 200 else 1)
    assert "Traceback" not in done.stderr
    assert place.run().outcome_counts() == {"completed" if status == 200 else "failed": 2}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
def test_a_full_standard_output_costs_a_run_nothing_and_a_listing_its_exit_code(place: Place) -> None:
    place.prompts("a")

    def code_of(*words: str) -> int:
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, *words],
                cwd=place.folder,
                stdout=full,
                timeout=60,
                check=False,
            )
        return done.returncode

    with serving(fine) as endpoint:
        assert code_of("batch", "p.jsonl", *flags(endpoint)) == 0
        assert code_of("batch", "p.jsonl", *flags(endpoint), "--resume", "--json") == 0
    assert code_of("distributions") in (1, 2)


def test_an_option_there_is_not_exits_non_zero_and_names_it(place: Place, taskmill: Command) -> None:
    place.prompts("a")
    said = taskmill("batch", "p.jsonl", "--batchsize", "3")
    assert said.code != 0
    assert "--batchsize" in said.out + said.err


def test_a_run_that_has_rows_is_refused_without_resume_and_the_message_says_how(
    place: Place, taskmill: Command
) -> None:
    place.prompts("a")
    with serving(fine) as endpoint:
        taskmill("batch", "p.jsonl", *flags(endpoint))
        before = place.run().content()
        said = taskmill("batch", "p.jsonl", *flags(endpoint))
        changed = taskmill("batch", "p.jsonl", *flags(endpoint), "--resume", "--max-iterations", "3")

    assert said.code == 2
    assert "--resume" in said.err
    assert changed.code == 2
    assert "max_iterations: stored 10, now 3" in changed.err
    assert endpoint.calls == 1
    assert place.run().content() == before


def test_a_second_process_is_refused_with_pid_and_host(place: Place, taskmill: Command) -> None:
    place.prompts("a")
    with serving(fine, latency=30) as endpoint:
        first = place.start("batch", "p.jsonl", *flags(endpoint), "--json")
        try:
            assert first.stdout is not None
            while json.loads(first.stdout.readline())["event"] != "started":
                pass
            second = taskmill("batch", "p.jsonl", *flags(endpoint), "--resume")
        finally:
            first.kill()
            ended(first)

    assert second.code == 2
    assert f"process {first.pid} on host {os.uname().nodename!r}" in second.err


# -- where settings come from ---------------------------------------------------------------------------------


def test_the_command_line_wins_over_the_file(place: Place, taskmill: Command) -> None:
    place.prompts("a", "b", "c")
    with serving(fine) as endpoint:
        (place.folder / "c.toml").write_text(
            f"""
            dataset_file = "p.jsonl"
            run_name = "named"
            batch_size = 3
            temperature = 0.25
            model = "from-file"
            base_url = "{endpoint.url}"
            distribution = "mine"
            ephemeral_system_prompt = "BE BRIEF"
            reasoning_config = {{ enabled = true, effort = "low" }}

            [prices.from-file]
            input = 1.0
            output = 2.0

            [distributions.mine]
            todo = 100
            """
        )
        said = taskmill("batch", "--config", "c.toml", "--temperature", "0.75")

    assert said.code == 0, said.err
    body = endpoint.requests[0].body
    assert (body["model"], body["temperature"], body["reasoning_effort"]) == ("from-file", 0.75, "low")
    assert body["messages"][0] == {"role": "system", "content": "BE BRIEF"}
    assert [tool["function"]["name"] for tool in body["tools"]] == ["todo"]
    stored = place.run("named")
    assert sorted(stored.shards) == [0]
    assert stored.statistics["cost"] == pytest.approx(3 * (10 * 1.0 + 5 * 2.0) / 1e6)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("batchsize = 3", "unknown setting 'batchsize'; did you mean 'batch_size'?"),
        ("modell = 'm'", "unknown setting 'modell'; did you mean 'model'?"),
        ("base-url = 'x'", "unknown setting 'base-url'; did you mean 'base_url'?"),
        ("tools = ['a']", "unknown setting 'tools'"),
        ("on_event = 'x'", "unknown setting 'on_event'"),
        ("batch_size = 0", "batch_size=0"),
        ("batch_size = true", "batch_size=True"),
        ("batch_size = 'x'", "batch_size='x'"),
        ("prices = 3", "prices"),
        ("mcp = 3", "mcp"),
        ("distributions = 3", "distributions"),
        ("[distributions.mine]\ntermnal = 100", "did you mean 'terminal'"),
        ("[prices.m]\nin = 1", "prices of model 'm'"),
        ("batch_size = ", "is not TOML"),
    ],
)
def test_a_file_with_what_cannot_be_meant_is_refused_and_names_it(
    place: Place, taskmill: Command, line: str, told: str
) -> None:
    place.prompts("a")
    (place.folder / "c.toml").write_text(line)

    said = taskmill("batch", "p.jsonl", "--model", "m", "--base-url", "http://h/v1", "--config", "c.toml")

    assert said.code == 2, said.err
    assert told in said.err
    assert "Traceback" not in said.err
    assert not (place.folder / "data").exists()


@pytest.mark.parametrize(
    ("options", "environment", "file", "expected"),
    [
        ({"model": "o"}, {"MODEL_ID": "e"}, "model = 'f'", ("o", "K-none")),
        ({}, {"MODEL_ID": "e"}, "model = 'f'", ("e", "K-none")),
        ({}, {}, "model = 'f'", ("f", "K-none")),
        ({"api-key": "K-o"}, {"MODEL_ID": "m", "MODEL_API_KEY": "K-e"}, "", ("m", "K-o")),
        ({}, {"MODEL_ID": "m", "MODEL_API_KEY": "K-e"}, "", ("m", "K-e")),
    ],
)
@pytest.mark.parametrize("address", ["MODEL_BASE_URL", "option", "file"])
def test_model_address_and_key_come_from_options_then_the_environment_then_the_file(
    place: Place,
    taskmill: Command,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    environment: dict[str, str],
    file: str,
    expected: tuple[str, str],
    address: str,
) -> None:
    place.prompts("a")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with serving(fine) as endpoint:
        if address == "file":
            file += f"\nbase_url = '{endpoint.url}'"
        elif address == "option":
            options = {**options, "base-url": endpoint.url}
            monkeypatch.setenv("MODEL_BASE_URL", "http://127.0.0.1:9/v1")
        else:
            monkeypatch.setenv(address, endpoint.url)
            file += "\nbase_url = 'http://127.0.0.1:9/v1'"
        (place.folder / "c.toml").write_text(file)
        given = [part for name, value in options.items() for part in (f"--{name}", value)]
        said = taskmill("batch", "p.jsonl", "--config", "c.toml", "--max-attempts", "1", *given)

    assert said.code == 0, said.err
    (request,) = endpoint.requests
    assert request.body["model"] == expected[0]
    assert request.headers.get("Authorization", "Bearer K-none") == f"Bearer {expected[1]}"


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ((), {}),
        ((), {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "k"}),
        (("--model", "embedded"), {"MODEL_ID": "m", "MODEL_BASE_URL": "http://127.0.0.1:9/v1"}),
    ],
)
def test_where_nothing_names_a_model_the_embedded_one_would_answer(
    place: Place,
    taskmill: Command,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    environment: dict[str, str],
) -> None:
    place.prompts("a")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = taskmill("batch", "p.jsonl", *options, "--dry-run", "--json")
    assert said.code == 0, said.err
    assert said.events()[-1]["model"] == "embedded"


@pytest.mark.parametrize("given", ["option", "MODEL_BASE_URL", "file"])
def test_an_address_without_a_model_is_refused_and_says_what_to_set(
    place: Place, taskmill: Command, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    place.prompts("a")
    url = "https://gateway.example/v1?key=SECRET"
    (place.folder / "c.toml").write_text(f"base_url = '{url}'" if given == "file" else "")
    if given == "MODEL_BASE_URL":
        monkeypatch.setenv(given, url)
    said = taskmill(
        "batch", "p.jsonl", "--config", "c.toml", *(["--base-url", url] if given == "option" else [])
    )

    assert said.code == 2
    assert "base_url='https://gateway.example/v1' without a model: set --model, MODEL_ID" in said.err
    assert "SECRET" not in said.err
    assert not (place.folder / "data").exists()


def test_several_providers_are_given_with_commas_or_one_by_one(place: Place, taskmill: Command) -> None:
    place.prompts("a")
    with serving(fine) as endpoint:
        said = taskmill(
            *("batch", "p.jsonl", *flags(endpoint)),
            *("--providers-allowed", "a,b", "--providers-ignored", "c", "--providers-ignored", "d, e"),
            *("--providers-order", "b,a", "--provider-sort", "price"),
        )
    assert said.code == 0, said.err
    config = place.run().config
    assert config["providers_allowed"] == ["a", "b"]
    assert config["providers_ignored"] == ["c", "d", "e"]
    assert config["providers_order"] == ["b", "a"]
    assert config["provider_sort"] == "price"


def test_the_other_options_reach_the_run(place: Place, taskmill: Command) -> None:
    place.prompts("a", "b", "c")
    (place.folder / "prefill.json").write_text('[{"role": "user", "content": "BEFORE"}]')
    with serving(lambda body: answer("no reasoning")) as endpoint:
        said = taskmill(
            *("batch", "p.jsonl", *flags(endpoint), "--run-name", "r", "-b", "1", "-c", "2", "-n", "2"),
            *("-d", "minimal", "--max-iterations", "4", "--max-tokens", "99", "--top-p", "0.5"),
            *("--reasoning-effort", "high", "--system-prompt", "EPHEMERAL", "--prefill", "prefill.json"),
            *("--sandbox", "plain", "--network", "--seed", "7", "--keep-without-reasoning"),
            *("--max-failures", "1", "--call-timeout", "50", "--max-attempts", "2"),
            *("--tool-result-limit", "777", "--sync", "each", "--output-dir", "elsewhere", "-v"),
        )

    assert said.code == 0, said.err
    path = place.folder / "elsewhere" / "r"
    assert {name.name for name in path.glob("batch_*.jsonl")} == {"batch_0.jsonl", "batch_1.jsonl"}
    body = endpoint.requests[0].body
    assert [message["content"] for message in body["messages"]] == ["EPHEMERAL", "BEFORE", "a"]
    assert (body["max_tokens"], body["top_p"], body["reasoning_effort"]) == (99, 0.5, "high")
    config = json.loads((path / "run.json").read_text())["config"]
    expected = {"sandbox": "plain", "network": True, "seed": 7, "tool_result_limit": 777, "max_iterations": 4}
    assert expected.items() <= config.items()
    assert config["discard_without_reasoning"] is False
    assert "row 0: completed" in said.err


def test_no_reasoning_asks_the_model_not_to_think(place: Place, taskmill: Command) -> None:
    place.prompts("a")
    with serving(fine) as endpoint:
        taskmill("batch", "p.jsonl", *flags(endpoint), "--no-reasoning")
    assert endpoint.requests[0].body["chat_template_kwargs"]["enable_thinking"] is False


# -- dry run --------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_the_plan_and_touches_nothing(place: Place, taskmill: Command) -> None:
    place.prompts("a", "b", b"123", "c")
    before = sorted(place.folder.rglob("*"))
    with serving(fine) as endpoint:
        said = taskmill("batch", "p.jsonl", *flags(endpoint), "--dry-run", "-b", "2")
        as_json = taskmill("batch", "p.jsonl", *flags(endpoint), "--dry-run", "--json", "-b", "2")

    assert (said.code, as_json.code, endpoint.calls) == (0, 0, 0)
    assert sorted(place.folder.rglob("*")) == before
    assert "3 usable, 1 skipped, 0 done, 3 to run" in said.out
    assert "3 to 33 model calls" in said.out
    plan = as_json.events()[-1]
    assert (plan["event"], plan["rows"], plan["skipped_lines"], plan["batches"]) == ("plan", 3, 1, 2)
    assert plan["estimate"]["calls_most"] == 33


def test_a_dry_run_of_a_stored_run_estimates_from_its_rows_and_leaves_them_alone(
    place: Place, taskmill: Command
) -> None:
    place.prompts("a", "b", "c", "d")
    prices = place.folder / "c.toml"
    prices.write_text("[prices.m]\ninput = 100.0\noutput = 200.0")
    with serving(fine) as endpoint:
        taskmill("batch", "p.jsonl", *flags(endpoint), "--config", str(prices), "-n", "1")
        before = place.run().content()
        said = taskmill("batch", "p.jsonl", *flags(endpoint), "--dry-run", "--json", "--resume")

    assert place.run().content() == before
    plan = said.events()[-1]
    assert (plan["rows"], plan["done"]) == (4, 1)
    estimate = plan["estimate"]
    assert (estimate["calls_most"], estimate["input_tokens"], estimate["output_tokens"]) == (3, 30, 15)
    assert estimate["cost"] == pytest.approx(3 * (10 * 100 + 5 * 200) / 1e6)


@pytest.mark.parametrize("name", ["run.json", "lock"])
@pytest.mark.parametrize("damage", [Path.unlink, os.mkfifo, os.mkdir, lambda path: path.write_text("[]")])
def test_a_run_without_its_configuration_or_with_an_odd_one_is_refused_in_one_line(
    place: Place, taskmill: Command, name: str, damage: Any
) -> None:
    place.prompts("a", "b")
    with serving(fine) as endpoint:
        command = ("batch", "p.jsonl", *flags(endpoint))
        taskmill(*command, "-n", "1")
        path = place.run().path / name
        if damage is not Path.unlink:
            path.unlink()
        damage(path)
        harmless = name == "lock" and (path.is_file() or not path.exists())
        said = taskmill(*command, "--resume")
        planned = taskmill(*command, "--resume", "--dry-run")

    assert (said.code, planned.code) == ((0, 0) if harmless else (2, 2))
    assert endpoint.answered == (2 if harmless else 1)
    if not harmless:
        last = said.err.splitlines()[-1]
        assert last.startswith("taskmill: ")
        assert name in last
        assert name in planned.out


def test_a_dry_run_says_what_would_be_refused_and_how_many_rows_are_done(
    place: Place, taskmill: Command
) -> None:
    place.prompts("a", "b", "c")
    with serving(fine) as endpoint:
        command = ("batch", "p.jsonl", *flags(endpoint))
        taskmill(*command, "-n", "1")
        before = place.run().content()
        changed = taskmill(*command, "--resume", "--temperature", "0.5", "--max-iterations", "3", "--dry-run")
        fresh = taskmill(*command, "--dry-run")
        as_json = taskmill(*command, "--dry-run", "--json")
        good = taskmill(*command, "--resume", "--dry-run")

    assert [said.code for said in (changed, fresh, as_json, good)] == [2, 2, 2, 0]
    assert "temperature: stored None, now 0.5" in changed.out
    assert "max_iterations: stored 10, now 3" in changed.out
    assert all("3 usable, 0 skipped, 1 done, 2 to run" in said.out for said in (changed, fresh, good))
    assert "already has rows" in fresh.out
    assert "already has rows" in as_json.events()[-1]["refused"]
    assert "refused" not in good.out
    assert place.run().content() == before


# -- what is told ---------------------------------------------------------------------------------------------


def test_json_writes_one_event_a_line_and_nothing_else(place: Place, taskmill: Command) -> None:
    place.prompts("plain", "\u2028 ü 🦊", b"123", "bad")
    with serving(lambda body: refusal(400) if "bad" in str(body) else fine(body)) as endpoint:
        said = taskmill("batch", "p.jsonl", *flags(endpoint), "--json")

    events = said.events()
    kinds = [event["event"] for event in events]
    assert said.code == 1
    assert said.err == ""
    assert kinds.count("recorded") == 3
    assert {"warning", "note", "started", "first_error", "ended"} <= set(kinds)
    assert kinds[-1] == "ended"
    assert events[-1] == {
        "event": "ended",
        "exit": 1,
        "total": 3,
        "reused": 0,
        "states": {"completed": 2, "failed": 1},
        "error": None,
        "path": "data/p",
        "resume": events[-1]["resume"],
    }
    assert events[-1]["resume"].endswith("--resume")


def test_an_emoji_on_a_narrow_console_is_no_crash(place: Place) -> None:
    place.prompts("🦊 \u2028 Ω", "plain 🦊")
    with serving(lambda body: answer("🦊", reasoning="Ω")) as endpoint:
        arguments = ("batch", "p.jsonl", *flags(endpoint), "--run-name", "🦊")
        said = place.finish(*arguments, "-v", PYTHONIOENCODING="cp1252")
        again = place.finish(*arguments, PYTHONIOENCODING="ascii")

    assert said.code == 0, said.err
    assert "\\U0001f98a" in said.err
    assert said.out == "trajectories: data/\\U0001f98a/trajectories.jsonl\n"
    assert again.code == 2
    assert "Traceback" not in again.err
    assert prompts_of(place.run("🦊").trajectories) == ["🦊 \u2028 Ω", "plain 🦊"]


def test_a_reader_that_goes_away_does_not_end_the_run(place: Place) -> None:
    """As with `taskmill batch … --json | head -1`: the events are for whoever reads, the run is for its owner."""
    place.prompts(*[str(number) for number in range(50)])
    with serving(fine) as endpoint:
        process = place.start("batch", "p.jsonl", *flags(endpoint), "--json", "-b", "2")
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        code = process.wait(60)
        process.stderr.close()

    assert "BrokenPipe" not in err
    assert "Traceback" not in err
    assert code == 0
    assert place.run().outcome_counts() == {"completed": 50}


@pytest.mark.parametrize("where", ["--api-key", "user", "query"])
def test_no_key_is_printed_or_stored(place: Place, taskmill: Command, where: str) -> None:
    """Not even one that the endpoint repeats in its refusal."""
    place.prompts("a", "b")
    with serving(refusal(401, "Incorrect API key: SECRET-key")) as endpoint:
        url = endpoint.url
        if where == "user":
            url = url.replace("http://", "http://user:SECRET-key@")
        if where == "query":
            url += "?key=SECRET-key"
        key = ["--api-key", "SECRET-key"] if where == "--api-key" else []
        said = [
            taskmill("batch", "p.jsonl", "--model", "m", "--base-url", url, *key),
            taskmill("batch", "p.jsonl", "--model", "m", f"--base-url={url}", *key, "--resume", "-v"),
            taskmill("batch", "p.jsonl", "--model", "m", "--base-url", url, *key, "--resume", "--json"),
            taskmill("batch", "p.jsonl", "--model", "m", "--base-url", url, *key, "--resume", "--dry-run"),
            taskmill("batch", "p.jsonl", "--model", "", "--base-url", url, *key),
            taskmill("batch", "p.jsonl", "--model", "m", "--base-url", url.replace("http", "ftp"), *key),
            taskmill("status", "data/p"),
        ]

    assert [one.code for one in said] == [1, 1, 1, 0, 2, 2, 1]
    assert "[key removed]" in said[0].err
    for one in said:
        assert "SECRET" not in one.out
        assert "SECRET" not in one.err
    for name, content in place.run().content().items():
        assert b"SECRET" not in content, name


@pytest.mark.parametrize(
    "key", [["--api_key", "SECRET"], ["--api_key=SECRET"], ["--api-key=SECRET"]], ids=" ".join
)
def test_no_key_is_printed_however_its_option_is_spelt(
    place: Place, taskmill: Command, key: list[str]
) -> None:
    place.prompts("a")
    with serving(refusal(400), key="SECRET") as endpoint:
        url = f"--base_url={endpoint.url}?key=SECRET"
        said = taskmill("batch", "p.jsonl", "--model", "m", url, *key)
        as_json = taskmill("batch", "p.jsonl", "--model", "m", url, *key, "--resume", "--json")

    assert [said.code, as_json.code] == [1, 1]
    assert endpoint.calls == 2
    assert "with --base-url and --api-key as before" in said.err
    assert as_json.events()[-1]["resume"] == "taskmill batch p.jsonl --model m --resume --json"
    for one in (said, as_json):
        assert "SECRET" not in one.out + one.err


def test_the_command_that_resumes_can_be_run_as_it_is_printed(place: Place) -> None:
    (place.folder / "my prompts.jsonl").write_text('{"prompt": "a"}\n')
    allowed: list[bool] = []
    with serving(lambda body: fine(body) if allowed else refusal(400)) as endpoint:
        first = place.finish("batch", "my prompts.jsonl", *flags(endpoint), "--api-key", "k", "--run-name=x")
        line = first.err.strip().splitlines()[-1].strip()
        allowed.append(True)
        bin_folder = Path(subprocess.sys.executable).parent  # type: ignore[attr-defined]
        second = subprocess.run(
            line,
            shell=True,
            cwd=place.folder,
            env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "MODEL_API_KEY": "k"},
            capture_output=True,
            text=True,
        )

    assert first.code == 1
    assert line.startswith("taskmill batch 'my prompts.jsonl'")
    assert line.endswith(" --resume")
    assert "--api-key" not in line
    assert second.returncode == 0, second.stderr
    assert place.run("x").outcome_counts() == {"completed": 1}


def test_a_tool_of_an_mcp_server_named_in_the_file_is_offered_and_called(
    place: Place, taskmill: Command
) -> None:
    pytest.importorskip("mcp")
    server = Path(__file__).parents[1] / "tools" / "mcp_server.py"
    place.prompts("a")
    (place.folder / "c.toml").write_text(
        f"distribution = 'none'\n[mcp.mine]\ncommand = '{subprocess.sys.executable}'\nargs = ['{server}']\n"  # type: ignore[attr-defined]
    )

    def script(body: dict[str, Any]) -> Any:
        if any(message["role"] == "tool" for message in body["messages"]):
            return answer("done", reasoning="hm")
        name = body["tools"][0]["function"]["name"]
        return answer("", calls=[call(name, {})], reasoning="hm")

    with serving(script) as endpoint:
        said = taskmill("batch", "p.jsonl", *flags(endpoint), "--config", "c.toml")

    assert said.code == 0, said.err
    (row,) = place.run().trajectories
    assert row["toolsets_used"] == ["mine"]
    assert sum(counts["count"] for counts in row["tool_stats"].values()) == 1
