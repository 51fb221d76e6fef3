"""An MCP server for the tests, over stdio, or over HTTP with `--http` (it prints its port)."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

# Before the imports that take long: these two never become servers.
if "--silent" in sys.argv:
    print("loading the index with key", os.environ.get("KEY"), file=sys.stderr, flush=True)
    sys.stdin.read()
    sys.exit()
if "--broken" in sys.argv:
    sys.exit("no such index")

from mcp.server.mcpserver import Image, MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("Test", log_level="WARNING")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("on purpose")


@server.tool()
def picture() -> Image:
    """Draw."""
    return Image(data=b"\x89PNG" * 100, format="png")


@server.tool()
def environment() -> str:
    """Name the variables of the environment."""
    return " ".join(sorted(os.environ))


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
async def sleep() -> str:
    """Sleep for ever, and say so in a file when that ends."""
    try:
        await asyncio.Event().wait()
    finally:
        Path(os.environ["CANCELLED"]).touch()
    return "awake"


@server.tool(name="dotted.name")
def dotted() -> str:
    """Have an odd name."""
    return "ok"


if __name__ == "__main__":
    if "--http" in sys.argv:
        import uvicorn

        listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--http") + 1])))
        print(listener.getsockname()[1], flush=True)
        app = server.streamable_http_app()
        asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="error")).serve([listener]))
    else:
        server.run()
