"""Workers for tests of the supervisor: they do what the request says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Echo:
    told = b"here"

    async def answer(self, kind: str, body: bytes) -> bytes:
        match kind:
            case "echo":
                return body
            case "pid":
                return str(os.getpid()).encode()
            case "wait":
                await asyncio.sleep(float(body))
                return body
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "die once":
                try:
                    os.mkdir(body)
                except FileExistsError:
                    return b"lived"
                os._exit(3)
            case "exit":
                sys.exit("enough")
            case "raise":
                raise ValueError("no such luck")
            case "child":
                return str(subprocess.Popen(["sleep", "1000"]).pid).encode()
            case "detached child":
                return str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid).encode()
            case "tight loop":
                while True:
                    pass
            case "until cancelled":
                try:
                    await asyncio.sleep(3600)
                finally:
                    os.mkdir(body)
        raise AssertionError(kind)


@asynccontextmanager
async def echo(settings: bytes) -> AsyncIterator[Echo]:
    yield Echo()


@asynccontextmanager
async def unwilling(settings: bytes) -> AsyncIterator[Echo]:
    raise RuntimeError("the disk is missing")
    yield


@asynccontextmanager
async def mute(settings: bytes) -> AsyncIterator[Echo]:
    os._exit(7)
    yield


@asynccontextmanager
async def slow(settings: bytes) -> AsyncIterator[Echo]:
    time.sleep(3600)
    yield Echo()
