"""Which sandbox a row gets: the confinement the machine offers, or the container its image asks for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

from taskmill.errors import ConfigurationError, SandboxError
from taskmill.sandbox import bubblewrap, plain
from taskmill.sandbox.base import Sandbox, SandboxFactory, SandboxLimits
from taskmill.sandbox.leftovers import tag
from taskmill.sandbox.local import Confinement, LocalSandbox, place_for

Kind = Literal["auto", "bubblewrap", "plain", "docker"]


class Sandboxes:
    """Makes the sandbox of one rollout. A row with an image gets a container, whatever the kind is."""

    def __init__(self, confinement: Confinement | None, directory: Path, limits: SandboxLimits) -> None:
        self._confinement = confinement
        self._directory = directory
        self._limits = limits
        self._tag = tag(directory)

    def create(self, rollout_id: str, *, image: str | None = None, cwd: str | None = None) -> Sandbox:
        """The sandbox of one rollout. Nothing is made or started before it is used.

        Raises `SandboxError` when there is no image and the kind is `docker`, or `cwd` leaves the workspace.
        """
        place = place_for(self._directory, rollout_id)
        mark = f"{self._tag}.{place.base.name}"
        if image is not None:
            from taskmill.sandbox.docker import DockerSandbox

            return DockerSandbox(image, place, self._limits, tag=self._tag, mark=mark, cwd=cwd)
        if self._confinement is None:
            raise SandboxError(
                f"rollout {rollout_id!r} has no image to make a container of: give the row an 'image', "
                "or use the sandbox 'auto'"
            )
        return LocalSandbox(self._confinement, place, self._limits, mark=mark, cwd=cwd)


def open_sandboxes(
    kind: Kind = "auto",
    *,
    directory: Path,
    limits: SandboxLimits = SandboxLimits(),  # noqa: B008 - frozen
) -> SandboxFactory:
    """The factory of a run's sandboxes; their folders are made in `directory` and deleted with them.

    `auto` is bubblewrap where it works and plain elsewhere; `describe` says which and why. Raises
    `ConfigurationError` for a kind there is not, `SandboxError` when bubblewrap is asked for by name and does not
    work.
    """
    chosen = _choose(kind)
    directory = Path(os.path.abspath(directory)).resolve()
    if chosen == "bubblewrap":
        return Sandboxes(bubblewrap.confinement(limits), directory, limits)
    return Sandboxes(plain.confinement() if chosen == "plain" else None, directory, limits)


def describe(kind: Kind = "auto") -> str:
    """One sentence for people: which confinement is active, and why."""
    chosen = _choose(kind)
    if chosen == "bubblewrap":
        return "bubblewrap: commands see their own workspace, a read-only system and no other process"
    if chosen == "docker":
        return "docker: commands run in a container of the row's image"
    open_to = "commands run as this user and can reach its files and the network"
    if kind == "plain":
        return f"plain: {open_to}"
    return f"plain: {open_to}, because {bubblewrap.problem()}"


def _choose(kind: Kind) -> Kind:
    if kind not in get_args(Kind):
        raise ConfigurationError(f"sandbox {kind!r}: there is {', '.join(map(repr, get_args(Kind)))}")
    if kind == "auto":
        return "bubblewrap" if bubblewrap.problem() is None else "plain"
    if kind == "bubblewrap":
        reason = bubblewrap.problem()
        if reason is not None:
            raise SandboxError(f"sandbox 'bubblewrap': {reason}; use 'auto' or 'plain', or put that right")
    return kind
