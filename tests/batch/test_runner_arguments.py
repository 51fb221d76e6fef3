"""`BatchRunner(...)`: what it takes, what it refuses and when, and what of it reaches the endpoint."""

from __future__ import annotations

import asyncio
import inspect
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskmill import BatchRunner
from taskmill.errors import ConfigurationError, RunExistsError, TaskmillError
from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import answer
from tests.batch.mill import Mill, answering
from tests.batch.serving import serving

OPENROUTER = "http://openrouter.ai/v1"

SEED_EXAMPLE = """
import asyncio
import os

from batch_runner import BatchRunner


async def main() -> None:
    runner = BatchRunner(
        dataset_file="prompts.jsonl",
        batch_size=8,
        run_name="tool-training",
        distribution="terminal_only",
        base_url=os.getenv("MODEL_BASE_URL") or None,
        api_key=os.getenv("MODEL_API_KEY") or None,
        model=os.environ["MODEL_ID"],
        num_workers=4,
        max_iterations=20,
        reasoning_config={"enabled": True, "effort": "low"},
    )
    await runner.run(resume=True)


asyncio.run(main())
"""


def test_the_arguments_are_those_of_the_contract_in_its_order() -> None:
    parameters = list(inspect.signature(BatchRunner).parameters.values())
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    required = inspect.Parameter.empty

    assert positional == {
        "dataset_file": required,
        "batch_size": required,
        "run_name": required,
        "distribution": "default",
        "max_iterations": 10,
        "base_url": None,
        "api_key": None,
        "model": None,
        "num_workers": 4,
        "verbose": False,
        "ephemeral_system_prompt": None,
        "log_prefix_chars": 100,
        "providers_allowed": None,
        "providers_ignored": None,
        "providers_order": None,
        "provider_sort": None,
        "max_tokens": None,
        "reasoning_config": None,
        "prefill_messages": None,
        "max_samples": None,
    }
    assert list(positional) == [p.name for p in parameters][: len(positional)]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters[len(positional) :])


_seen: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    touches = ("open", "os.mkdir", "os.rename", "os.remove", "socket.", "subprocess.", "sqlite3.")
    if _seen is not None and event.startswith(touches):
        _seen.append(f"{event} {arguments!r:.100}")


@pytest.fixture
def touched() -> Iterator[list[str]]:
    """What is opened, made, connected or started during the test. An audit hook can't be taken off again."""
    global _seen
    if not getattr(sys, "_taskmill_watched", False):
        sys.addaudithook(_watch)
        sys._taskmill_watched = True  # type: ignore[attr-defined]
    _seen = []
    yield _seen
    _seen = None


def test_constructing_touches_nothing_and_needs_no_loop(
    mill: Mill, touched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> BatchRunner:
        return BatchRunner("no.jsonl", 8, "run", model="m", base_url="http://localhost:1/v1", api_key="k")

    monkeypatch.chdir(mill.folder)
    make()  # imports are I/O too, and done once
    touched.clear()

    runner = make()

    assert touched == []
    assert not Path("data").exists()
    assert runner.path == Path("data/run")


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ({"batch_size": 0}, ["batch_size", "0", "1"]),
        ({"batch_size": "many"}, ["batch_size", "'many'"]),
        ({"num_workers": 0}, ["num_workers"]),
        ({"max_iterations": 0}, ["max_iterations"]),
        ({"max_samples": 0}, ["max_samples"]),
        ({"max_tokens": -1}, ["max_tokens"]),
        ({"log_prefix_chars": -1}, ["log_prefix_chars"]),
        ({"distribution": "terminal_onl"}, ["distribution", "'terminal_onl'", "'terminal_only'"]),
        ({"run_name": "../x"}, ["run_name", "'../x'", "one folder"]),
        ({"run_name": "a/b"}, ["run_name", "one folder"]),
        ({"run_name": ".."}, ["run_name", "one folder"]),
        ({"run_name": " "}, ["run_name", "one folder"]),
        ({"run_name": "/etc"}, ["run_name", "one folder"]),
        ({"provider_sort": "quality"}, ["provider_sort", "'quality'", "'price'"]),
        ({"reasoning_config": {"enabled": True, "effort": "huge"}}, ["reasoning_config.effort", "'xhigh'"]),
        ({"reasoning_config": {"efort": "low"}}, ["reasoning_config.efort"]),
        ({"prefill_messages": [{"role": "tool", "content": "x"}]}, ["prefill_messages.0.role", "'user'"]),
        ({"temperature": float("nan")}, ["temperature", "finite"]),
        ({"call_timeout": float("inf")}, ["call_timeout", "finite"]),
        ({"max_failures": 0}, ["max_failures"]),
        ({"sandbox": "chroot"}, ["sandbox", "'bubblewrap'"]),
        ({"sync": "never"}, ["sync", "'group'"]),
        ({"sed": 3}, ["unknown setting 'sed'", "'seed'"]),
        ({"model": "m"}, ["model='m'", "base_url"]),
        ({"model": "m", "base_url": "localhost:8000"}, ["base_url", "https://"]),
        ({"model": "m", "base_url": "http://h/v1", "api_key": "two words"}, ["api_key"]),
        ({"model": "m", "base_url": "http://h/v1", "prices": {"m": {"in": 1}}}, ["prices", "input"]),
        ({"model": None, "base_url": "http://h/v1"}, ["base_url", "model"]),
        ({"base_url": "http://h/v1"}, ["base_url", "model object"]),
        ({"batch_size": True}, ["batch_size"]),
    ],
)
def test_a_bad_argument_is_refused_by_the_constructor_naming_it_and_what_would_do(
    setting: dict[str, Any], names: list[str]
) -> None:
    good = {"dataset_file": "prompts.jsonl", "batch_size": 1, "run_name": "run", "model": answering()}
    with pytest.raises(ConfigurationError) as refused:
        BatchRunner(**{**good, **setting})

    assert all(name in str(refused.value) for name in names), str(refused.value)


async def test_run_returns_none_and_its_result_is_the_files(mill: Mill) -> None:
    mill.prompts("a", "b", "c")

    assert await mill.runner().run() is None

    assert sorted(path.name for path in mill.stored.path.iterdir() if path.is_file()) == [
        "batch_0.jsonl",
        "batch_1.jsonl",
        "checkpoint.json",
        "lock",
        "run.json",
        "sessions.jsonl",
        "statistics.json",
        "trajectories.jsonl",
    ]


async def test_a_run_that_has_rows_is_refused_without_resume_and_nothing_is_touched(mill: Mill) -> None:
    mill.prompts("a", "b")
    await mill.run()
    before = mill.stored.content()
    model = answering()

    with pytest.raises(RunExistsError, match=r"(?s)already has rows.*resume=True"):
        await mill.run(model)

    assert mill.stored.content() == before
    assert model.calls == 0


async def test_another_dataset_under_a_used_run_name_is_refused_without_resume(mill: Mill) -> None:
    mill.prompts("a", "b", "c")
    await mill.run()
    before = mill.stored.content()
    mill.prompts("other", "rows")

    with pytest.raises(RunExistsError, match="another run name"):
        await mill.run()

    assert mill.stored.content() == before


async def test_a_run_of_which_only_failures_are_recorded_is_refused_as_well(mill: Mill) -> None:
    mill.prompts("a")
    await mill.run(answering([]))
    with pytest.raises(RunExistsError):
        await mill.run()


async def test_resume_on_a_new_run_is_an_ordinary_start(mill: Mill) -> None:
    mill.prompts("a", "b")

    stored = await mill.run(resume=True)

    assert stored.outcome_counts() == {"completed": 2}
    assert mill.told("started") == [{"event": "started", "total": 2, "reused": 0}]


async def test_one_runner_does_not_run_twice_at_once(mill: Mill) -> None:
    mill.prompts("a")
    runner = mill.runner()

    results = await asyncio.gather(runner.run(), runner.run(), return_exceptions=True)

    assert [type(result).__name__ for result in results] == ["NoneType", "RunAbortedError"]
    await runner.run(resume=True)


@pytest.mark.parametrize(
    ("config", "own_server", "openrouter"),
    [
        (
            {"enabled": True, "effort": "low"},
            {"enable_thinking": True, "effort": "low"},
            {"enabled": True, "effort": "low"},
        ),
        ({"enabled": True}, {"enable_thinking": True, "effort": None}, {"enabled": True}),
        ({"enabled": False}, {"enable_thinking": False, "effort": None}, {"enabled": False}),
        ({"effort": "none"}, {"enable_thinking": False, "effort": None}, {"enabled": False}),
        (
            {"enabled": True, "effort": "max"},
            {"enable_thinking": True, "effort": "high"},
            {"enabled": True, "effort": "xhigh"},
        ),
        (None, None, None),
    ],
)
async def test_reasoning_config_reaches_the_endpoint_as_the_field_its_family_takes(
    mill: Mill,
    routing: FakeEndpoint,
    config: dict[str, Any] | None,
    own_server: dict[str, Any] | None,
    openrouter: dict[str, Any] | None,
) -> None:
    mill.prompts("a")
    own = await body_of(mill, routing, run_name="own", reasoning_config=config)
    routed = await body_of(mill, routing, OPENROUTER, run_name="routed", reasoning_config=config)

    if own_server is None:
        assert "chat_template_kwargs" not in own
        assert "reasoning_effort" not in own
    else:
        assert own["chat_template_kwargs"]["enable_thinking"] is own_server["enable_thinking"]
        assert own.get("reasoning_effort") == own_server["effort"]
    assert routed.get("reasoning") == openrouter


async def test_provider_options_reach_endpoints_that_route_and_no_others(
    mill: Mill, routing: FakeEndpoint
) -> None:
    mill.prompts("a")
    options: dict[str, Any] = {
        "providers_allowed": ["a", "b"],
        "providers_ignored": ["c"],
        "providers_order": ["b", "a"],
        "provider_sort": "price",
    }

    routed = await body_of(mill, routing, OPENROUTER, run_name="routed", **options)
    own = await body_of(mill, routing, run_name="own", **options)
    plain = await body_of(mill, routing, OPENROUTER, run_name="plain")

    assert routed["provider"] == {"only": ["a", "b"], "ignore": ["c"], "order": ["b", "a"], "sort": "price"}
    assert "provider" not in own
    assert "provider" not in plain


async def test_sampling_reaches_the_endpoint(mill: Mill, routing: FakeEndpoint) -> None:
    mill.prompts("a")
    body = await body_of(mill, routing, max_tokens=77, temperature=0.25, top_p=0.5)
    bare = await body_of(mill, routing, run_name="bare")

    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (77, 0.25, 0.5)
    assert not {"max_tokens", "temperature", "top_p"} & set(bare)


async def test_prefill_and_ephemeral_prompt_reach_the_endpoint_and_never_stand_in_a_record(
    mill: Mill, routing: FakeEndpoint
) -> None:
    mill.prompts("a", "b")
    settings: dict[str, Any] = {
        "ephemeral_system_prompt": "EPHEMERAL",
        "prefill_messages": [
            {"role": "user", "content": "PREFILLED-QUESTION"},
            {"role": "assistant", "content": "PREFILLED-ANSWER"},
        ],
    }

    body = await body_of(mill, routing, **settings)

    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("system", "EPHEMERAL"),
        ("user", "PREFILLED-QUESTION"),
        ("assistant", "PREFILLED-ANSWER"),
        ("user", "b"),
    ]
    records = {name: data for name, data in mill.stored.content().items() if name != "run.json"}
    assert records
    for name, data in records.items():
        assert b"EPHEMERAL" not in data, name
        assert b"PREFILLED" not in data, name


async def test_prefill_and_ephemeral_prompt_stand_in_no_record_of_a_failure_either(mill: Mill) -> None:
    mill.prompts("a")

    stored = await mill.run(
        answering([]),
        ephemeral_system_prompt="EPHEMERAL",
        prefill_messages=[{"role": "user", "content": "PREFILLED"}],
    )

    assert stored.outcomes[0]["state"] == "failed"
    assert b"EPHEMERAL" not in stored.content()["outcomes.jsonl"]
    assert b"PREFILLED" not in stored.content()["outcomes.jsonl"]


async def test_max_samples_takes_the_first_usable_rows(mill: Mill) -> None:
    mill.prompts("a", b"123", "b", "c")

    stored = await mill.run(max_samples=2)

    assert stored.statistics["total_prompts"] == 2
    assert len(stored.rows) == 2


async def test_a_model_object_is_used_as_it_is_and_stays_open(mill: Mill) -> None:
    mill.prompts("a")
    model = answering(name="mine")

    stored = await mill.run(model)

    assert stored.rows[0]["metadata"]["model"] == "mine"
    assert not model.closed


def test_the_example_of_the_documentation_runs_as_printed(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = mill.folder / "example.py"
    example.write_text(SEED_EXAMPLE)
    mill.prompts("Inspect this project.", "Repair the fixture.")
    monkeypatch.chdir(mill.folder)
    monkeypatch.setenv("MODEL_ID", "some/model")
    monkeypatch.setenv("MODEL_API_KEY", "secret")

    with serving(lambda body: answer("done", reasoning="hm"), key="secret") as endpoint:
        monkeypatch.setenv("MODEL_BASE_URL", endpoint.url)
        runpy.run_path(str(example), run_name="__main__")

    run = mill.folder / "data" / "tool-training"
    names = {"batch_0.jsonl", "trajectories.jsonl", "checkpoint.json", "statistics.json"}
    assert names <= {path.name for path in run.iterdir()}
    assert len((run / "trajectories.jsonl").read_bytes().splitlines()) == 2
    offered = {tool["function"]["name"] for tool in endpoint.requests[0].body["tools"]}
    assert {"terminal", "read_file", "write_file"} <= offered
    assert "execute_code" not in offered


@pytest.fixture
async def routing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An endpoint that is also the proxy on the way to every other host, so that it can be openrouter.ai."""
    async with FakeEndpoint(lambda body: answer("done", reasoning="hm")) as endpoint:
        for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", endpoint.url.removesuffix("/v1"))
        yield endpoint


async def body_of(
    mill: Mill, endpoint: FakeEndpoint, base_url: str | None = None, **settings: Any
) -> dict[str, Any]:
    """The last request of a run at `base_url` (the endpoint itself by default), as the endpoint got it."""
    before = endpoint.calls
    await mill.run("m", base_url=base_url or endpoint.url, resume=True, **settings)
    assert endpoint.calls > before
    body: dict[str, Any] = endpoint.requests[-1].body
    return body


@pytest.mark.parametrize(
    "settings",
    [
        {"distribution": "web_alone"},
        {"mcp_servers": {"gone": {"command": "no-such-program-anywhere"}}},
        {"sandbox": "bubblewrap"},
    ],
)
async def test_a_start_that_is_refused_leaves_nothing_behind(
    mill: Mill, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskmill.sandbox import bubblewrap
    from taskmill.tools import distributions

    monkeypatch.setitem(distributions._user, "web_alone", {"web": 100})
    for key in ("TAVILY_API_KEY", "EXA_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(bubblewrap, "problem", lambda: "it is not for us")
    mill.prompts("a")
    with pytest.raises(TaskmillError):
        await mill.run(**settings)
    assert [path.name for path in mill.folder.iterdir()] == ["prompts.jsonl"]
