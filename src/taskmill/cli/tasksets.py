"""`taskmill tasksets`: which there are, and the fields of one."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from importlib.util import find_spec
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import Parameter
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from taskmill.cli import EXIT_OK
from taskmill.cli.display import harmless

ABOUT_FILES = "a file (my_tasks.py, my_tasks.py:Class) or a module (package.tasks:Class) is a taskset too"

HOW_TO_INSTALL = (
    "get it with: pip install 'taskmill[games]', or in a checkout of taskmill: pip install '.[games]'"
)


def tasksets(name: str | None = None, /, *, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """The tasksets there are, and what is missing for the others; with a name, the fields of that one.

    Parameters
    ----------
    name
        A taskset, by its name, file or module.
    json
        Write JSON.
    """
    found = listed() if name is None else described(name)
    if json:
        print(json_module.dumps(found))
    else:
        print(harmless(_list_text(found) if isinstance(found, list) else _text(found)))
    return EXIT_OK


def listed() -> list[dict[str, Any]]:
    """Every taskset that has a name: what it is, whether it is infinite, and what is missing for it."""
    from taskmill.errors import TasksetError
    from taskmill.tasks.registry import BUILT_IN, find_taskset, installed

    points = installed()
    rows = []
    for name in (*BUILT_IN, *(name for name in points if name not in BUILT_IN)):
        origin = "built in" if name in BUILT_IN else _package_of(points[name])
        row: dict[str, Any] = {"name": name, "from": origin, "about": "", "infinite": None, "missing": None}
        try:
            kind = find_taskset(name)
        except TasksetError as problem:
            row["missing"] = str(problem)
        else:
            lacking = [package for package in kind.needs if find_spec(package) is None]
            row |= {"about": _about(kind), "infinite": kind.INFINITE}
            row["missing"] = f"the package {', '.join(map(repr, lacking))}" if lacking else None
        rows.append(row)
    return rows


def described(name: str) -> dict[str, Any]:
    """One taskset, with the fields of its configuration as options. Raises `TasksetError` where there is none."""
    from taskmill.tasks.registry import find_taskset

    kind = find_taskset(name)
    return {
        "name": name,
        "about": _about(kind),
        "infinite": kind.INFINITE,
        "fields": [
            {
                "option": f"--{path.removeprefix('taskset.') if path.startswith('taskset.task.') else path}",
                **field,
            }
            for path, field in sorted(_fields(kind.Config, "taskset"), key=lambda found: _place(found[0]))
        ],
    }


def _place(path: str) -> int:
    """The taskset's own fields stand first, and judges last."""
    return 2 if path.startswith("taskset.task.judges.") else path.startswith("taskset.task.")


def _fields(model: type[BaseModel], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in model.model_fields.items():
        below = f"{path}.{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, below)
        elif (value := _model_in_mapping(field.annotation)) is not None:
            yield from _fields(value, f"{below}.NAME")
        else:
            yield below, _field(field)


def _model_in_mapping(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) is not dict:
        return None
    value = get_args(annotation)[1]
    return value if isinstance(value, type) and issubclass(value, BaseModel) else None


def _field(field: FieldInfo) -> dict[str, Any]:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return {"type": in_words(field.annotation), "required": field.is_required(), "default": default}


PLAIN = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    NoneType: "none",
    Any: "any value",
}
"""Types as people call them."""


def in_words(annotation: Any) -> str:
    """A type as people call it: `list[int] | None` is "list (whole number) or none"."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if origin is Annotated:
        return in_words(inner[0])
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (Union, UnionType):
        return " or ".join(map(in_words, inner))
    if origin in (list, tuple, set, frozenset) or annotation in (list, tuple, set, frozenset):
        kinds = ", ".join(in_words(kind) for kind in inner if kind is not ...)
        return f"list ({kinds})" if kinds else "list"
    if dict in (origin, annotation):
        return "table"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _about(kind: type) -> str:
    """The first line of a class's own docstring."""
    from inspect import cleandoc

    return cleandoc(vars(kind).get("__doc__") or "").partition("\n")[0]


def _package_of(point: Any) -> str:
    return str(point.value if point.dist is None else point.dist.name)


def _list_text(rows: list[dict[str, Any]]) -> str:
    width = max(len(row["name"]) for row in rows)
    lines = []
    for row in rows:
        endless = "infinite: " if row["infinite"] else ""
        lines.append(f"{row['name']:<{width}}  {endless}{row['about'] or row['missing']}")
        if row["from"] != "built in":
            lines.append(f"{'':<{width}}  from the package {row['from']}")
        if row["missing"] and row["about"]:
            lines.append(f"{'':<{width}}  missing: {row['missing']}")
            if row["from"] == "built in":
                lines.append(f"{'':<{width}}  {HOW_TO_INSTALL}")
    return "\n".join([*lines, "", ABOUT_FILES])


def _default(value: Any) -> str:
    return "none" if value is None else repr(value)


def _text(found: dict[str, Any]) -> str:
    lines = [f"{found['name']}: {found['about']}"]
    if found["infinite"]:
        lines.append("It is infinite: say how many tasks with -n.")
    width = max((len(field["option"]) for field in found["fields"]), default=0)
    lines.append("")
    for field in found["fields"]:
        default = "required" if field["required"] else f"default {_default(field['default'])}"
        lines.append(f"  {field['option']:<{width}}  {field['type']}, {default}")
    return "\n".join(lines)
