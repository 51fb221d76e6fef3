"""A thousand kills: not a ratio but a count of what was lost, which must be nothing."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from tests.crash.campaign import campaign

KILLS = 1000


def run() -> list[tuple[str, float, float | None]]:
    """Rows of the benchmark table: name, ratio, goal."""
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(campaign(Path(folder), kills=KILLS, seed=1))
    for fault in result.faults:
        print(f"  {fault}")
    return [
        (f"things lost or done twice in {result.kills} kills", float(len(result.faults)), 0.0),
        ("kills in the middle of a write, sync or rename (no ratio)", float(result.torn), None),
    ]


if __name__ == "__main__":
    for row in run():
        print(row)
