"""Numbers and kinds of values as people say them."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A number and what it counts, in the singular for one."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def a(value: object) -> str:
    """The type of a value with its article."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
