"""The ways out: a run in the forms trainers read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct, field

from taskmill.engine.traces import trace_of
from taskmill.errors import ConfigurationError
from taskmill.programs.row import NOT_JSON, UNKNOWN_TOOL, row_fault
from taskmill.records import DONE_STATES, Trace
from taskmill.store.jsonl import encode_row
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
    "failed": "the rollout failed",
    "cancelled": "the rollout was cancelled",
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


class Traces:
    """The traces of a taskset's run that may be exported, each with the bytes of its row; the others are counted."""

    def __init__(self, run: RunDirectory, report: ExportReport) -> None:
        self._run = run
        self.report = report

    def __iter__(self) -> Iterator[tuple[Trace, int]]:
        for _, line in self._run.read_traces():
            trace = trace_of(line)
            fault = NOT_JSON if trace is None else _trace_fault(trace)
            if trace is None or fault is not None:
                self.report.left_out[fault or NOT_JSON] += 1
            else:
                yield trace, len(line)


def _trace_fault(trace: Trace) -> str | None:
    if trace.state not in DONE_STATES:
        return trace.state
    offered = {tool.name for tool in trace.tools}
    called = {call.name for message in trace.messages for call in message.tool_calls}
    return UNKNOWN_TOOL if called - offered else None


def scores_of(trace: Trace) -> dict[str, Any]:
    """What a sample of a taskset says beside its conversation. Whatever has no fixed shape is JSON in a text."""
    return {
        "id": trace.id,
        "idx": trace.task.get("idx"),
        "number": trace.number,
        "reward": trace.reward,
        "rewards": as_text(trace.rewards),
        "metrics": as_text(trace.metrics),
        "task": as_text(trace.task),
    }


def as_text(value: Any) -> str:
    """A value as the text of its JSON."""
    return encode_row(value).decode().removesuffix("\n")


def export_run(run: Path | str, to: Format, out: Path | str | None = None) -> ExportReport:
    """Write the samples of the run at `run` to the file `out`, one row in memory at a time.

    - `sharegpt`: JSON lines `{"conversations": […]}`.
    - `messages`: JSON lines `{"messages": […], "tools": […]}` in the chat format of the OpenAI API.
    - `parquet`: a table with the same columns for every run; whatever has no fixed shape is JSON in a text
      column. Needs `pip install 'taskmill[parquet]'`.

    Samples of a taskset's run have their scores and their task beside them: `id`, `idx`, `number`, `reward`, and as
    JSON in a text `rewards`, `metrics` and `task`. Rollouts that failed or were cancelled are left out.

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
    if next(directory.read_conversations(), None) is not None:
        raise ConfigurationError(
            f"the run in {str(directory.path)!r} is one of conversations between participants, of which no side is the "
            "assistant's: read it with taskmill.RunReport.read, and write what you need"
        )
    if out is not None and directory.owns(Path(out)):
        raise ConfigurationError(
            f"out={str(out)!r} is a file of the run itself, which an export would overwrite: give another name, or "
            f"leave it out for {_DEFAULT_NAMES[to]!r} in the run's folder"
        )
    report = ExportReport(Path(out) if out is not None else directory.path / _DEFAULT_NAMES[to])
    form = import_module(f"taskmill.export.{to}")
    if next(directory.read_traces(), None) is None:
        form.write(Rows(directory, report))
    else:
        form.write_traces(Traces(directory, report))
    return report


__all__ = ["ExportReport", "Format", "export_run"]
