"""A debate: two debaters, and a judge who reads it at the end.

python examples/debate.py                                       # scripted answers, to see what it does
MODEL_BASE_URL=http://localhost:8000/v1 python examples/debate.py my-model
"""

from __future__ import annotations

import os
import sys
from typing import Any

from taskmill import Conversation, Participant, TokenBudget
from taskmill.conversations import TextPattern

CLAIM = "Tabs are better than spaces."
SCRIPTS = {
    "for": [
        "One key, one level: tabs say what is meant.",
        "Then set it once, and be done.",
        "I rest my case.",
    ],
    "against": ["Spaces look the same everywhere.", "Nobody sets it once. I CONCEDE nothing.", "As do I."],
}


def debater(name: str, model: str | None) -> Participant:
    """A debater on an endpoint, or one with answers to say where no model is named."""
    told = f"You argue {name} the claim, in two sentences at most."
    if model is None:
        return Participant(name, SCRIPTS[name], system_prompt=told)
    return Participant(
        name,
        model,
        base_url=os.environ["MODEL_BASE_URL"],
        system_prompt=told,
        temperature=0.9,
        max_tokens=120,
    )


def words(conversation: Any) -> dict[str, int]:
    """How many words each of them used: what is recorded as the analysis of a debate."""
    return {
        name: sum(len(message.content.split()) for message in conversation.transcript.by(name))
        for name in conversation.names
    }


def main(model: str | None = None) -> None:
    """Hold three debates and print them."""
    debate = Conversation(
        [debater("for", model), debater("against", model)],
        shared_context=f"The claim: {CLAIM}",
        shared_system_prompt="This is a friendly debate. Say nothing that you can't stand by.",
        analyzer=words,
    )
    # Six turns, unless somebody gives in, or 2,000 tokens are spent.
    debate = debate.turns(6).run_until(TextPattern(r"\bI concede\b") | TokenBudget(per_conversation=2_000))
    report = debate.rollout(3)
    for job_id, transcript in report.transcripts().items():
        print(f"--- {job_id}: {report.analyses()[job_id]}\n{transcript}\n")
    print(report)


if __name__ == "__main__":
    main(*sys.argv[1:2])
