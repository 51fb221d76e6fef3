"""`taskmill export`: a run in the form a trainer reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from taskmill.cli import EXIT_OK
from taskmill.cli.display import say
from taskmill.records import DONE_STATES


def export(
    run: Path,
    /,
    *,
    to: Literal["sharegpt", "messages", "parquet"],
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
) -> int:
    """Turn a run into ShareGPT, chat messages or Parquet.

    Parameters
    ----------
    run
        The run's folder or name, such as data/my-run or my-run.
    to
        sharegpt: the conversations alone. messages: chat messages with their tools. parquet: a table.
    out
        The file to write. [default: beside the run's own files]
    """
    from taskmill.cli.places import place_of
    from taskmill.export import export_run

    place = place_of(run)
    report = export_run(place, to, out)
    print(report.as_text())
    missing, planned = _not_done(place)
    if missing:
        say(
            f"the run is not finished: {missing:,} of {planned:,} planned are not done, and not in the file "
            f"('taskmill status {place}' tells more)"
        )
    return EXIT_OK


def _not_done(place: Path) -> tuple[int, int]:
    """How many rows or rollouts of a run are not done, and how many were planned, as far as the files tell."""
    from taskmill.batch.status import status_of as status_of_batch
    from taskmill.evaluation.status import is_run_of_taskset
    from taskmill.evaluation.status import status_of as status_of_taskset

    outcomes: Mapping[str, int]
    if is_run_of_taskset(place):
        found = status_of_taskset(place)
        outcomes = {} if found.command == "validate" else found.summary["outcomes"]
    else:
        outcomes = asyncio.run(status_of_batch(place)).outcomes
    planned = sum(outcomes.values())
    return planned - sum(outcomes.get(state, 0) for state in DONE_STATES), planned
