"""What each rollout of a run is offered: toolsets drawn by its own seed, made once for all rollouts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from taskmill.errors import ConfigurationError
from taskmill.tools.base import Tool
from taskmill.tools.distributions import NO_TOOLSETS, distribution, select_toolsets
from taskmill.tools.toolsets import TOOLSETS, known_tools

OWN = "own"
"""The toolset that a run's own tools stand under in its records."""


class Toolkit:
    """The tools of a run.

    `missing` maps each toolset of the distribution that can't be offered here to what it needs; the draw is
    made as if it were there, so that a run drawn on one machine is the same run on another.
    """

    def __init__(self, name: str, own: Mapping[str, Sequence[Tool]], seed: int) -> None:
        self._name = name
        self._seed = seed
        self._own = {toolset: tuple(tools) for toolset, tools in own.items() if tools}
        self.chances = chances_of(name)
        self.missing: dict[str, str] = {}
        self._made: dict[str, tuple[Tool, ...]] = {}
        for toolset in self.chances:
            lacks = TOOLSETS[toolset].missing()
            if lacks is None:
                self._made[toolset] = tuple(TOOLSETS[toolset].tools())
            else:
                self.missing[toolset] = lacks
        if self.chances and not self._made and not self._own:
            raise ConfigurationError(
                f"distribution={name!r} offers nothing here: "
                + "; ".join(f"{toolset}: {lacks}" for toolset, lacks in self.missing.items())
            )
        self._refuse_twins()
        self.known_tools = tuple(
            sorted({*known_tools(), *(tool.spec.name for tools in self._own.values() for tool in tools)})
        )
        self._choices: dict[tuple[str, ...], tuple[Tool, ...]] = {}

    def draw(self, rollout_id: str) -> tuple[tuple[str, ...], tuple[Tool, ...]]:
        """The toolsets a rollout is offered, and their tools: always the same for the same seed and rollout."""
        drawn: tuple[str, ...] = ()
        if self.chances:
            rng = random.Random(f"{self._seed}:{rollout_id}")
            drawn = tuple(name for name in select_toolsets(self._name, rng) if name in self._made)
            if not drawn and self._made:
                drawn = (min(self._made, key=lambda name: (-self.chances[name], name)),)
        offered = (*drawn, *self._own)
        if offered not in self._choices:
            unique = {tool.spec.name: tool for name in drawn for tool in self._made[name]}
            unique |= {tool.spec.name: tool for tools in self._own.values() for tool in tools}
            self._choices[offered] = tuple(unique.values())
        return offered, self._choices[offered]

    def _refuse_twins(self) -> None:
        built_in = set(known_tools())
        seen: set[str] = set()
        for tools in self._own.values():
            for tool in tools:
                name = tool.spec.name
                if name in built_in or name in seen:
                    raise ConfigurationError(f"tools: two tools are called {name!r}; give yours another name")
                seen.add(name)


def chances_of(name: str) -> Mapping[str, float]:
    """The chances of a distribution in percent; raises `ConfigurationError` for one that isn't there."""
    return {} if name == NO_TOOLSETS else distribution(name)
