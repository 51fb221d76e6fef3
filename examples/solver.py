"""A solver and a checker against the rows of a file, graded: stored as it goes, resumed if it is run again.

python examples/solver.py [DIRECTORY]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from taskmill import Conversation, Participant, dataset_field, register_analyzer
from taskmill.models.base import Request

HERE = Path(__file__).resolve().parent
QUESTION = re.compile(r"(\d+) ([-+*/]) (\d+)")


def solve(request: Request) -> str:
    """Stands in for a model: right at sums, and wrong at divisions until it is told to check."""
    asked = QUESTION.search(" ".join(message.content for message in request.messages))
    assert asked is not None
    first, operation, second = int(asked[1]), asked[2], int(asked[3])
    results = {"+": first + second, "-": first - second, "*": first * second, "/": first // second}
    is_first_try = len(request.messages) < 3
    return f"The answer is {results[operation] + (operation == '/' and is_first_try)}."


def check(request: Request) -> str:
    """Stands in for a model that asks for a second look."""
    return "Please check that once more, and end with the number."


@register_analyzer("graded")
def grade(conversation: Any) -> dict[str, Any]:
    """Whether the first and the last answer are right; `conversation.row` is the row it was about."""
    given = [int(re.findall(r"\d+", message.content)[-1]) for message in conversation.transcript.by("solver")]
    right = conversation.row["answer"]
    return {"first": given[0] == right, "last": given[-1] == right}


def main(directory: str = "runs/solver") -> None:
    """Run every row twice and say how often a second look helped."""
    with open(HERE / "sums.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    solver = Participant("solver", solve, system_prompt="You solve sums.")
    checker = Participant(
        "checker", check, system_prompt=("The right answer is ", dataset_field("answer"), ".")
    )
    conversation = Conversation([solver, checker], shared_context=dataset_field("question"), turns=3)
    report = conversation.data(rows).analyzer("graded").rollout(2, out_dir=directory, resume=True)
    graded = list(report.analyses().values())
    print(f"{len(graded)} conversations, {len(report.skipped)} of them from before")
    for which in ("first", "last"):
        print(f"{which} answer right: {sum(marks[which] for marks in graded)} of {len(graded)}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
