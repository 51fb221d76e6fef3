"""One turn that is being made: its tokens so far, how they are sampled, and when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from taskmill.models.local.sampling import Noise, Rule, draw, stream

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

UNFINISHED = "�"
"""What a tokenizer shows for a character of which not all bytes are there yet."""


class Task(NamedTuple):
    """What is to be made. `opened` says that the prompt itself ends inside a think block."""

    prompt: tuple[int, ...]
    limit: int
    rule: Rule
    seed: int | None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    opened: bool = False


class Made(NamedTuple):
    """What was made. `tokens` are all that were sampled, the end token too; `text` ends before a stop text.

    `cached` tokens of the prompt were not computed again. `waiting` and `seconds` are before and after the row joined.
    """

    tokens: tuple[int, ...]
    finish: str
    text: str
    logprobs: tuple[float, ...] | None
    cached: int
    waiting: float
    seconds: float


class Row:
    """A turn under way. Owned by the thread of the batch, but for `cancel`, which any thread may call.

    `deliver` gets what was made, or the exception that came instead, in the batch's thread.
    """

    def __init__(
        self,
        task: Task,
        deliver: Callable[[Made | BaseException], None],
        *,
        ends: frozenset[int],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.task = task
        self.tokens = list(task.prompt)
        self._numbers = stream(task.seed)
        self._noise: Noise | None = None
        self.logprobs: list[float] = []
        self.cached: int | None = None
        self._deliver = deliver
        self._ends = ends
        self._decode = decode
        self._cancelled = threading.Event()
        self._asked = time.monotonic()
        self._joined: float | None = None
        self._said = _Said(task, decode) if task.stop else None

    @property
    def made(self) -> list[int]:
        """The tokens sampled so far."""
        return self.tokens[len(self.task.prompt) :]

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Let it go at the next step."""
        self._cancelled.set()

    def noise(self, vocabulary: int) -> Noise | None:
        """The head starts of the next token: the same ones until it is accepted, however often it is computed."""
        if self._noise is None and not self.task.rule.greedy:
            self._noise = draw(self._numbers, vocabulary)
        return self._noise

    def joins(self, cached: int) -> None:
        """It is part of the batch now; `cached` tokens of it need not be computed. Only the first time counts."""
        if self._joined is None:
            self._joined = time.monotonic()
            self.cached = min(cached, len(self.task.prompt))

    def accept(self, token: int, logprob: float | None) -> bool:
        """Take the next token. Returns whether the turn has ended, in which case it has been delivered."""
        self._noise = None
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        count = len(self.tokens) - len(self.task.prompt)
        if token in self._ends:
            return self._end("stop", None)
        if self._said is not None and (text := self._said.with_token(token)) is not None:
            return self._end("stop", text)
        if count >= self.task.limit:
            return self._end("length", None)
        return False

    def fail(self, problem: BaseException) -> None:
        """End it with an error."""
        self._deliver(problem)

    def _end(self, finish: str, text: str | None) -> bool:
        made = tuple(self.made)
        if text is None:
            text = self._decode(made[:-1] if made[-1] in self._ends else made)
        now = time.monotonic()
        joined = now if self._joined is None else self._joined
        self._deliver(
            Made(
                tokens=made,
                finish=finish,
                text=text,
                logprobs=tuple(self.logprobs) if self.task.logprobs else None,
                cached=self.cached or 0,
                waiting=joined - self._asked,
                seconds=now - joined,
            )
        )
        return True


class _Said:
    """The text of a row as it grows, searched for stop texts: of what is said, and not of what is thought before."""

    def __init__(self, task: Task, decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stop for stop in task.stop if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._decode = decode
        self._thinking: bool | None = True if task.opened else None
        self._spoken_from = 0
        self._text = ""
        self._open: list[int] = []
        self._shown = ""

    def with_token(self, token: int) -> str | None:
        """Add a token; returns the text up to a stop text, once there is one."""
        self._open.append(token)
        # Decoded together with a few before it, since tokens may be parts of a character, or swallow a space.
        text = self._decode(self._open)
        if text.endswith(UNFINISHED):
            return None
        fresh = text[len(self._shown) :]
        self._open = self._open[-4:]
        self._shown = self._decode(self._open)
        searched = max(self._spoken_from, len(self._text) - self._longest + 1)
        self._text += fresh
        if self._still_thinking():
            return None
        places = [
            place
            for stop in self._stops
            if (place := self._text.find(stop, max(searched, self._spoken_from))) >= 0
        ]
        return self._text[: min(places)] if places else None

    def _still_thinking(self) -> bool:
        if self._thinking is None:
            start = self._text.lstrip()
            if start.startswith(THINK_OPEN):
                self._thinking = True
            elif len(start) >= len(THINK_OPEN) or not THINK_OPEN.startswith(start):
                self._thinking = False
            elif start:
                return True  # may become a think block with the next token
        if self._thinking:
            closed = self._text.find(THINK_CLOSE)
            if closed < 0:
                return True
            self._thinking = False
            self._spoken_from = closed + len(THINK_CLOSE)
        return False
