"""Runs of tasksets: what is run, what is stored, and what a resume does."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from taskmill.errors import (
    ConfigurationError,
    RunAbortedError,
    RunChangedError,
    RunLockedError,
    StoreError,
    TasksetError,
    TransientModelError,
)
from taskmill.evaluation import Evaluation, evaluate, validate
from taskmill.evaluation.fingerprint import scoring_of
from taskmill.evaluation.status import status_of
from taskmill.models.base import Request
from taskmill.models.scripted import ScriptedModel
from taskmill.tasks import Task, TaskData, Taskset, reward, stop
from taskmill.tasks.registry import find_taskset
from tests.evaluate.lab import (
    Adder,
    RankedTask,
    RankedTaskset,
    SumData,
    SumsTaskset,
    SumTask,
    TenSumsTaskset,
    adder,
    rows,
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "runs"


async def test_each_rollout_is_a_row_with_its_reward(out: Path) -> None:
    result = await evaluate(TenSumsTaskset, model=Adder(), num_tasks=3, num_rollouts=2, output_dir=out)
    assert result.reward == 1.0
    assert result.complete
    stored = rows(result.path)
    assert sorted((row["task"]["idx"], row.get("number", 0)) for row in stored) == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert {row["reward"] for row in stored} == {1.0}
    assert all(row["rewards"] == {"right": 1.0} and row["metrics"]["length"] >= 1 for row in stored)
    assert [trace.reward for trace in result.traces()] == [1.0] * 6
    assert {path.name for path in result.path.iterdir()} >= {
        "config.toml", "run.json", "run.log", "summary.json", "traces.jsonl",
    }  # fmt: skip


async def test_a_run_is_never_overwritten(out: Path) -> None:
    paths = {
        (await evaluate(TenSumsTaskset, model=Adder(), num_tasks=1, output_dir=out)).path for _ in range(3)
    }
    assert len(paths) == 3
    assert all(len(rows(path)) == 1 for path in paths)


async def test_an_infinite_taskset_builds_only_what_is_run(out: Path) -> None:
    SumsTaskset.built = 0
    await evaluate(SumsTaskset, model=Adder(), num_tasks=7, output_dir=out)
    assert SumsTaskset.built == 7


async def test_an_infinite_taskset_without_a_number_is_refused_before_anything_is_written(out: Path) -> None:
    with pytest.raises(ValueError, match="SumsTaskset is infinite - select a bounded subset with num_tasks"):
        await evaluate(SumsTaskset, model=Adder(), output_dir=out)
    with pytest.raises(ConfigurationError, match="num_tasks=0: Input should be greater than or equal to 1"):
        await evaluate(SumsTaskset, model=Adder(), num_tasks=0, output_dir=out)
    assert not out.exists()


async def test_at_most_so_many_rollouts_are_under_way(out: Path) -> None:
    under_way = most = 0

    async def answer(request: Request) -> str:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(5):
            await asyncio.sleep(0)
        under_way -= 1
        return adder(request)

    class MixedTaskset(SumsTaskset):
        def load(self):  # type: ignore[no-untyped-def]
            for task in super().load():
                yield (RankedTask if task.data.idx % 2 else SumTask)(task.data)

    for taskset in (SumsTaskset, RankedTaskset, MixedTaskset):
        most = 0
        await evaluate(
            taskset, model=ScriptedModel(answer), num_tasks=9, num_rollouts=3, concurrency=4, output_dir=out
        )
        assert most == 4


async def test_a_shuffle_draws_from_the_whole_taskset(out: Path) -> None:
    async def drawn(seed: int) -> list[int]:
        result = await evaluate(
            TenSumsTaskset, model=Adder(), num_tasks=4, shuffle=True, seed=seed, concurrency=1, output_dir=out
        )
        return [row["task"]["idx"] for row in rows(result.path)]

    first = await drawn(1)
    assert first == await drawn(1) != await drawn(2)
    assert max(first) > 3


async def test_a_shuffle_of_an_infinite_taskset_is_warned_of(out: Path) -> None:
    events: list[dict[str, object]] = []
    result = await evaluate(
        SumsTaskset,
        model=Adder(),
        num_tasks=2,
        shuffle=True,
        output_dir=out,
        on_event=lambda event: events.append(dict(event)),
    )
    assert any(event["event"] == "warning" and "no-op" in str(event["message"]) for event in events)
    assert [row["task"]["idx"] for row in rows(result.path)] == [0, 1]


# -- what goes wrong ------------------------------------------------------------------------------------------


class Bad(SumTask):
    @reward
    def broken(self) -> float:
        if self.data.idx == 0:
            raise KeyError("gold")
        return float("nan") if self.data.idx == 1 else 1.0

    @reward
    async def curious(self, oracle: object) -> float:
        return 1.0


class BadTaskset(TenSumsTaskset):
    def load(self) -> list[SumTask]:
        return [Bad(task.data) for task in super().load()]


async def test_a_reward_that_fails_is_an_error_that_names_it_and_the_run_goes_on(out: Path) -> None:
    result = await evaluate(BadTaskset, model=Adder(), num_tasks=3, concurrency=1, output_dir=out)
    messages = [[error["message"] for error in row["errors"]] for row in rows(result.path)]
    asked = "reward 'curious' asks for 'oracle', and there is only messages, sandbox, state, task, trace"
    assert messages == [
        ["reward 'broken' failed: KeyError: 'gold'", asked],
        ["reward 'broken' returned nan; a finite number is needed", asked],
        [asked],
    ]
    assert {row["state"] for row in rows(result.path)} == {"failed"}
    assert all("reward" not in row for row in rows(result.path))
    assert result.reward is None
    assert not result.complete
    assert result.summary["outcomes"]["failed"] == 3
    assert result.summary["errors"]["RewardError"]["count"] == 3


async def test_what_a_run_of_failing_tasks_met_is_not_held_against_the_model(out: Path) -> None:
    result = await evaluate(BadTaskset, model=Adder(), num_tasks=10, num_rollouts=4, output_dir=out)
    assert len(rows(result.path)) == 40


async def test_a_run_whose_model_fails_gives_up_and_can_be_resumed(out: Path) -> None:
    def refuse(request: Request) -> str:
        raise TransientModelError("the endpoint is away")

    evaluation = Evaluation(
        SumsTaskset, model=ScriptedModel(refuse), num_tasks=100, concurrency=1, output_dir=out
    )
    with pytest.raises(
        RunAbortedError, match="gave up after 20 of 20 rollouts failed; the first was Transient"
    ):
        await evaluation.run()
    assert evaluation.path is not None
    model = Adder()
    result = await Evaluation.resume(evaluation.path, model=renamed(model, "scripted")).run()
    assert model.calls == 100
    assert result.reward == 1.0
    assert len(rows(result.path)) == 100
    assert len(rows(result.path, "attempts.jsonl")) == 20


def renamed(model: ScriptedModel, name: str) -> ScriptedModel:
    model._name = name
    return model


class GarbageTaskset(Taskset[SumTask]):
    def load(self):  # type: ignore[no-untyped-def]
        yield SumTask(SumData(idx=0, prompt="1+1=", answer=2))
        yield {"prompt": "not a task"}


class LateTaskset(Taskset[SumTask]):
    def load(self):  # type: ignore[no-untyped-def]
        for n in range(5):
            yield SumTask(SumData(idx=n, prompt=f"{n}+1=", answer=n + 1))
        raise OSError("the disk of the dataset is gone")


@pytest.mark.parametrize(
    ("taskset", "message", "done"),
    [
        (GarbageTaskset, "taskset 'garbage' gave a dict as its task 1, not a Task", 1),
        (LateTaskset, "taskset 'late' failed at its task 5: OSError: the disk of the dataset is gone", 5),
    ],
)
async def test_a_taskset_that_fails_ends_the_run_and_keeps_what_was_done(
    out: Path, taskset: type[Taskset[SumTask]], message: str, done: int
) -> None:
    evaluation = Evaluation(taskset, model=Adder(), concurrency=1, output_dir=out)
    with pytest.raises(TasksetError, match=message):
        await evaluation.run()
    assert evaluation.path is not None
    assert len(rows(evaluation.path)) == done


# -- limits ---------------------------------------------------------------------------------------------------


class Chat(Task[TaskData]):
    """A user who never has enough."""

    def user(self, state: dict[str, int]) -> str:
        state["said"] = state.get("said", 0) + 1
        return f"{state['said']}+1="

    @reward
    def turns(self, trace) -> int:  # type: ignore[no-untyped-def]
        return sum(1 for message in trace.messages if message.role == "assistant")


class ChatTaskset(Taskset[Chat]):
    def load(self) -> list[Chat]:
        return [Chat(TaskData(idx=n)) for n in range(3)]


async def test_a_rollout_that_reaches_a_limit_is_scored(out: Path) -> None:
    result = await evaluate(ChatTaskset, model=Adder(), num_tasks=1, limits={"max_turns": 4}, output_dir=out)
    (row,) = rows(result.path)
    assert (row["state"], row["stop_reason"], row["reward"]) == ("partial", "max_turns", 4.0)
    assert row["task_state"] == {"said": 5}
    assert result.complete


async def test_a_rollout_that_takes_too_long_is_cut_short_and_scored(out: Path) -> None:
    asked = 0

    async def answer(request: Request) -> str:
        nonlocal asked
        asked += 1
        if asked > 2:
            await asyncio.Event().wait()
        return adder(request)

    result = await evaluate(
        ChatTaskset, model=ScriptedModel(answer), num_tasks=1, limits={"max_seconds": 0.2}, output_dir=out
    )
    (row,) = rows(result.path)
    assert (row["state"], row["stop_reason"], row["reward"]) == ("partial", "max_seconds", 2.0)


async def test_a_run_that_reaches_its_limit_scores_what_it_has_and_is_not_complete(out: Path) -> None:
    result = await evaluate(
        ChatTaskset,
        model=Adder(),
        concurrency=1,
        limits={"max_turns": 4},
        run_limits={"max_turns": 6},
        output_dir=out,
    )
    assert [(row["stop_reason"], row["reward"]) for row in rows(result.path)] == [
        ("max_turns", 4.0),
        ("run_max_turns", 2.0),
    ]
    assert not result.complete
    assert result.summary["outcomes"]["missing"] == 1


class Stopped(Chat):
    @stop
    def enough(self, state: dict[str, int]) -> bool:
        return state["said"] == 3


class StoppedTaskset(ChatTaskset):
    def load(self) -> list[Chat]:
        return [Stopped(TaskData(idx=0))]


async def test_a_stop_condition_ends_the_conversation_as_completed(out: Path) -> None:
    result = await evaluate(StoppedTaskset, model=Adder(), output_dir=out)
    (row,) = rows(result.path)
    assert (row["state"], row["stop_reason"], row["reward"]) == ("completed", "enough", 3.0)


# -- resume ---------------------------------------------------------------------------------------------------


async def interrupted(evaluation: Evaluation, after: int) -> Path:
    """Cancel a run when its `after`-th row is on disk."""
    enough = asyncio.Event()
    work = asyncio.ensure_future(evaluation.run())
    listen = evaluation.progress._on_event

    def on_event(event):  # type: ignore[no-untyped-def]
        if listen is not None:
            listen(event)
        if event["event"] == "recorded" and evaluation.progress.finished >= after:
            enough.set()

    evaluation.progress._on_event = on_event
    waiting = asyncio.ensure_future(enough.wait())
    await asyncio.wait([waiting, work], return_when=asyncio.FIRST_COMPLETED)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert evaluation.path is not None
    return evaluation.path


@pytest.mark.parametrize("taskset", [SumsTaskset, RankedTaskset])
async def test_interrupted_twice_nothing_is_lost_or_run_again(out: Path, taskset: type[SumsTaskset]) -> None:
    model = Adder(latency=0.001)
    first = Evaluation(
        taskset, model=model, num_tasks=30, num_rollouts=3, concurrency=5, sync="none", output_dir=out
    )
    path = await interrupted(first, 20)
    before = {row["id"] for row in rows(path) if row["state"] == "completed"}
    assert 20 <= len(before) < 90
    await interrupted(Evaluation.resume(path, model=model), 20)
    between = {row["id"] for row in rows(path) if row["state"] == "completed"}
    assert before < between
    result = await Evaluation.resume(path, model=model).run()
    assert result.complete
    stored = rows(path)
    assert len(stored) == len({row["id"] for row in stored}) == 90
    # What was under way when it was cancelled had no answer yet, and nothing that had one was asked again.
    answered = [call for row in stored for call in row["calls"]]
    assert len(answered) == 90
    assert model.calls <= 90 + 2 * 5
    expected = 1.0 if taskset is SumsTaskset else 1.5
    assert result.reward == expected


async def test_a_larger_number_of_tasks_or_rollouts_extends_the_run(out: Path) -> None:
    model = Adder()
    result = await evaluate(SumsTaskset, model=model, num_tasks=3, output_dir=out)
    await Evaluation.resume(result.path, model=model, num_tasks=5).run()
    assert model.calls == 5
    extended = await Evaluation.resume(result.path, model=model, num_rollouts=2).run()
    assert model.calls == 10
    assert len(rows(result.path)) == 10
    assert extended.summary["outcomes"]["completed"] == 10
    with pytest.raises(RunChangedError, match="num_tasks=5, now 4: a resume can extend a run"):
        await Evaluation.resume(result.path, model=model, num_tasks=4).run()


async def test_groups_are_made_anew_when_they_grow(out: Path) -> None:
    model = Adder()
    result = await evaluate(RankedTaskset, model=model, num_tasks=2, num_rollouts=2, output_dir=out)
    assert sorted(row["rewards"]["rank"] for row in rows(result.path)) == [0.0, 0.0, 1.0, 1.0]
    await Evaluation.resume(result.path, model=model, num_rollouts=3).run()
    assert sorted(row["rewards"]["rank"] for row in rows(result.path)) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert len(rows(result.path, "attempts.jsonl")) == 4


async def test_a_resume_with_other_settings_is_refused_with_the_difference(out: Path) -> None:
    model = Adder()
    result = await evaluate(SumsTaskset, model=model, num_tasks=3, output_dir=out)
    with pytest.raises(RunChangedError, match=r"sampling\.temperature: stored None, now 0\.5"):
        await Evaluation.resume(result.path, model=model, sampling={"temperature": 0.5}).run()
    with pytest.raises(RunChangedError, match=r"taskset\.start: stored 0, now 4"):
        await Evaluation.resume(result.path, taskset=SumsTaskset(start=4), model=model).run()
    await Evaluation.resume(result.path, model=model, concurrency=2, call_timeout=5.0).run()
    assert model.calls == 3


async def test_two_processes_can_not_work_on_one_run(out: Path) -> None:
    model = Adder(latency=0.01)
    first = Evaluation(SumsTaskset, model=model, num_tasks=20, concurrency=2, output_dir=out)
    work = asyncio.ensure_future(first.run())
    while first.path is None or not (first.path / "traces.jsonl").exists():
        await asyncio.sleep(0.01)
    with pytest.raises(RunLockedError):
        await Evaluation.resume(first.path, model=model).run()
    await work


async def test_failed_calls_of_a_rollout_are_replayed_and_not_billed_twice(out: Path) -> None:
    class Flaky(Chat):
        broken = True

        @reward
        def moody(self) -> float:
            if type(self).broken:
                raise RuntimeError("not today")
            return 1.0

    class FlakyTaskset(Taskset[Flaky]):
        def load(self) -> list[Flaky]:
            return [Flaky(TaskData(idx=0))]

    model = Adder()
    result = await evaluate(FlakyTaskset(), model=model, limits={"max_turns": 3}, output_dir=out)
    assert not result.complete
    assert model.calls == 3
    Flaky.broken = False
    again = await Evaluation.resume(result.path, taskset=FlakyTaskset(), model=model).run()
    assert again.complete
    assert model.calls == 3
    (row,) = rows(result.path)
    assert (row["attempt"], row["billed_before"], row["reward"]) == (2, 3, 4.0)
    assert again.summary["calls"] == 3


async def test_no_process_is_started_where_no_tool_asks_for_one(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "posix_spawn", refuse)
    monkeypatch.setattr(os, "fork", refuse)

    class Armed(SumTask):
        def tools(self) -> list[str]:
            return ["terminal", "file"]

    class ArmedTaskset(SumsTaskset):
        task_class = Armed

    result = await evaluate(ArmedTaskset, model=Adder(), num_tasks=3, output_dir=out)
    assert result.complete


async def test_tasks_that_ask_the_same_are_counted_and_not_merged(out: Path) -> None:
    class TwinsTaskset(Taskset[SumTask]):
        def load(self) -> list[SumTask]:
            return [SumTask(SumData(idx=n, prompt="1+1=", answer=2)) for n in range(3)]

    model = Adder()
    result = await evaluate(TwinsTaskset(), model=model, num_tasks=2, output_dir=out)
    assert model.calls == 2
    await Evaluation.resume(result.path, taskset=TwinsTaskset(), model=model, num_tasks=3).run()
    assert model.calls == 3
    assert len({row["id"] for row in rows(result.path)}) == 3


async def test_what_is_stored_of_tasks_that_are_gone_is_kept_and_counted(out: Path) -> None:
    model = Adder()
    result = await evaluate(SumsTaskset, model=model, num_tasks=3, output_dir=out)

    class Changed(SumsTaskset):
        def load(self):  # type: ignore[no-untyped-def]
            for task in super().load():
                yield SumTask(task.data.model_copy(update={"prompt": "0+" + task.data.prompt[:-3] + "1="}))

    events: list[dict[str, object]] = []
    resumed = Evaluation.resume(
        result.path,
        taskset=Changed(),
        model=model,
        num_tasks=3,
        num_rollouts=2,
        concurrency=1,
        on_event=lambda event: events.append(dict(event)),
    )
    again = await resumed.run()
    assert again.summary["surplus"] == 3
    assert len(rows(result.path)) == 9
    assert again.summary["planned"] == again.summary["outcomes"]["completed"] == 6
    assert again.summary["reward"]["scored"] == 6
    assert again.summary["calls"] == 9
    assert (resumed.progress.total, resumed.progress.reused, resumed.progress.finished) == (6, 0, 6)
    kinds = [event["event"] for event in events]
    told = [event["message"] for event in events if event["event"] == "warning"]
    assert [text for text in told if "tasks that the taskset no longer gives" in str(text)] == told[-1:]
    assert kinds.index("warning") < kinds.index("recorded")
    found = status_of(result.path)
    assert found.done
    assert found.summary == again.summary


async def test_a_surplus_that_only_the_end_tells_is_warned_of_then(out: Path) -> None:
    class Shrinking(Taskset[SumTask]):
        size = 3

        def load(self):  # type: ignore[no-untyped-def]
            for n in range(type(self).size):
                yield SumTask(SumData(idx=n, prompt=f"{n}+1=", answer=n + 1))

    result = await evaluate(Shrinking, model=Adder(), output_dir=out)
    Shrinking.size = 2
    events: list[dict[str, object]] = []
    again = Evaluation.resume(
        result.path, taskset=Shrinking(), model=Adder(), on_event=lambda event: events.append(dict(event))
    )
    summary = (await again.run()).summary
    assert "the taskset no longer gives" in str([event for event in events if event["event"] == "warning"])
    assert (summary["planned"], summary["outcomes"]["completed"], summary["surplus"]) == (2, 2, 1)
    assert (again.progress.total, again.progress.reused) == (2, 2)


async def test_a_resume_with_other_scoring_is_warned_of(out: Path) -> None:
    class Heavier(SumTask):
        @reward(weight=2.0)
        def right(self, trace) -> float:  # type: ignore[no-untyped-def]
            return 1.0

    class Sums(SumsTaskset):
        pass

    events: list[dict[str, object]] = []

    async def resumed() -> str:
        events.clear()
        await Evaluation.resume(
            result.path,
            taskset=Sums(),
            model=Adder(),
            num_tasks=3,
            on_event=lambda event: events.append(dict(event)),
        ).run()
        return str([event for event in events if event["event"] == "warning"])

    result = await evaluate(Sums, model=Adder(), num_tasks=2, output_dir=out)
    assert await resumed() == "[]"
    Sums.task_class = Heavier
    warned = await resumed()
    assert "code changed since this run began" in warned
    assert f"taskmill replay {result.path}" in warned
    Sums.task_class = SumTask
    assert await resumed() == "[]"


def test_the_source_of_a_taskset_is_part_of_its_scoring(tmp_path: Path) -> None:
    def scoring(folder: str, source: str) -> str:
        file = tmp_path / folder / "mine.py"
        file.parent.mkdir()
        file.write_text(source)
        taskset = find_taskset(str(file))()
        return scoring_of(taskset, taskset.select(1)[0])

    source = (
        "from taskmill.tasks import Task, TaskData, Taskset, reward\n"
        "class MyTask(Task[TaskData]):\n"
        "    @reward\n"
        "    def right(self) -> float:\n"
        "        return 1.0\n"
        "class MyTaskset(Taskset[MyTask]):\n"
        "    def load(self):\n"
        "        return [MyTask(TaskData(idx=0))]\n"
    )
    assert scoring("a", source) == scoring("b", source) != scoring("c", source.replace("1.0", "0.5"))


async def test_what_a_taskset_lacks_is_found_before_a_directory_is_made(out: Path) -> None:
    class Lacking(TenSumsTaskset):
        needs = ("json", "no_such_package_at_all")

    class Importing(Taskset[SumTask]):
        def load(self):  # type: ignore[no-untyped-def]
            import no_such_package_at_all  # type: ignore[import-not-found]

            yield no_such_package_at_all.task

    for taskset in (Lacking, Importing):
        with pytest.raises(TasksetError, match="needs the package 'no_such_package_at_all'"):
            await evaluate(taskset, model=Adder(), output_dir=out)
        with pytest.raises(TasksetError, match="needs the package 'no_such_package_at_all'"):
            await validate(taskset, output_dir=out)
    assert not out.exists()


@pytest.mark.parametrize(
    "damage",
    [
        {"number": -1},
        {"number": 10**12},
        {"number": 1},
        {"reward": "1.0"},
        {"messages": [{"role": "user", "content": None}]},
    ],
)
async def test_a_row_that_is_damaged_by_hand_is_made_anew(out: Path, damage: dict[str, object]) -> None:
    model = Adder()
    result = await evaluate(SumsTaskset, model=model, num_tasks=2, concurrency=1, output_dir=out)
    first, second = rows(result.path)
    lines = [json.dumps(first | damage), json.dumps(second)]
    (result.path / "traces.jsonl").write_text("".join(line + "\n" for line in lines))
    again = await Evaluation.resume(result.path, model=model).run()
    assert model.calls == 3
    assert again.complete
    assert again.summary["outcomes"]["completed"] == 2


async def test_a_link_in_the_place_of_the_traces_is_refused(out: Path, tmp_path: Path) -> None:
    result = await evaluate(SumsTaskset, model=Adder(), num_tasks=1, output_dir=out)
    mine = tmp_path / "mine.txt"
    mine.write_text("dear diary\n")
    (result.path / "traces.jsonl").unlink()
    (result.path / "traces.jsonl").symlink_to(mine)
    with pytest.raises(StoreError, match="is a link"):
        await Evaluation.resume(result.path, model=Adder()).run()
    assert mine.read_text() == "dear diary\n"


async def test_data_that_can_not_be_stored_is_an_error_that_names_the_task(out: Path) -> None:
    class Bytes(TaskData):
        blob: bytes

    class BytesTaskset(Taskset[Task[Bytes]]):
        def load(self) -> list[Task[Bytes]]:
            return [Task(Bytes(idx=n, prompt="1+1=", blob=b"\xff" * n)) for n in range(2)]

    evaluation = Evaluation(BytesTaskset(), model=Adder(), output_dir=out)
    with pytest.raises(TasksetError, match="the data of task 1 can't be stored"):
        await evaluation.run()
