"""Peak memory of a batch of a million rows against one of ten thousand: scripted model, short answers."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL, LARGE, GOAL = 10_000, 1_000_000, 1.3


async def batch(rows: int) -> None:
    from taskmill import BatchRunner
    from taskmill.testing import ScriptedModel

    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "prompts.jsonl"
        with dataset.open("w") as file:
            file.writelines(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(rows))
        runner = BatchRunner(
            dataset_file=dataset,
            batch_size=1000,
            run_name="large",
            distribution="none",
            model=ScriptedModel(lambda request: "yes"),
            output_dir=Path(folder),
            discard_without_reasoning=False,
        )
        await runner.run()
        done = json.loads((Path(folder) / "large" / "statistics.json").read_text())
        assert done["outcomes"]["completed"] == rows, done["outcomes"]


def peak_kib(rows: int) -> float:
    command = [sys.executable, "-m", "benchmarks.memory", str(rows)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def run() -> list[tuple[str, float, float | None]]:
    """Rows of the benchmark table: name, ratio, goal."""
    return [("peak memory at 1,000,000 rows / at 10,000", peak_kib(LARGE) / peak_kib(SMALL), GOAL)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(batch(int(sys.argv[1])))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    else:
        for row in run():
            print(row)
