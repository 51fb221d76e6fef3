"""Named groups of tools, what each of them needs, and every tool name there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module

from msgspec import Struct

from taskmill.errors import ConfigurationError
from taskmill.tools.base import Tool


def _nothing_missing() -> str | None:
    return None


class Toolset(Struct, frozen=True):
    """A named group of tools.

    `tools` makes them; `names` are known without making them. `missing` says what is not there (a key, a
    program) and how to get it, or `None`; a toolset with something missing is left out of a run. A composite has
    `parts`: the toolsets it stands for.
    """

    name: str
    description: str
    names: tuple[str, ...]
    tools: Callable[[], Sequence[Tool]]
    missing: Callable[[], str | None] = _nothing_missing
    parts: tuple[str, ...] = ()


def _from(module: str, *names: str) -> Callable[[], Sequence[Tool]]:
    """Tools of a module that is imported when the toolset is used, so that listing toolsets costs nothing."""

    def make() -> Sequence[Tool]:
        home = import_module(f"taskmill.tools.{module}")
        return [getattr(home, name) for name in names]

    return make


def _web_tools() -> Sequence[Tool]:
    from taskmill.tools.web import web_tools

    return web_tools()


def _web_missing() -> str | None:
    from taskmill.tools.web import missing

    return missing()


def _composite(name: str, description: str, *parts: str) -> Toolset:
    """Several toolsets under one name: there as soon as one of its parts is."""

    def tools() -> Sequence[Tool]:
        there = [_BUILT_IN[part] for part in parts if _BUILT_IN[part].missing() is None]
        return [tool for part in there for tool in part.tools()]

    def missing() -> str | None:
        reasons = [_BUILT_IN[part].missing() for part in parts]
        return None if None in reasons else "; ".join(reason for reason in reasons if reason)

    names = tuple(tool for part in parts for tool in _BUILT_IN[part].names)
    return Toolset(name, description, names, tools, missing, parts)


_BUILT_IN: dict[str, Toolset] = {
    toolset.name: toolset
    for toolset in (
        Toolset(
            "terminal",
            "A shell that keeps its directory, and processes in the background.",
            ("terminal", "process"),
            _from("terminal", "terminal", "process"),
        ),
        Toolset(
            "file",
            "Read, write, change and search files of the workspace.",
            ("read_file", "write_file", "patch", "search_files"),
            _from("files", "read_file", "write_file", "patch", "search_files"),
        ),
        Toolset(
            "code_execution",
            "Run a Python script in the workspace.",
            ("execute_code",),
            _from("code", "execute_code"),
        ),
        Toolset(
            "web",
            "Search the web and read pages, through a search provider.",
            ("web_search", "web_extract"),
            _web_tools,
            _web_missing,
        ),
        Toolset("todo", "A task list the agent keeps for itself.", ("todo",), _from("todo", "todo")),
        Toolset(
            "memory",
            "Notes that outlive a conversation; for conversations, not for batches.",
            ("memory",),
            _from("memory", "memory"),
        ),
    )
}
_BUILT_IN["coding"] = _composite(
    "coding",
    "Everything to work on code: terminal, file and code_execution.",
    "terminal",
    "file",
    "code_execution",
)
_BUILT_IN["all"] = _composite(
    "all", "Every toolset but memory.", "terminal", "file", "code_execution", "web", "todo"
)

_registered: dict[str, Toolset] = {}


class _Toolsets(Mapping[str, Toolset]):
    """All toolsets by name, those users added included."""

    def __getitem__(self, name: str) -> Toolset:
        return _registered[name] if name in _registered else _BUILT_IN[name]

    def __iter__(self) -> Iterator[str]:
        yield from _BUILT_IN
        yield from (name for name in _registered if name not in _BUILT_IN)

    def __len__(self) -> int:
        return len(_BUILT_IN.keys() | _registered.keys())


TOOLSETS: Mapping[str, Toolset] = _Toolsets()
"""Toolsets by name. `register_toolset` adds to it."""


class Offer(Struct, frozen=True):
    """What a rollout really gets: tools, the toolsets they are from, and why others were left out."""

    tools: tuple[Tool, ...]
    toolsets: tuple[str, ...]
    left_out: Mapping[str, str]


def offer(names: Iterable[str]) -> Offer:
    """The tools of these toolsets, each once, in the order of the names.

    A composite stands for its parts. A toolset with something missing is left out with the reason. Raises
    `ConfigurationError` for a toolset nobody knows.
    """
    tools: dict[str, Tool] = {}
    offered: list[str] = []
    left_out: dict[str, str] = {}
    for name in expand(names):
        toolset = TOOLSETS[name]
        reason = toolset.missing()
        if reason is not None:
            left_out[name] = reason
            continue
        offered.append(name)
        for tool in toolset.tools():
            tools.setdefault(tool.spec.name, tool)
    return Offer(tuple(tools.values()), tuple(offered), left_out)


def expand(names: Iterable[str]) -> list[str]:
    """Toolset names with composites replaced by their parts, each once; unknown ones raise `ConfigurationError`."""
    expanded: dict[str, None] = {}
    for name in names:
        toolset = TOOLSETS.get(name)
        if toolset is None:
            near = get_close_matches(str(name), list(TOOLSETS), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigurationError(
                f"toolset {name!r} is not known{hint}; there are {', '.join(sorted(TOOLSETS))}"
            )
        expanded.update(dict.fromkeys(expand(toolset.parts) if toolset.parts else [name]))
    return list(expanded)


def register_toolset(name: str, tools: Sequence[Tool], *, description: str = "") -> None:
    """Add a toolset of the user's own for this process, so that names and distributions may use it.

    Raises `ConfigurationError` for a name that a built-in toolset has, and for a tool called like one of
    another toolset: records tell tools apart by name.
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigurationError(f"a toolset needs a name that is not blank, not {name!r}")
    if name in _BUILT_IN:
        raise ConfigurationError(f"toolset {name!r} is built in; choose another name")
    if not tools:
        raise ConfigurationError(f"toolset {name!r} has no tools")
    names = tuple(tool.spec.name for tool in tools)
    for other in TOOLSETS.values():
        taken = set(names) & set(other.names)
        if other.name != name and taken:
            raise ConfigurationError(
                f"toolset {name!r}: a tool called {min(taken)!r} is already in toolset {other.name!r}"
            )
    if len(set(names)) < len(names):
        raise ConfigurationError(f"toolset {name!r}: two of its tools have one name")
    kept = tuple(tools)
    _registered[name] = Toolset(name, description, names, lambda: kept)


def known_tools(extra: Iterable[str] = ()) -> tuple[str, ...]:
    """Every tool name there is, sorted: built in, registered, and `extra` (those of a run's MCP servers).

    The same for every row of a run, so that records with a column for each tool have one schema.
    """
    names = set(extra)
    for toolset in TOOLSETS.values():
        names.update(toolset.names)
    return tuple(sorted(names))
