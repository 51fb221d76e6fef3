"""Validation: what makes a task invalid, what is stored, and what a resume looks at again."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from taskmill.errors import ConfigurationError, RunChangedError
from taskmill.evaluation import Evaluation, checks, evaluate
from taskmill.evaluation.checks import Reason, TaskCheck, Tried
from taskmill.evaluation.validation import Validation, ValidationResult, validate
from taskmill.records import Message, ToolCall, Trace
from taskmill.sandbox.base import Sandbox
from taskmill.tasks import JudgeConfig, Task, TaskConfig, Taskset, group_reward, metric, reward
from tests.docpages import ROOT
from tests.evaluate.lab import Adder, SumData, SumsTaskset, SumTask, TenSumsTaskset, rows


def taskset_of(*tasks: Task[Any]) -> Taskset[Any]:
    class Given(Taskset[Any]):
        def load(self) -> list[Task[Any]]:
            return list(tasks)

    return Given()


def a_task(kind: type[Task[Any]], idx: int = 0, **fields: Any) -> Task[Any]:
    return kind(SumData(idx=idx, prompt="1+1=", answer=2, **fields))


async def reasons(tmp_path: Path, *tasks: Task[Any]) -> list[list[tuple[str, str]]]:
    """What is wrong with each of the tasks: kinds and messages."""
    result = await validate(taskset_of(*tasks), output_dir=tmp_path / "runs", concurrency=1)
    return [[(reason.kind, reason.message) for reason in check.reasons] for check in result.checks()]


async def only_reason(tmp_path: Path, task: Task[Any]) -> tuple[str, str]:
    ((found,),) = await reasons(tmp_path, task)
    return found


def read(result: ValidationResult) -> list[dict[str, Any]]:
    return rows(result.path, "validation.jsonl")


# -- what is valid --------------------------------------------------------------------------------------------


async def test_a_sound_taskset_is_valid_and_each_task_is_a_row(tmp_path: Path) -> None:
    result = await validate(TenSumsTaskset, num_tasks=3, output_dir=tmp_path / "runs")
    assert result.valid
    assert sorted((row["idx"], row["state"]) for row in read(result)) == [
        (0, "valid"),
        (1, "valid"),
        (2, "valid"),
    ]
    assert read(result)[0]["reference"]["reward"] == 1.0
    assert read(result)[0]["untouched"]["reward"] == 0.0
    assert result.summary["outcomes"] == {"valid": 3, "invalid": 0, "missing": 0}
    assert msgspec.json.decode((result.path / "summary.json").read_bytes()) == result.summary
    assert {"config.toml", "run.json", "run.log"} <= {path.name for path in result.path.iterdir()}


class Untrue(SumTask):
    def solve(self) -> str:
        return "7"


async def test_a_reference_solution_that_is_not_rewarded(tmp_path: Path) -> None:
    kind, told = await only_reason(tmp_path, a_task(Untrue))
    assert kind == "reference_reward"
    assert told == "its reference solution got 0, and 1 is needed (right 0; answer)"


class Free(SumTask):
    @reward
    def right(self) -> float:
        return 1.0


async def test_a_task_that_is_solved_by_doing_nothing(tmp_path: Path) -> None:
    kind, told = await only_reason(tmp_path, a_task(Free))
    assert kind == "untouched_reward"
    assert told == "is solved by doing nothing: an untouched rollout got 1, and must stay below 1"


class Unsolved(SumTask):
    solve: ClassVar[None] = None  # type: ignore[assignment]


async def test_a_task_without_a_solution_or_a_check_of_its_own(tmp_path: Path) -> None:
    assert await only_reason(tmp_path, a_task(Unsolved)) == ("no_solution", "has no reference solution")


class Checked(Unsolved):
    def validate(self, state: dict[str, Any]) -> bool | None:
        if not state.get("ready"):
            raise ValueError("it was not set up")
        return {1: True, 2: None, 3: False}[self.data.answer]

    def setup(self, state: dict[str, Any]) -> None:
        state["ready"] = self.data.answer < 9


async def test_a_check_of_the_tasks_own_is_called_after_its_setup(tmp_path: Path) -> None:
    tasks = [Checked(SumData(idx=n, prompt="?", answer=n)) for n in (1, 2, 3, 9)]
    assert await reasons(tmp_path, *tasks) == [
        [],
        [],
        [("validate", "TaskError: validate returned False")],
        [("validate", "TaskError: validate failed: ValueError: it was not set up")],
    ]


class Broken(SumTask):
    def solve(self) -> str:
        raise KeyError("gold")


class Mute(SumTask):
    def solve(self) -> int:  # type: ignore[override]
        return 2


class Brittle(SumTask):
    @reward
    def right(self, trace: Trace) -> float:
        return float(int(trace.messages[-1].content) == self.data.answer)


class Curious(SumTask):
    @metric
    def guess(self, oracle: str) -> float:
        return 0.0


class Unready(SumTask):
    def setup(self) -> None:
        raise OSError("no disk")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            Broken,
            ["reference_failed: its reference solution failed: TaskError: solve failed: KeyError: 'gold'"],
        ),
        (
            Mute,
            [
                "reference_failed: its reference solution failed: TaskError: solve said an int; "
                "a text, a Message or None is needed"
            ],
        ),
        (
            Brittle,
            [
                "untouched_failed: an untouched rollout can't be scored: RewardError: reward 'right' failed: "
                "ValueError: invalid literal for int() with base 10: ''"
            ],
        ),
        (
            Unready,
            [
                "reference_failed: its reference solution failed: TaskError: setup failed: OSError: no disk",
                "untouched_failed: an untouched rollout can't be scored: TaskError: setup failed: OSError: no disk",
            ],
        ),
    ],
)
async def test_what_fails_is_named(tmp_path: Path, kind: type[Task[Any]], expected: list[str]) -> None:
    (found,) = await reasons(tmp_path, a_task(kind))
    assert [f"{kind}: {told}" for kind, told in found] == expected


async def test_a_metric_that_fails_makes_a_task_invalid_although_it_is_no_part_of_the_reward(
    tmp_path: Path,
) -> None:
    (found,) = await reasons(tmp_path, a_task(Curious))
    assert [kind for kind, _ in found] == ["reference_failed", "untouched_failed"]
    assert "metric 'guess' asks for 'oracle'" in found[0][1]


# -- solutions of several turns -------------------------------------------------------------------------------


class Talk(SumTask):
    """The user asks twice; the solution answers from what was said, and uses a tool before it does."""

    def user(self, messages: tuple[Message, ...]) -> str | None:
        said = sum(message.role == "user" for message in messages)
        return "and twice that?" if said < 2 else None

    def tools(self) -> list[Callable[..., Any]]:
        def double(number: int) -> int:
            """Double a number."""
            return 2 * number

        return [double]

    async def solve(self, messages: tuple[Message, ...]) -> str | Message:
        if messages[-1].content == "and twice that?":
            return Message("assistant", tool_calls=(ToolCall("1", "double", '{"number": 2}'),))
        return messages[-1].content if messages[-1].role == "tool" else str(self.data.answer)

    @reward
    def right(self, trace: Trace) -> float:
        answers = [message.content for message in trace.messages if message.role == "assistant"]
        return float(answers == ["2", "", "4"])


async def test_a_solution_takes_several_turns_and_calls_tools(tmp_path: Path) -> None:
    result = await validate(taskset_of(a_task(Talk)), output_dir=tmp_path / "runs")
    assert result.valid, list(result.checks())
    assert read(result)[0]["reference"]["turns"] == 3


class Written(SumTask):
    """The answer is a file."""

    async def solve(self, sandbox: Sandbox) -> str | None:
        await sandbox.write_bytes("answer.txt", str(self.data.answer).encode())
        return None

    @reward
    async def right(self, sandbox: Sandbox) -> float:
        found = await sandbox.run("cat answer.txt", timeout=30)
        return float(found.output.strip() == str(self.data.answer))


async def test_a_solution_may_work_in_the_sandbox_and_say_nothing(tmp_path: Path) -> None:
    result = await validate(taskset_of(a_task(Written)), output_dir=tmp_path / "runs", sandbox="plain")
    assert result.valid, list(result.checks())
    assert not (result.path / "workspaces").exists()


# -- judges and groups ----------------------------------------------------------------------------------------


async def test_no_judge_is_asked_and_each_counts_for_the_solution_alone(tmp_path: Path) -> None:
    class Half(SumTask):
        @reward(weight=0.5)
        def right(self, trace: Trace) -> float:
            return float(trace.messages[-1].content == str(self.data.answer))

    config = TaskConfig(judges={"style": JudgeConfig(weight=0.5)})
    data = SumData(idx=0, prompt="1+1=", answer=2)
    assert await reasons(tmp_path, Half(data, config)) == [[]]
    kind, _ = await only_reason(tmp_path, Half(data))
    assert kind == "reference_reward"


class Best(Task[SumData]):
    """The best of the group gets all of it."""

    @group_reward
    def best(self, traces: list[Trace]) -> list[float]:
        return [float(trace.messages[-1].content == str(self.data.answer)) for trace in traces]

    def solve(self) -> str:
        return str(self.data.answer)


class Ranked(SumTask):
    @group_reward
    def bonus(self, traces: list[Trace]) -> list[float]:
        return [-5.0 for _ in traces]


class Short(SumTask):
    @group_reward
    def bonus(self, traces: list[Trace]) -> list[float]:
        return [1.0]


async def test_group_rewards_count_only_where_there_is_no_other_but_must_work(tmp_path: Path) -> None:
    found = await reasons(tmp_path, a_task(Best, 0), a_task(Ranked, 1), a_task(Short, 2))
    assert found == [
        [],
        [],
        [
            (
                "group_reward",
                "GroupRewardError: group reward 'bonus' returned 1 numbers for 2 rollouts; one for each is needed",
            )
        ],
    ]


# -- runs -----------------------------------------------------------------------------------------------------


class Moody(SumTask):
    """Solved as told. `tried` is what was solved, `wrong` what is answered wrongly."""

    tried: ClassVar[list[int]] = []
    wrong: ClassVar[set[int]] = set()

    def solve(self) -> str:
        self.tried.append(self.data.idx)
        return "no" if self.data.idx in self.wrong else str(self.data.answer)


class MoodyTaskset(SumsTaskset):
    task_class = Moody


@pytest.fixture
def moody() -> type[Moody]:
    Moody.tried.clear()
    Moody.wrong = {1, 3}
    return Moody


async def test_a_resume_looks_again_at_what_was_invalid_and_at_nothing_else(
    tmp_path: Path, moody: type[Moody]
) -> None:
    first = await validate(MoodyTaskset, num_tasks=5, output_dir=tmp_path)
    assert first.summary["outcomes"] == {"valid": 3, "invalid": 2, "missing": 0}
    assert not first.valid
    assert sorted(check.idx for check in first.failures()) == [1, 3]

    moody.tried.clear()
    moody.wrong = {3}
    again = await Validation.resume(first.path, taskset=MoodyTaskset, num_tasks=6).run()
    assert again.path == first.path
    assert sorted(moody.tried) == [1, 3, 5]
    assert again.summary["outcomes"] == {"valid": 5, "invalid": 1, "missing": 0}
    assert again.summary["reasons"] == {"reference_reward": 1}
    assert sorted((row["idx"], row.get("attempt", 1)) for row in read(again)) == [
        (0, 1),
        (1, 2),
        (2, 1),
        (3, 2),
        (4, 1),
        (5, 1),
    ]
    assert sorted(row["idx"] for row in rows(again.path, "attempts.jsonl")) == [1, 3]


async def test_a_cancelled_validation_keeps_what_it_found(tmp_path: Path) -> None:
    held = asyncio.Event()
    reached = asyncio.Event()

    class Held(SumTask):
        async def solve(self) -> str:  # type: ignore[override]
            if self.data.idx == 2:
                reached.set()
                await held.wait()
            return str(self.data.answer)

    class HeldTaskset(SumsTaskset):
        task_class = Held

    validation = Validation(HeldTaskset, num_tasks=4, concurrency=1, output_dir=tmp_path)
    running = asyncio.ensure_future(validation.run())
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert validation.path is not None
    assert [row["idx"] for row in rows(validation.path, "validation.jsonl")] == [0, 1]
    summary = msgspec.json.decode((validation.path / "summary.json").read_bytes())
    assert summary["outcome"] == "cancelled"
    assert summary["outcomes"] == {"valid": 2, "invalid": 0, "missing": 2}

    held.set()
    result = await Validation.resume(validation.path, taskset=HeldTaskset).run()
    assert result.summary["outcomes"] == {"valid": 4, "invalid": 0, "missing": 0}
    assert sorted(row["idx"] for row in read(result)) == [0, 1, 2, 3]


async def test_a_resume_that_is_itself_interrupted_loses_nothing(tmp_path: Path, moody: type[Moody]) -> None:
    first = await validate(MoodyTaskset, num_tasks=5, output_dir=tmp_path)
    moody.wrong = set()
    reached, held = asyncio.Event(), asyncio.Event()

    class Held(Moody):
        async def solve(self) -> str:  # type: ignore[override]
            if self.data.idx == 3:
                reached.set()
                await held.wait()
            return super().solve()

    class HeldTaskset(MoodyTaskset):
        task_class = Held

    resumed = asyncio.ensure_future(Validation.resume(first.path, taskset=HeldTaskset, concurrency=1).run())
    await reached.wait()
    resumed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resumed
    assert sorted(row["idx"] for row in rows(first.path, "validation.jsonl")) == [0, 1, 2, 4]

    moody.tried.clear()
    last = await Validation.resume(first.path, taskset=MoodyTaskset).run()
    assert moody.tried == [3]
    assert last.summary["outcomes"] == {"valid": 5, "invalid": 0, "missing": 0}


async def test_no_more_tasks_are_built_than_there_are_places_for(tmp_path: Path) -> None:
    most = 0
    under_way = itertools.count()
    ended = itertools.count()

    class Counted(SumTask):
        def solve(self) -> str:
            next(ended)
            return str(self.data.answer)

    class CountedTaskset(SumsTaskset):
        def load(self) -> Iterator[SumTask]:
            nonlocal most
            for idx in itertools.count():
                built = next(under_way)
                done = int(repr(ended).removeprefix("count(").removesuffix(")"))
                most = max(most, built - done)
                yield Counted(SumData(idx=idx, prompt="?", answer=1))

    result = await validate(CountedTaskset, num_tasks=40, concurrency=3, output_dir=tmp_path)
    assert result.valid
    assert int(repr(under_way).removeprefix("count(").removesuffix(")")) == 40
    assert most <= 4


def test_what_cannot_be_meant_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as infinite:
        Validation(SumsTaskset, output_dir=tmp_path / "runs")
    assert str(infinite.value) == (
        "SumsTaskset is infinite - select a bounded subset with num_tasks (-n on the CLI)"
    )
    with pytest.raises(ConfigurationError, match=r"num_tasks=0: Input should be greater than or equal to 1"):
        Validation(TenSumsTaskset, num_tasks=0, output_dir=tmp_path / "runs")
    with pytest.raises(
        ConfigurationError, match=r"unknown field 'pass_rewards'; did you mean 'pass_reward'\?"
    ):
        Validation(TenSumsTaskset, pass_rewards=1, output_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


async def test_runs_of_another_kind_and_other_settings_are_refused_on_resume(tmp_path: Path) -> None:
    evaluated = await evaluate(TenSumsTaskset, model=Adder(), num_tasks=1, output_dir=tmp_path)
    with pytest.raises(
        ConfigurationError, match="is of another kind: name a directory of `taskmill validate`"
    ):
        Validation.resume(evaluated.path)
    with pytest.raises(ConfigurationError, match="name a directory of `taskmill eval`"):
        Evaluation.resume((await validate(TenSumsTaskset, num_tasks=1, output_dir=tmp_path)).path)
    validated = await validate(TenSumsTaskset, num_tasks=2, output_dir=tmp_path)
    with pytest.raises(RunChangedError, match=r"pass_reward: stored 1\.0, now 0\.5"):
        await Validation.resume(validated.path, pass_reward=0.5).run()
    with pytest.raises(RunChangedError, match="num_tasks=2, now 1"):
        await Validation.resume(validated.path, num_tasks=1).run()


# -- the documentation ----------------------------------------------------------------------------------------


def test_every_field_of_a_row_and_every_kind_of_reason_is_listed() -> None:
    page = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    section = page.partition("## Validation\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    fields = {name for kind in (TaskCheck, Tried, Reason) for name in kind.__struct_fields__}
    kinds = set(re.findall(r'Reason\(\s*"(\w+)"', Path(checks.__file__).read_text(encoding="utf-8")))
    assert len(kinds) == 8
    assert fields | kinds <= named
