"""terminal, process and execute_code, against real processes in every kind of sandbox of this machine."""

from __future__ import annotations

import asyncio
import json

import psutil
import pytest

from taskmill.records import ToolCall
from taskmill.sandbox import bubblewrap
from taskmill.sandbox.base import SandboxLimits
from taskmill.sandbox.choose import open_sandboxes
from taskmill.tools import ToolBox, ToolContext
from taskmill.tools.code import execute_code
from taskmill.tools.terminal import process, terminal


@pytest.fixture(
    params=[
        "plain",
        pytest.param(
            "bubblewrap",
            marks=pytest.mark.skipif(bubblewrap.problem() is not None, reason=str(bubblewrap.problem())),
        ),
    ]
)
def kind(request) -> str:
    return request.param


@pytest.fixture
async def box(kind, tmp_path):
    """A rollout's tools, called as a model calls them."""
    sandboxes = open_sandboxes(kind, directory=tmp_path, limits=SandboxLimits())
    context = ToolContext("rollout", sandboxes.create("rollout"))
    yield ToolBox([terminal, process, execute_code], context)
    await context.sandbox.close()


async def ask(box, name, **arguments):
    ((message, event),) = await box.run([ToolCall("1", name, json.dumps(arguments))])
    content = json.loads(message.content) if message.content.startswith("{") else message.content
    assert event.success is message.success
    return content, event


async def test_a_command_answers_in_json(box):
    content, event = await ask(box, "terminal", command="echo 'a\"b'; echo ü >&2")
    assert content == {"output": 'a"b\nü\n', "exit_code": 0, "error": None}
    assert event.success


async def test_a_non_zero_exit_is_no_failure_of_the_tool(box):
    content, event = await ask(box, "terminal", command="ls nowhere; exit 4")
    assert content["exit_code"] == 4
    assert content["error"] is None
    assert event.success


async def test_a_timeout_is_a_failure_and_keeps_the_output(box):
    content, event = await ask(box, "terminal", command="echo before; sleep 100", timeout=0.5)
    assert content["output"] == "before\n"
    assert "timed out after 0.5 s" in content["error"]
    assert not event.success
    assert (await ask(box, "terminal", command="echo after"))[0]["output"] == "after\n"


async def test_the_directory_is_kept_between_calls_and_variables_are_not(box):
    await ask(box, "terminal", command="mkdir -p a/b && cd a/b && export X=1")
    content, _ = await ask(box, "terminal", command='pwd; echo "<$X>"')
    assert content["output"] == f"{box.context.sandbox.root}/a/b\n<>\n"
    await ask(box, "terminal", command="cd ..; exit 1")
    content, _ = await ask(box, "terminal", command="pwd")
    assert content["output"].endswith("/a\n")


async def test_a_directory_for_one_command_does_not_stay(box):
    await ask(box, "terminal", command="mkdir -p a/b; cd a")
    assert (await ask(box, "terminal", command="pwd", workdir="b"))[0]["output"].endswith("/a/b\n")
    assert (await ask(box, "terminal", command="pwd"))[0]["output"].endswith("/a\n")
    content, event = await ask(box, "terminal", command="pwd", workdir="nowhere")
    assert "nowhere" in content
    assert not event.success


async def test_a_directory_that_was_removed_is_said_and_left(box):
    await ask(box, "terminal", command="mkdir gone; cd gone")
    await box.context.sandbox.remove("gone")
    content, event = await ask(box, "terminal", command="echo x")
    assert not event.success
    assert "gone" in content
    assert box.context.sandbox.root in content
    assert (await ask(box, "terminal", command="echo x"))[0]["output"] == "x\n"


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": " "},
        {"command": "true", "timeout": 0},
        {"command": "true", "timeout": 601},
        {"command": "a\0b"},
    ],
)
async def test_arguments_that_can_not_be_meant_are_a_failure_that_says_why(box, arguments):
    content, event = await ask(box, "terminal", **arguments)
    assert not event.success
    assert content.startswith("Error: ")


@pytest.mark.parametrize(
    "command", ["yes | head -c 3M", "yes '\"' | head -c 3M", "head -c 500K /dev/zero", "yes ü | head -c 1M"]
)
async def test_an_answer_is_whole_json_however_long_the_output(box, command):
    content, event = await ask(box, "terminal", command=f"echo first; {command}; echo; echo last")
    assert event.success
    assert content["output"].startswith("first\n")
    assert content["output"].endswith("\nlast\n")
    assert content["exit_code"] == 0


async def test_a_process_in_the_background_is_listed_polled_written_waited_for_and_killed(box):
    content, _ = await ask(
        box, "terminal", command="while read x; do echo got $x; done; exit 5", background=True
    )
    id = content["process_id"]
    assert content["exit_code"] is None
    listed, _ = await ask(box, "process", action="list")
    assert [(entry["process_id"], entry["status"]) for entry in listed["processes"]] == [(id, "running")]
    await ask(box, "process", action="write", process_id=id, data="one\n")
    seen = ""
    while "got one" not in seen:
        seen += (await ask(box, "process", action="poll", process_id=id))[0]["output"]
        await asyncio.sleep(0.01)
    waited, event = await ask(box, "process", action="wait", process_id=id, timeout=0.05)
    assert (waited["status"], waited["exit_code"], event.success) == ("running", None, True)
    logged, _ = await ask(box, "process", action="log", process_id=id)
    assert logged["output"] == "got one\n"
    killed, _ = await ask(box, "process", action="kill", process_id=id)
    assert (killed["status"], killed["exit_code"]) == ("ended", -9)
    _, event = await ask(box, "process", action="write", process_id=id, data="two\n")
    assert not event.success


async def test_waiting_gives_the_end_of_a_process(box):
    await ask(box, "terminal", command="sleep 0.2; echo done; exit 5", background=True)
    content, _ = await ask(box, "process", action="wait", process_id="p1", timeout=30)
    assert (content["output"], content["exit_code"], content["status"]) == ("done\n", 5, "ended")


async def test_a_process_there_is_not_is_a_failure_that_names_those_there_are(box):
    content, event = await ask(box, "process", action="poll", process_id="p9")
    assert not event.success
    assert "none was started" in content
    await ask(box, "terminal", command="true", background=True)
    content, _ = await ask(box, "process", action="poll")
    assert content.endswith("p1")


async def test_what_is_left_in_the_background_dies_with_the_rollout(box):
    await ask(box, "terminal", command="sleep 98765.4321", background=True)
    await box.context.sandbox.close()
    alive = [p for p in psutil.process_iter(["cmdline"]) if "98765.4321" in " ".join(p.info["cmdline"] or [])]
    _, alive = psutil.wait_procs(alive, timeout=10)
    assert alive == []


async def test_python_code_is_run_where_the_terminal_stands(box):
    await ask(box, "terminal", command="mkdir d; cd d")
    code = "import os, sys\nprint(os.path.basename(os.getcwd()), sys.version_info[0])\nopen('made', 'w').write('x')"
    content, event = await ask(box, "execute_code", code=code)
    assert content == {"output": "d 3\n", "exit_code": 0, "error": None}
    assert event.success
    assert await box.context.sandbox.list_files() == ["d/made"]


async def test_an_exception_of_the_code_is_shown_and_is_no_failure_of_the_tool(box):
    content, event = await ask(box, "execute_code", code="print('before')\n1 / 0")
    assert content["output"].startswith("before\nTraceback")
    assert "ZeroDivisionError" in content["output"]
    assert content["exit_code"] == 1
    assert event.success


async def test_code_that_does_not_end_is_killed(box):
    content, event = await ask(box, "execute_code", code="print('up')\nwhile True: pass", timeout=1)
    assert content["output"] == "up\n"
    assert "timed out" in content["error"]
    assert not event.success


async def test_long_code_with_odd_characters_runs(box):
    code = "x = '" + "ü" * 200_000 + "'\nprint(len(x), '\u2028' in '\u2028')"
    assert (await ask(box, "execute_code", code=code))[0]["output"] == "200000 True\n"


async def test_keys_are_invisible_to_code(box, monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "sk-very-secret")
    content, _ = await ask(box, "execute_code", code="import os; print(sorted(os.environ))")
    assert "SECRET" not in content["output"]
