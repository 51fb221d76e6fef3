"""Help for tests: a model that follows a script, and a real HTTP endpoint with faults on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["FakeEndpoint", "ScriptedModel"]

if TYPE_CHECKING:
    from taskmill.models.scripted import ScriptedModel
    from taskmill.testing.endpoint import FakeEndpoint


def __getattr__(name: str) -> Any:
    # Not imported at the top: `python -m taskmill.testing.endpoint` would otherwise load its own module twice.
    if name == "FakeEndpoint":
        from taskmill.testing.endpoint import FakeEndpoint

        return FakeEndpoint
    if name == "ScriptedModel":
        from taskmill.models.scripted import ScriptedModel

        return ScriptedModel
    raise AttributeError(f"module 'taskmill.testing' has no attribute {name!r}")
