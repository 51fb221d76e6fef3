"""The sandboxes of many rollouts: a factory for each set of resources that tasks ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from taskmill.sandbox.base import Sandbox, SandboxFactory, SandboxLimits
from taskmill.sandbox.choose import Kind, describe, open_sandboxes
from taskmill.sandbox.leftovers import sweep_leftovers
from taskmill.tasks.task import Resources, TaskData


class SandboxSource:
    """Makes the sandboxes of a run or a worker in `directory`. `tell` hears which kind it is, at the first one."""

    def __init__(self, kind: Kind, directory: Path, tell: Callable[[str, str], None]) -> None:
        self._kind: Kind = kind
        self._directory = directory
        self._tell = tell
        self._factories: dict[Resources, SandboxFactory] = {}

    def make(self, rollout_id: str, data: TaskData) -> Sandbox:
        """The sandbox of one rollout; nothing is started before it is used."""
        factory = self._factories.get(data.resources)
        if factory is None:
            if not self._factories:
                self._tell("note", f"sandbox: {describe(self._kind)}")
            memory = data.resources.memory
            limits = SandboxLimits(network=data.resources.network)
            if memory is not None:
                limits = replace(limits, memory=memory)
            factory = open_sandboxes(self._kind, directory=self._directory, limits=limits)
            self._factories[data.resources] = factory
        return factory.create(rollout_id, image=data.image, cwd=data.workdir)

    async def sweep(self) -> None:
        """Remove what a killed session left."""
        if self._directory.exists() and (left := await asyncio.to_thread(sweep_leftovers, self._directory)):
            self._tell("note", f"{left} leftovers of a killed session were removed")

    def close(self) -> None:
        """Remove the folder of the workspaces, which is empty by now."""
        with suppress(OSError):
            self._directory.rmdir()
