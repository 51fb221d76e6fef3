"""The ways out: a run in the forms trainers read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct, field

from taskmill.errors import ConfigurationError
from taskmill.programs.row import row_fault
from taskmill.store.run import RunDirectory
from taskmill.tools.toolsets import known_tools

Format = Literal["sharegpt", "messages", "parquet"]

UNREADABLE = "unreadable"
"""Why a row is left out that is a row, but not of the shape this format needs."""

_DEFAULT_NAMES: dict[Format, str] = {
    "sharegpt": "export_sharegpt.jsonl",
    "messages": "export_messages.jsonl",
    "parquet": "export.parquet",
}


class ExportReport(Struct):
    """What an export wrote. `left_out` counts the rows that are not in the file, by reason."""

    path: Path
    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def as_text(self) -> str:
        """The report for people."""
        lines = [f"{self.written:,} samples in {self.path}"]
        lines += [
            f"left out: {count:,} ({_REASONS.get(why, why)})" for why, count in sorted(self.left_out.items())
        ]
        return "\n".join(lines)


_REASONS = {
    "not_json": "no row of JSON",
    "unknown_tool": "calls a tool that does not exist",
    UNREADABLE: "a row that this format has no place for",
}


class Rows:
    """The rows of a run that may be exported, as bytes, shard by shard; what is left out is counted in `report`."""

    def __init__(self, run: RunDirectory, report: ExportReport) -> None:
        self._run = run
        self.report = report

    def __iter__(self) -> Iterator[bytes]:
        known = frozenset(known_tools())
        for shard in self._run.shard_numbers():
            for _, line in self._run.read_shard(shard):
                fault = row_fault(line, known)
                if fault is None:
                    yield line
                else:
                    self.report.left_out[fault] += 1


def export_run(run: Path | str, to: Format, out: Path | str | None = None) -> ExportReport:
    """Write the samples of the run at `run` to the file `out`, one row in memory at a time.

    - `sharegpt`: JSON lines `{"conversations": […]}`.
    - `messages`: JSON lines `{"messages": […], "tools": […]}` in the chat format of the OpenAI API.
    - `parquet`: a table with the same columns for every run; whatever has no fixed shape is JSON in a text
      column. Needs `pip install 'taskmill[parquet]'`.

    Left out and counted are the rows that `trajectories.jsonl` leaves out. The run's own files are not
    touched, and may not be `out`; another file that is there already is replaced only once the new one is whole.

    Raises:
        RunNotFoundError: there is no run at that path.
        ConfigurationError: an unknown format, an `out` that is the run's own, or a package is missing.
        StorageFullError: the file can't be written.
    """
    if to not in get_args(Format):
        raise ConfigurationError(f"to={to!r} must be one of {', '.join(get_args(Format))}")
    directory = RunDirectory(run)
    directory.require()
    if out is not None and directory.owns(Path(out)):
        raise ConfigurationError(
            f"out={str(out)!r} is a file of the run itself, which an export would overwrite: give another name, or "
            f"leave it out for {_DEFAULT_NAMES[to]!r} in the run's folder"
        )
    report = ExportReport(Path(out) if out is not None else directory.path / _DEFAULT_NAMES[to])
    rows = Rows(directory, report)
    if to == "sharegpt":
        from taskmill.export.sharegpt import write
    elif to == "messages":
        from taskmill.export.messages import write
    else:
        from taskmill.export.parquet import write
    write(rows)
    return report


__all__ = ["ExportReport", "Format", "export_run"]
