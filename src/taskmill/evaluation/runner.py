"""Running a taskset: `evaluate` in code, `taskmill eval` on the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from taskmill.engine.envclient import EnvClient
from taskmill.engine.environment import EndpointChoice
from taskmill.engine.progress import Progress
from taskmill.engine.traces import read_traces
from taskmill.errors import ConfigurationError, RunAbortedError, RunChangedError, StoreError, TasksetError
from taskmill.evaluation.begun import Begun, begin_draw
from taskmill.evaluation.fingerprint import scoring_of
from taskmill.evaluation.run import EvalRun
from taskmill.evaluation.served import ServedRun, Serving, check_info, infinite_message
from taskmill.evaluation.settings import POLICY_FIELDS, EvalSettings, check_settings
from taskmill.evaluation.told import log_events
from taskmill.models.base import Model
from taskmill.models.choose import open_model
from taskmill.models.endpoint import Timeouts
from taskmill.models.families import public_url
from taskmill.models.retry import RetryPolicy
from taskmill.records import DONE_STATES, Trace
from taskmill.store.run import RunDirectory
from taskmill.tasks.explain import explain
from taskmill.tasks.registry import find_taskset, reference_of
from taskmill.tasks.taskset import Taskset, check_number

SCORING = "scoring"
"""The field of a run's configuration that tells whether its taskset's code is still what it was at the start."""

OUTPUT_DIR = Path("runs")
"""Where runs stand unless told otherwise."""

Listener = Callable[[Mapping[str, Any]], None]


class EvalResult:
    """A run that came to its end. The files in `path` hold all of it; `summary` is what `summary.json` says."""

    def __init__(self, path: Path, summary: Mapping[str, Any]) -> None:
        self.path = path
        self.summary = summary

    @property
    def reward(self) -> float | None:
        """The mean reward; `None` where no rollout has one."""
        found: float | None = self.summary["reward"]["mean"]
        return found

    @property
    def complete(self) -> bool:
        """Whether every rollout that was asked for is done."""
        outcomes = self.summary["outcomes"]
        return self.summary["outcome"] == "finished" and all(
            count == 0 for state, count in outcomes.items() if state not in DONE_STATES
        )

    def traces(self) -> Iterator[Trace]:
        """The traces, one at a time, in the order in which the rollouts ended."""
        return read_traces(RunDirectory(self.path).read_traces())


class Evaluation:
    """A taskset, a model and settings, checked; `run` makes the rollouts.

    Every run has a directory of its own under `output_dir`; none is ever overwritten. Raises `ConfigurationError` for
    what can't be meant, before anything is written.

    With a `server`, an environment server makes the rollouts: the address of one (`server_token` is its token), or an
    `EnvServer` that is started for the run. The same seeds give the same results.
    """

    def __init__(
        self,
        taskset: Taskset[Any] | type[Taskset[Any]] | str,
        *,
        model: str | Model | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        prices: Mapping[str, Any] | None = None,
        output_dir: Path | str = OUTPUT_DIR,
        run_name: str | None = None,
        on_event: Listener | None = None,
        resume: Path | str | None = None,
        reference: str | None = None,
        server: str | Serving | None = None,
        server_token: str | None = None,
        **settings: Any,
    ) -> None:
        self.taskset = as_taskset(taskset)
        self.settings: EvalSettings = check_settings(settings)
        self._server = server
        self._server_token = server_token
        self._reference = reference or (taskset if isinstance(taskset, str) else recorded_name(self.taskset))
        self._choice = model
        self._base_url = base_url
        self._api_key = api_key
        self._prices = prices
        self._output_dir = Path(output_dir)
        self._run_name = run_name
        self._resume = None if resume is None else Path(resume)
        self.progress = Progress(on_event or log_events)
        self.summary: dict[str, Any] | None = None
        """What the run came to, also where it was interrupted or gave up; `None` before that."""
        self.path: Path | None = self._resume
        self._begun: Begun | None = None
        check_number(self.settings.num_tasks)
        # Says at once what it would say later, before a folder or a connection is made.
        if self.taskset.INFINITE and self.settings.num_tasks is None:
            if server is not None:
                raise ConfigurationError(infinite_message(self.taskset.name))
            self.taskset.draw(None)
        if server is not None and (not isinstance(model, str) or base_url is None):
            raise ConfigurationError(
                "an environment server asks models at endpoints only: set model and base_url (--model, --base-url)"
            )
        for name, judge in self.taskset.config.task.judges.items():
            if judge.model is None:
                raise ConfigurationError(f"judge {name!r} has no model: set task.judges.{name}.model")

    @classmethod
    def resume(
        cls,
        path: Path | str,
        *,
        taskset: Taskset[Any] | type[Taskset[Any]] | str | None = None,
        model: str | Model | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        prices: Mapping[str, Any] | None = None,
        on_event: Listener | None = None,
        server: str | Serving | None = None,
        server_token: str | None = None,
        **changes: Any,
    ) -> Evaluation:
        """Go on with the run in `path`, by its own configuration.

        `changes` may name settings that change no result, and larger numbers of tasks and rollouts. A taskset or a
        model that is no name (an object of your own) has to be given again.

        Raises `RunNotFoundError`, `RunChangedError`.
        """
        stored = stored_config(path)
        fields = dict(stored["taskset"])
        reference = fields.pop("name")
        if taskset is None:
            taskset = configured(find_taskset(reference), fields)
        settings = {
            name: value
            for name, value in stored.items()
            if name not in ("taskset", "model", "base_url", SCORING)
        }
        return cls(
            taskset,
            model=stored["model"] if model is None else model,
            base_url=stored["base_url"] if base_url is None and not _is_object(model) else base_url,
            api_key=api_key,
            prices=prices,
            on_event=on_event,
            resume=path,
            reference=reference,
            server=server,
            server_token=server_token,
            **(settings | changes),
        )

    def config(self, model: str) -> dict[str, Any]:
        """The resolved configuration: what the run's directory keeps. No key stands in it."""
        return {
            "taskset": {"name": self._reference, **self.taskset.config.model_dump(mode="json")},
            "model": model,
            "base_url": None if self._base_url is None else public_url(self._base_url),
            **self.settings.model_dump(mode="json"),
        }

    @property
    def model_name(self) -> str:
        """The model's name, as records will show it."""
        if self._choice is None:
            return "embedded"
        return self._choice if isinstance(self._choice, str) else self._choice.name

    def begin(self) -> Begun | None:
        """Build the first task. `run` does so too where it was not done, before it makes a directory.

        Raises `TasksetError` where that fails, or a package is missing. A server builds its own: `None`.
        """
        if self._begun is None and self._server is None:
            settings = self.settings
            self._begun = begin_draw(self.taskset, settings.num_tasks, settings.shuffle, settings.seed)
        return self._begun

    async def run(self) -> EvalResult:
        """Make every rollout that is not done, and sum up. Cancelling leaves a run that can be resumed.

        Raises:
            RunChangedError: the run to resume was made with settings that give other results.
            RunLockedError: another process is at work on it.
            TasksetError: the taskset can't be loaded, or gave what is no task.
            StorageFullError: nothing more can be written; what was acknowledged is intact.
            RunAbortedError: the model failed in too many rollouts; those not run are left for a resume.
        """
        if self.path is not None and self._resume is None:
            raise RunAbortedError("this evaluation was run already; make another, or resume its directory")
        async with AsyncExitStack() as stack:
            begun = self.begin()
            client = info = None
            if self._server is not None:
                client = await self._connect(self._server, stack)
                info = await client.info()
                check_info(info, self.taskset, self.settings.num_tasks)
                if info.problem is not None and not info.num_tasks:
                    raise TasksetError(info.problem)
            model = self._open_model(self._choice, self._base_url, self._api_key)
            if model is not self._choice:
                stack.push_async_callback(model.close)
            config = self.config(model.name)
            scoring = None if begun is None else scoring_of(self.taskset, begun.first)
            began_with = scoring
            if self._resume is not None:
                stored = stored_config(self._resume)
                refuse_fewer(stored, config)
                began_with = stored.get(SCORING)
            if began_with is not None:
                config[SCORING] = began_with
            judges = {}
            for name, judge in self.taskset.config.task.judges.items():
                if client is not None:
                    break  # the server has its own
                key = os.environ.get(judge.api_key_env)
                judges[name] = self._open_model(judge.model, judge.base_url, key)
                if judges[name] is not judge.model:
                    stack.push_async_callback(judges[name].close)
            path = self.path = self._resume or new_directory(
                self._output_dir, self._run_name or f"{self.taskset.name}--{model.name}"
            )
            directory = RunDirectory(path, sync=self.settings.sync)
            opened = directory.open_for_writing(
                config, resume=self._resume is not None, policy_fields=POLICY_FIELDS
            )
            stack.push_async_callback(directory.close)
            directory.write_file("config.toml", as_toml(config))
            for repair in opened.repairs:
                self.progress.tell("warning", message=str(repair))
            run: EvalRun
            if client is not None and info is not None:
                run = ServedRun(
                    self.taskset,
                    self.settings,
                    client=client,
                    info=info,
                    endpoint=self._endpoint(),
                    directory=directory,
                    progress=self.progress,
                    model=model,
                )
            else:
                assert begun is not None
                run = EvalRun(
                    self.taskset,
                    self.settings,
                    directory=directory,
                    progress=self.progress,
                    model=model,
                    judges=judges,
                    begun=begun,
                    rescored=None not in (scoring, began_with) and scoring != began_with,
                )
            try:
                return EvalResult(path, await run.carry_out())
            finally:
                self.summary = run.summary or None

    async def _connect(self, server: str | Serving, stack: AsyncExitStack) -> EnvClient:
        if not isinstance(server, str):
            await stack.enter_async_context(server)
        url = server if isinstance(server, str) else server.url
        return await stack.enter_async_context(EnvClient(url, token=self._server_token))

    def _endpoint(self) -> EndpointChoice:
        settings = self.settings
        return EndpointChoice.model_validate(
            {
                "name": self._choice,
                "base_url": self._base_url,
                "api_key": self._api_key,
                "call_timeout": settings.call_timeout,
                "total_timeout": settings.total_timeout,
                "max_attempts": settings.max_attempts,
                "prices": self._prices,
            }
        )

    def _open_model(self, model: str | Model | None, base_url: str | None, api_key: str | None) -> Model:
        settings = self.settings
        return open_model(
            model,
            base_url=base_url,
            api_key=api_key,
            timeouts=Timeouts(attempt=settings.call_timeout, total=settings.total_timeout),
            policy=RetryPolicy(attempts=settings.max_attempts),
            prices=self._prices,
        )


async def evaluate(
    taskset: Taskset[Any] | type[Taskset[Any]] | str,
    *,
    model: str | Model | None = None,
    num_tasks: int | None = None,
    num_rollouts: int = 1,
    **options: Any,
) -> EvalResult:
    """Roll out a taskset and score it: `num_tasks` tasks, `num_rollouts` rollouts each.

    `taskset` is an object, a class, or a name as on the command line; `model` a name (with `base_url` and `api_key`), a
    model object, or nothing for the embedded model. `options` are those of `Evaluation` and the fields of
    `EvalSettings`. Raises as `Evaluation` and its `run` do.
    """
    evaluation = Evaluation(taskset, model=model, num_tasks=num_tasks, num_rollouts=num_rollouts, **options)
    return await evaluation.run()


def as_taskset(taskset: Taskset[Any] | type[Taskset[Any]] | str) -> Taskset[Any]:
    """A taskset from what a caller may give for one."""
    if isinstance(taskset, str):
        taskset = find_taskset(taskset)
    return taskset() if isinstance(taskset, type) else taskset


def configured(kind: type[Taskset[Any]], fields: Mapping[str, Any]) -> Taskset[Any]:
    """A taskset with the fields of its configuration. Raises `ConfigurationError` naming those that won't do."""
    try:
        return kind(kind.Config.model_validate(dict(fields)))
    except ValidationError as problem:
        raise ConfigurationError(explain(problem, kind.Config, f"taskset {kind.name!r}")) from None


def recorded_name(taskset: Taskset[Any]) -> str:
    """What the configuration calls the class: a name that finds it again, where it has one."""
    kind = type(taskset)
    try:
        return reference_of(kind)
    except TasksetError:  # of a notebook or a function: a resume has to be given the object
        return f"{kind.__module__}:{kind.__qualname__}"


def stored_config(path: Path | str, *commands: str) -> dict[str, Any]:
    """The configuration of the run in `path`, which one of the `commands` made (`eval` where none is named).

    Raises `RunNotFoundError`, or `ConfigurationError` where it is another kind of run.
    """
    directory = RunDirectory(path)
    directory.require()
    stored = directory.read_config()
    commands = commands or ("eval",)
    if (
        stored is None
        or not isinstance(stored.get("taskset"), dict)
        or stored.get("command", "eval") not in commands
    ):
        wanted = " or ".join(f"`taskmill {command}`" for command in commands)
        raise ConfigurationError(f"the run in {str(path)!r} is of another kind: name a directory of {wanted}")
    return stored


def refuse_fewer(stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `RunChangedError` where a resume asks for fewer tasks or rollouts than the run has."""
    for name in ("num_tasks", "num_rollouts"):
        before, after = stored.get(name), now.get(name)
        if before != after and (before is None or (after is not None and after < before)):
            raise RunChangedError(
                f"the run has {name}={before!r}, now {after!r}: a resume can extend a run, not make it smaller"
            )


def new_directory(parent: Path, name: str) -> Path:
    """Make a directory that was not there before, called by `name` and this moment."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:150] or "run"
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
            path = parent / f"{slug}--{stamp}{suffix}"
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise StoreError(
            f"no directory for the run can be made in {str(parent)!r}: {error.strerror}"
        ) from error
    raise StoreError(f"there are too many runs of this moment in {str(parent)!r}")


def _is_object(model: Any) -> bool:
    return model is not None and not isinstance(model, str)


def as_toml(config: Mapping[str, Any]) -> bytes:
    """A configuration as the text of `config.toml`."""
    return tomli_w.dumps(_without_nulls(config)).encode()


def _without_nulls(value: Any) -> Any:
    """For TOML, which has no null: what is not set is left out."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value if item is not None] if isinstance(value, list) else value
