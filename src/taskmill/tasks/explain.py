"""What is wrong with a configuration, in words: the field, what was given, and what would do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError


def explain(problem: ValidationError, model: type[BaseModel], where: str = "") -> str:
    """Every fault that pydantic found, one clause each, with the nearest name for a field there is not."""
    told = "; ".join(_one(error, model) for error in problem.errors(include_url=False))
    return f"{where}: {told}" if where else told


def _one(error: Any, model: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        *above, last = error["loc"]
        near = difflib.get_close_matches(str(last), names_at(model, above), n=1)
        full = ".".join([*map(str, above), *near])
        return f"unknown field {path!r}" + (f"; did you mean {full!r}?" if near else "")
    if error["type"] == "missing":
        return f"{path!r} is required"
    shown = "" if isinstance(error["input"], Mapping | BaseModel) else f"={error['input']!r:.200}"
    return f"{path}{shown}: {error['msg'].removeprefix('Value error, ')}"


def names_at(model: type[BaseModel], path: list[Any]) -> list[str]:
    """The field names of the model that stands at `path` inside `model`, as far as its classes say."""
    here: Any = model
    for part in path:
        if _is_model(here):
            field = here.model_fields.get(part)
            here = None if field is None else _inner(field.annotation)
        elif get_origin(here) is dict:
            here = _inner(get_args(here)[1])
        else:
            return []
    return list(here.model_fields) if _is_model(here) else []


def _inner(annotation: Any) -> Any:
    """The model or mapping in an annotation that also allows `None`."""
    parts = [part for part in get_args(annotation) if part is not NoneType]
    return parts[0] if len(parts) == 1 and get_origin(annotation) in (Union, UnionType) else annotation


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
