"""The environment server: HTTP in front, worker processes behind, nothing of a client kept in between."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
from aiohttp import web

from taskmill._version import __version__
from taskmill.engine.environment import (
    TASKS_A_PAGE,
    Complaint,
    GroupRequest,
    Info,
    Refusal,
    RolloutRequest,
    read_request,
)
from taskmill.engine.supervisor import WorkerPlan, Workers
from taskmill.errors import (
    ConfigurationError,
    ServerBusyError,
    ServerError,
    ServerTokenError,
    TaskIndexError,
    TaskmillError,
    TasksetError,
)
from taskmill.sandbox.choose import Kind
from taskmill.serve import metrics
from taskmill.serve.address import (
    check_token,
    is_allowed,
    is_loopback,
    names_this_machine,
    parse_address,
)
from taskmill.serve.metrics import Metrics
from taskmill.serve.openapi import description
from taskmill.serve.places import sweep_worker, workspaces
from taskmill.serve.worker import Outcome, Told, WorkerSettings
from taskmill.tasks.registry import find_taskset, reference_of
from taskmill.tasks.taskset import Taskset

MAX_BODY = 128 * 1024
"""Bytes of a request that are read; an endpoint and some settings take a few hundred. A full queue holds many."""

READ_TIMEOUT = 60.0
"""Seconds the body of a request may take to arrive."""

DRAIN = 30.0
"""Seconds that requests under way have to be done when the server is told to stop."""

RETRY_AFTER = 1
"""Seconds after which a client that was turned away may ask again."""

_GONE = 499
"""How a request is logged whose client went away."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class NoSuchRouteError(ServerError):
    """There is nothing at that path."""


_STATUS: tuple[tuple[type[TaskmillError], int], ...] = (
    (TaskIndexError, 404),
    (NoSuchRouteError, 404),
    (ServerBusyError, 503),
    (ServerTokenError, 401),
    (ConfigurationError, 422),
)
"""Which status says which error; every other one of taskmill is a 500."""

Log = Callable[..., None]
"""Hears of events: a name, then fields by keyword."""

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.Response]]
"""Answers a request; what it puts into the mapping stands in the request's log line."""


def _silent(event: str, **fields: Any) -> None:
    pass


class Turned(NamedTuple):
    """A request that is not answered as asked: a status, and why."""

    status: int
    error: TaskmillError


class EnvServer:
    """Serves the rollouts of a taskset over HTTP, as an async context manager.

        async with EnvServer("gsm8k", workers=2) as server:
            async with EnvClient(server.url) as client: ...

    Its workers find the taskset by its name, so a class or object must stand in a module or a file. `address` is
    `HOST:PORT`; port 0, the default, takes a free one, which `url` then names. Any address but this machine's own
    needs a `token`. There are up to `workers` processes, of which `min_workers` are started at once (all, unless it
    is said). A worker makes `places` rollouts or groups at once; `queue` more requests wait, others are turned away.
    `log` hears of each event, by name and fields.

    Entering raises `ConfigurationError` for what can't be meant, `TasksetError` for workers that do not make the same
    tasks, and `WorkerStartError` where no worker comes up, with the cause.
    """

    def __init__(
        self,
        taskset: Taskset[Any] | type[Taskset[Any]] | str,
        *,
        config: Mapping[str, Any] | None = None,
        address: str = "127.0.0.1:0",
        workers: int = 1,
        min_workers: int | None = None,
        token: str | None = None,
        places: int = 256,
        queue: int = 10_000,
        max_body: int = MAX_BODY,
        sandbox: Kind = "auto",
        log: Log = _silent,
    ) -> None:
        for name, number in (("workers", workers), ("min_workers", min_workers), ("places", places)):
            if number is not None and number < 1:
                raise ConfigurationError(f"{name}={number!r}: at least 1 is needed")
        if min_workers is not None and min_workers > workers:
            raise ConfigurationError(f"min_workers={min_workers!r} is more than workers={workers!r}")
        self._reference, self._config = _by_reference(taskset, config)
        self.address = parse_address(address)
        self._token = None if token is None else check_token(token)
        if self._token is None and not is_loopback(self.address.host):
            raise ConfigurationError(
                f"address={address!r} can be reached from other machines, so a token is needed (--token-file FILE)"
            )
        self._plan = WorkerPlan(
            target="taskmill.serve.worker:open_worker",
            least=min_workers or workers,
            most=workers,
            places=places,
            queue=queue,
        )
        self._max_body = max_body
        self._sandbox: Kind = sandbox
        self._log = log
        self._told: Told | None = None
        self._metrics = Metrics()
        self._workers: Workers | None = None
        self._runner: web.AppRunner | None = None
        self._stack = AsyncExitStack()
        self._place: Path | None = None
        self._openapi: bytes | None = None

    @property
    def url(self) -> str:
        """Where it listens, for clients on this machine."""
        return f"http://{self.address}"

    @property
    def info(self) -> Info:
        """What is served."""
        assert self._told is not None
        told = self._told
        return Info(told.num_tasks, told.requires_group_scoring, told.taskset, __version__, told.problem)

    @property
    def worker_pids(self) -> list[int]:
        """The worker processes that are up."""
        return [] if self._workers is None else self._workers.pids

    # -- beginning and end ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            listening = _listen(self.address.host, self.address.port)
            stack.callback(listening.close)
            self.address = self.address._replace(port=listening.getsockname()[1])
            self._place = stack.enter_context(workspaces())
            settings = WorkerSettings(self._reference, self._config, str(self._place), self._sandbox)
            plan = msgspec.structs.replace(self._plan, settings=msgspec.msgpack.encode(settings))
            self._workers = await stack.enter_async_context(
                Workers(plan, accept=self._accept, buried=self._sweep, tell=self._log)
            )
            self._runner = web.AppRunner(
                self._application(),
                access_log=None,
                handler_cancellation=True,
                keepalive_timeout=75.0,
                shutdown_timeout=1.0,
            )
            await self._runner.setup()
            stack.push_async_callback(self._runner.cleanup)
            await web.SockSite(self._runner, listening, backlog=8192).start()
            self._stack = stack.pop_all()
        self._log("serving", url=self.url, pid_workers=self.worker_pids, **msgspec.to_builtins(self.info))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            await self._stack.__aexit__(kind, error, trace)

    async def stop(self, patience: float = 0.0) -> None:
        """Take no more requests; those under way have `patience` seconds, then they are cancelled.

        May be called twice, the second time with less patience.
        """
        if self._runner is not None:
            for site in list(self._runner.sites):
                with suppress(RuntimeError):
                    await site.stop()
        if self._workers is not None:
            await self._workers.close(patience)

    def _accept(self, told: bytes) -> None:
        """Compare what a worker makes with what the first one made."""
        said = msgspec.msgpack.decode(told, type=Told)
        first = self._told
        if first is None:
            self._told = said
            return
        for idx, (ours, theirs) in enumerate(zip(first.first_hashes, said.first_hashes, strict=False)):
            if ours != theirs:
                raise TasksetError(_unlike(first.taskset, f"task {idx} is not the same in two workers"))
        if (first.num_tasks, len(first.first_hashes)) != (said.num_tasks, len(said.first_hashes)):
            raise TasksetError(
                _unlike(
                    first.taskset,
                    f"one worker made {first.num_tasks or len(first.first_hashes)} tasks, "
                    f"another {said.num_tasks or len(said.first_hashes)}",
                )
            )

    async def _sweep(self, pid: int) -> None:
        assert self._place is not None
        await asyncio.to_thread(sweep_worker, self._place, pid)

    # -- requests ---------------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=self._max_body)
        routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/info"): self._tell_info,
            ("GET", "/tasks"): self._tasks,
            ("POST", "/rollout"): self._rollout,
            ("POST", "/group"): self._group,
            ("GET", "/metrics"): self._tell_metrics,
            ("GET", "/openapi.json"): self._tell_openapi,
        }
        for (method, path), handler in routes.items():
            application.router.add_route(method, path, self._wrapped(path, handler))
        application.router.add_route("*", "/{anything:.*}", self._wrapped("other", self._unknown))
        return application

    def _wrapped(self, route: str, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        """`handler` with what all have in common: who may come, an id, a count, a log line, errors as answers."""

        async def handle(request: web.Request) -> web.Response:
            began = time.perf_counter()
            given = request.headers.get("X-Request-Id", "")
            id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
            status = _GONE
            fields: dict[str, Any] = {}
            try:
                turned = self._turn_away(request, route)
                if turned is not None:
                    response = _refused(turned.status, turned.error, id)
                else:
                    response = await handler(request, fields)
                status = response.status
            except TaskmillError as problem:
                status = next((code for kind, code in _STATUS if isinstance(problem, kind)), 500)
                fields["error"] = f"{type(problem).__name__}: {problem}"
                response = _refused(status, problem, id)
            except web.HTTPRequestEntityTooLarge:
                status = 413
                response = _refused(
                    413,
                    ServerError(f"the body is larger than the {self._max_body:,} bytes that are taken"),
                    id,
                )
            except Exception as fault:
                status = 500
                fields["traceback"] = "".join(traceback.format_exception(fault))
                response = _refused(500, ServerError("a fault in taskmill; the server's log tells more"), id)
            finally:
                seconds = time.perf_counter() - began
                self._metrics.answered(route, status, seconds)
                if route != "/health":
                    self._log(
                        "request",
                        id=id,
                        method=request.method,
                        route=route,
                        status=status,
                        seconds=round(seconds, 6),
                        **fields,
                    )
            response.headers["X-Request-Id"] = id
            return response

        return handle

    def _turn_away(self, request: web.Request, route: str) -> Turned | None:
        """Why a request is not looked at, if it is not."""
        if self._token is not None:
            if route != "/health" and not is_allowed(request.headers.get("Authorization"), self._token):
                return Turned(
                    401, ServerTokenError("the server's token is needed: Authorization: Bearer TOKEN")
                )
        elif not names_this_machine(request.headers.get("Host")):
            return Turned(
                403,
                ServerError("without a token, only requests to localhost or a loopback address are taken"),
            )
        if request.method == "POST" and request.content_type != "application/json":
            return Turned(415, ServerError("send the request as application/json"))
        return None

    async def _ask(self, kind: str, body: bytes) -> Outcome:
        assert self._workers is not None
        return msgspec.msgpack.decode(await self._workers.call(kind, body), type=Outcome)

    async def _rollout(self, request: web.Request, fields: dict[str, Any]) -> web.Response:
        body = await _body(request)
        asked = read_request(RolloutRequest, body)
        return await self._made("rollout", asked.task_idx, body, fields)

    async def _group(self, request: web.Request, fields: dict[str, Any]) -> web.Response:
        body = await _body(request)
        asked = read_request(GroupRequest, body)
        return await self._made("group", asked.task_idx, body, fields)

    async def _made(self, kind: str, task_idx: int, body: bytes, fields: dict[str, Any]) -> web.Response:
        fields["task_idx"] = task_idx
        outcome = await self._ask(kind, body)
        self._metrics.rollouts.update(outcome.states)
        return _json(outcome.body)

    async def _tasks(self, request: web.Request, fields: dict[str, Any]) -> web.Response:
        start = _number(request.query.get("start", "0"), "start", 0)
        count = _number(request.query.get("count", "64"), "count", 1)
        outcome = await self._ask("tasks", msgspec.msgpack.encode((start, min(count, TASKS_A_PAGE))))
        return _json(outcome.body)

    async def _health(self, request: web.Request, fields: dict[str, Any]) -> web.Response:
        assert self._workers is not None
        workers = self._workers
        status = "stopping" if workers.stopping else "failed" if workers.problem is not None else "ok"
        said = {
            "status": status,
            "workers": len(workers.pids),
            "running": workers.running,
            "queued": workers.queued,
        }
        return _json(msgspec.json.encode(said), 200 if status == "ok" else 503)

    async def _tell_info(self, request: web.Request, fields: dict[str, Any]) -> web.Response:
        said = msgspec.to_builtins(self.info)
        if said["problem"] is None:
            del said["problem"]
        return _json(msgspec.json.encode(said))

    async def _tell_metrics(self, request: web.Request, fields: dict[str, Any]) -> web.Response:
        assert self._workers is not None
        workers = self._workers
        text = self._metrics.text(
            {
                "taskmill_workers": ("gauge", "Worker processes that are up.", len(workers.pids)),
                "taskmill_running": ("gauge", "Requests that are with a worker.", workers.running),
                "taskmill_queued": ("gauge", "Requests that wait for a worker.", workers.queued),
                "taskmill_worker_deaths_total": ("counter", "Workers that died.", workers.deaths),
                "taskmill_reruns_total": (
                    "counter",
                    "Requests run again because their worker died.",
                    workers.reruns,
                ),
            }
        )
        return web.Response(body=text.encode(), headers={"Content-Type": metrics.TYPE})

    async def _tell_openapi(self, request: web.Request, fields: dict[str, Any]) -> web.Response:
        if self._openapi is None:
            self._openapi = msgspec.json.encode(description(with_token=self._token is not None))
        return _json(self._openapi)

    async def _unknown(self, request: web.Request, fields: dict[str, Any]) -> web.Response:
        raise NoSuchRouteError(f"there is no {request.method} {request.path!r:.200}; see /openapi.json")


def _by_reference(
    taskset: Taskset[Any] | type[Taskset[Any]] | str, config: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """The name and configuration by which workers make the taskset. Raises for what none could make."""
    if isinstance(taskset, Taskset):
        if config is not None:
            raise ConfigurationError("give a taskset with its configuration, or a class or name and a config")
        made = taskset
        reference = reference_of(type(made))
    else:
        kind = find_taskset(taskset) if isinstance(taskset, str) else taskset
        made = kind(dict(config or {}))
        reference = taskset if isinstance(taskset, str) else reference_of(kind)
    for name, judge in made.config.task.judges.items():
        if judge.model is not None and not isinstance(judge.model, str):
            raise ConfigurationError(
                f"judge {name!r} is a model object, which workers can't be given: name its model and base_url"
            )
    return reference, made.config.model_dump(mode="json", exclude_defaults=True)


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises `ConfigurationError` saying what stands in the way."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError, AttributeError):
            # Accepted connections inherit these: a client whose machine vanished is noticed within minutes.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigurationError(f"address={host}:{port} can't be listened at: {error.strerror}") from None
    listening.setblocking(False)
    return listening


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            return await request.read()
    except TimeoutError:
        raise ConfigurationError(f"the body did not arrive within {READ_TIMEOUT:g} s") from None


def _number(text: str, name: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(f"{name}={text!r:.50} must be a number from {least} on")
    return int(text)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _refused(status: int, error: TaskmillError, id: str) -> web.Response:
    kind = ServerError if isinstance(error, NoSuchRouteError) else type(error)
    response = _json(msgspec.json.encode(Refusal(Complaint(kind.__name__, str(error), id))), status)
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER)
    return response


def _unlike(name: str, how: str) -> str:
    return (
        f"the workers of taskset {name!r} do not make the same tasks: {how}. Its load must give the same sequence in "
        "every process: draw from a random.Random with a fixed seed, and go over no set"
    )


__all__ = ["EnvServer"]
