"""The endpoint for benchmarks: HTTP/1.1 by hand over asyncio, so that the server is never what is measured.

It knows one behaviour: so many turns with a tool call, then an answer. It reads no more of a request than it
has to, and a whole answer is bytes made in advance.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
from collections import Counter
from typing import Any, cast

import msgspec

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TEXT = "All done."
_THOUGHT = "The user wants this done; one step at a time."


class _Turn(msgspec.Struct):
    role: str
    content: Any = None


class _Body(msgspec.Struct):
    messages: list[_Turn]


_decode = msgspec.json.Decoder(_Body).decode


class _State:
    """What the connections of one server share: settings and counts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.turns = options.turns if options.turns is not None else int(options.script == "tool_then_answer")
        self.latency = options.latency
        self.bearer = None if options.key is None else b"Bearer " + options.key.encode() + b"\r\n"
        self.fault_every = options.fault_every
        self.fault_status = options.fault_status
        self.count_prompts = options.count_prompts
        self.calls = self.answered = self.refused = self.connections = 0
        self.prompts: Counter[str] = Counter()
        function = {"name": options.tool, "arguments": options.arguments}
        self.calling = [
            _ok(None, [{"id": f"call_{n}", "type": "function", "function": function}])
            for n in range(self.turns)
        ]
        self.speaking = _ok(options.text)

    def counts(self) -> dict[str, Any]:
        names = ("calls", "answered", "refused", "connections", "prompts")
        return {name: getattr(self, name) for name in names}


def _response(status: int, body: Any, extra: str = "") -> bytes:
    raw = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{extra}Content-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


def _ok(text: str | None, calls: list[dict[str, Any]] | None = None) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": _THOUGHT}
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return _response(200, {"id": "lean", "model": "lean", "choices": [choice], "usage": usage})


class _Connection(asyncio.Protocol):
    def __init__(self, state: _State) -> None:
        self._state = state
        self._buffer = bytearray()
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._state.connections += 1

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(buffer[:end])
            announced = _LENGTH.search(head)
            length = int(announced[1]) if announced else 0
            if len(buffer) < end + 4 + length:
                return
            body = bytes(buffer[end + 4 : end + 4 + length])
            del buffer[: end + 4 + length]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        state = self._state
        if head.startswith(b"GET /counts"):
            self._write(_response(200, state.counts()))
            return
        state.calls += 1
        if state.bearer is not None and state.bearer not in head + b"\r\n":
            state.refused += 1
            self._write(_response(401, {"error": {"message": "wrong key", "code": "invalid_api_key"}}))
            return
        if state.fault_every and state.calls % state.fault_every == 0:
            state.refused += 1
            extra = "Retry-After: 0\r\n" if state.fault_status == 429 else ""
            self._write(_response(state.fault_status, {"error": {"message": "a fault, as asked"}}, extra))
            return
        messages = _decode(body).messages
        if state.count_prompts:
            prompt = next((turn.content for turn in messages if turn.role == "user"), "")
            state.prompts[str(prompt)] += 1
        done = sum(turn.role == "tool" for turn in messages) if state.turns else 0
        said = state.calling[done] if done < state.turns else state.speaking
        state.answered += 1
        if state.latency:
            self._loop.call_later(state.latency, self._write, said)
        else:
            self._write(said)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m taskmill.testing.endpoint", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any free one; the address is printed")
    parser.add_argument("--script", choices=["answer", "tool_then_answer"], default="answer")
    parser.add_argument("--turns", type=int, default=None, help="turns with a tool call before the answer")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--key", default=None, help="the only bearer that is let in")
    parser.add_argument("--tool", default="terminal", help="the tool that is called")
    parser.add_argument("--arguments", default='{"command": "echo hello"}', help="its arguments, as text")
    parser.add_argument("--text", default=_TEXT, help="the answer")
    parser.add_argument("--fault-every", type=int, default=0, help="every so many calls fail")
    parser.add_argument("--fault-status", type=int, default=429, help="the status they fail with")
    parser.add_argument(
        "--count-prompts", action="store_true", help="count calls by their first user message"
    )
    return parser.parse_args(arguments)


async def _serve(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    state = _State(options)
    server = await loop.create_server(lambda: _Connection(state), "127.0.0.1", options.port, backlog=8192)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}/v1", "pid": os.getpid()}), flush=True)
    parent = os.getppid()
    # A test that is killed can't stop its server: it goes when its parent has gone.
    while not stop.is_set() and os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await stop.wait()
    server.close()


def main(arguments: list[str] | None = None) -> None:
    """Serve until told to stop, or until the process that started this one is gone."""
    options = _options(arguments)
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(options))
    else:
        uvloop.run(_serve(options))
