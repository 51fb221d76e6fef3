"""Who answers: scripted, endpoint, embedded and local models behind one protocol, with retry around them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Completion": "taskmill.models.base",
    "LocalModel": "taskmill.models.local",
    "Model": "taskmill.models.base",
    "Reasoning": "taskmill.models.base",
    "Request": "taskmill.models.base",
    "Sampling": "taskmill.models.base",
    "ScriptedModel": "taskmill.models.scripted",
    "open_model": "taskmill.models.choose",
}

__all__ = [
    "Completion",
    "LocalModel",
    "Model",
    "Reasoning",
    "Request",
    "Sampling",
    "ScriptedModel",
    "open_model",
]

if TYPE_CHECKING:
    from taskmill.models.base import Completion, Model, Reasoning, Request, Sampling
    from taskmill.models.choose import open_model
    from taskmill.models.local import LocalModel
    from taskmill.models.scripted import ScriptedModel


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'taskmill.models' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
