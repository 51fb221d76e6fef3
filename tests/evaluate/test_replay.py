"""Replay: stored traces scored by today's rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from taskmill.errors import BadRequestError, ConfigurationError, RunNotFoundError
from taskmill.evaluation import EvalResult, Evaluation, evaluate
from taskmill.evaluation.replaying import Replay, replay
from taskmill.evaluation.validation import validate
from taskmill.models.base import Request
from taskmill.models.scripted import ScriptedModel
from taskmill.records import Trace
from taskmill.sandbox.base import Sandbox
from taskmill.tasks import JudgeConfig, TaskConfig, group_reward, metric, reward
from tests.evaluate.lab import Adder, SumData, SumsTaskset, SumTask, TenSumsTaskset, adder, rows


class Today(SumTask):
    """What is rewarded now is the length; it used to be the answer."""

    @reward(weight=2.0)
    def right(self, trace: Trace) -> float:
        return float(len(trace.messages[-1].content))

    @metric
    def turns(self, messages: Any) -> int:
        return len(messages)

    length = None  # type: ignore[assignment]


class TodaySums(SumsTaskset):
    name = "sums"
    task_class = Today


def traces(result: EvalResult) -> dict[str, Trace]:
    return {trace.id: trace for trace in result.traces()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "runs"


async def run(out: Path, kind: type[SumsTaskset] = SumsTaskset, **options: Any) -> EvalResult:
    options = {"model": Adder(), "num_tasks": 3} | options
    return await evaluate(kind, output_dir=out, **options)


async def test_traces_get_todays_rewards_in_a_new_run_and_the_old_one_stays_as_it_was(out: Path) -> None:
    old = await run(out, num_rollouts=2)
    before = {path.name: path.read_bytes() for path in old.path.iterdir() if path.is_file()}
    new = await replay(old.path, taskset=TodaySums)

    assert new.path != old.path
    assert new.path.parent.samefile(old.path.parent)
    assert {path.name: path.read_bytes() for path in old.path.iterdir() if path.is_file()} == before
    stored = msgspec.json.decode((new.path / "run.json").read_bytes())["config"]
    assert stored["replay_of"] == old.path.name
    assert stored["model"] == "adder"
    had, got = traces(old), traces(new)
    assert had.keys() == got.keys()
    for id, trace in got.items():
        assert trace.messages == had[id].messages
        assert trace.calls == had[id].calls
        assert (trace.number, trace.stop_reason, trace.state) == (had[id].number, "answer", "completed")
        assert trace.rewards == {"right": len(trace.messages[-1].content)}
        assert trace.reward == 2.0 * len(trace.messages[-1].content)
        assert trace.metrics == {"turns": 2}
    assert new.summary["reward"]["mean"] == 2.0
    assert new.complete


async def test_nothing_is_paid_for(out: Path) -> None:
    old = await run(out)
    new = await replay(old.path, taskset=SumsTaskset())
    assert old.summary["calls"] == 3
    assert new.summary["calls"] == 0
    assert new.summary["reward"] == old.summary["reward"]


async def test_a_rollout_that_only_could_not_be_scored_is_scored_now(out: Path) -> None:
    class Broken(SumTask):
        @reward
        def right(self) -> float:
            raise KeyError("gold")

    class BrokenSums(SumsTaskset):
        task_class = Broken

    old = await run(out, BrokenSums)
    assert old.summary["outcomes"]["failed"] == 3
    new = await replay(old.path, taskset=SumsTaskset())
    assert new.summary["reward"]["mean"] == 1.0
    for trace in new.traces():
        assert (trace.state, trace.stop_reason, trace.errors) == ("completed", "answer", ())
    again = await replay(new.path, taskset=BrokenSums())
    assert again.summary["errors"]["RewardError"]["count"] == 3
    assert not again.complete


async def test_a_limit_is_still_the_ending_of_a_rollout_that_failed_to_be_scored(out: Path) -> None:
    class Chatty(SumTask):
        broken: ClassVar[bool] = True

        def user(self) -> str:
            return "1+1="

        @reward
        def right(self) -> float:
            if self.broken:
                raise KeyError("gold")
            return 0.5

    class ChattySums(SumsTaskset):
        task_class = Chatty

    old = await run(out, ChattySums, limits={"max_turns": 2})
    Chatty.broken = False
    new = await replay(old.path, taskset=ChattySums())
    assert [(t.state, t.stop_reason, t.reward) for t in new.traces()] == [("partial", "max_turns", 0.5)] * 3


async def test_a_rollout_whose_model_failed_stays_as_it_is(out: Path) -> None:
    def script(request: Request) -> Any:
        if request.messages[-1].content == "1+1=":
            raise BadRequestError("no")
        return adder(request)

    old = await run(out, model=ScriptedModel(script))
    new = await replay(old.path, taskset=TodaySums)
    (failed,) = [trace for trace in new.traces() if trace.state == "failed"]
    assert failed == traces(old)[failed.id]
    assert new.summary["outcomes"]["completed"] == 2
    assert not new.complete


async def test_a_reward_that_needs_the_sandbox_is_an_error_that_names_it(out: Path) -> None:
    class Boxed(SumTask):
        @reward
        async def right(self, sandbox: Sandbox) -> float:
            return float(await sandbox.read_bytes("answer") == b"2")

    class BoxedSums(SumsTaskset):
        task_class = Boxed

    new = await replay((await run(out)).path, taskset=BoxedSums)
    messages = {trace.errors[-1].message for trace in new.traces()}
    assert messages == {"reward 'right' failed: its sandbox is gone: a stored trace is scored without one"}
    assert new.summary["errors"]["RewardError"]["count"] == 3


async def test_state_is_there_again(out: Path) -> None:
    class Kept(SumTask):
        def finalize(self, state: dict[str, Any]) -> None:
            state["found"] = {"a": [1, 2]}
            state["_open"] = object()

        @reward
        def right(self, state: dict[str, Any]) -> float:
            return float(sum(state["found"]["a"]))

    class KeptSums(SumsTaskset):
        task_class = Kept

    old = await run(out, KeptSums)
    new = await replay(old.path, taskset=KeptSums)
    assert [trace.reward for trace in new.traces()] == [3.0] * 3
    assert all(trace.task_state == {"found": {"a": [1, 2]}} for trace in new.traces())


async def test_tasks_that_are_gone_or_others_are_errors_and_counted(out: Path) -> None:
    old = await run(out, num_tasks=12)
    new = await replay(old.path, taskset=TenSumsTaskset)
    lost = {trace.task["idx"]: trace.errors[-1].message for trace in new.traces() if trace.state == "failed"}
    assert lost == {n: f"the taskset has no task {n} any more" for n in (10, 11)}
    assert new.summary["errors"]["TasksetError"]["count"] == 2
    assert new.summary["reward"]["scored"] == 10

    other = await replay(old.path, taskset=SumsTaskset(start=1))
    assert {trace.errors[-1].message for trace in other.traces() if trace.task["idx"] == 4} == {
        "task 4 of the taskset is another one than it was"
    }
    assert other.summary["outcomes"]["failed"] == 12


async def test_tasks_are_built_up_to_the_last_one_that_is_needed(out: Path) -> None:
    old = await run(out, num_tasks=5)
    SumsTaskset.built = 0
    await replay(old.path, taskset=SumsTaskset)
    assert SumsTaskset.built == 5


class Ranked(SumTask):
    better: ClassVar[float] = 1.0

    @group_reward(weight=0.5)
    def rank(self, traces: list[Trace]) -> list[float]:
        return [self.better * trace.number for trace in traces]


class RankedSums(SumsTaskset):
    task_class = Ranked


async def test_group_rewards_are_given_to_the_whole_group(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = await run(out, RankedSums, num_tasks=2, num_rollouts=3)
    monkeypatch.setattr(Ranked, "better", 4.0)
    new = await replay(old.path, taskset=RankedSums)
    by_number = sorted(
        (t.task["idx"], t.number, t.rewards["rank"], t.reward, t.group_size) for t in new.traces()
    )
    assert by_number == [(idx, n, 4.0 * n, 1.0 + 2.0 * n, 3) for idx in (0, 1) for n in range(3)]


async def test_a_group_that_is_not_whole_is_an_error(out: Path) -> None:
    old = await run(out, RankedSums, num_tasks=1, num_rollouts=3)
    file = old.path / "traces.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))
    new = await replay(old.path, taskset=RankedSums)
    assert {trace.errors[-1].message for trace in new.traces()} == {
        "the group rewards can't be given: there are 2 of 3 rollouts of the task"
    }


async def test_judges_keep_their_grades_and_are_not_asked(out: Path) -> None:
    grader = ScriptedModel(lambda request: "Good.\nGRADE: 0.5", name="grader")

    class Judged(SumsTaskset):
        def load(self) -> Iterator[SumTask]:
            yield SumTask(SumData(idx=0, prompt="1+1=", answer=2), self.config.task)

    judges = {"style": JudgeConfig(model=grader, weight=2.0)}
    old = await evaluate(Judged(task=TaskConfig(judges=judges)), model=Adder(), num_tasks=1, output_dir=out)
    assert (old.reward, grader.calls) == (2.0, 1)

    heavier = {"style": JudgeConfig(model=grader, weight=4.0)}
    new = await replay(old.path, taskset=Judged(task=TaskConfig(judges=heavier)))
    assert (new.reward, grader.calls) == (3.0, 1)
    assert new.summary["calls"] == 0

    added = {**judges, "tone": JudgeConfig(model=grader)}
    lacking = await replay(old.path, taskset=Judged(task=TaskConfig(judges=added)))
    (trace,) = lacking.traces()
    assert trace.errors[-1].message == (
        "judge 'tone' gave no grade when the trace was made, and is not asked now"
    )
    assert grader.calls == 1


async def test_what_is_no_run_with_traces_is_refused(out: Path) -> None:
    with pytest.raises(RunNotFoundError):
        Replay(out / "nowhere")
    validated = await validate(TenSumsTaskset, num_tasks=1, output_dir=out)
    with pytest.raises(ConfigurationError, match="name a directory of `taskmill eval`"):
        Replay(validated.path)
    replayed = await replay((await run(out)).path, taskset=SumsTaskset)
    with pytest.raises(ConfigurationError, match="name a directory of `taskmill eval`"):
        Evaluation.resume(replayed.path)


async def test_a_damaged_line_is_passed_over(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = await run(out)
    file = old.path / "traces.jsonl"
    kept = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(kept[0] + b'{"id": 3}\n' + b"".join(kept[1:]))
    new = await replay(old.path, taskset=SumsTaskset)
    assert len(rows(new.path)) == 3
    assert "1 lines of traces.jsonl can't be read" in caplog.text
