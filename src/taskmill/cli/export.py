"""`taskmill export`: a run in the form a trainer reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from taskmill.cli import EXIT_OK


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
        The run's folder, such as data/my-run.
    to
        sharegpt: the conversations alone. messages: chat messages with their tools. parquet: a table.
    out
        The file to write. [default: beside the run's own files]
    """
    from taskmill.export import export_run

    report = export_run(run, to, out)
    print(report.as_text())
    return EXIT_OK
