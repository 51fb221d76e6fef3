"""Tools of MCP servers: programs started for a run, or services reached over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from taskmill.errors import ConfigurationError, ToolError
from taskmill.records import ToolSpec
from taskmill.tools.base import Tool, ToolContext, ToolResult
from taskmill.tools.function import to_json

logger = logging.getLogger(__name__)

START_TIMEOUT = 30.0
"""Seconds a server has until it has listed its tools."""

CALL_TIMEOUT = 120.0
RESTARTS = 10
"""How often a server that died is started again, or reached again, before it is given up."""

_CLOSE_TIMEOUT = 30.0
_MOST_PAGES = 100
_SERVER_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}\Z")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class ServerConfig(Struct, frozen=True):
    """One MCP server: a `command` to start, or a `url` to reach. `timeout` is the seconds of one call."""

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = {}
    timeout: float = CALL_TIMEOUT

    def hidden(self, text: str) -> str:
        """`text` without the values that this server was given in confidence."""
        for name, value in (*self.env.items(), *self.headers.items()):
            if len(value) >= 6:
                text = text.replace(value, f"[{name}]")
        return text


def read_servers(config: str | Path | Mapping[str, Any]) -> list[ServerConfig]:
    """The servers of a configuration in the shape that is usual for MCP, as a mapping or a JSON file.

        {"mcpServers": {"files": {"command": "files-server", "args": [], "env": {"KEY": "${MY_KEY}"}},
                        "wiki":  {"url": "https://…/mcp", "headers": {"Authorization": "Bearer ${WIKI}"}}}}

    A server's environment is HOME, PATH and their like, and what stands in `env`; nothing else is inherited.
    `${NAME}` is taken from the environment of this process, so that keys need not stand in the file. Raises
    `ConfigurationError` naming server and field.
    """
    where = "MCP servers"
    if not isinstance(config, Mapping):
        where = f"MCP servers file {str(config)!r}"
        try:
            config = json.loads(Path(config).read_bytes())
        except OSError as error:
            raise ConfigurationError(f"{where} can't be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigurationError(f"{where} is not JSON: {error}") from error
    servers = config.get("mcpServers", config) if isinstance(config, Mapping) else None
    if not isinstance(servers, Mapping) or not servers:
        raise ConfigurationError(f"{where}: expected {{'mcpServers': {{name: {{'command': …}}}}}}")
    return [_read_server(where, name, fields) for name, fields in servers.items()]


def _read_server(where: str, name: Any, fields: Any) -> ServerConfig:
    where = f"{where}: server {name!r}"
    if not isinstance(name, str) or not _SERVER_NAME.match(name):
        raise ConfigurationError(f"{where}: a name has 1 to 32 letters, digits, '_' or '-'")
    if not isinstance(fields, Mapping):
        raise ConfigurationError(f"{where}: must be an object, not {fields!r}")
    known = {"command", "args", "env", "cwd", "url", "headers", "timeout", "type", "transport"}
    for field in fields:
        if field not in known:
            near = get_close_matches(str(field), sorted(known), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigurationError(f"{where}: field {field!r} is not known{hint}")
    kind = fields.get("type", fields.get("transport", "http" if "url" in fields else "stdio"))
    if kind not in ("stdio", "http", "streamable-http", "streamable_http"):
        raise ConfigurationError(f"{where}, type: must be 'stdio' or 'http', not {kind!r}")
    if ("command" in fields) == ("url" in fields):
        raise ConfigurationError(f"{where}: give either 'command' (a program to start) or 'url'")
    timeout = fields.get("timeout", CALL_TIMEOUT)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ConfigurationError(f"{where}, timeout: must be a number of seconds over 0, not {timeout!r}")
    for field in ("command", "cwd", "url"):
        if field in fields and (not isinstance(fields[field], str) or not fields[field].strip()):
            raise ConfigurationError(
                f"{where}, {field}: must be a text that is not blank, not {fields[field]!r}"
            )
    args = fields.get("args", ())
    if not isinstance(args, list | tuple) or not all(isinstance(part, str) for part in args):
        raise ConfigurationError(f"{where}, args: must be a list of texts, not {args!r}")
    return ServerConfig(
        name=name,
        command=fields.get("command"),
        args=tuple(_filled(f"{where}, args", part) for part in args),
        env=_texts(where, "env", fields.get("env", {})),
        cwd=fields.get("cwd"),
        url=_filled(f"{where}, url", fields["url"]) if "url" in fields else None,
        headers=_texts(where, "headers", fields.get("headers", {})),
        timeout=float(timeout),
    )


def _texts(where: str, field: str, values: Any) -> dict[str, str]:
    if not isinstance(values, Mapping) or not all(
        isinstance(part, str) for pair in values.items() for part in pair
    ):
        raise ConfigurationError(f"{where}, {field}: must map texts to texts")
    return {name: _filled(f"{where}, {field}, {name}", value) for name, value in values.items()}


def _filled(where: str, text: str) -> str:
    def value_of(match: re.Match[str]) -> str:
        value = os.environ.get(match[1])
        if value is None:
            raise ConfigurationError(f"{where}: the environment variable {match[1]!r} is not set")
        return value

    return _VARIABLE.sub(value_of, text)


@asynccontextmanager
async def open_mcp(
    config: str | Path | Mapping[str, Any],
    *,
    start_timeout: float = START_TIMEOUT,
    restarts: int = RESTARTS,
) -> AsyncIterator[list[Tool]]:
    """Start or reach the servers of a configuration, and give their tools as `<server>_<tool>`.

    A call during which its server dies ends as a failure and is not repeated, since nobody knows what it has
    done; the next call starts the server again, at most `restarts` times. The servers are shared by all who
    use these tools: a server with a memory shows one rollout what another did.

    Raises `ConfigurationError` for a configuration that can't be meant and for a server that does not start.
    All servers have ended when the context is left.
    """
    try:
        import mcp  # noqa: F401 - asked for before anything is started
    except ImportError:
        raise ConfigurationError("MCP servers need the package mcp: pip install 'taskmill[mcp]'") from None
    servers = [_Server(server, start_timeout, restarts) for server in read_servers(config)]
    loop = asyncio.get_running_loop()
    owners = [loop.create_task(server.hold(), name=f"mcp-{server.config.name}") for server in servers]
    try:
        tools: dict[str, Tool] = {}
        for server in servers:
            server.ask()
        for server in servers:
            try:
                await server.connected()
            except ToolError as error:
                raise ConfigurationError(str(error)) from error
            for tool in server.tools():
                if tool.spec.name in tools:
                    raise ConfigurationError(f"two tools of MCP servers would be called {tool.spec.name!r}")
                tools[tool.spec.name] = tool
        yield list(tools.values())
    finally:
        for server in servers:
            server.close()
        try:
            await asyncio.wait(owners, timeout=_CLOSE_TIMEOUT)
        finally:
            for owner in owners:
                owner.cancel()
            await asyncio.wait(owners, timeout=_CLOSE_TIMEOUT)


class _Server:
    """One server and the task that holds its connection.

    The connection is opened and closed in the same task, as its library demands, and used from any.
    """

    def __init__(self, config: ServerConfig, start_timeout: float, restarts: int) -> None:
        self.config = config
        self._start_timeout = start_timeout
        self._starts_left = restarts + 1
        self._ready: asyncio.Future[Any] | None = None
        self._asked = asyncio.Event()
        self._ended = asyncio.Event()
        self._closing = False
        self._listing: list[Any] = []

    def ask(self) -> asyncio.Future[Any]:
        """Have the server started unless it is; the future is its client."""
        if self._ready is not None:
            return self._ready
        ready = self._ready = asyncio.get_running_loop().create_future()
        ready.add_done_callback(_look_at)
        if self._closing:
            self._fail(ready, "is closed")
        elif self._starts_left <= 0:
            self._fail(ready, "died too often and is not started again")
        else:
            self._starts_left -= 1
            self._asked.set()
        return ready

    async def connected(self) -> Any:
        """The client of the running server; raises `ToolError` when it does not start."""
        return await asyncio.shield(self.ask())

    def close(self) -> None:
        """Have the connection closed for good."""
        self._closing = True
        self._asked.set()
        self._ended.set()

    def tools(self) -> list[_McpTool]:
        """The tools the server listed when it was last started."""
        return [_McpTool(self, listed) for listed in self._listing]

    async def hold(self) -> None:
        """Open the connection when asked, hold it until it is broken or closed, and begin again."""
        while True:
            await self._asked.wait()
            if self._closing:
                return
            self._asked.clear()
            self._ended.clear()
            ready, errors = self._ready, _ErrorOutput()
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(self._start_timeout):
                        client = await self._open(stack, errors)
                        self._listing = await _all_tools(client)
                    if ready is not None and not ready.done():
                        ready.set_result(client)
                    await self._ended.wait()
            except TimeoutError:
                self._fail(ready, f"did not start within {self._start_timeout:g} s{errors.said()}")
            except Exception as error:
                logger.info("MCP server %r", self.config.name, exc_info=True)
                what = "did not start" if self.config.url is None else "can't be reached"
                self._fail(ready, f"{what}: {_reason(error)}{errors.said()}")
            finally:
                errors.close()

    async def _open(self, stack: AsyncExitStack, errors: _ErrorOutput) -> Any:
        import httpx2
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        config = self.config
        if config.command is not None:
            parameters = StdioServerParameters(
                command=config.command,
                args=list(config.args),
                env=dict(config.env),
                cwd=config.cwd,
                encoding_error_handler="replace",
            )
            client = Client(stdio_client(parameters, errlog=errors))  # type: ignore[arg-type]
        else:
            assert config.url is not None
            # A server may keep an answer open for as long as a call may take.
            limits = httpx2.Timeout(self._start_timeout, read=config.timeout)
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=dict(config.headers), timeout=limits)
            )
            client = Client(streamable_http_client(config.url, http_client=http))
        return await stack.enter_async_context(client)

    def _fail(self, waiting: asyncio.Future[Any] | None, what: str) -> None:
        if self._ready is waiting:
            self._ready = None
        error = ToolError(self.config.hidden(f"MCP server {self.config.name!r} {what}"))
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """One call; raises `ToolError` when the server refuses it, dies, or is gone."""
        import anyio
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        connection = self.ask()
        client = await asyncio.shield(connection)
        try:
            result = await client.call_tool(name, dict(arguments))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream):
            self._lost(connection)
            raise ToolError(f"MCP server {self.config.name!r} ended during the call") from None
        except MCPError as error:
            # A service that was started anew says no to the session of its former life.
            if error.code == CONNECTION_CLOSED or error.message == "Session terminated":
                self._lost(connection)
                raise ToolError(f"MCP server {self.config.name!r} ended during the call") from None
            raise ToolError(self.config.hidden(f"MCP server {self.config.name!r}: {error.message}")) from None
        return to_tool_result(result)

    def _lost(self, connection: asyncio.Future[Any]) -> None:
        # Several calls may find the same death; only the first of them ends the connection.
        if self._ready is connection:
            self._ready = None
            self._ended.set()


class _McpTool:
    """One tool of an MCP server.

    Runs alone in its turn unless the server says that it only reads.
    """

    def __init__(self, server: _Server, listed: Any) -> None:
        self._server = server
        self._name: str = listed.name
        schema = {"type": "object", "properties": {}, **(listed.input_schema or {})}
        self.spec = ToolSpec(
            name=_tool_name(server.config.name, listed.name),
            description=listed.description or listed.title or "",
            parameters=msgspec.Raw(json.dumps(schema, ensure_ascii=False, separators=(",", ":")).encode()),
        )
        hints = listed.annotations
        self.exclusive = not (hints is not None and hints.read_only_hint)
        self.timeout = server.config.timeout

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Pass the call on; the server checks the arguments."""
        return await self._server.call(self._name, arguments)


class _ErrorOutput:
    """Where a server's stderr goes: the log, and its last lines into the message when it does not start."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=8)
        self._loop = asyncio.get_running_loop()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._loop.add_reader(self._reading, self._read)

    def fileno(self) -> int:
        """The end that the server writes to."""
        return self._writing

    def _read(self) -> None:
        try:
            data = os.read(self._reading, 65536)
        except BlockingIOError:
            return
        for line in data.decode(errors="replace").splitlines():
            if line.strip():
                self._lines.append(line.strip()[:300])
                logger.debug("MCP server: %s", line)

    def said(self) -> str:
        """The last lines, as the end of a message."""
        self._read()
        return f"; it said: {' | '.join(self._lines)}" if self._lines else ""

    def close(self) -> None:
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
        os.close(self._writing)


def _look_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


async def _all_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _tool_name(server: str, name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}_{name}")[:64]


def _reason(error: BaseException) -> str:
    """The first plain exception in the groups that task groups make of one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def to_tool_result(result: Any) -> ToolResult:
    """What a server answered, as text: an image, sound or file by its kind and size."""
    parts = list(_texts_of(result.content))
    if not parts and result.structured_content is not None:
        parts = [to_json(result.structured_content)]
    text = "\n".join(parts)
    if result.is_error:
        return ToolResult(text, success=False, error=text or "the tool reports a failure")
    return ToolResult(text)


def _texts_of(blocks: Iterable[Any]) -> Iterable[str]:
    for block in blocks:
        if block.type == "text":
            yield block.text
        elif block.type in ("image", "audio"):
            yield f"[{block.type}: {block.mime_type}, {_size(block.data):,} bytes]"
        elif block.type == "resource_link":
            yield f"[resource: {block.name}, {block.uri}]"
        elif getattr(block.resource, "text", None) is not None:
            yield block.resource.text
        else:
            kind = block.resource.mime_type or "unknown type"
            yield f"[resource: {block.resource.uri}, {kind}, {_size(block.resource.blob):,} bytes]"


def _size(encoded: str) -> int:
    """Bytes that a base64 text stands for."""
    return len(encoded) * 3 // 4 - encoded[-2:].count("=")
