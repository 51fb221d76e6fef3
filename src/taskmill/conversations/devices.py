"""Where local models can be, and what of a conversation can cross to a worker process there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from taskmill.conversations.analyzers import find_analyzer, home_of
from taskmill.conversations.conversation import Conversation
from taskmill.errors import ConfigurationError
from taskmill.programs.conversation.recipes import import_path, modules_of


def available_devices() -> list[str]:
    """Where local models can be: every GPU of this machine, or else its CPU."""
    with suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        if torch.backends.mps.is_available():
            return ["mps"]
    return ["cpu"]


def chosen_devices(devices: Any, known: Sequence[Conversation]) -> list[str]:
    """The devices of a run. Without local models nobody needs more than this process."""
    if devices is None:
        named = (participant for one in known for participant in one.participants)
        local = any(one.kind == "local" and not one.brings_model for one in named)
        return available_devices() if local else ["cpu"]
    chosen = [devices] if isinstance(devices, str) else list(devices)
    if not chosen or not all(isinstance(device, str) and device.strip() for device in chosen):
        raise ConfigurationError(
            f"devices={devices!r} is a device, such as 'cpu' or 'cuda:0', or a list of them"
        )
    return chosen


def check_crossing(conversation: Conversation) -> set[str]:
    """The modules a worker has to import for a conversation.

    Raises `ConfigurationError` for what can't cross to another process, saying what to do.
    """
    recipe = conversation.recipe()
    modules = modules_of(recipe)
    analyzer = conversation.lineup.analyzer
    if isinstance(analyzer, str):
        find_analyzer(analyzer)
        home = home_of(analyzer) or analyzer.partition(":")[0]
        modules.add(home)
    if "__main__" in modules:
        raise ConfigurationError(
            "a worker process can't import what is defined in the program that was started, or in a notebook: move the "
            "functions and classes of this conversation to a module, and import them from there"
        )
    return modules


def initializer_path(initializer: Any) -> str | None:
    """`module:function` of what a worker calls once. Raises `ConfigurationError` for what it can't import."""
    if initializer is None or isinstance(initializer, str):
        return initializer
    path = import_path(initializer, "initializer")
    if path.startswith("__main__:"):
        raise ConfigurationError(
            "initializer is defined in the program that was started, which a worker process can't import: move it to a "
            "module"
        )
    return path
