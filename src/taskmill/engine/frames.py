"""What a supervisor and its workers say to each other: length-prefixed MessagePack over a socket pair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import msgspec
from msgspec import Struct

from taskmill import errors
from taskmill.errors import TaskmillError, WorkerError

LONGEST = (1 << 32) - 1
"""Bytes of one message, which four bytes can say."""


class Open(Struct, frozen=True, array_like=True, tag="open"):
    """To a worker, first of all: the function that makes it (`module:function`), and what that is told."""

    target: str
    settings: bytes


class Ask(Struct, frozen=True, array_like=True, tag="ask"):
    """To a worker: a request."""

    id: int
    kind: str
    body: bytes


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """To a worker: nobody waits for that request any more."""

    id: int


class End(Struct, frozen=True, array_like=True, tag="end"):
    """To a worker: cancel what runs, and go."""


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """From a worker: it can be asked. `told` is what it has to say of itself."""

    pid: int
    told: bytes


class Unready(Struct, frozen=True, array_like=True, tag="unready"):
    """From a worker: it could not be made, and why. It ends after this."""

    error: str
    message: str


class Answer(Struct, frozen=True, array_like=True, tag="answer"):
    """From a worker: what came of a request."""

    id: int
    body: bytes


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """From a worker: the error a request ended with. A cancelled one has no type."""

    id: int
    error: str
    message: str


class Note(Struct, frozen=True, array_like=True, tag="note"):
    """From a worker: something of a request that is under way, for whoever asked."""

    id: int
    body: bytes


class Beat(Struct, frozen=True, array_like=True, tag="beat"):
    """From a worker, every second or so: its event loop turns."""


ToWorker = Open | Ask | Cancel | End
ToSupervisor = Ready | Unready | Answer | Failed | Note | Beat

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker).decode
to_supervisor = msgspec.msgpack.Decoder(ToSupervisor).decode


def error_of(name: str, message: str) -> TaskmillError:
    """An error of taskmill by the name of its class, or a `WorkerError` that says the name."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TaskmillError):
        return kind(message)
    return WorkerError(f"{name}: {message}")


class Channel(asyncio.Protocol):
    """One end of the socket pair. `heard` is called with each message, `lost` once, when the other end is gone."""

    def __init__(self, heard: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._heard = heard
        self._lost = lost
        self._incoming = bytearray()
        self._transport: asyncio.Transport | None = None

    def send(self, message: ToWorker | ToSupervisor) -> None:
        """Send a message; to an end that is gone, nothing is sent. Raises `WorkerError` where it is too long."""
        if self._transport is None or self._transport.is_closing():
            return
        encoded = _encoder.encode(message)
        if len(encoded) > LONGEST:
            raise WorkerError(f"a message of {len(encoded):,} bytes is too long: {LONGEST:,} are the most")
        # In one piece, although that copies it: each write is a system call that wakes the other end.
        self._transport.write(len(encoded).to_bytes(4, "big") + encoded)

    def close(self) -> None:
        """Close this end."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._lost()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        incoming = self._incoming
        incoming += data
        start = 0
        while len(incoming) - start >= 4:
            end = start + 4 + int.from_bytes(incoming[start : start + 4], "big")
            if len(incoming) < end:
                break
            self._heard(bytes(memoryview(incoming)[start + 4 : end]))
            start = end
        if start:
            del incoming[:start]
