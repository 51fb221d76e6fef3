"""Peak memory of a run of a million conversations from a generator against one of ten thousand: scripted, stored."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SMALL, LARGE, GOAL = 10_000, 1_000_000, 1.3


def hold(count: int) -> None:
    from taskmill.conversations import Conversation, Participant, run_jobs

    talk = Conversation([Participant("one", ["yes"])], "Say yes.", turns=1)

    def jobs() -> Iterator[tuple[str, Conversation]]:
        for number in range(count):
            yield f"job {number}", talk

    with tempfile.TemporaryDirectory() as folder:
        report = run_jobs(jobs(), out_dir=Path(folder) / "run")
        assert len(report.results) == count
        assert report.results[f"job {count - 1}"].transcript[0].content == "yes"


def peak_kib(count: int) -> float:
    command = [sys.executable, "-m", "benchmarks.conversations", str(count)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def run() -> list[tuple[str, float, float | None]]:
    """Rows of the benchmark table: name, ratio, goal."""
    return [("peak memory at 1,000,000 conversations / at 10,000", peak_kib(LARGE) / peak_kib(SMALL), GOAL)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        hold(int(sys.argv[1]))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    else:
        for row in run():
            print(row)
