"""All benchmarks, as one table of ratios: `python -m benchmarks [NAME …]`."""

from __future__ import annotations

import sys
import time
from importlib import import_module

NAMES = (
    "start",
    "overhead",
    "concurrency",
    "sandbox",
    "serve",
    "store",
    "memory",
    "tasksets",
    "conversations",
    "crash",
    "local",
)


def main() -> int:
    names = sys.argv[1:] or NAMES
    missed = 0
    print(f"{'':<14}{'':<62}{'ratio':>9}  {'goal':>7}")
    for name in names:
        started = time.perf_counter()
        for label, value, goal in import_module(f"benchmarks.{name}").run():
            kept = goal is None or (value >= goal if label.endswith("(at least)") else value <= goal)
            missed += not kept
            told = "" if goal is None else f"{goal:>7.2f}{'' if kept else '  missed'}"
            print(f"{name:<14}{label:<62}{value:>9.2f}  {told}", flush=True)
        print(f"{name:<14}took {time.perf_counter() - started:.0f} s", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
