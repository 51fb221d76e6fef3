"""What the built-in tasksets share: bundled texts, finding an answer in a text, packages that may be missing."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from decimal import Decimal
from difflib import SequenceMatcher
from importlib import resources
from types import ModuleType

from taskmill.errors import TasksetError
from taskmill.records import Message

_SIGN = r"[-\u2212\u2013]"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"(?<![\w.])(?:{_SIGN}\s?)?\$?{_SIGN}?(?:{_DIGITS})")
_MARKED = re.compile(r"####\s*([^\n]*)")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_LATEX_IN_NUMBERS = str.maketrans({"\\": "", "{": "", "}": "", "!": "", "\u202f": "", "\u00a0": ""})


def bundled_text(name: str) -> str:
    """A text file that comes with the package."""
    return (resources.files(__package__) / "bundled" / name).read_text("utf-8")


def bundled_words(name: str) -> list[str]:
    """The words of such a file, in its order."""
    return bundled_text(name).split()


def needed_package(module: str, taskset: str, extra: str) -> ModuleType:
    """Import what a taskset needs, or raise `TasksetError` with the package that is missing and how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise TasksetError(
            f"taskset {taskset!r} needs the package {(error.name or module).partition('.')[0]!r}, "
            f"which is not installed; get it with: pip install 'taskmill[{extra}]'"
        ) from error


def answers(messages: Sequence[Message]) -> list[str]:
    """What the model said, turn by turn, turns that call tools not among it."""
    return [turn.content for turn in messages if turn.role == "assistant" and not turn.tool_calls]


def last_answer(messages: Sequence[Message]) -> str:
    """The text of the model's last turn that calls no tool; empty where there is none."""
    said = answers(messages)
    return said[-1] if said else ""


def all_inside(text: str, tag: str) -> list[str]:
    """What stands between `<tag>` and `</tag>`, each time it does, without white space around it."""
    found = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL | re.IGNORECASE)
    return [part.strip() for part in found]


def inside(text: str, tag: str) -> str | None:
    """What stands in the last pair of these tags; `None` where there is none."""
    found = all_inside(text, tag)
    return found[-1] if found else None


def similarity(said: str, truth: str) -> float:
    """How alike two texts are, from 0 to 1: the ratio of `difflib`, where 1 means equal.

    Without the shortcut of `difflib` for long texts, which takes frequent letters for noise and finds two equal
    sentences of 200 letters to have nothing in common.
    """
    return 1.0 if said == truth else SequenceMatcher(None, said, truth, autojunk=False).ratio()


def number_in(text: str) -> Decimal | None:
    """The number a text gives as its answer: after its last `####`, else in its last `\\boxed{}`, else its last one.

    Thousands separators, currency signs and trailing zeros are no part of it.
    """
    marked = _MARKED.findall(text)
    if marked and (number := _first_number(_unboxed(marked[-1]) or marked[-1])) is not None:
        return number
    boxed = _unboxed(text)
    if boxed is not None and (number := _first_number(boxed)) is not None:
        return number
    numbers = _NUMBER.findall(text)
    return _decimal(numbers[-1]) if numbers else None


def _unboxed(text: str) -> str | None:
    boxed = _BOXED.findall(text)
    return boxed[-1] if boxed else None


def _first_number(text: str) -> Decimal | None:
    found = _NUMBER.search(text.translate(_LATEX_IN_NUMBERS))
    return _decimal(found.group()) if found else None


def _decimal(text: str) -> Decimal:
    value = Decimal(re.sub(r"[^\d.]", "", text))
    return -value if re.search(_SIGN, text) else value
