from __future__ import annotations

import posixpath

import pytest

from taskmill.errors import ToolRefusedError
from taskmill.tools import ToolContext


class MemorySandbox:
    """A workspace that is a dict, for tools that only touch files."""

    kind = "memory"
    root = "/workspace"
    cwd = "/workspace"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fail_on_write: str | None = None

    def _place(self, path: str) -> str:
        place = posixpath.normpath(posixpath.join(self.root, path))
        if place != self.root and not place.startswith(self.root + "/"):
            raise ToolRefusedError(f"{path!r} is outside the workspace")
        return posixpath.relpath(place, self.root)

    async def read_bytes(self, path, *, limit=None):
        place = self._place(path)
        if place not in self.files:
            if any(name.startswith(place + "/") for name in self.files):
                raise IsADirectoryError(path)
            raise FileNotFoundError(path)
        return self.files[place][:limit]

    async def write_bytes(self, path, data):
        if self._place(path) == self.fail_on_write:
            self.fail_on_write = None
            raise OSError(28, "No space left on device")
        self.files[self._place(path)] = data

    async def remove(self, path):
        place = self._place(path)
        if place not in self.files:
            raise FileNotFoundError(path)
        del self.files[place]

    async def list_files(self, path=".", *, limit=10_000):
        place = self._place(path)
        if place == ".":
            return sorted(self.files)[:limit]
        if place in self.files:
            raise NotADirectoryError(path)
        names = [name[len(place) + 1 :] for name in self.files if name.startswith(place + "/")]
        if not names:
            raise FileNotFoundError(path)
        return sorted(names)[:limit]

    async def close(self):
        pass


@pytest.fixture
def sandbox() -> MemorySandbox:
    return MemorySandbox()


@pytest.fixture
def context(sandbox) -> ToolContext:
    return ToolContext("rollout", sandbox)
