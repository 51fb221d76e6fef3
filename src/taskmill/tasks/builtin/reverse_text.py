"""`reverse_text`: write a text backwards, letter by letter."""

from __future__ import annotations

from collections.abc import Iterator

from taskmill.records import Trace
from taskmill.tasks.builtin._shared import bundled_text, inside, last_answer, similarity
from taskmill.tasks.scoring import reward
from taskmill.tasks.task import Task, TaskData
from taskmill.tasks.taskset import Taskset

_SYSTEM = (
    "Reverse the text of the user character by character, spaces and punctuation included. "
    "Write the reversed text between <reversed_text> and </reversed_text>."
)


class ReverseTextData(TaskData):
    """A text, and the same backwards."""

    answer: str


class ReverseTextTask(Task[ReverseTextData]):
    """Reward: how alike the text in the tags is to the truth, from 0 to 1."""

    @reward
    def likeness(self, trace: Trace) -> float:
        said = inside(last_answer(trace.messages), "reversed_text")
        return 0.0 if said is None else similarity(said, self.data.answer)

    def solve(self) -> str:
        return f"<reversed_text>{self.data.answer}</reversed_text>"


class ReverseTextTaskset(Taskset[ReverseTextTask]):
    """Write a text backwards, letter by letter: a hundred sentences, and a hundred pieces of two or three of them."""

    def load(self) -> Iterator[ReverseTextTask]:
        for idx, text in enumerate(_texts()):
            data = ReverseTextData(idx=idx, prompt=text, system_prompt=_SYSTEM, answer=text[::-1])
            yield ReverseTextTask(data, self.config.task)


def _texts() -> Iterator[str]:
    sentences = bundled_text("sentences.txt").splitlines()
    yield from sentences
    # Steps that have no factor in common with their number, so that each sentence begins one longer piece.
    for place, first in enumerate(sentences):
        others = [sentences[(place * step + 11) % len(sentences)] for step in (37, 63)[: 1 + place % 2]]
        yield " ".join([first, *(other for other in others if other != first)])
