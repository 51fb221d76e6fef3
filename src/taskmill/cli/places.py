"""Where a run is that somebody names: by its folder, or by its name in one of the folders that runs stand in."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from taskmill.errors import ConfigurationError, RunNotFoundError

PARENTS = (Path("data"), Path("runs"))
"""Where batches and runs of tasksets stand unless they were told otherwise."""


def place_of(run: Path | str) -> Path:
    """The folder of a run: that folder itself, or the one of that name in `data` or `runs`.

    The run of a taskset has the time in its name; the part before it does where no other run begins alike. Raises
    `RunNotFoundError`, naming the nearest, or `ConfigurationError` where the name begins several.
    """
    path = Path(run)
    if _is_run(path):
        return path
    if len(path.parts) == 1 and not path.is_absolute():
        for parent in PARENTS:
            if _is_run(parent / path):
                return parent / path
        begun = [found for found in _runs(PARENTS[1]) if found.name.startswith(path.name)]
        if len(begun) == 1:
            return begun[0]
        if begun:
            some = ", ".join(repr(str(found)) for found in begun[-3:])
            raise ConfigurationError(
                f"{len(begun):,} runs in {str(PARENTS[1])!r} begin with {str(path)!r}: name one of them, such as {some}"
            )
    near = _nearest(path)
    hint = "" if near is None else f"; did you mean {str(near)!r}?"
    where = (
        ", nor one of that name in 'data' or 'runs'"
        if len(path.parts) == 1 and not path.is_absolute()
        else ""
    )
    raise RunNotFoundError(
        f"there is no run in {str(path)!r}{where}{hint or '.'} Give the name or the folder of a run that was started."
    )


def _nearest(path: Path) -> Path | None:
    found = {
        str(known): known for parent in dict.fromkeys((path.parent, *PARENTS)) for known in _runs(parent)
    }
    names: dict[str, Path] = {}
    for known in found.values():
        for name in (str(known), known.name, known.name.partition("--")[0]):
            names.setdefault(name, known)
    for wanted in (str(path), path.name):
        for name in get_close_matches(wanted, names, n=1):
            return names[name]
    return None


def _runs(parent: Path) -> Iterator[Path]:
    try:
        found = sorted(parent.iterdir())
    except OSError:
        return
    yield from (path for path in found if _is_run(path))


def _is_run(path: Path) -> bool:
    try:
        return (path / "run.json").is_file() or any(path.glob("batch_*.jsonl"))
    except OSError:
        return False
