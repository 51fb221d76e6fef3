"""How long it takes to start, against a bare interpreter."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

REPEATS = 15


def best(command: list[str]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return min(times)


def run() -> list[tuple[str, float, float | None]]:
    """Rows of the benchmark table: name, ratio, goal."""
    bare = best([sys.executable, "-c", "pass"])
    command = str(Path(sys.executable).with_name("taskmill"))
    return [
        ("taskmill --help / python -c pass", best([command, "--help"]) / bare, 15.0),
        ("import taskmill / python -c pass", best([sys.executable, "-c", "import taskmill"]) / bare, 5.0),
    ]


if __name__ == "__main__":
    for row in run():
        print(row)
