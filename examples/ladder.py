"""A ladder of pairs in one pool: every model meets every other, all conversations run side by side.

python examples/ladder.py                       # functions stand in for models
python examples/ladder.py Qwen/Qwen3-0.6B HuggingFaceTB/SmolLM2-360M-Instruct      # local models, on all GPUs
"""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import partial
from itertools import combinations
from typing import Any

from taskmill import Conversation, Participant, run
from taskmill.models.base import Request


def bid(request: Request, most: int) -> str:
    """Stands in for a model: offers a little more each time, up to what it has."""
    offers = sum(message.role == "assistant" for message in request.messages) + 1
    jitter = (request.sampling.seed or 0) % 3
    return f"I offer {min(most, 2 * offers + jitter)}."


def main(*models: str) -> None:
    """Pair all, run every pair four times, and print who offered most."""
    seats: dict[str, Any] = {name: name for name in models} or {
        f"purse of {most}": partial(bid, most=most) for most in (4, 7, 10)
    }
    ladder = [
        Conversation(
            [Participant(one, seats[one], max_tokens=40), Participant(other, seats[other], max_tokens=40)],
            shared_context="You bid for a painting in turns. Say one number.",
            turns=6,
            name=f"{one} meets {other}",
        )
        for one, other in combinations(seats, 2)
    ]
    report = run(ladder, n=4)
    last: dict[str, list[str]] = defaultdict(list)
    for job_id, transcript in report.transcripts().items():
        last[job_id.rpartition("/")[0]].append(" / ".join(message.content for message in transcript[-2:]))
    for pair, ends in last.items():
        print(pair)
        for end in ends:
            print(f"    {end}")
    print(report)


if __name__ == "__main__":
    main(*sys.argv[1:])
