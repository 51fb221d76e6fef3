"""`taskmill compare`: two runs of a taskset, task by task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from taskmill.cli import EXIT_INCOMPLETE, EXIT_OK
from taskmill.cli.display import harmless
from taskmill.tasks.words import counted


def compare(run_a: Path, run_b: Path, /, *, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Two runs of a taskset, paired by task: differences with their intervals, and where they disagree.

    Exit code 0, or 1 when no task was scored in both.

    Parameters
    ----------
    run_a
        The folder of one run, or its name.
    run_b
        The same of the run that is compared with it.
    json
        Write JSON.
    """
    from taskmill.cli.places import place_of
    from taskmill.evaluation.compare import compare as compared

    found = compared(place_of(run_a), place_of(run_b))
    print(msgspec.json.encode(found).decode() if json else harmless(as_text(found)))
    return EXIT_INCOMPLETE if found.reward is None else EXIT_OK


def as_text(found: Any) -> str:
    """A comparison for people."""
    lines = []
    for letter, side in (("A", found.a), ("B", found.b)):
        lines.append(
            f"{letter}  {side.path}: {side.model}, {counted(side.scored, 'rollout')} of {counted(side.tasks, 'task')} "
            f"with a reward, {side.unscored:,} without"
        )
    if found.reward is None:
        lines.append("no task was scored in both, so there is nothing to compare")
        return "\n".join(lines)
    told = f" ({found.by_prompt:,} of them alike only in number and prompt)" if found.by_prompt else ""
    lines += [
        f"in both: {counted(found.reward.tasks, 'task')}{told}; {found.only_a:,} only in A, {found.only_b:,} only in B",
        "",
        f"reward       {_difference(found.reward)}",
        f"B is better  on {counted(found.wins, 'task')}, worse on {found.losses:,}, the same on {found.ties:,}",
    ]
    for title, group in (("reward", found.rewards), ("metric", found.metrics)):
        lines += [f"{title}       {name}: {_difference(pair)}" for name, pair in group.items()]
    for letter, names in (("A", found.names_a), ("B", found.names_b)):
        if names:
            lines.append(f"the runs were not scored alike: only {letter} has {', '.join(names)}")
    if found.disagreements:
        lines += ["", "they disagree most on"]
    for task in found.disagreements:
        called = f" ({task.name})" if task.name else ""
        lines.append(f"  task {task.idx}{called}: A {task.a:.4g}, B {task.b:.4g}")
        lines.append(f"    A {_some(task.ids_a)}")
        lines.append(f"    B {_some(task.ids_b)}")
    return "\n".join(lines)


def _difference(pair: Any) -> str:
    if pair.low is None:
        interval = "one task says nothing of the error"
    else:
        interval = f"95% from {pair.low:+.4f} to {pair.high:+.4f}"
    return f"A {pair.a:.4f}, B {pair.b:.4f}, B - A {pair.difference:+.4f} ({interval}, {counted(pair.tasks, 'task')})"


def _some(ids: Any, most: int = 4) -> str:
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more
