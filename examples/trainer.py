"""The loop of a trainer: ask an environment server for groups of rollouts, turn rewards into advantages, learn.

    python examples/trainer.py                                              # a pretended endpoint, nothing to set up
    python examples/trainer.py --base-url http://localhost:8000/v1 --model my-policy
    python examples/trainer.py --server http://gpu-box:8400 --token-file token --base-url … --model …

What a trainer needs of a rollout is in its trace: the reward, and for each model call the ids and log-probabilities of
the tokens, where the endpoint gives them (vLLM does). What happens with them is the trainer's own: `learn` shows where.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from taskmill import EnvClient, EnvServer, Task, TaskData, Taskset, Trace, reward
from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import Step, reply


class Sum(TaskData):
    answer: int


class SumTask(Task[Sum]):
    @reward
    def right(self, trace: Trace) -> float:
        return float(str(self.data.answer) in trace.messages[-1].content.split())


class SumsTaskset(Taskset[SumTask]):
    """Sums of two numbers, for ever."""

    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        draw = random.Random(0)
        idx = 0
        while True:
            a, b = draw.randrange(100), draw.randrange(100)
            yield SumTask(Sum(idx=idx, prompt=f"What is {a} + {b}? Answer with the number.", answer=a + b))
            idx += 1


class Sample(NamedTuple):
    """One model call as a trainer learns from it. `token_ids` and `logprobs` may be missing."""

    trace: Trace
    advantage: float
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None


def advantages(rewards: Sequence[float]) -> list[float]:
    """How much better each rollout of a group was than the group, in standard deviations."""
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (spread + 1e-6) for reward in rewards]


def samples(group: Sequence[Trace]) -> Iterator[Sample]:
    """What is learnt from a group. One in which all did equally well, or that failed, teaches nothing."""
    scored = [trace for trace in group if trace.reward is not None]
    if len(scored) < 2:
        return
    for trace, advantage in zip(scored, advantages([trace.reward or 0.0 for trace in scored]), strict=True):
        if abs(advantage) > 1e-3:
            for call in trace.calls:
                yield Sample(trace, advantage, call.token_ids, call.logprobs)


def learn(step: int, batch: Sequence[Sample], groups: Sequence[Sequence[Trace]]) -> dict[str, Any]:
    """Where the policy is updated. Here it is only counted what there is to learn from."""
    rewards = [trace.reward for group in groups for trace in group if trace.reward is not None]
    return {
        "step": step,
        "rollouts": sum(map(len, groups)),
        "reward": round(statistics.fmean(rewards), 3) if rewards else None,
        "samples": len(batch),
        "tokens": sum(len(sample.token_ids or ()) for sample in batch),
        "with_logprobs": sum(sample.logprobs is not None for sample in batch),
        "failed": sum(trace.state == "failed" for group in groups for trace in group),
    }


async def train(
    client: EnvClient, model: dict[str, Any], *, steps: int, tasks: int, n: int
) -> AsyncIterator[dict[str, Any]]:
    """`steps` steps: each asks for `n` rollouts of each of the next `tasks` tasks, all at once."""
    info = await client.info()
    for step in range(steps):
        first = step * tasks
        numbers = [
            first + place if info.num_tasks is None else (first + place) % info.num_tasks
            for place in range(tasks)
        ]
        sampling = {"temperature": 1.0, "logprobs": True, "seed": step}
        async with asyncio.TaskGroup() as running:
            asked = [
                running.create_task(client.group(number, n, model=model, sampling=sampling))
                for number in numbers
            ]
        groups = [task.result() for task in asked]
        yield learn(step, [sample for group in groups for sample in samples(group)], groups)


@asynccontextmanager
async def pretended_policy() -> AsyncIterator[str]:
    """An endpoint that is right in about half of the cases, and gives tokens with log-probabilities as vLLM does."""
    draw = random.Random(0)

    def respond(body: dict[str, Any]) -> Step:
        numbers = [
            int(word) for word in body["messages"][-1]["content"].replace("?", " ").split() if word.isdigit()
        ]
        text = str(sum(numbers) + draw.choice((0, 1)))
        tokens = [ord(character) for character in text]
        choice = {
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": chr(token), "logprob": -0.7} for token in tokens]},
            "token_ids": tokens,
        }
        usage = {"prompt_tokens": 12, "completion_tokens": len(tokens)}
        return reply({"choices": [choice], "usage": usage, "model": "pretended"})

    async with FakeEndpoint(respond) as endpoint:
        yield endpoint.url


async def main(options: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        base_url = options.base_url or await stack.enter_async_context(pretended_policy())
        url, token = options.server, None
        if options.token_file is not None:
            token = Path(options.token_file).read_text().strip()
        if url is None:
            url = (await stack.enter_async_context(EnvServer(SumsTaskset, workers=options.workers))).url
        client = await stack.enter_async_context(EnvClient(url, token=token))
        model = {"name": options.model, "base_url": base_url, "api_key": options.api_key}
        async for said in train(
            client, model, steps=options.steps, tasks=options.tasks, n=options.group_size
        ):
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--server", help="address of a running environment server (default: start one)")
    parser.add_argument("--token-file", help="file with that server's token")
    parser.add_argument("--base-url", help="the policy's endpoint (default: a pretended one)")
    parser.add_argument("--model", default="policy", help="the policy's name at its endpoint")
    parser.add_argument("--api-key", help="the endpoint's key")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=4, help="tasks a step")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts a task")
    parser.add_argument("--workers", type=int, default=2, help="worker processes, where a server is started")
    asyncio.run(main(parser.parse_args()))
