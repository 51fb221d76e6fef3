"""Finding a taskset: a built-in one, one of an installed package, or one in a file or module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from taskmill.errors import TasksetError
from taskmill.tasks.taskset import Taskset

GROUP = "taskmill.tasksets"
"""The group of entry points by which a package names its tasksets."""

BUILT_IN: Mapping[str, str] = {
    "alphabet_sort": "taskmill.tasks.builtin.alphabet_sort:AlphabetSortTaskset",
    "color_codeword": "taskmill.tasks.builtin.color_codeword:ColorCodewordTaskset",
    "gsm8k": "taskmill.tasks.builtin.gsm8k:Gsm8kTaskset",
    "jsonl": "taskmill.tasks.builtin.jsonl:JsonlTaskset",
    "reasoning_gym": "taskmill.tasks.builtin.reasoning_gym:ReasoningGymTaskset",
    "reverse_text": "taskmill.tasks.builtin.reverse_text:ReverseTextTaskset",
    "textarena": "taskmill.tasks.builtin.textarena:TextArenaTaskset",
    "wordle": "taskmill.tasks.builtin.textarena:WordleTaskset",
}
"""Names of the tasksets that come along, and where they are."""


def installed() -> dict[str, EntryPoint]:
    """The tasksets that installed packages bring, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def find_taskset(name: str) -> type[Taskset[Any]]:
    """The class of a taskset by its name, or by `file.py`, `file.py:Class`, `module` or `module:Class`.

    Raises `TasksetError`, saying whether there is no such taskset, or a package that it needs is missing.
    """
    target = BUILT_IN.get(name)
    if target is None and (point := installed().get(name)) is not None:
        target = point.value
    if target is not None:
        return _from_module(target, name)
    if ".py" in name or "/" in name or "\\" in name:
        return _from_file(name)
    module, _, _ = name.partition(":")
    if ("." in name or ":" in name) and _is_module(module):
        return _from_module(name, name)
    known = sorted({*BUILT_IN, *installed()})
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise TasksetError(
        f"there is no taskset {name!r}{hint} There are {', '.join(known)}; "
        "a file (my_tasks.py) or a module (package.tasks:MyTaskset) does too"
    )


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _from_module(target: str, name: str) -> type[Taskset[Any]]:
    path, _, wanted = target.partition(":")
    return _class_in(_imported(lambda: importlib.import_module(path), name), wanted, name)


def _from_file(target: str) -> type[Taskset[Any]]:
    file, wanted = target, ""
    if not target.endswith(".py"):
        file, _, wanted = target.rpartition(":")
    path = Path(file).resolve()
    if not file.endswith(".py") or not path.is_file():
        raise TasksetError(f"there is no taskset file {file or target!r}; name a Python file that is there")

    def load() -> ModuleType:
        # Under a name of its own and in sys.modules, so that dataclasses, pickling and forward references find it.
        name = f"taskmill_file_{path.stem}_{abs(hash(str(path))):x}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    return _class_in(_imported(load, target), wanted, target)


def _imported(load: Any, name: str) -> ModuleType:
    try:
        module: ModuleType = load()
    except ModuleNotFoundError as error:
        raise TasksetError(
            f"taskset {name!r} needs the package {(error.name or '?').partition('.')[0]!r}, which is not installed"
        ) from error
    except (Exception, SystemExit) as error:
        raise TasksetError(f"taskset {name!r} can't be imported: {type(error).__name__}: {error}") from error
    return module


def _class_in(module: ModuleType, wanted: str, name: str) -> type[Taskset[Any]]:
    if wanted:
        found = getattr(module, wanted, None)
        if not (isinstance(found, type) and issubclass(found, Taskset)):
            raise TasksetError(f"taskset {name!r}: {wanted!r} is no class of tasksets in {module.__name__!r}")
        return found
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Taskset) and value.__module__ == module.__name__
    ]
    if not own:
        raise TasksetError(f"taskset {name!r}: no class of tasksets (a subclass of Taskset) is defined there")
    if len(own) > 1:
        names = ", ".join(kind.__name__ for kind in own)
        raise TasksetError(
            f"taskset {name!r}: one class of tasksets is needed, and there are {names}; add ':{own[0].__name__}'"
        )
    return own[0]


def reference_of(kind: type[Taskset[Any]]) -> str:
    """By which name another process finds that class: a taskset's name, `module:Class`, or `file.py:Class`.

    Raises `TasksetError` for a class that stands in no module or file.
    """
    target = f"{kind.__module__}:{kind.__qualname__}"
    named = {place: name for name, place in BUILT_IN.items()}
    named |= {point.value: name for name, point in installed().items()}
    if target in named:
        return named[target]
    if "<locals>" in kind.__qualname__:
        raise TasksetError(
            f"taskset {kind.__qualname__!r} is defined inside a function, where no other process finds it: "
            "define it in a module or file"
        )
    if kind.__module__ == "__main__" or kind.__module__.startswith("taskmill_file_"):
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file is None:
            raise TasksetError(
                f"taskset {kind.__qualname__!r} stands in no file, so no other process finds it: put it in one"
            )
        return f"{Path(file).resolve()}:{kind.__qualname__}"
    return target
