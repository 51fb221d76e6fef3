from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from taskmill.errors import ConfigurationError
from taskmill.records import ToolCall
from taskmill.tools import ToolBox, open_mcp
from taskmill.tools.mcp import read_servers

pytest.importorskip("mcp")
SERVER = str(Path(__file__).with_name("mcp_server.py"))


def config(*args: str, **fields):
    return {"mcpServers": {"test": {"command": sys.executable, "args": [SERVER, *args], **fields}}}


def children() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if SERVER in process.cmdline()]


async def ask(context, tools, name, **arguments):
    [(message, event)] = await ToolBox(tools, context).run([ToolCall("c", name, json.dumps(arguments))])
    return event.success, message.content


async def test_the_tools_of_a_server(context):
    async with open_mcp(config()) as tools:
        by_name = {tool.spec.name: tool for tool in tools}
        assert {"test_add", "test_fail", "test_dotted_name"} <= set(by_name)
        add = by_name["test_add"]
        assert add.spec.description == "Add two numbers."
        assert json.loads(bytes(add.spec.parameters))["required"] == ["a", "b"]
        assert (add.exclusive, by_name["test_fail"].exclusive) == (False, True)

        assert await ask(context, tools, "test_add", a=1, b=2) == (True, "3")
        assert await ask(context, tools, "test_dotted_name") == (True, "ok")
        assert await ask(context, tools, "test_picture") == (True, "[image: image/png, 400 bytes]")

        success, text = await ask(context, tools, "test_fail")
        assert (success, "test" in text or "fail" in text) == (False, True)
        success, text = await ask(context, tools, "test_add", a="x")
        assert not success
    assert children() == []


async def test_calls_run_side_by_side(context):
    async with open_mcp(config()) as tools:
        calls = [ToolCall(str(n), "test_add", json.dumps({"a": n, "b": n})) for n in range(8)]
        answers = await ToolBox(tools, context).run(calls)
        assert [message.content for message, _ in answers] == [str(2 * n) for n in range(8)]


async def test_only_the_environment_that_is_given_is_inherited(context, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "not for the server")
    monkeypatch.setenv("WIKI_KEY", "for the server")
    async with open_mcp(config(env={"KEY": "${WIKI_KEY}"})) as tools:
        names = (await ask(context, tools, "test_environment"))[1].split()
    assert "KEY" in names
    assert "PATH" in names
    assert "OPENAI_API_KEY" not in names
    assert "WIKI_KEY" not in names


async def test_a_server_that_dies_fails_that_call_and_is_started_again_up_to_a_limit(context):
    async with open_mcp(config(), restarts=1) as tools:
        died = (False, "Error: MCP server 'test' ended during the call")
        assert await ask(context, tools, "test_die") == died
        assert await ask(context, tools, "test_add", a=1, b=2) == (True, "3")
        assert await ask(context, tools, "test_die") == died
        said = "Error: MCP server 'test' died too often and is not started again"
        for _ in range(2):
            assert await ask(context, tools, "test_add", a=1, b=2) == (False, said)
    assert children() == []


async def test_calls_under_way_when_a_server_dies_all_fail_and_it_is_started_once(context, tmp_path):
    async with open_mcp(config(env={"CANCELLED": str(tmp_path / "x")}), restarts=1) as tools:
        calls = [ToolBox(tools, context).run([ToolCall("c", "test_sleep")]) for _ in range(3)]
        calls.append(ToolBox(tools, context).run([ToolCall("c", "test_die")]))
        answers = await asyncio.gather(*calls)
        assert {message.content for [(message, _)] in answers} == {
            "Error: MCP server 'test' ended during the call"
        }
        assert await ask(context, tools, "test_add", a=1, b=2) == (True, "3")


async def test_a_late_call_is_cancelled_in_the_server(context, tmp_path):
    mark = tmp_path / "cancelled"
    async with open_mcp(config(timeout=0.3, env={"CANCELLED": str(mark)})) as tools:
        success, text = await ask(context, tools, "test_sleep")
        assert (success, text) == (False, "Error: test_sleep did not end within 0.3 s and was given up.")
        assert await ask(context, tools, "test_add", a=1, b=2) == (True, "3")
    assert mark.exists()


async def test_a_server_that_does_not_start_is_said_with_its_last_words(monkeypatch):
    monkeypatch.setenv("WIKI_KEY", "very-secret")
    with pytest.raises(
        ConfigurationError, match="'test' did not start within 3 s; it said: loading"
    ) as raised:
        async with open_mcp(config("--silent", env={"KEY": "${WIKI_KEY}"}), start_timeout=3):
            pass
    assert "very-secret" not in str(raised.value)
    assert "[KEY]" in str(raised.value)
    with pytest.raises(ConfigurationError, match=r"'test' did not start: .*; it said: no such index"):
        async with open_mcp(config("--broken")):
            pass
    with pytest.raises(ConfigurationError, match="'test' did not start: FileNotFoundError"):
        async with open_mcp({"test": {"command": "no-such-program-anywhere"}}):
            pass
    assert children() == []


async def test_an_exception_inside_comes_out_as_it_is_and_ends_the_server():
    seen = []

    async def use() -> None:
        async with open_mcp(config()):
            seen.extend(children())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()
    assert len(seen) == 1
    assert children() == []


async def test_cancelling_ends_the_server(context):
    inside = asyncio.Event()

    async def use() -> None:
        async with open_mcp(config()):
            inside.set()
            await asyncio.Event().wait()

    using = asyncio.ensure_future(use())
    await inside.wait()
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert children() == []


@asynccontextmanager
async def http_server(port: int = 0):
    process = await asyncio.create_subprocess_exec(
        sys.executable, SERVER, "--http", str(port), stdout=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(30):
            yield process, int(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_server_over_http(context, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    async with http_server() as (process, port):
        servers = {"web": {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-Key": "secret-key"}}}
        async with open_mcp(servers) as tools:
            assert await ask(context, tools, "web_add", a=1, b=2) == (True, "3")
            process.kill()
            await process.wait()
            success, text = await ask(context, tools, "web_add", a=1, b=2)
            assert (success, "'web'" in text) == (False, True)
            async with http_server(port):
                assert await ask(context, tools, "web_add", a=2, b=2) == (True, "4")


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        ({}, "expected"),
        ({"a b": {"command": "x"}}, "server 'a b': a name has"),
        ({"a": "x"}, "server 'a': must be an object"),
        ({"a": {}}, "give either 'command'"),
        ({"a": {"command": "x", "url": "http://x"}}, "give either 'command'"),
        ({"a": {"comand": "x"}}, r"field 'comand' is not known \(did you mean 'command'\?\)"),
        ({"a": {"command": "x", "args": "y"}}, "args: must be a list of texts"),
        ({"a": {"command": "x", "env": {"K": 1}}}, "env: must map texts to texts"),
        ({"a": {"command": "x", "env": {"K": "${NOT_SET_ANYWHERE}"}}}, "'NOT_SET_ANYWHERE' is not set"),
        ({"a": {"command": "x", "timeout": float("nan")}}, "timeout: must be a number of seconds"),
        ({"a": {"command": " "}}, "command: must be a text"),
        ({"a": {"url": "http://x", "type": "sse"}}, "type: must be 'stdio' or 'http'"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(servers, said):
    with pytest.raises(ConfigurationError, match=said):
        read_servers({"mcpServers": servers})


def test_a_configuration_from_a_file(tmp_path):
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps(config(timeout=5)))
    [server] = read_servers(path)
    assert (server.name, server.command, server.args, server.timeout) == (
        "test",
        sys.executable,
        (SERVER,),
        5.0,
    )
    path.write_text("{")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        read_servers(path)
    with pytest.raises(ConfigurationError, match="can't be read"):
        read_servers(tmp_path / "nowhere.json")


async def test_without_the_package_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'taskmill\[mcp\]'"):
        async with open_mcp(config()):
            pass
