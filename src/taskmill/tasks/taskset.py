"""A taskset: where tasks come from, built as they are asked for, perhaps for ever."""

from __future__ import annotations

import itertools
import random
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sized
from importlib.util import find_spec
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from taskmill.errors import ConfigurationError, TasksetError
from taskmill.tasks.explain import explain
from taskmill.tasks.task import UNSET, Task, TaskConfig

TaskT = TypeVar("TaskT", bound=Task[Any])


class TasksetConfig(BaseModel):
    """Settings of a taskset. Subclass it for your own; `task` holds those that reach every task."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    task: TaskConfig = Field(default_factory=TaskConfig)


class Taskset(Generic[TaskT]):
    """Tasks with a name, from a list or a generator. Subclasses say how `load` makes them.

    Loading is deterministic: two `load()` of one configuration give the same sequence, in any process. Draw from a
    `random.Random` of your own and leave the generator of the `random` module alone.
    """

    INFINITE: ClassVar[bool] = False
    """`load` never ends. How many tasks a run takes is then for `select` to say, not for the configuration."""

    Config: ClassVar[type[TasksetConfig]] = TasksetConfig
    """The class of the configuration."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Packages that `load` imports and that may be missing."""

    name: ClassVar[str] = ""
    """What it is called; the name of the class, in lower case with underscores, where nothing is said."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            bare = cls.__name__.removesuffix("Taskset") or cls.__name__
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", bare).lower()

    def __init__(self, config: TasksetConfig | Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Take a configuration, or its fields. Raises `ConfigurationError` naming the field that won't do."""
        if isinstance(config, TasksetConfig):
            if fields:
                raise ConfigurationError("give a configuration or its fields, not both")
            self.config = config
        else:
            try:
                self.config = self.Config.model_validate({**(config or {}), **fields})
            except ValidationError as problem:
                raise ConfigurationError(explain(problem, self.Config, f"taskset {self.name!r}")) from None

    def load(self) -> Iterable[TaskT]:
        """The tasks, with rising `idx`: a list, or a generator that builds each as it is asked for."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its tasks are loaded")

    def select(self, num_tasks: int | None = None, shuffle: bool = False, seed: int = 0) -> list[TaskT]:
        """The tasks of a run. Builds no task more than it takes, except that a shuffle has to see them all.

        Raises:
            ValueError: `num_tasks` is no positive number, or missing where the taskset is infinite.
            TasksetError: `load` failed, or gave what is no task.
        """
        return list(self.draw(num_tasks, shuffle, seed))

    def draw(self, num_tasks: int | None = None, shuffle: bool = False, seed: int = 0) -> Draw[TaskT]:
        """`select` as an iterator, for runs larger than memory. A choice that can't be meant is refused at once."""
        check_number(num_tasks)
        if self.INFINITE and num_tasks is None:
            raise ConfigurationError(
                f"{type(self).__name__} is infinite - select a bounded subset with num_tasks (-n on the CLI)"
            )
        if self.INFINITE and shuffle:
            warnings.warn(
                f"shuffle is a no-op on an infinite taskset: {type(self).__name__} gives its first {num_tasks} tasks",
                stacklevel=2,
            )
            shuffle = False
        loaded = self._loaded()
        if not shuffle:
            size = len(loaded) if isinstance(loaded, Sized) else num_tasks if self.INFINITE else None
            total = size if size is None or num_tasks is None else min(size, num_tasks)
            return Draw(itertools.islice(self.checked(loaded), num_tasks), total)
        tasks = list(self.checked(loaded))
        random.Random(seed).shuffle(tasks)
        chosen = tasks[:num_tasks]
        return Draw(iter(chosen), len(chosen))

    def _loaded(self) -> Iterable[TaskT]:
        try:
            return self.load()
        except (Exception, SystemExit) as error:
            raise self._failed(0, error) from error

    def checked(self, loaded: Iterable[TaskT] | None = None) -> Iterator[TaskT]:
        """The tasks of `load`, each looked at: a task it must be, with an `idx` above the one before."""
        before = -1
        tasks: Iterator[TaskT] | None = None
        for place in itertools.count():
            try:
                if tasks is None:
                    tasks = iter(self._loaded() if loaded is None else loaded)
                task = next(tasks)
            except StopIteration:
                return
            except (Exception, SystemExit) as error:
                raise self._failed(place, error) from error
            if not isinstance(task, Task):
                raise TasksetError(
                    f"taskset {self.name!r} gave a {type(task).__name__} as its task {place}, not a Task: {task!r:.200}"
                )
            if task.data.idx <= before:
                raise TasksetError(
                    f"taskset {self.name!r}: task {place} has idx {task.data.idx} after idx {before}; they must rise"
                )
            before = task.data.idx
            if task.config is UNSET:
                task.config = self.config.task
            yield task

    def _failed(self, place: int, error: BaseException) -> TasksetError:
        if isinstance(error, TasksetError):
            return error
        if isinstance(error, ModuleNotFoundError):
            return _lacking(self.name, [(error.name or "?").partition(".")[0]])
        return TasksetError(
            f"taskset {self.name!r} failed at its task {place}: {type(error).__name__}: {error}"
        )


class Draw(Iterator[TaskT]):
    """Tasks one at a time. `total` is how many there are, `None` where only the end will tell."""

    def __init__(self, tasks: Iterator[TaskT], total: int | None) -> None:
        self._tasks = tasks
        self.total = total

    def begin(self) -> TaskT | None:
        """Build the first task, which the next `next` will give; `None` where there is none.

        Raises `TasksetError` where it can't be built: so that is known before anything is made for the run.
        """
        first = next(self._tasks, None)
        if first is not None:
            self._tasks = itertools.chain((first,), self._tasks)
        return first

    def __next__(self) -> TaskT:
        return next(self._tasks)


def require_packages(taskset: Taskset[Any]) -> None:
    """Raise `TasksetError` where a package that `taskset` needs is not installed."""
    lacking = [package for package in taskset.needs if find_spec(package) is None]
    if lacking:
        raise _lacking(taskset.name, lacking)


def _lacking(name: str, packages: list[str]) -> TasksetError:
    noun, verb = ("packages", "are") if len(packages) > 1 else ("package", "is")
    told = ", ".join(map(repr, packages))
    return TasksetError(f"taskset {name!r} needs the {noun} {told}, which {verb} not installed")


class _Selection(BaseModel):
    num_tasks: int | None = Field(None, ge=1, le=sys.maxsize, strict=True)


def check_number(num_tasks: int | None) -> None:
    """Raise `ConfigurationError` unless that many tasks can be taken."""
    try:
        _Selection(num_tasks=num_tasks)
    except ValidationError as problem:
        raise ConfigurationError(explain(problem, _Selection)) from None


__all__ = ["Draw", "Taskset", "TasksetConfig", "check_number", "require_packages"]
