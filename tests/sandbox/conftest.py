from __future__ import annotations

import uuid
from collections.abc import Iterator

import psutil
import pytest

from taskmill.sandbox import bubblewrap
from taskmill.sandbox.choose import open_sandboxes


class Leftovers:
    """Finds processes by a text that stands in their command line and in no other."""

    def __init__(self) -> None:
        self.text = f"7{uuid.uuid4().int % 10**12:012d}"

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            zombie = process.info["status"] == psutil.STATUS_ZOMBIE
            if not zombie and self.text in " ".join(process.info["cmdline"] or []):
                found.append(process)
        return found

    def gone(self) -> bool:
        """Whether all are dead, or die of what was already sent to them."""
        _, alive = psutil.wait_procs(self.alive(), timeout=10)
        return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def leftovers() -> Iterator[Leftovers]:
    found = Leftovers()
    yield found
    for process in found.alive():
        process.kill()


BUBBLEWRAP = pytest.param(
    "bubblewrap",
    marks=pytest.mark.skipif(bubblewrap.problem() is not None, reason=str(bubblewrap.problem())),
)


@pytest.fixture(params=["plain", BUBBLEWRAP])
def kind(request) -> str:
    return request.param


@pytest.fixture
async def sandboxes(kind, tmp_path):
    """Makes sandboxes of a kind and closes them after the test."""
    made = []

    def make(rollout_id="rollout", *, image=None, cwd=None, **options):
        factory = open_sandboxes(options.pop("kind", kind), directory=tmp_path / "sandboxes", **options)
        made.append(factory.create(rollout_id, image=image, cwd=cwd))
        return made[-1]

    yield make
    for sandbox in made:
        await sandbox.close()


@pytest.fixture
def sandbox(sandboxes):
    return sandboxes()
