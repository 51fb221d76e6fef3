"""`taskmill eval` by way of a server: the same files, the same results."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from taskmill.engine.envclient import EnvClient
from taskmill.errors import ConfigurationError, ServerError, TasksetError
from taskmill.evaluation import runner
from taskmill.evaluation.runner import Evaluation
from taskmill.serve import EnvServer
from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import answer, silence
from tests.batch.serving import serving
from tests.cli.conftest import Place, place, taskmill
from tests.evaluate.lab import rows
from tests.serve import tasksets
from tests.serve.waiting import all_gone, family, until

__all__ = ["place", "taskmill"]

TASKSETS = Path(__file__).with_name("tasksets.py")
TIMES = {"started_at", "timing", "calls"}


def solve(body: dict[str, Any]) -> str:
    a, b = body["messages"][0]["content"].rstrip("?").split(" + ")
    return str(int(a) + int(b) + body.get("seed", 0) % 2)


def settings(path: Path) -> list[str]:
    """The configuration, but for the mark of the code that scores: a run by way of a server does not see that code."""
    lines = (path / "config.toml").read_text().splitlines()
    return [line for line in lines if not line.startswith("scoring = ")]


def told(path: Path) -> list[dict[str, Any]]:
    """What the traces of a run say, without times, in order of their ids."""
    kept = [{name: value for name, value in row.items() if name not in TIMES} for row in rows(path)]
    return sorted(kept, key=lambda row: row["id"])


def summed(path: Path) -> dict[str, Any]:
    """The summary without what depends on the clock."""
    said = json.loads((path / "summary.json").read_text())
    names = ("reward", "rewards", "metrics", "outcomes", "pass_at_k")
    return {name: rounded(said[name]) for name in names if name in said}


def rounded(value: Any) -> Any:
    """Sums depend in their last digits on the order in which rollouts end."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return round(value, 9) if isinstance(value, float) else value


async def run(taskset: Any, endpoint: FakeEndpoint, folder: Path, **options: Any) -> Evaluation:
    evaluation = Evaluation(taskset, model="m", base_url=endpoint.url, output_dir=folder, **options)
    await evaluation.run()
    return evaluation


@pytest.mark.parametrize(
    ("taskset", "options"),
    [
        (tasksets.SumsTaskset, {"num_rollouts": 2}),
        (tasksets.SumsTaskset, {"num_tasks": 4, "shuffle": True, "seed": 3}),
        (tasksets.EndlessTaskset, {"num_tasks": 30, "concurrency": 5}),
        (tasksets.GroupsTaskset, {"num_rollouts": 3, "concurrency": 2}),
    ],
)
async def test_a_run_by_way_of_a_server_is_the_run_in_this_process(
    taskset: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    async with FakeEndpoint(solve) as endpoint:
        here = await run(taskset, endpoint, tmp_path / "here", sampling={"seed": 11}, **options)
        calls = endpoint.calls
        peak = endpoint.peak
        server = EnvServer(taskset, workers=2)
        there = await run(
            taskset, endpoint, tmp_path / "there", sampling={"seed": 11}, server=server, **options
        )
        assert endpoint.calls == 2 * calls
        assert endpoint.peak <= max(peak, options.get("concurrency", 16))
    assert here.path is not None
    assert there.path is not None
    assert told(there.path) == told(here.path)
    assert summed(there.path) == summed(here.path)
    assert settings(there.path) == settings(here.path)
    files = {entry.name for entry in here.path.iterdir()}
    assert {entry.name for entry in there.path.iterdir()} == files - {"journal"}, (
        "calls are the server's to make"
    )


async def test_an_infinite_taskset_needs_a_bound(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Evaluation(
            tasksets.EndlessTaskset,
            model="m",
            base_url="http://x/v1",
            server="http://127.0.0.1:9",
            output_dir=tmp_path,
        )
    assert str(caught.value) == "endless is infinite - bound the run with -n/--num-tasks"
    assert not list(tmp_path.iterdir())


async def test_only_models_at_endpoints_can_be_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="set model and base_url"):
        Evaluation(tasksets.SumsTaskset, model="embedded", server="http://127.0.0.1:9", output_dir=tmp_path)


async def test_a_server_of_another_taskset_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    async with FakeEndpoint(solve) as endpoint, EnvServer(tasksets.GroupsTaskset) as server:
        with pytest.raises(ConfigurationError, match="the server serves 'groups', not 'sums'"):
            await run(tasksets.SumsTaskset, endpoint, tmp_path, server=server.url)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_tasks", [None, 9])
async def test_a_load_that_fails_ends_the_run_as_it_does_in_this_process(
    num_tasks: int | None, tmp_path: Path
) -> None:
    async with FakeEndpoint(solve) as endpoint, EnvServer(tasksets.RaisesAtFifthTaskset) as server:
        for where in (None, server.url):
            folder = tmp_path / str(where is None)
            with pytest.raises(TasksetError, match="failed at its task 5: ValueError: row 5 is damaged"):
                await run(tasksets.RaisesAtFifthTaskset, endpoint, folder, server=where, num_tasks=num_tasks)
            (path,) = folder.iterdir()
            assert len(rows(path)) == 5, "what was paid for is kept"
        good = await run(
            tasksets.RaisesAtFifthTaskset, endpoint, tmp_path / "good", server=server.url, num_tasks=5
        )
        assert good.summary is not None
        assert good.summary["outcomes"]["completed"] == 5


async def test_a_rollout_whose_workers_die_is_an_error_row_and_the_rest_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    async with FakeEndpoint("2") as endpoint:
        taskset = tasksets.DeadlyTaskset(folder=str(folder))
        evaluation = await run(taskset, endpoint, tmp_path / "runs", server=EnvServer(taskset), concurrency=1)
    assert evaluation.path is not None
    stored = {row["task"]["idx"]: row for row in rows(evaluation.path)}
    assert (stored[0]["state"], stored[0]["errors"][0]["type"]) == ("failed", "WorkerDied")
    assert (stored[1]["state"], stored[2]["state"]) == ("completed", "completed")


async def test_a_server_that_goes_away_ends_the_run_and_a_resume_does_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "EnvClient", partial(EnvClient, patience=1.0))
    asked = 0

    def step(body: dict[str, Any]) -> Any:
        nonlocal asked
        asked += 1
        return answer(solve(body)) if asked <= 6 else silence()

    async with FakeEndpoint(step) as endpoint:
        async with EnvServer(tasksets.SumsTaskset) as server:
            evaluation = Evaluation(
                tasksets.SumsTaskset,
                model="m",
                base_url=endpoint.url,
                output_dir=tmp_path,
                server=server.url,
                concurrency=2,
                on_event=lambda event: None,
            )
            running = asyncio.ensure_future(evaluation.run())
            await until(lambda: asked == 8)
            await server.stop()
            with pytest.raises(ServerError):
                await running
        assert evaluation.path is not None
        states = [row["state"] for row in rows(evaluation.path)]
        assert states.count("completed") == 6
        asked = -100
        server = EnvServer(tasksets.SumsTaskset)
        result = await Evaluation.resume(evaluation.path, server=server).run()
        assert result.complete
        assert asked == -96, "what was done is not run again"
    assert len({row["id"] for row in rows(evaluation.path) if row["state"] == "completed"}) == 10


def test_the_command_starts_a_server_of_its_own(place: Place) -> None:
    with serving(solve) as endpoint:
        said = place.finish(
            "eval",
            f"{TASKSETS}:SumsTaskset",
            "-m",
            "m",
            "--base-url",
            endpoint.url,
            "--server",
            "--workers",
            "2",
            "-n",
            "6",
        )
        assert said.code == 0, said.err
        assert endpoint.calls == 6
    (path,) = (place.folder / "runs").iterdir()
    assert len(rows(path)) == 6


async def test_the_command_asks_a_server_elsewhere(place: Place) -> None:
    token = "0123456789abcdef0123"
    (place.folder / "token").write_text(token)
    async with FakeEndpoint(solve) as endpoint, EnvServer(tasksets.SumsTaskset, token=token) as server:
        arguments = ["eval", f"{TASKSETS}:SumsTaskset", "-m", "m", "--base-url", endpoint.url]
        said = await asyncio.to_thread(
            place.finish, *arguments, "--server-url", server.url, "--server-token-file", "token"
        )
        assert said.code == 0, said.err
        refused = await asyncio.to_thread(place.finish, *arguments, "--server-url", server.url)
        assert refused.code == 1
        assert "token is needed" in refused.err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--server", "--server-url", "http://x"], "give one of them"),
        (["--workers", "2"], "--workers goes with --server"),
        (["--server-token-file", "t"], "goes with --server-url"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    place: Place, taskmill: Any, options: list[str], why: str
) -> None:
    said = taskmill("eval", f"{TASKSETS}:SumsTaskset", "-m", "m", "--base-url", "http://x/v1", *options)
    assert said.code == 2
    assert why in said.err


def test_an_infinite_taskset_needs_a_bound_on_the_command_line_too(place: Place, taskmill: Any) -> None:
    said = taskmill("eval", f"{TASKSETS}:EndlessTaskset", "-m", "m", "--base-url", "http://x/v1", "--server")
    assert said.code == 2
    assert said.err.strip() == "taskmill: endless is infinite - bound the run with -n/--num-tasks"


async def test_ctrl_c_leaves_no_process_and_a_run_that_resumes(place: Place) -> None:
    async with FakeEndpoint(silence()) as endpoint:
        arguments = ["eval", f"{TASKSETS}:SumsTaskset", "-m", "m", "--base-url", endpoint.url, "--server"]
        process = place.start(*arguments)
        await until(lambda: endpoint.calls == 10)
        processes = family(process.pid)
        os.kill(process.pid, signal.SIGINT)
        _, err = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 130, err
        assert "--resume" in err
        assert "--server" in err.split("--resume")[1]
    await all_gone(processes)
