"""A taskset that stands in a package of its own."""

from __future__ import annotations

from collections.abc import Iterator

from taskmill import Trace
from taskmill.tasks import Task, TaskData, Taskset, reward

WORDS = {"de": "Hallo", "fr": "Bonjour", "it": "Ciao"}


class GreetingData(TaskData):
    language: str
    word: str


class GreetingTask(Task[GreetingData]):
    @reward
    def greeted(self, trace: Trace) -> float:
        return float(self.data.word in trace.messages[-1].content)

    def solve(self) -> str:
        return f"{self.data.word}!"


class GreetingsTaskset(Taskset[GreetingTask]):
    """Say hello in a language."""

    def load(self) -> Iterator[GreetingTask]:
        for idx, (language, word) in enumerate(WORDS.items()):
            prompt = f"Say hello in the language {language!r}."
            yield GreetingTask(GreetingData(idx=idx, prompt=prompt, language=language, word=word))
