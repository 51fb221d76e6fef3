"""The running batch: rows join it and leave it between forward passes, each with a sampling of its own.

One `step` lets rows in (a pass over what is new in their prompts), or makes one token for each row that is in. Nothing
here waits or knows of threads; `engine` calls it.

A row is nothing but its tokens and its random numbers. Keys and values can be dropped at any time and computed again
from the tokens, which is how memory is found when there is none left, and how a token is computed alone when company
might have changed it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from taskmill.errors import ModelError, ModelMemoryError
from taskmill.models.local.cache import Kept, KeptTurns, Slots, tokens_taken
from taskmill.models.local.loading import Loaded
from taskmill.models.local.row import Row
from taskmill.models.local.sampling import MARGIN, choose, log_probabilities, penalised

TOKENS_A_PASS = 2048
"""Tokens of prompts computed in one pass at most: it bounds memory, not what is computed."""

STEPS_WAITED = 4
"""Steps that a row waits for others to join with, while few wait: a pass for one costs as much as one for ten."""

_log = logging.getLogger("taskmill.models.local")


class _Joining(NamedTuple):
    row: Row
    kept: Kept | None
    known: int

    @property
    def fresh(self) -> int:
        return len(self.row.tokens) - self.known


class Batcher:
    """Makes the tokens of all rows given to `add`, at most `max_rows` at once."""

    def __init__(self, loaded: Loaded, *, memory: int, max_rows: int = 1) -> None:
        self.loaded = loaded
        self.max_rows = max_rows
        self.passes = 0
        self.rechecked = 0
        self.memory = memory
        self.kept = KeptTurns(memory // 3)
        self._margin = MARGIN if loaded.exact else 0.0
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._slots = self._no_slots()
        self._ceiling: int | None = None
        self._waited = 0
        self._forgets = 0
        self._hooks: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._rows and not self._waiting

    @property
    def running(self) -> int:
        """Rows in the batch."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Rows that are to join it."""
        return len(self._waiting)

    def add(self, row: Row) -> None:
        """Let `row` join as soon as there is room."""
        self._waiting.append(row)

    def bound_memory(self, size: int) -> None:
        """Use at most `size` bytes for keys and values: a third of it for turns that are kept."""
        self.memory = size
        self.kept.bound(size // 3)

    def step(self) -> None:
        """Do the next thing there is to do: one round of joining, or one token for each row."""
        self._drop_cancelled()
        if self._time_to_join() and self._join():
            self._waited = 0
        elif self._rows:
            self._waited += bool(self._waiting)
            self._next_tokens()

    def fail_all(self, problem: BaseException) -> None:
        """End every row with `problem`."""
        rows = [*self._rows, *self._waiting]
        self._rows.clear()
        self._waiting.clear()
        self._slots = self._no_slots()
        for row in rows:
            row.fail(problem)

    # -- joining ----------------------------------------------------------------------------------------------

    def _free(self) -> int:
        most = self.max_rows if self._ceiling is None else min(self.max_rows, self._ceiling)
        return max(0, most - len(self._rows))

    def _time_to_join(self) -> bool:
        ready = min(len(self._waiting), self._free())
        if not ready:
            return False
        return not self._rows or ready >= max(1, len(self._rows) // 8) or self._waited >= STEPS_WAITED

    def _join(self) -> bool:
        """Let in who waits, as far as there is room; `False` where there is none."""
        if (hooks := _hooks(self.loaded.module)) != self._hooks:
            # What a hook changes or sees depends on all that was computed; what was kept came without it.
            self.kept.clear()
            self._hooks = hooks
        joining: list[_Joining] = []
        width = max(self._slots.lengths, default=0)
        free = self._free()
        while self._waiting and len(joining) < free:
            row = self._waiting[0]
            width = max(width, len(row.tokens) + 1)
            if not self._fits(len(self._rows) + len(joining) + 1, width) and (self._rows or joining):
                break
            self._waiting.popleft()
            joining.append(_Joining(row, *self.kept.find(row.tokens)))
        if not joining:
            return False
        joining.sort(key=lambda one: one.fresh)
        while joining:
            group = _alike(joining)
            del joining[: len(group)]
            forgets = self._forgets
            joined = self._try_group(group)
            if not joined:
                # Before those that came later.
                self._waiting.extendleft(one.row for one in reversed(joining))
                return False
            if self._forgets > forgets:
                # There is no memory, so nothing of what was kept may stay referred to.
                joining = [one._replace(kept=None, known=0) for one in joining]
        return True

    def _fits(self, rows: int, width: int) -> bool:
        return tokens_taken(rows, width) * self.loaded.token_bytes <= self.memory - self.memory // 3

    def _try_group(self, group: list[_Joining]) -> bool:
        """Compute these rows' prompts; `False` when there was no memory for it and rows had to be put back."""
        try:
            self._let_in(group)
        except Exception as problem:
            if not is_out_of_memory(problem):
                _fail([one.row for one in group], problem)
                return True
            self._forget()
        else:
            return True
        if len(group) > 1:
            half = group[: len(group) // 2]
            self._waiting.extendleft(one.row for one in reversed(group[len(half) :]))
            return self._try_group([one._replace(kept=None, known=0) for one in half])
        if self._rows:
            self._ceiling = len(self._rows)
            self._waiting.appendleft(group[0].row)
            return False
        self._alone(group[0])
        return True

    def _alone(self, one: _Joining) -> None:
        """The last try of a row for which there was no memory: nothing else is in it now."""
        self._slots = self._no_slots()
        try:
            self._let_in([one._replace(kept=None, known=0)])
        except Exception as problem:
            if not is_out_of_memory(problem):
                _fail([one.row], problem)
                return
            self._forget()
            one.row.fail(self._too_large(one.row))

    def _too_large(self, row: Row) -> ModelMemoryError:
        return ModelMemoryError(
            f"a turn of {len(row.tokens)} tokens does not fit the memory of {self.loaded.device!r}, even alone: "
            "shorten the conversation, load the model in a smaller dtype, or use a device with more memory"
        )

    def _let_in(self, group: Sequence[_Joining]) -> None:
        # Equal prompts (copies of one scenario) are computed once.
        places: dict[tuple[int, ...], int] = {}
        picks = [places.setdefault(tuple(one.row.tokens), len(places)) for one in group]
        first = {pick: one for one, pick in reversed(list(zip(group, picks, strict=True)))}
        different = [first[pick] for pick in range(len(places))]
        slots, logits = self._read([one.row.tokens for one in different], different)
        chosen = self._sample(logits[picks], [one.row for one in group])
        for one in group:
            one.row.joins(one.known)
        if not self._rows:
            self._slots = self._no_slots()
        self._slots.join(slots, picks, most_rows=self.max_rows)
        before = len(self._rows)
        self._rows += [one.row for one in group]
        self._hand_out(chosen, before)

    def _read(self, rows: Sequence[Sequence[int]], known: Sequence[_Joining]) -> tuple[Slots, Tensor]:
        """One pass (or several, for long ones) over what is new in `rows`; their caches, and the last logits."""
        fresh = max(one.fresh for one in known)
        lengths = [len(tokens) for tokens in rows]
        # All rows take part with the same number of tokens. A row with fewer new ones computes some of its history
        # again rather than padding: there is then no gap between a row's history and what is new.
        histories = [max(0, length - fresh) for length in lengths]
        before = max(histories)
        slots = Slots(self.loaded.layers, rows=len(rows), columns=before + fresh, end=before)
        slots.begin([(one.kept, length) for one, length in zip(known, histories, strict=True)])
        padded: Any = np.full((len(rows), before + fresh), self.loaded.pad, dtype=np.int64)
        for number, tokens in enumerate(rows):
            padded[number, before + fresh - len(tokens) :] = tokens
        whole = torch.from_numpy(padded).to(self.loaded.device)
        piece = max(16, TOKENS_A_PASS // len(rows))
        logits: Tensor | None = None
        for begin in range(before, before + fresh, piece):
            end = min(begin + piece, before + fresh)
            # Lengths counted up to `end`: what comes after it is not there yet.
            so_far = [max(0, length - (before + fresh - end)) for length in lengths]
            logits = self._forward(whole[:, begin:end], so_far, slots)
            slots.place.end = end
        assert logits is not None
        slots.lengths = lengths
        return slots, logits

    # -- stepping ---------------------------------------------------------------------------------------------

    def _next_tokens(self) -> None:
        try:
            self._slots.make_room(1)
            last = torch.tensor([[row.tokens[-1]] for row in self._rows], device=self.loaded.device)
            logits = self._forward(last, [length + 1 for length in self._slots.lengths], self._slots)
            chosen = self._sample(logits, self._rows)
        except Exception as problem:
            if is_out_of_memory(problem):
                self._halve()
                return
            rows, self._rows = self._rows, []
            self._slots = self._no_slots()
            _fail(rows, problem)
            return
        self._slots.advance(1)
        self._hand_out(chosen, 0)

    def _hand_out(self, chosen: Sequence[tuple[int, float | None]], first: int) -> None:
        """Give the rows from `first` on their tokens, and take out those that have ended."""
        ended = [
            first + number
            for number, (token, logprob) in enumerate(chosen)
            if self._rows[first + number].accept(token, logprob)
        ]
        for number in reversed(ended):
            self._keep(number)
            self._take_out(number)
            if self._ceiling is not None:
                self._ceiling += 1

    def _keep(self, number: int) -> None:
        try:
            self.kept.put(self._rows[number].tokens, self._slots.copy_of(number))
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
            self._forget()

    def _take_out(self, number: int) -> Row:
        row = self._rows[number]
        self._rows[number] = self._rows[-1]
        self._rows.pop()
        self._slots.leave(number)
        if not self._rows:
            self._slots = self._no_slots()
        return row

    def _halve(self) -> None:
        """Go on with half of the rows; the others join again, from their tokens, when there is room."""
        self._forget()
        if len(self._rows) == 1:
            (row,) = self._rows
            self._rows, self._slots = [], self._no_slots()
            self._alone(_Joining(row, None, 0))
            return
        half = len(self._rows) // 2
        self._ceiling = half
        aside = [self._take_out(number) for number in reversed(range(half, len(self._rows)))]
        self._waiting.extendleft(aside)
        _log.warning(
            "out of memory on %s: going on with %d rows, %d wait", self.loaded.device, half, len(aside)
        )

    def _forget(self) -> None:
        self._forgets += 1
        self.kept.clear()
        if self.loaded.device.startswith("cuda"):
            torch.cuda.empty_cache()

    # -- the model --------------------------------------------------------------------------------------------

    def _forward(self, tokens: Tensor, lengths: Sequence[int], slots: Slots) -> Tensor:
        """Logits (rows, vocabulary) of the last column. `lengths` count a row's tokens up to it."""
        fresh = tokens.shape[1]
        width = slots.width + fresh
        columns = torch.arange(width, device=tokens.device)
        missing = width - torch.tensor(lengths, device=tokens.device)[:, None]
        positions = (columns[width - fresh :] - missing).clamp(min=0)
        # Without padding there is nothing to mask, and the model takes the faster way.
        mask = None if min(lengths) == width else (columns >= missing).long()
        self.passes += 1
        return self.loaded.forward(tokens, mask, positions, slots)

    def _sample(self, logits: Tensor, rows: Sequence[Row]) -> list[tuple[int, float | None]]:
        rules = [row.task.rule for row in rows]
        noise = [row.noise(logits.shape[-1]) for row in rows]
        shaped = penalised(logits, rules, [row.tokens for row in rows])
        chosen = choose(shaped, rules, noise, margin=self._margin)
        tokens = [choice.token for choice in chosen]
        if self._margin:
            for number, choice in enumerate(chosen):
                if not choice.sure:
                    alone = self._computed_alone(rows[number])
                    shaped = penalised(alone, [rules[number]], [rows[number].tokens])
                    tokens[number] = choose(shaped, [rules[number]], [noise[number]])[0].token
        wanted = [number for number, row in enumerate(rows) if row.task.logprobs]
        logprobs: dict[int, float] = {}
        if wanted:
            given = log_probabilities(logits, wanted, [tokens[number] for number in wanted])
            logprobs = dict(zip(wanted, given, strict=True))
        return [(token, logprobs.get(number)) for number, token in enumerate(tokens)]

    def _computed_alone(self, row: Row) -> Tensor:
        """The next logits of `row` from all its tokens in one pass of its own: no company, no history, one result."""
        self.rechecked += 1
        tokens = torch.tensor([row.tokens], device=self.loaded.device)
        return self.loaded.forward(tokens, None, None, None)

    def _no_slots(self) -> Slots:
        return Slots(self.loaded.layers)

    def _drop_cancelled(self) -> None:
        for number in reversed(range(len(self._rows))):
            if self._rows[number].cancelled:
                self._take_out(number)
        if any(row.cancelled for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if not row.cancelled)


def _alike(joining: Sequence[_Joining]) -> list[_Joining]:
    """As many from the front of these (sorted by what is new) as are worth one pass, with little computed in vain."""
    least = joining[0].fresh
    count = 1
    while count < len(joining):
        fresh = joining[count].fresh
        if fresh > 2 * least + 32 or fresh * (count + 1) > 2 * TOKENS_A_PASS:
            break
        count += 1
    return list(joining[:count])


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether torch, or Python, had no memory to give."""
    if isinstance(problem, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(problem).lower()
    return isinstance(problem, RuntimeError) and (
        "out of memory" in said or "not enough memory" in said or "can't allocate memory" in said
    )


def _fail(rows: Sequence[Row], problem: Exception) -> None:
    failure = problem
    if not isinstance(problem, ModelError):
        failure = ModelError(f"the model's forward pass failed: {type(problem).__name__}: {problem}")
        failure.__cause__ = problem
    for row in rows:
        row.fail(failure)


def _hooks(module: Any) -> tuple[int, ...]:
    return tuple(
        key
        for part in module.modules()
        for hooks in (part._forward_hooks, part._forward_pre_hooks)
        for key in hooks
    )
