"""What a rollout's commands run in: a workspace of its own, confined as the machine allows, gone with the rollout."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "BackgroundProcess": "taskmill.sandbox.base",
    "CommandResult": "taskmill.sandbox.base",
    "Sandbox": "taskmill.sandbox.base",
    "SandboxFactory": "taskmill.sandbox.base",
    "SandboxLimits": "taskmill.sandbox.base",
    "describe": "taskmill.sandbox.choose",
    "open_sandboxes": "taskmill.sandbox.choose",
    "sweep_leftovers": "taskmill.sandbox.leftovers",
}

__all__ = [
    "BackgroundProcess",
    "CommandResult",
    "Sandbox",
    "SandboxFactory",
    "SandboxLimits",
    "describe",
    "open_sandboxes",
    "sweep_leftovers",
]

if TYPE_CHECKING:
    from taskmill.sandbox.base import BackgroundProcess, CommandResult, Sandbox, SandboxFactory, SandboxLimits
    from taskmill.sandbox.choose import describe, open_sandboxes
    from taskmill.sandbox.leftovers import sweep_leftovers


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'taskmill.sandbox' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
