"""No confinement: commands run as the user, in a workspace of their own, and die with the rollout.

For machines without bubblewrap, and for commands that are trusted. What it does not protect from stands in
`docs/design/sandbox.md`.
"""

from __future__ import annotations

import os
from pathlib import Path

from taskmill.sandbox.host import interpreter
from taskmill.sandbox.local import Confinement, Place


def confinement() -> Confinement:
    """How a rollout's commands run without confinement."""
    return Confinement(
        kind="plain",
        namespace=False,
        root=lambda place: str(place.workspace),
        argv=lambda place: [],
        environment=_environment,
    )


def _environment(place: Place) -> dict[str, str]:
    """Every variable a command has: none that could be a key. Its home and its temporary files are its own."""
    path = os.environ.get("PATH") or os.defpath
    return {
        "PATH": f"{Path(interpreter()).parent}:{path}",
        "LANG": "C.UTF-8",
        "HOME": str(place.workspace),
        "TERM": "dumb",
        "TMPDIR": str(place.temporary),
    }
