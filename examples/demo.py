"""What `make demo` runs: a batch on a small real model, killed in the middle and resumed, and what came of it.

Needs no key, no GPU and no network once it is installed. Everything it makes is in `demo/run-<n>/`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROMPTS = HERE / "prompts.jsonl"
DEMO = Path("demo")
KILL_AFTER_ROWS = 3
STEP_SECONDS = 280
LINE_WIDTH = 100


def main() -> int:
    """Run, kill, look, resume, count; 0 when real tool calls and reasoning came out of it."""
    run = fresh_folder()
    command = batch_command(run)
    planned = sum(1 for line in PROMPTS.read_bytes().splitlines() if line.strip())

    say(f"1. {planned} prompts, four at a time, on a real model of 135 million parameters")
    print(f"   $ {shown(command)}")
    code = run_and_kill(command, run)
    if code > 0:
        return failed(f"the run ended with exit code {code} before it could be killed")
    how = "killed with SIGKILL" if code else "ended before it could be killed"
    print(f"   {how}: {stored_rows(run)} of {planned} rows were stored")

    say("2. what is there")
    print(f"   $ {shown(taskmill('status', str(run)))}")
    subprocess.run(taskmill("status", str(run)), timeout=STEP_SECONDS)

    say("3. resumed: what is stored is not run again, and a finished call is not made again")
    print(f"   $ {shown([*command, '--resume'])}")
    done = subprocess.run([*command, "--resume"], timeout=STEP_SECONDS)
    if done.returncode:
        return failed(f"the resumed run ended with exit code {done.returncode}")

    rows = [json.loads(line) for line in read_lines(run / "trajectories.jsonl")]
    statistics = json.loads((run / "statistics.json").read_bytes())
    say("4. what came of it")
    show_table(rows, statistics)
    show_excerpt(rows)
    show_files(run)
    return verdict(rows, statistics, planned)


# -- running --------------------------------------------------------------------------------------------------


def fresh_folder() -> Path:
    """The first `demo/run-<n>` that is not there yet."""
    number = 1
    while (DEMO / f"run-{number}").exists():
        number += 1
    return DEMO / f"run-{number}"


def taskmill(*arguments: str) -> list[str]:
    """The command line of the taskmill that belongs to this Python."""
    return [str(Path(sys.executable).with_name("taskmill")), *arguments]


def batch_command(run: Path) -> list[str]:
    """The batch. At temperature 0 the model says the same again, as far as its batched arithmetic does."""
    return taskmill(
        "batch",
        os.path.relpath(PROMPTS),
        *("--run-name", run.name, "--output-dir", str(run.parent)),
        *("--batch-size", "3", "--num-workers", "4"),
        *("--distribution", "terminal_only", "--seed", "7"),
        *("--model", "embedded", "--temperature", "0", "--max-iterations", "4"),
    )


def run_and_kill(command: list[str], run: Path) -> int:
    """Start the batch and kill it without warning once a few rows are stored; return its exit code."""
    process = subprocess.Popen(command)
    give_up = time.monotonic() + STEP_SECONDS
    try:
        while stored_rows(run) < KILL_AFTER_ROWS:
            if process.poll() is not None or time.monotonic() > give_up:
                break
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait()
    return process.returncode


def stored_rows(run: Path) -> int:
    """Whole rows in the shards."""
    return sum(shard.read_bytes().count(b"\n") for shard in run.glob("batch_*.jsonl"))


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines of a JSONL file; only a line feed ends one."""
    with path.open("rb") as file:
        yield from file


# -- showing --------------------------------------------------------------------------------------------------


def say(heading: str) -> None:
    """A heading."""
    print(f"\n{heading}", flush=True)


def shown(command: list[str]) -> str:
    """A command as one would type it."""
    return " ".join([os.path.relpath(command[0]), *command[1:]])


def cut(line: str) -> str:
    """A line as far as there is room for it."""
    return line if len(line) <= LINE_WIDTH else line[: LINE_WIDTH - 1] + "…"


def show_table(rows: list[dict[str, Any]], statistics: dict[str, Any]) -> None:
    """Rows, tool calls, reasoning, tokens, time."""
    tools = statistics["tool_statistics"]
    reasoning = statistics["reasoning_statistics"]
    tokens = statistics["tokens"]
    used = {name: counts for name, counts in tools.items() if counts["count"]}
    outcomes = {state: count for state, count in statistics["outcomes"].items() if count}
    table = [
        ("rows", ", ".join(f"{count} {state}" for state, count in outcomes.items())),
        ("model calls", str(statistics["api_calls"])),
        ("tool calls", ", ".join(f"{n} {c['success']} of {c['count']} ok" for n, c in used.items())),
        (
            "reasoning",
            f"{reasoning['turns_with_reasoning']} of {reasoning['total_assistant_turns']} assistant turns",
        ),
        ("tokens", f"{tokens['input_tokens']:,} in, {tokens['output_tokens']:,} out"),
        ("time", f"{statistics['duration_seconds']:.0f} s of work, the killed session included"),
        ("trajectories", f"{len(rows)} rows"),
    ]
    for name, value in table:
        print(f"   {name:<13} {value}")


def show_excerpt(rows: list[dict[str, Any]]) -> None:
    """One trajectory, without its system turn: the first whose answer repeats what the tool gave, if any does."""
    row = next((row for row in rows if answers_from_observation(row)), rows[0])
    print(
        f"\n   row {row['prompt_index']}, as it is stored (the system turn with the tools' schemas left out):"
    )
    for turn in row["conversations"]:
        if turn["from"] != "system":
            for number, line in enumerate(turn["value"].splitlines()):
                print(f"   {turn['from'] if not number else '':>6} | {cut(line)}")


def answers_from_observation(row: dict[str, Any]) -> bool:
    """Whether a word of a command's output stands in the row's last turn."""
    answer = row["conversations"][-1]["value"]
    observed = [turn["value"] for turn in row["conversations"] if turn["from"] == "tool"]
    outputs = [text.partition('"output":"')[2].partition('"')[0] for text in observed]
    return any(
        len(word) > 3 and word in answer for text in outputs for word in text.replace("\\n", " ").split()
    )


def show_files(run: Path) -> None:
    """Where to look."""
    print()
    for name, what in (
        ("trajectories.jsonl", "all rows, ShareGPT style"),
        ("batch_0.jsonl …", "the shards they come from"),
        ("statistics.json", "tools, reasoning, tokens, outcomes of the whole run"),
    ):
        print(f"   {run / name!s:<34} {what}")
    print(f"   then: {shown(taskmill('export', str(run), '--to', 'messages'))}")


def verdict(rows: list[dict[str, Any]], statistics: dict[str, Any], planned: int) -> int:
    """0 when every prompt has its row and there were real tool calls and real reasoning."""
    succeeded = sum(counts["success"] for counts in statistics["tool_statistics"].values())
    if len(rows) != planned or len({row["prompt_index"] for row in rows}) != planned:
        return failed(f"{planned} prompts, but {len(rows)} trajectories")
    if not succeeded:
        return failed("no tool call succeeded")
    if not statistics["reasoning_statistics"]["turns_with_reasoning"]:
        return failed("no turn has reasoning")
    return 0


def failed(why: str) -> int:
    """Say what went wrong."""
    print(f"\nThe demo did not come out as it should: {why}.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
