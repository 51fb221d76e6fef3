"""Texts that wait for a row of data: a field of it, a function of it, or several parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from taskmill.errors import ConfigurationError, TaskError


class Field(Struct, frozen=True):
    """The place of a row's field in a text. See `dataset_field`."""

    name: str


def dataset_field(name: str) -> Field:
    """The field `name` of the row that a conversation is about, wherever a text of its framing may stand.

    The row has to have it: a conversation whose row lacks the field fails, naming the field and the row.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"dataset_field({name!r}): give the name of a field")
    return Field(name)


Text = str | Field | Callable[[Any], str]
Template = Text | tuple[Text, ...]
"""A text, or what becomes one with a row: a field, a function of the row, or a tuple of parts that are put together."""


def needs_row(template: Template | None) -> bool:
    """Whether a text can't be had without a row."""
    if isinstance(template, tuple):
        return any(needs_row(part) for part in template)
    return template is not None and not isinstance(template, str)


def check_template(template: Any, where: str) -> None:
    """Raise `ConfigurationError` for what can't become a text."""
    parts = template if isinstance(template, tuple) else (template,)
    for part in parts:
        if part is not None and not isinstance(part, str | Field) and not callable(part):
            raise ConfigurationError(
                f"{where} is a text, dataset_field('name'), a function of the row, or a tuple of these; "
                f"not {part!r:.200}"
            )


def filled(template: Template | None, row: Any, *, where: str, place: str = "the row") -> str | None:
    """The text that a template becomes with a row.

    Raises `ConfigurationError` naming the field and the row where it is missing, `TaskError` where a function of the
    row failed.
    """
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, tuple):
        parts = (filled(part, row, where=where, place=place) for part in template)
        return "".join(part for part in parts if part is not None)
    if isinstance(template, Field):
        return _field(template.name, row, where, place)
    try:
        said = template(row)
    except Exception as error:
        raise TaskError(
            f"the function for {where} failed with {place}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(said, str):
        raise TaskError(f"the function for {where} returned {said!r:.200} for {place}; a text is needed")
    return said


def _field(name: str, row: Any, where: str, place: str) -> str:
    if row is None:
        raise ConfigurationError(
            f"{where} needs the field {name!r} of a row, and there is no data: give it with .data(rows)"
        )
    if not isinstance(row, Mapping) or name not in row:
        has = (
            f"its fields are {', '.join(map(repr, row))}"
            if isinstance(row, Mapping)
            else f"it is {row!r:.100}"
        )
        raise ConfigurationError(f"{place} has no field {name!r}, which {where} needs; {has}")
    value = row[name]
    if value is None:
        raise ConfigurationError(f"the field {name!r} of {place} is empty (null), and {where} needs it")
    return value if isinstance(value, str) else str(value)
