"""CPU time of a batch per model call, against a bare `aiohttp` + `orjson` loop that makes the same requests.

Both talk to the same fake endpoint in another process, at zero latency, with the same number of rollouts in
flight; each is measured in a process of its own, imports left out. What taskmill does besides (tool, journal,
store, merge, statistics) is in its number.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from taskmill.testing.endpoint import EndpointProcess

ROLLOUTS = 2000
WIDTH = 50
ROUNDS = 5
GOAL = 1.6


Post = Callable[[bytes], Awaitable[bytes]]
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}


async def bare(url: str, prompts: list[str]) -> float:
    """CPU seconds of two calls and a tool a rollout, nothing else."""
    import aiohttp

    before = time.process_time()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=HEADERS) as session:

        async def post(body: bytes) -> bytes:
            async with session.post(f"{url}/chat/completions", data=body) as response:
                return await response.read()

        await loop_over(prompts, post)
    return time.process_time() - before


async def kept(url: str, prompts: list[str]) -> float:
    """The same over the connections taskmill uses."""
    from yarl import URL

    from taskmill.models.transport import Connections

    before = time.process_time()
    address = URL(f"{url}/chat/completions")
    loop = asyncio.get_running_loop()
    connections = Connections(loop, address, HEADERS, proxy=None, patience=30.0, keep_alive=True)

    async def post(body: bytes) -> bytes:
        return (await connections.post(body, largest=1 << 20)).body

    await loop_over(prompts, post)
    await connections.close()
    return time.process_time() - before


async def loop_over(prompts: list[str], post: Post) -> None:
    """Two calls and a tool for each prompt."""
    import orjson

    tools = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Add two numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                    "required": ["a", "b"],
                },
            },
        }
    ]
    pending = iter(prompts)

    async def ask(messages: list[Any]) -> Any:
        body = orjson.dumps({"model": "scripted", "messages": messages, "tools": tools})
        return orjson.loads(await post(body))["choices"][0]["message"]

    async def work() -> None:
        for prompt in pending:
            messages: list[Any] = [{"role": "user", "content": prompt}]
            answer = await ask(messages)
            call = answer["tool_calls"][0]
            arguments = orjson.loads(call["function"]["arguments"])
            result = orjson.dumps({"sum": arguments["a"] + arguments["b"]}).decode()
            messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": result}]
            await ask(messages)

    async with asyncio.TaskGroup() as group:
        for _ in range(WIDTH):
            group.create_task(work())


async def mill(url: str, prompts: list[str]) -> float:
    """The same by `BatchRunner`."""
    import genai_prices  # noqa: F401  a run loads it in a thread, later than the warm-up lasts

    from taskmill import BatchRunner, tool

    @tool
    def add(a: int, b: int) -> dict[str, int]:
        """Add two numbers."""
        return {"sum": a + b}

    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "prompts.jsonl"
        dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        runner = BatchRunner(
            dataset_file=dataset,
            batch_size=-(-len(prompts) // WIDTH),
            run_name="overhead",
            distribution="none",
            base_url=url,
            api_key="none",
            model="scripted",
            num_workers=WIDTH,
            output_dir=Path(folder),
            tools=[add],
            discard_without_reasoning=False,
        )
        before = time.process_time()
        await runner.run()
        taken = time.process_time() - before
        done = json.loads((Path(folder) / "overhead" / "statistics.json").read_text())
        assert done["outcomes"]["completed"] == len(prompts), done["outcomes"]
        assert done["api_calls"] == 2 * len(prompts)
        return taken


def child(kind: str, url: str, uvloop: bool) -> None:
    """Warm up, then measure; prints CPU seconds."""
    run = {"bare": bare, "kept": kept, "mill": mill}[kind]
    prompts = [f"Add {i} and {i + 1} with the tool, then say the sum in a sentence." for i in range(ROLLOUTS)]
    if uvloop:
        import uvloop as fast

        start = fast.run
    else:
        start = asyncio.run
    start(run(url, prompts[:100]))
    print(start(run(url, prompts)))


def measure(url: str, kind: str, *options: str) -> float:
    """CPU seconds of one child."""
    command = [sys.executable, "-m", "benchmarks.overhead", kind, url, *options]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def run() -> list[tuple[str, float, float | None]]:
    """Rows of the benchmark table: name, ratio, goal."""
    options = ("--script", "tool_then_answer", "--tool", "add", "--arguments", '{"a": 1, "b": 2}')
    with EndpointProcess(*options) as endpoint:
        url = endpoint.url
        kinds = ("bare",), ("mill",), ("kept",), ("bare", "uvloop"), ("mill", "uvloop")
        taken: dict[tuple[str, ...], list[float]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind in kinds:
                taken[kind].append(measure(url, *kind))
    # What else the machine does only adds to a time, so the least of some is nearest to what was asked.
    plain, whole, lean, plain_fast, whole_fast = (min(taken[kind]) for kind in kinds)
    median = statistics.median(
        mine / theirs for mine, theirs in zip(taken["mill",], taken["bare",], strict=True)
    )
    return [
        (f"CPU per model call / bare aiohttp + orjson loop, least of {ROUNDS}", whole / plain, GOAL),
        ("the same, median of pairs", median, None),
        ("the same, both under uvloop", whole_fast / plain_fast, None),
        ("the bare loop over taskmill's connections / over a session", lean / plain, None),
        ("CPU per model call, microseconds (no ratio)", whole / (2 * ROLLOUTS) * 1e6, None),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        child(sys.argv[1], sys.argv[2], "uvloop" in sys.argv[3:])
    else:
        for row in run():
            print(row)
