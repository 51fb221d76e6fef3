"""One rollout of a task: its parts, its scoring, and the record of what went wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from taskmill.errors import BadRequestError, ConfigurationError, TaskError
from taskmill.models.base import Model, Request, Sampling
from taskmill.models.scripted import ScriptedModel
from taskmill.records import Message, ToolCall, Trace
from taskmill.sandbox.choose import open_sandboxes
from taskmill.store.jsonl import encode_row
from taskmill.tasks import JudgeConfig, Task, TaskConfig, TaskData, group_reward, metric, reward, stop
from taskmill.tasks.groups import score_group
from taskmill.tasks.judge import grade_in
from taskmill.tasks.rollout import RolloutSettings, TaskRollout
from taskmill.tasks.scoring import scorers


def no_sandbox(rollout_id: str, data: TaskData) -> Any:
    raise AssertionError("nothing asked for a sandbox")


async def roll(task: Task[Any], model: Model | Sequence[Any], **options: Any) -> Trace:
    if isinstance(model, list):
        model = ScriptedModel(model)
    options.setdefault("make_sandbox", no_sandbox)
    rollout = TaskRollout(task, rollout_id="r", model=model, **options)  # type: ignore[arg-type]
    await rollout.run()
    return rollout.trace()


class Scored(Task[TaskData]):
    @reward(weight=2)
    def plain(self, trace: Trace) -> bool:
        return trace.messages[-1].content == "yes"

    @reward
    async def several(self, messages: tuple[Message, ...]) -> dict[str, float]:
        return {"turns": len(messages), "half": 0.5}

    @metric
    def said(self, task: Task[Any]) -> int:
        return task.data.idx


async def test_the_reward_is_the_weighted_sum() -> None:
    trace = await roll(Scored(TaskData(idx=7, prompt="?")), ["yes"])
    assert trace.rewards == {"plain": 1.0, "turns": 2.0, "half": 0.5}
    assert trace.reward == 4.5
    assert trace.metrics == {"said": 7.0}
    assert (trace.state, trace.stop_reason) == ("completed", "answer")
    assert trace.task == {"idx": 7, "prompt": "?"}


def test_an_override_without_a_mark_is_no_reward() -> None:
    class Less(Scored):
        def plain(self, trace: Trace) -> bool:
            return True

        @reward
        def more(self) -> float:
            return 1.0

    assert [scorer.name for scorer in scorers(Less, "reward")] == ["several", "more"]


async def test_parts_run_in_order_and_share_the_state_of_the_rollout() -> None:
    class Parts(Task[TaskData]):
        async def setup(self, state: dict[str, Any]) -> None:
            state["parts"] = ["setup"]
            state["_live"] = threading.Lock()

        def user(self, state: dict[str, Any], messages: Sequence[Message]) -> Any:
            state["parts"].append(f"user {len(messages)}")
            return {1: "one", 3: [Message("user", "two"), "three"], 6: None}[len(messages)]

        def finalize(self, state: dict[str, Any], trace: Trace) -> None:
            state["parts"].append(f"finalize {trace.stop_reason}")
            state["odd"] = {1: {2}}

        @reward
        def counted(self, state: dict[str, Any]) -> int:
            return len(state["parts"])

    trace = await roll(Parts(TaskData(idx=0, system_prompt="be brief")), ["a", "b"])
    assert [message.content for message in trace.messages] == ["be brief", "one", "a", "two", "three", "b"]
    assert trace.task_state["parts"] == ["setup", "user 1", "user 3", "user 6", "finalize answer"]
    assert trace.task_state["odd"] == {"1": [2]}
    assert "_live" not in trace.task_state
    encode_row(trace)
    assert trace.reward == 5


async def test_a_plain_function_stops_nobody_and_has_a_deadline() -> None:
    release = threading.Event()

    class Slow(Task[TaskData]):
        @reward
        def stuck(self) -> float:
            release.wait(60)
            return 1.0

    data = TaskData(idx=0, prompt="?", timeouts={"scoring": 0.05})  # type: ignore[arg-type]
    try:
        trace = await roll(Slow(data), ["yes"])
    finally:
        release.set()
    assert trace.state == "failed"
    assert [error.message for error in trace.errors] == ["reward 'stuck' did not end within 0.05 s"]


@pytest.mark.parametrize("part", ["setup", "user", "finalize", "stopped", "graded"])
async def test_an_error_names_the_function_and_keeps_what_was_had(part: str) -> None:
    def fail(name: str) -> None:
        if name == part:
            raise LookupError("the gold is gone")

    class Fails(Task[TaskData]):
        def setup(self) -> None:
            fail("setup")

        def user(self) -> None:
            fail("user")

        async def finalize(self) -> None:
            fail("finalize")

        @stop
        def stopped(self) -> None:
            fail("stopped")

        @reward
        def graded(self) -> float:
            fail("graded")
            return 1.0

    trace = await roll(Fails(TaskData(idx=0, prompt="?")), ["yes"])
    assert (trace.state, trace.reward) == ("failed", None)
    assert trace.stop_reason == ("answer" if part == "graded" else "error")
    (error,) = trace.errors
    named = {"stopped": "stop condition 'stopped'", "graded": "reward 'graded'"}.get(part, part)
    assert error.message == f"{named} failed: LookupError: the gold is gone"
    assert error.type == ("RewardError" if part == "graded" else "TaskError")
    assert error.traceback is not None
    assert "the gold is gone" in error.traceback
    assert len(trace.messages) == (1 if part == "setup" else 2)


async def test_a_failed_conversation_is_not_scored() -> None:
    trace = await roll(Scored(TaskData(idx=0, prompt="?")), [BadRequestError("no")])
    assert (trace.state, trace.reward, trace.rewards) == ("failed", None, {})


async def test_two_rewards_of_one_name_are_an_error() -> None:
    class Twice(Scored):
        @reward
        def again(self) -> dict[str, float]:
            return {"half": 1.0}

    trace = await roll(Twice(TaskData(idx=0, prompt="?")), ["yes"])
    assert trace.errors[0].message == "reward 'again' returned 'half', and that name is taken by another"


@pytest.mark.parametrize("value", [float("inf"), "1", None, [1.0], {"a": float("nan")}, {1: 1.0}])
async def test_what_is_no_finite_number_is_an_error_and_never_a_zero(value: Any) -> None:
    class Odd(Task[TaskData]):
        @reward
        def odd(self) -> Any:
            return value

    trace = await roll(Odd(TaskData(idx=0, prompt="?")), ["yes"])
    assert trace.state == "failed"
    assert trace.reward is None
    assert "reward 'odd' returned" in trace.errors[0].message
    assert "a finite number is needed" in trace.errors[0].message


def test_a_weight_must_be_a_finite_number() -> None:
    with pytest.raises(TaskError, match="the weight of a reward must be a finite number, not nan"):
        reward(weight=float("nan"))


# -- tools and sandboxes --------------------------------------------------------------------------------------


async def test_tools_and_rewards_see_the_same_workspace(tmp_path: Path) -> None:
    class Files(Task[TaskData]):
        async def setup(self, sandbox: Any) -> None:
            await sandbox.write_bytes("in.txt", b"41")

        def tools(self) -> list[Any]:
            return ["file"]

        @reward
        async def written(self, sandbox: Any) -> float:
            return float(await sandbox.read_bytes("out.txt") == b"42")

    sandboxes = open_sandboxes("auto", directory=tmp_path)
    call = ToolCall("c1", "write_file", '{"path": "out.txt", "content": "42"}')
    answers = [Message("assistant", "", tool_calls=(call,)), "done"]
    trace = await roll(
        Files(TaskData(idx=0, prompt="?")),
        answers,
        make_sandbox=lambda id, data: sandboxes.create(id, image=data.image, cwd=data.workdir),
    )
    assert trace.reward == 1.0
    assert "write_file" in [spec.name for spec in trace.tools]
    assert trace.toolsets == ("file",)
    assert list(tmp_path.iterdir()) == []


async def test_a_function_is_a_tool_and_what_is_none_is_refused() -> None:
    class Offers(Task[TaskData]):
        offered: Any = None

        def tools(self) -> Any:
            return [self.offered]

    def double(n: int) -> int:
        """Twice n."""
        return 2 * n

    task = Offers(TaskData(idx=0, prompt="?"))
    task.offered = double
    call = ToolCall("c1", "double", '{"n": 4}')
    trace = await roll(task, [Message("assistant", "", tool_calls=(call,)), "8"])
    assert trace.messages[2].content == "8"
    task.offered = 5
    with pytest.raises(ConfigurationError, match="task 0 offers 5, which is no tool"):
        await roll(task, ["8"])


async def test_each_rollout_samples_with_a_seed_of_its_own() -> None:
    async def seeds(*ids: str) -> list[int | None]:
        model = ScriptedModel(lambda request: "x")
        settings = RolloutSettings(sampling=Sampling(seed=1))
        for id in ids:
            rollout = TaskRollout(
                Task(TaskData(idx=0, prompt="?")),
                rollout_id=id,
                model=model,
                make_sandbox=no_sandbox,
                settings=settings,
            )
            await rollout.run()
        return [request.sampling.seed for request in model.requests]

    first = await seeds("a", "b")
    assert first == await seeds("a", "b")
    assert len(set(first)) == 2


# -- judges ---------------------------------------------------------------------------------------------------


class Answered(TaskData):
    answer: str = "Paris"


async def judged(said: Any, **config: Any) -> tuple[Trace, ScriptedModel]:
    grader = ScriptedModel([said], name="grader")
    task = Task(
        Answered(idx=0, prompt="Capital of France?"),
        TaskConfig(judges={"tone": JudgeConfig(model=grader, **config)}),
    )
    return await roll(task, ["It is Paris."], judges={"tone": grader}), grader


async def test_a_judge_gives_a_reward_and_its_call_is_on_the_trace() -> None:
    trace, grader = await judged("Polite enough.\nGRADE: 0.75", rubric="It is polite.", weight=2.0)
    assert trace.rewards == {"tone": 0.75}
    assert trace.reward == 1.5
    (said,) = trace.judgements
    assert (said.judge, said.model, said.score) == ("tone", "grader", 0.75)
    asked = grader.requests[0].messages[0].content
    assert "It is polite." in asked
    assert "It is Paris." in asked
    assert len(trace.billed) == 2


async def test_a_judge_compares_with_the_reference() -> None:
    _, grader = await judged("Same.\nGRADE: 1", kind="reference")
    assert "# The right answer\nParis" in grader.requests[0].messages[0].content
    trace, _ = await judged("GRADE: 1", kind="reference", reference="gold")
    assert "the field 'gold' of the task's data, which this task does not have" in trace.errors[0].message


@pytest.mark.parametrize("said", ["I can't say.", "GRADE: 7", "GRADE: -1", BadRequestError("overloaded")])
async def test_a_judge_that_fails_is_an_error_and_never_a_zero(said: Any) -> None:
    trace, _ = await judged(said)
    assert (trace.state, trace.reward) == ("failed", None)
    assert trace.errors[0].type == "JudgeError"
    assert "tone" not in trace.rewards


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("GRADE: 1", 1.0),
        ("so\n**GRADE: 0.5**", 0.5),
        ("Grade: 3/4", 0.75),
        ("GRADE: 0.2\nno, better\nGRADE: 0.9", 0.9),
        ("The grade: 1 would be too good", None),
        ("", None),
    ],
)
def test_the_last_grade_counts(text: str, grade: float | None) -> None:
    assert grade_in(text) == grade


# -- groups ---------------------------------------------------------------------------------------------------


class Grouped(Scored):
    numbers: Any = (0.0, 1.0)

    @group_reward(weight=0.5)
    def spread(self, traces: list[Trace]) -> Any:
        return self.numbers


async def group(numbers: Any, *answers: Any) -> list[Trace]:
    task = Grouped(TaskData(idx=0, prompt="?"))
    task.numbers = numbers
    traces = [await roll(task, [answer], number=place) for place, answer in enumerate(answers)]
    return await score_group(task, traces)


async def test_a_group_reward_sees_all_and_gives_one_number_to_each() -> None:
    traces = await group([0.0, 1.0], "yes", "no")
    assert [trace.rewards["spread"] for trace in traces] == [0.0, 1.0]
    assert [trace.reward for trace in traces] == [4.5, 3.0]
    assert {trace.group_size for trace in traces} == {2}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([1.0], "group reward 'spread' returned 1 numbers for 2 rollouts; one for each is needed"),
        ([1.0, float("nan")], "group reward 'spread' returned nan; finite numbers are needed"),
        (3.0, "group reward 'spread' returned a float; a list of 2 numbers is needed"),
    ],
)
async def test_a_group_reward_that_can_not_be_given_fails_the_group(numbers: Any, message: str) -> None:
    for trace in await group(numbers, "yes", "no"):
        assert (trace.state, trace.reward) == ("failed", None)
        assert trace.errors[-1].type == "GroupRewardError"
        assert trace.errors[-1].message == message


async def test_a_group_with_a_failed_member_is_not_scored() -> None:
    good, bad = await group([1.0, 1.0], "yes", BadRequestError("no"))
    assert (good.state, good.reward) == ("failed", None)
    assert "rollout 1 of the task ended failed" in good.errors[-1].message
    assert bad.errors[-1].type == "BadRequestError"


async def test_a_cancelled_rollout_leaves_a_record() -> None:
    asked = asyncio.Event()

    async def never(request: Request) -> str:
        asked.set()
        await asyncio.Event().wait()
        return ""

    rollout = TaskRollout(
        Scored(TaskData(idx=0, prompt="?")),
        rollout_id="r",
        model=ScriptedModel(never),
        make_sandbox=no_sandbox,
    )
    work = asyncio.ensure_future(rollout.run())
    await asked.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert (rollout.trace().state, rollout.trace().reward) == ("cancelled", None)


# -- functions that behave badly ------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["setup", "user", "finalize", "graded"])
@pytest.mark.parametrize("how", ["exits", "lets a cancellation out"])
async def test_a_function_that_would_end_the_process_or_the_rollout_is_an_error(part: str, how: str) -> None:
    async def misbehave(name: str) -> None:
        if name == part:
            if how == "exits":
                raise SystemExit(3)
            lost = asyncio.ensure_future(asyncio.sleep(60))
            lost.cancel()
            await lost

    class Bad(Task[TaskData]):
        async def setup(self) -> None:
            await misbehave("setup")

        async def user(self) -> None:
            await misbehave("user")

        async def finalize(self) -> None:
            await misbehave("finalize")

        @reward
        async def graded(self) -> float:
            await misbehave("graded")
            return 1.0

    trace = await roll(Bad(TaskData(idx=0, prompt="?")), ["yes"])
    assert (trace.state, trace.reward) == ("failed", None)
    what = "reward 'graded'" if part == "graded" else part
    told = "tried to end the process" if how == "exits" else "was cancelled by what it awaited"
    assert f"{what} {told}" in trace.errors[0].message


@pytest.mark.parametrize("part", ["finalize", "graded"])
async def test_interrupted_while_it_is_scored_a_rollout_is_cancelled_and_has_no_reward(part: str) -> None:
    begun = asyncio.Event()

    async def wait(name: str) -> None:
        if name == part:
            begun.set()
            await asyncio.Event().wait()

    class Slow(Task[TaskData]):
        async def finalize(self) -> None:
            await wait("finalize")

        @reward
        async def graded(self) -> float:
            await wait("graded")
            return 1.0

    model = ScriptedModel(["yes"])
    rollout = TaskRollout(
        Slow(TaskData(idx=0, prompt="?")), rollout_id="r", model=model, make_sandbox=no_sandbox
    )
    work = asyncio.ensure_future(rollout.run())
    await begun.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    trace = rollout.trace()
    assert (trace.state, trace.stop_reason, trace.reward) == ("cancelled", "cancelled", None)
    assert trace.messages[-1].content == "yes"


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("not for your eyes")


def cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [{(1, 2): 3}, {None: 1}, cycle(), Unshowable(), [Unshowable()]])
async def test_a_state_that_can_not_be_stored_costs_no_rollout(value: Any) -> None:
    class Stateful(Scored):
        def setup(self, state: dict[str, Any]) -> None:
            state["odd"] = value
            state["kept"] = [1]

    trace = await roll(Stateful(TaskData(idx=0, prompt="?")), ["yes"])
    assert trace.state == "completed"
    assert trace.task_state["kept"] == [1]
    encode_row(trace)


@pytest.mark.parametrize("weight", [1.0, -1.0])
async def test_rewards_that_add_up_to_no_number_are_an_error(weight: float) -> None:
    class Huge(Task[TaskData]):
        @reward(weight=1e300)
        def up(self) -> float:
            return 1e300

        @reward(weight=weight * 1e300)
        def again(self) -> float:
            return 1e300

    trace = await roll(Huge(TaskData(idx=0, prompt="?")), ["yes"])
    assert (trace.state, trace.reward) == ("failed", None)
    assert "the weighted sum of the rewards is" in trace.errors[0].message


async def test_a_reward_can_not_change_the_record() -> None:
    class Forger(Task[TaskData]):
        @reward
        def forge(self, trace: Trace) -> float:
            trace.task["idx"] = 77  # type: ignore[index]
            return 1.0

    trace = await roll(Forger(TaskData(idx=3, prompt="?")), ["yes"])
    assert trace.task["idx"] == 3


@pytest.mark.parametrize("offered", [None, 5, KeyError("gone"), SystemExit(1)])
async def test_tools_that_can_not_be_had_are_an_error_of_the_rollout(offered: Any) -> None:
    class Toolless(Scored):
        def tools(self) -> Any:
            if isinstance(offered, BaseException):
                raise offered
            return offered

    trace = await roll(Toolless(TaskData(idx=0, prompt="?")), ["yes"])
    assert trace.state == "failed"
    assert trace.errors[0].message.startswith("tools failed: ")


@pytest.mark.parametrize("said", [5, [None], Message("user", None)])  # type: ignore[arg-type]
async def test_a_user_that_says_no_text_is_an_error(said: Any) -> None:
    class Odd(Task[TaskData]):
        def user(self) -> Any:
            return said

    trace = await roll(Odd(TaskData(idx=0)), ["yes"])
    assert trace.state == "failed"
    assert trace.errors[0].message.startswith("user said")


@pytest.mark.parametrize("url", ["http://me:secret@host/v1", "http://host/v1?key=secret"])
def test_a_key_in_the_address_of_a_judge_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="give it by api_key_env"):
        JudgeConfig(model="m", base_url=url)
