"""Recipes as JSON: what a conversation is made of, with functions and classes by the path they are imported from.

Reading one imports the modules it names, as any Python program does: read only files that you trust.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
from msgspec import Struct

from taskmill.errors import ConfigurationError
from taskmill.programs.conversation.stop import StopCondition
from taskmill.records import Message

_MARK = "$"
_OURS = "taskmill.programs.conversation"


def as_recipe(value: Any, where: str = "the conversation") -> Any:
    """`value` as JSON, so that `from_recipe` gives an equal one, in any process that can import what it names.

    Raises `ConfigurationError` for what can't be found again, naming where it stands and what to do.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple | list):
        return [as_recipe(item, f"{where}[{place}]") for place, item in enumerate(value)]
    if isinstance(value, partial):
        return {
            _MARK: "partial",
            "function": as_recipe(value.func, where),
            "args": as_recipe(value.args, where),
            "keywords": as_recipe(value.keywords, where),
        }
    if isinstance(value, type) or (callable(value) and _target(value) is not None):
        return {_MARK: "import", "name": import_path(value, where)}
    if isinstance(value, Mapping):
        return {str(name): as_recipe(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, Message | Struct) or is_dataclass(value) or isinstance(value, StopCondition):
        names = _fields(value)
        inner = {name: as_recipe(getattr(value, name), f"{where}.{name}") for name in names}
        return {_MARK: class_path(type(value), where), **inner}
    raise ConfigurationError(
        f"{where} can't be saved: {value!r:.200} is an object of {type(value).__qualname__}, which nobody could make "
        "again. Use a list of answers, a function or class of a module, the name of a model, or a policy that is a "
        "dataclass"
    )


def from_recipe(recipe: Any, where: str = "the recipe") -> Any:
    """What `as_recipe` was given. Raises `ConfigurationError` naming what can't be imported or made."""
    if isinstance(recipe, list):
        return tuple(from_recipe(item, where) for item in recipe)
    if not isinstance(recipe, Mapping):
        return recipe
    kind = recipe.get(_MARK)
    values = {name: from_recipe(item, f"{where}.{name}") for name, item in recipe.items() if name != _MARK}
    if kind is None:
        return values
    if kind == "import":
        return imported(str(recipe["name"]), where)
    if kind == "partial":
        return partial(values["function"], *values["args"], **values["keywords"])
    made = imported(kind if ":" in kind else f"{_OURS}:{kind}", where)
    try:
        if made is Message:
            return msgspec.convert({k: v for k, v in recipe.items() if k != _MARK}, Message)
        return made(**values)
    except (TypeError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{where} can't be made again as {kind!r}: {error}") from error


def import_path(value: Any, where: str) -> str:
    """`module:name` under which a function or class is found. Raises `ConfigurationError` where it is found nowhere."""
    target = _target(value)
    if target is not None:
        try:
            if _walk(*target) is value:
                return ":".join(target)
        except (ImportError, AttributeError):
            pass
    name = getattr(value, "__qualname__", None) or repr(value)
    raise ConfigurationError(
        f"{where} can't be saved or sent to another process: {name!r} is not found by importing its module. Define it "
        "at the top of a module and give that, or functools.partial of it for what it should know; "
        "an analyzer can also be registered there, register_analyzer(name, function), and given by its name"
    )


def class_path(kind: type, where: str) -> str:
    """The same for the class of a value; those of this package by their names alone."""
    import taskmill.programs.conversation as ours

    name: str = kind.__name__
    return name if getattr(ours, name, None) is kind else import_path(kind, where)


def imported(path: str, where: str) -> Any:
    """What stands at `module:name`. Raises `ConfigurationError`, naming it and why it can't be had."""
    module, _, name = path.partition(":")
    try:
        return _walk(module, name)
    except AttributeError:
        raise ConfigurationError(f"{where}: there is no {name!r} in the module {module!r}") from None
    except Exception as error:
        raise ConfigurationError(
            f"{where}: {path!r} can't be imported: {type(error).__name__}: {error}"
        ) from error


def _target(value: Any) -> tuple[str, str] | None:
    """The module and the name a function says it has; a tool those of its function."""
    inner = getattr(value, "function", value) if hasattr(value, "spec") else value
    module, name = getattr(inner, "__module__", None), getattr(inner, "__qualname__", None)
    return (module, name) if isinstance(module, str) and isinstance(name, str) else None


def _walk(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module) or import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _fields(value: Any) -> tuple[str, ...]:
    if isinstance(value, StopCondition):
        return value.fields
    if isinstance(value, Struct):
        return tuple(value.__struct_fields__)
    return tuple(info.name for info in fields(value))


def modules_of(recipe: Any) -> set[str]:
    """The modules that reading a recipe imports."""
    if isinstance(recipe, list):
        return set().union(*map(modules_of, recipe))
    if not isinstance(recipe, Mapping):
        return set()
    found = set().union(*map(modules_of, recipe.values()))
    kind = recipe.get(_MARK)
    named = recipe.get("name") if kind == "import" else kind
    if isinstance(named, str) and ":" in named:
        found.add(named.partition(":")[0])
    return found
