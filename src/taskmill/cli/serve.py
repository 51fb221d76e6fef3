"""`taskmill serve`: rollouts by number over HTTP."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from pydantic import ValidationError

from taskmill.cli import EXIT_INTERRUPTED, EXIT_OK
from taskmill.cli.display import say_result
from taskmill.cli.options import ENDPOINT_FIELDS, Grammar, parse, resolve
from taskmill.engine.collector import patient_collector
from taskmill.errors import ConfigurationError
from taskmill.serve import EnvServer
from taskmill.serve.address import read_token
from taskmill.serve.logs import LineWriter
from taskmill.serve.settings import ServeSettings
from taskmill.tasks.explain import explain

GRAMMAR = Grammar("serve", ServeSettings, options=(), flags=(), short={})

HELP = """\
Usage: taskmill serve TASKSET [OPTIONS] [@ FILE.toml]

Serve the rollouts of a taskset by number, over HTTP: for a trainer, or another machine. Each request names the model
that answers, so none is named here.

TASKSET is a name ('taskmill tasksets' lists them), a file (my_tasks.py, my_tasks.py:Class) or a module
(package.tasks:Class).

      --address HOST:PORT    Where to listen; :0 takes a free port, and says which. [default: 127.0.0.1:8400]
      --workers N            Worker processes there may be. [default: 1]
      --min-workers N        Worker processes that are started at once. [default: all of them]
      --token-file FILE      A file with the token that clients must give (16 characters or more). Needed on any
                             address that other machines reach.
      --places N             Requests that one worker has under way at once. [default: 256]
      --queue N              Requests that wait for a worker; others are turned away. [default: 10000]
      --max-body BYTES       Bytes of a request that are read. [default: 131072]
      --drain SECONDS        What requests under way have when the server is told to stop. [default: 30]
      --sandbox KIND         What confines commands: auto, bubblewrap, plain or docker. [default: auto]
      --taskset.NAME VALUE   The taskset's own fields ('taskmill tasksets NAME' shows them).
      --task.NAME VALUE      The fields of its tasks, such as --task.judges.tone.model NAME.
  @ FILE.toml                Settings from a file, several if need be; the command line wins.

Log lines, one JSON object each, go to standard error. SIGTERM or Ctrl-C stops it when what runs is done, a second
one at once.

Exit code 0 when it was stopped by SIGTERM, 130 by Ctrl-C, 2 when it could not be started as asked, 1 when no worker
process came up.
"""


def serve(*words: str) -> int:
    """Serve the rollouts of a taskset by number, over HTTP."""
    if not words or any(word in ("--help", "-h") for word in words):
        print(HELP, end="")
        return EXIT_OK
    parsed = parse(words, GRAMMAR)
    for name in ENDPOINT_FIELDS:
        if name in parsed.given:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} is not for 'serve': each request names its own model"
            )
    resolved = resolve(parsed, GRAMMAR, environment={})
    try:
        settings = ServeSettings.model_validate(resolved.settings)
    except ValidationError as problem:
        raise ConfigurationError(explain(problem, ServeSettings)) from None
    token = None if settings.token_file is None else read_token(settings.token_file)
    log = LineWriter()
    server = EnvServer(
        resolved.taskset,
        address=settings.address,
        workers=settings.workers,
        min_workers=settings.min_workers,
        token=token,
        places=settings.places,
        queue=settings.queue,
        max_body=settings.max_body,
        sandbox=settings.sandbox,
        log=log,
    )
    try:
        return asyncio.run(_serve(server, settings.drain, log))
    finally:
        log.close()


async def _serve(server: EnvServer, drain: float, log: Any) -> int:
    loop = asyncio.get_running_loop()
    pressed: list[int] = []
    told, again = asyncio.Event(), asyncio.Event()
    work = asyncio.current_task()
    assert work is not None
    started = False

    def on_signal(number: int) -> None:
        pressed.append(number)
        if not started:
            work.cancel()
        (again if told.is_set() else told).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        async with server:
            started = True
            info = server.info
            size = "infinite" if info.num_tasks is None else f"{info.num_tasks:,} tasks"
            say_result(f"serving {info.taskset!r} ({size}) at {server.url}")
            with patient_collector():
                await told.wait()
            log("stopping", signal=signal.Signals(pressed[0]).name, drain=drain)
            await _drain(server, drain, again)
    except asyncio.CancelledError:
        if not pressed:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    log("stopped")
    return EXIT_INTERRUPTED if pressed and pressed[0] == signal.SIGINT else EXIT_OK


async def _drain(server: EnvServer, drain: float, again: asyncio.Event) -> None:
    """Stop when what runs is done, when its time is over, or when told a second time."""

    async def hurry() -> None:
        await again.wait()
        await server.stop(0.0)

    async with asyncio.TaskGroup() as group:
        hurrying = group.create_task(hurry())
        await server.stop(drain)
        hurrying.cancel()
