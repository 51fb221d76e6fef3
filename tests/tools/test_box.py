from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from taskmill.errors import ConfigurationError, ToolRefusedError
from taskmill.records import ToolCall
from taskmill.tools import ToolBox, ToolContext, ToolResult, tool
from taskmill.tools import box as box_module
from taskmill.tools.threads import THREADS, DaemonThreads


@tool
async def echo(text: str = "nothing") -> str:
    return text


@tool
async def double(x: int) -> int:
    return 2 * x


def call(name: str, arguments: str = "{}", id: str = "c1") -> ToolCall:
    return ToolCall(id, name, arguments)


async def answer(context, made, arguments="{}", **options):
    [(message, event)] = await ToolBox([made], context, **options).run([call(made.spec.name, arguments)])
    assert message.success == event.success
    return message, event


# -- what a call can be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "content", "error_type"),
    [
        ("double", '{"x": 4}', "8", None),
        ("double", '"{\\"x\\": 4}"', "8", None),
        ("double", '{"x": 4}"', "8", None),
        ("echo", "", "nothing", None),
        ("echo", "null", "nothing", None),
        ("echo", '{"text": "a', "stop before the object is closed", "ToolArgumentsError"),
        ("double", "x=4", "not valid JSON", "ToolArgumentsError"),
        ("double", "[4]", "not a list", "ToolArgumentsError"),
        ("double", '{"y": 4}', "argument 'x' is missing", "ToolArgumentsError"),
        ("duoble", '{"x": 4}', "Did you mean 'double'? The tools are: double, echo.", "UnknownToolError"),
        ("", "{}", "There is no tool ''", "UnknownToolError"),
    ],
)
async def test_malformed_calls_are_answered_so_that_the_model_can_correct_itself(
    context, name, arguments, content, error_type
):
    [(message, event)] = await ToolBox([echo, double], context).run([call(name, arguments)])
    assert content in message.content
    assert (event.success, event.error_type) == (error_type is None, error_type)
    assert (message.role, message.tool_call_id, message.name) == ("tool", "c1", name)
    assert (event.call_id, event.name) == ("c1", name)


async def test_mended_arguments_are_marked(context):
    _, event = await answer(context, double, '{"x": 4}"')
    assert event.note == "dropped '\"' after the end"


async def test_every_call_has_one_answer_whatever_the_ids(context):
    calls = [
        call("echo", '{"text": "1"}'),
        call("echo", '{"text": "2"}'),
        call("nope"),
        call("echo", "["),
    ]
    answers = await ToolBox([echo], context).run(calls)
    assert [event.success for _, event in answers] == [True, True, False, False]
    assert [message.content for message, _ in answers][:2] == ["1", "2"]
    assert await ToolBox([echo], context).run([]) == []


async def test_two_tools_of_one_name_are_refused(context):
    with pytest.raises(ConfigurationError, match="two tools are called 'echo'"):
        ToolBox([echo, echo], context)


# -- side by side, and alone ----------------------------------------------------------------------------------


async def test_independent_calls_run_side_by_side_and_answers_stand_in_their_order(context):
    barrier = asyncio.Barrier(3)

    @tool
    async def meet(name: str) -> str:
        await barrier.wait()  # passes only when all three are here
        return name

    calls = [call("meet", f'{{"name": "{name}"}}', id=name) for name in "cab"]
    answers = await ToolBox([meet], context).run(calls)
    assert [message.content for message, _ in answers] == ["c", "a", "b"]
    assert [message.tool_call_id for message, _ in answers] == ["c", "a", "b"]


async def test_exclusive_calls_run_alone_and_in_order(context):
    running, seen = set(), []

    async def work(name: str) -> str:
        running.add(name)
        seen.append(frozenset(running))
        for _ in range(3):
            await asyncio.sleep(0)
        running.discard(name)
        return name

    beside = tool(work, name="beside")
    alone = tool(work, name="alone", exclusive=True)
    calls = [
        call(kind, f'{{"name": "{name}"}}', id=name)
        for kind, name in [("beside", "a"), ("beside", "b"), ("alone", "c"), ("alone", "d"), ("beside", "e")]
    ]
    answers = await ToolBox([beside, alone], context).run(calls)
    assert [message.content for message, _ in answers] == list("abcde")
    assert seen == [{"a"}, {"a", "b"}, {"c"}, {"d"}, {"e"}]


async def test_a_turn_of_very_many_calls_is_worked_off(context):
    most = 0
    running = 0

    @tool
    async def count() -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    answers = await ToolBox([count], context).run([call("count", id=str(n)) for n in range(100)])
    assert len(answers) == 100
    assert most == box_module.PARALLEL


async def test_a_plain_tool_sees_the_context_variables_of_its_caller(context):
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    message, _ = await answer(context, tool(name="look")(lambda: variable.get()))
    assert message.content == "set"


# -- failures -------------------------------------------------------------------------------------------------


async def test_an_exception_is_shown_with_its_class(context):
    @tool
    def look_up() -> str:
        return {}["x"]

    message, event = await answer(context, look_up)
    assert message.content == "Error: KeyError: 'x'"
    assert (event.success, event.error, event.error_type) == (False, "KeyError: 'x'", "KeyError")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ToolRefusedError("not outside"), "Error: not outside"),
        (ValueError(), "Error: ValueError"),
        (UnprintableError(), "Error: UnprintableError: (its message can't be shown)"),
        (StopIteration(3), "Error: StopIteration: 3"),
        (SystemExit(3), "Error: SystemExit: 3"),
        (asyncio.CancelledError(), "Error: CancelledError"),
        (TimeoutError("its own"), "Error: TimeoutError: its own"),
        (GeneratorExit(), "Error: GeneratorExit"),
    ],
)
async def test_whatever_a_plain_tool_raises_is_a_failure(context, raised, said):
    @tool
    def fail() -> None:
        raise raised

    message, event = await answer(context, fail)
    assert (message.content, event.success) == (said, False)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (SystemExit(3), "Error: SystemExit: 3"),
        (asyncio.CancelledError(), "Error: the tool cancelled itself"),
        (TimeoutError("its own"), "Error: TimeoutError: its own"),
        (BaseExceptionGroup("both", [SystemExit(1)]), "Error: BaseExceptionGroup: both (1 sub-exception)"),
    ],
)
async def test_whatever_an_async_tool_raises_is_a_failure(context, raised, said):
    @tool
    async def fail() -> None:
        raise raised

    message, event = await answer(context, fail)
    assert (message.content, event.success) == (said, False)


async def test_one_failing_call_does_not_touch_the_others(context):
    @tool
    async def fail() -> None:
        raise ValueError("no")

    answers = await ToolBox([echo, fail], context).run([call("echo"), call("fail"), call("echo")])
    assert [event.success for _, event in answers] == [True, False, True]


async def test_a_tool_that_says_it_failed_has_failed(context):
    message, event = await answer(context, tool(name="t")(lambda: {"error": "no such row"}))
    assert message.content == '{"error":"no such row"}'
    assert (event.success, event.error) == (False, "no such row")


async def test_a_tool_of_another_make_may_return_what_a_function_may(context):
    class Own:
        spec = echo.spec
        exclusive = False
        timeout = float("inf")

        async def call(self, arguments, context):
            return {"success": False}

    message, event = await answer(context, Own())
    assert (message.content, event.success) == ('{"success":false}', False)


# -- deadlines ------------------------------------------------------------------------------------------------


async def test_an_async_tool_that_is_late_is_stopped(context):
    ended = asyncio.Event()

    @tool(timeout=0.02)
    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    message, event = await answer(context, wait)
    assert ended.is_set()
    assert message.content == "Error: wait did not end within 0.02 s and was given up."
    assert event.error_type == "ToolTimeoutError"


async def test_an_async_tool_that_ignores_its_cancellation_is_left_behind(context, monkeypatch):
    monkeypatch.setattr(box_module, "GRACE", 0.02)
    let_go = asyncio.Event()

    @tool(timeout=0.02)
    async def stubborn() -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    _, event = await answer(context, stubborn)
    assert event.error_type == "ToolTimeoutError"
    assert box_module.left_behind() == 1
    let_go.set()
    while box_module.left_behind():
        await asyncio.sleep(0)


async def test_four_stuck_plain_tools_leave_room_for_the_next(context):
    stuck = threading.Event()

    @tool(timeout=0.05)
    def hang() -> None:
        stuck.wait()

    before = THREADS.abandoned
    try:
        calls = [call("hang", id=str(n)) for n in range(4)]
        answers = await ToolBox([hang], context).run(calls)
        assert [event.error_type for _, event in answers] == ["ToolTimeoutError"] * 4
        assert THREADS.abandoned == before + 4
        message, _ = await answer(context, tool(name="next")(lambda: "ran"))
        assert message.content == "ran"
    finally:
        stuck.set()
    while THREADS.abandoned > before:
        await asyncio.sleep(0.001)


def test_a_process_with_stuck_tools_ends():
    code = """
import asyncio, threading
from taskmill.tools import ToolBox, ToolContext, tool
from taskmill.records import ToolCall

@tool(timeout=0.05)
def hang():
    threading.Event().wait()

async def main():
    answers = await ToolBox([hang], ToolContext("r", None)).run([ToolCall(str(n), "hang") for n in range(4)])
    print([event.success for _, event in answers])

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[False, False, False, False]\n", "")


async def test_cancelling_a_turn_leaves_nothing_behind(context):
    started, ended = [], []
    all_started = asyncio.Event()

    @tool
    async def wait(name: str) -> None:
        started.append(name)
        if len(started) == 3:
            all_started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up takes a moment
            ended.append(name)

    calls = [call("wait", f'{{"name": "{n}"}}', id=str(n)) for n in range(3)]
    running = asyncio.ensure_future(ToolBox([wait], context).run(calls))
    await all_started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(ended) == ["0", "1", "2"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


# -- what is said ---------------------------------------------------------------------------------------------


async def test_a_huge_result_keeps_head_and_tail_and_stays_a_success(context):
    made = tool(name="much")(lambda: "A" * 600_000 + "Z" * 400_000)
    message, event = await answer(context, made, result_limit=1000)
    assert event.success
    assert message.content.startswith("A" * 500 + "\n[… 999,000 of 1,000,000 characters left out here …]\n")
    assert message.content.endswith("\n" + "Z" * 500)


async def test_a_huge_failure_stays_a_failure(context):
    made = tool(name="much")(lambda: ToolResult("x" * 9000, success=False))
    message, event = await answer(context, made, result_limit=1000)
    assert not event.success
    assert len(message.content) < 1100
    assert len(event.error) < 2100


async def test_lone_surrogates_are_written_out(context):
    message, _ = await answer(context, tool(name="t")(lambda: "a\ud83d\0ü"))
    assert message.content == "a\\ud83d\0ü"
    message.content.encode()

    @tool
    def fail() -> None:
        raise ValueError("\udcff")

    message, event = await answer(context, fail)
    assert message.content == "Error: ValueError: \\udcff"
    assert event.error == "ValueError: \\udcff"


# -- threads --------------------------------------------------------------------------------------------------


async def test_threads_are_used_again():
    threads = DaemonThreads("test")
    names = {await threads.run(lambda: threading.current_thread().name) for _ in range(100)}
    assert len(names) < 10  # one, unless the machine is so slow that a second was woken meanwhile
    assert threads.abandoned == 0


async def test_a_stuck_call_holds_up_no_call_that_comes_a_turn_later():
    threads = DaemonThreads("test")
    go = threading.Event()
    stuck = asyncio.ensure_future(threads.run(go.wait))
    try:
        for _ in range(3):
            await asyncio.sleep(0)
            quick = [asyncio.ensure_future(threads.run(lambda: "quick")) for _ in range(3)]
            async with asyncio.timeout(10):
                assert await asyncio.gather(*quick) == ["quick"] * 3
    finally:
        go.set()
    assert await stuck


async def test_an_abandoned_thread_is_counted_until_it_returns():
    threads = DaemonThreads("test")
    inside, go = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        go.wait()

    waiting = asyncio.ensure_future(threads.run(hang))
    while not inside.is_set():
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert threads.abandoned == 1
    go.set()
    while threads.abandoned:
        await asyncio.sleep(0)
    assert (await threads.run(lambda: threading.current_thread().name)).startswith("test-")


async def test_a_tool_context_is_of_one_rollout():
    one, two = ToolContext("1", None), ToolContext("2", None)
    one.state["x"] = 1
    assert two.state == {}
