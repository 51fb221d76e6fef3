"""Which toolsets a rollout gets: a distribution maps toolsets to chances, each drawn for itself."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from taskmill.errors import ConfigurationError

NO_TOOLSETS = "none"
"""The distribution that offers nothing but a run's own tools. There is nothing to draw, so it is no mapping here."""

_BUILT_IN: dict[str, dict[str, float]] = {
    "default": {"terminal": 100, "file": 100, "code_execution": 100, "web": 100, "todo": 100},
    "terminal_only": {"terminal": 100, "file": 100},
    "terminal_web": {"terminal": 100, "file": 100, "web": 100},
    "development": {"terminal": 90, "file": 90, "code_execution": 60, "todo": 50, "web": 20},
    "research": {"web": 95, "file": 60, "terminal": 30, "code_execution": 30, "todo": 50},
    "reasoning": {"code_execution": 60, "todo": 40, "file": 20, "terminal": 15, "web": 15},
    "safe": {"web": 80, "todo": 60, "file": 40},
    "balanced": {"terminal": 50, "file": 50, "code_execution": 50, "web": 50, "todo": 50},
    "minimal": {"terminal": 100},
}

_user: dict[str, dict[str, float]] = {}


class _Distributions(Mapping[str, Mapping[str, float]]):
    """All distributions by name, those users added included. Looking up an unknown one names its neighbour."""

    def __getitem__(self, name: str) -> Mapping[str, float]:
        chances = _user.get(name) or _BUILT_IN.get(name)
        if chances is None:
            raise KeyError(name)
        return MappingProxyType(chances)

    def __iter__(self) -> Iterator[str]:
        yield from _BUILT_IN
        yield from (name for name in _user if name not in _BUILT_IN)

    def __len__(self) -> int:
        return len(_BUILT_IN.keys() | _user.keys())


DISTRIBUTIONS: Mapping[str, Mapping[str, float]] = _Distributions()
"""Chances in percent of each toolset, by the name of the distribution."""


def distribution(name: str) -> Mapping[str, float]:
    """The distribution of that name; raises `ConfigurationError` naming the nearest one."""
    try:
        return DISTRIBUTIONS[name]
    except (KeyError, TypeError):
        raise ConfigurationError(
            f"distribution {name!r} is not known{_nearest(str(name), DISTRIBUTIONS)}; "
            f"there are {', '.join(sorted([*DISTRIBUTIONS, NO_TOOLSETS]))}"
        ) from None


def select_toolsets(name: str, rng: random.Random) -> tuple[str, ...]:
    """Draw the toolsets of one rollout, in sorted order.

    Each toolset is drawn for itself, in sorted order, so that one seed always gives the same draw. If none
    comes out, the likeliest is taken (of equals, the first by name).
    """
    chances = distribution(name)
    drawn = tuple(toolset for toolset in sorted(chances) if rng.random() * 100 < chances[toolset])
    if drawn:
        return drawn
    return (min(chances, key=lambda toolset: (-chances[toolset], toolset)),)


def register_distribution(name: str, chances: Mapping[str, float]) -> None:
    """Add a distribution, or put another one under its name, for this process.

    `chances` are percents (0 to 100) by toolset. Raises `ConfigurationError` naming the field that can't be
    meant.
    """
    _user[name] = _checked(name, chances, where=f"distribution {name!r}")


def load_distributions(path: str | Path) -> list[str]:
    """Add all distributions of a TOML file, one table each, and return their names.

        [mine]
        terminal = 100
        web = 25.5

    Raises `ConfigurationError` naming file and field; nothing is added then.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"distributions file {str(path)!r} can't be read: {error.strerror}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"distributions file {str(path)!r} is not TOML: {error}") from error
    if not tables:
        raise ConfigurationError(f"distributions file {str(path)!r} has no table; write one as [name]")
    checked = {
        name: _checked(name, table, where=f"{str(path)!r}, table [{name}]") for name, table in tables.items()
    }
    _user.update(checked)
    return list(checked)


def _checked(name: object, chances: object, *, where: str) -> dict[str, float]:
    from taskmill.tools.toolsets import TOOLSETS

    if not isinstance(name, str) or not name.strip():
        raise ConfigurationError(f"{where}: a distribution needs a name that is not blank")
    if name == NO_TOOLSETS:
        raise ConfigurationError(f"{where}: {name!r} is what offers no toolsets; give another name")
    if not isinstance(chances, Mapping) or not chances:
        raise ConfigurationError(f"{where}: must map toolsets to chances in percent, not {chances!r}")
    checked: dict[str, float] = {}
    for toolset, chance in chances.items():
        if toolset not in TOOLSETS:
            raise ConfigurationError(
                f"{where}: toolset {toolset!r} is not known{_nearest(str(toolset), TOOLSETS)}; "
                f"there are {', '.join(sorted(TOOLSETS))}"
            )
        if toolset == "memory":
            raise ConfigurationError(
                f"{where}: memory outlives a rollout, and rollouts see nothing of each other"
            )
        # Written so that NaN fails it too.
        if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 <= chance <= 100:
            raise ConfigurationError(
                f"{where}, {toolset}: must be a percentage from 0 to 100, not {chance!r}"
            )
        checked[toolset] = chance
    if not any(checked.values()):
        raise ConfigurationError(f"{where}: at least one chance must be over 0")
    return checked


def _nearest(name: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
