"""Wall time of a wide run against the ideal: with a second of latency, workers should be all that limits.

Imports are left out: a run of one row comes first.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path

from taskmill.testing.endpoint import EndpointProcess

ROWS, WORKERS, LATENCY, GOAL = 2000, 500, 1.0, 1.25


async def wall_seconds(url: str, rows: int) -> float:
    from taskmill import BatchRunner

    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "prompts.jsonl"
        dataset.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(rows)))
        runner = BatchRunner(
            dataset_file=dataset,
            batch_size=1,
            run_name="wide",
            distribution="none",
            base_url=url,
            api_key="none",
            model="scripted",
            num_workers=WORKERS,
            output_dir=Path(folder),
            discard_without_reasoning=False,
        )
        started = time.perf_counter()
        await runner.run()
        taken = time.perf_counter() - started
        done = json.loads((Path(folder) / "wide" / "statistics.json").read_text())
        assert done["outcomes"]["completed"] == rows, done["outcomes"]
        return taken


def run() -> list[tuple[str, float, float | None]]:
    """Rows of the benchmark table: name, ratio, goal."""
    with EndpointProcess("--script", "answer", "--latency", str(LATENCY)) as endpoint:
        asyncio.run(wall_seconds(endpoint.url, 1))
        ideal = ROWS * LATENCY / WORKERS
        return [
            (
                "wall time of 2,000 rows by 500 workers / ideal",
                asyncio.run(wall_seconds(endpoint.url, ROWS)) / ideal,
                GOAL,
            )
        ]


if __name__ == "__main__":
    for row in run():
        print(row)
