"""Which token comes next, and whether the last digits of the logits could have made it another.

A token is drawn by a race: each candidate's logit, divided by the temperature, gets a random head start (Gumbel
noise), and the largest sum wins; that is sampling from the softmax, exactly. The race has two legs, so that a row needs
a few hundred random numbers and not one for each of a hundred thousand tokens: first the blocks of the vocabulary
compete with their total weights, then the tokens of the winning block.

A race has a lead: how far the winner is ahead of the second. Logits computed in a batch differ from those computed
alone in their last digits, since sums come out in another order. Where the lead is larger than any such difference, the
batch could not have changed the token. The rare others (about one token in a thousand) are reported as not sure, for
the batcher to compute alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK = 256
"""Tokens of the vocabulary that enter the first leg together."""

MOST_SORTED = 512
"""Candidates looked at for top-p; where they don't reach it, the whole vocabulary is sorted."""

MARGIN = 1e-3
"""A lead in logits that rounding can't close. Differences seen with logits of 30 in fp32 are 1.2e-4."""

Noise = np.ndarray[Any, np.dtype[np.float32]]


class Rule(NamedTuple):
    """How a row is sampled. `temperature` 0 takes the likeliest token; 1, 0 and 1 are off for the other three."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature <= 0


class Choice(NamedTuple):
    """The token of a row, and whether its lead leaves no doubt about it."""

    token: int
    sure: bool


def stream(seed: int | None) -> np.random.Generator:
    """The random numbers of one turn: always the same for a seed, and nobody else's."""
    return np.random.Generator(np.random.PCG64(seed))


def draw(numbers: np.random.Generator, vocabulary: int) -> Noise:
    """The head starts of one token: those of the blocks, then those within the winning block."""
    count = _blocks(vocabulary) + BLOCK
    # Clipped where the logarithm has no value; the chance of that is 1e-30.
    waits = np.maximum(numbers.standard_exponential(count), 1e-30)
    starts: Noise = (-np.log(waits)).astype(np.float32)
    return starts


def choose(
    logits: Tensor, rules: Sequence[Rule], noise: Sequence[Noise | None], *, margin: float = 0.0
) -> list[Choice]:
    """One token for each row of `logits` (rows, vocabulary; float32, as the penalties left them).

    `noise` is `None` for greedy rows. With `margin`, in logits, a choice is sure when changing each logit by half of it
    would give the same token.
    """
    chosen: list[Choice | None] = [None] * len(rules)
    greedy = [row for row, rule in enumerate(rules) if rule.greedy]
    if greedy:
        best = logits[greedy].topk(2, dim=-1) if len(greedy) < len(rules) else logits.topk(2, dim=-1)
        tokens = best.indices[:, 0].tolist()
        leads = (best.values[:, 0] - best.values[:, 1]).tolist()
        for row, token, lead in zip(greedy, tokens, leads, strict=True):
            chosen[row] = Choice(token, lead > margin)
    drawn = [row for row, rule in enumerate(rules) if not rule.greedy]
    if drawn:
        starts = np.stack([start for start in noise if start is not None])
        raced = _race(
            logits[drawn] if greedy else logits,
            [rules[row] for row in drawn],
            torch.from_numpy(starts).to(logits.device),
            margin,
        )
        for row, choice in zip(drawn, raced, strict=True):
            chosen[row] = choice
    return [choice for choice in chosen if choice is not None]


def penalised(logits: Tensor, rules: Sequence[Rule], tokens: Sequence[Sequence[int]]) -> Tensor:
    """The logits with those of tokens that stood before made less likely, where a rule asks for it."""
    rows = [row for row, rule in enumerate(rules) if rule.repetition_penalty != 1.0]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        seen = torch.tensor(sorted(set(tokens[row])), device=logits.device)
        before, penalty = logits[row, seen], rules[row].repetition_penalty
        logits[row, seen] = torch.where(before < 0, before * penalty, before / penalty)
    return logits


def log_probabilities(logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Natural logarithm of the probability of `tokens` in `rows`, before temperature and top-p."""
    some = logits[list(rows)]
    picked = some.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    given: list[float] = (picked - some.logsumexp(-1)).tolist()
    return given


# -- the race -------------------------------------------------------------------------------------------------


def _blocks(vocabulary: int) -> int:
    return math.ceil(vocabulary / BLOCK)


def _race(logits: Tensor, rules: Sequence[Rule], starts: Tensor, margin: float) -> list[Choice]:
    rows, vocabulary = logits.shape
    blocks = _blocks(vocabulary)
    heat = torch.tensor([rule.temperature for rule in rules], device=logits.device)[:, None]
    scaled = logits / heat
    certain = torch.ones(rows, dtype=torch.bool, device=logits.device)
    fewer = more = scaled
    if any(rule.top_p < 1 or rule.top_k for rule in rules):
        fewer, more, certain = _nucleus(scaled, rules, margin / heat)
    missing = blocks * BLOCK - vocabulary
    if missing:
        fewer, more = (torch.nn.functional.pad(side, (0, missing), value=-math.inf) for side in (fewer, more))
    fewer, more = fewer.view(rows, blocks, BLOCK), more.view(rows, blocks, BLOCK)
    weights = fewer.logsumexp(-1)
    upper = weights if more is fewer else more.logsumexp(-1)
    winner, lead = _first(weights + starts[:, :blocks], upper + starts[:, :blocks])
    each = torch.arange(rows, device=logits.device)
    token, second_lead = _first(
        fewer[each, winner] + starts[:, blocks:], more[each, winner] + starts[:, blocks:]
    )
    certain &= torch.minimum(lead, second_lead) * heat[:, 0] > margin
    tokens = (winner * BLOCK + token).tolist()
    return [Choice(number, sure) for number, sure in zip(tokens, certain.tolist(), strict=True)]


def _first(certainly: Tensor, possibly: Tensor) -> tuple[Tensor, Tensor]:
    """The winner of each row, and its lead over the best that any other could possibly have."""
    best, winner = certainly.max(-1)
    others = possibly.scatter(1, winner[:, None], -math.inf)
    return winner, best - others.max(-1).values


def _nucleus(scaled: Tensor, rules: Sequence[Rule], slack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates under top-p and top-k, twice: those that are so for certain, and those that may be; others are -inf.

    With `slack` 0 the two are the same. The third part says for which rows there is one for certain.
    """
    vocabulary = scaled.shape[-1]
    total = scaled.logsumexp(-1, keepdim=True)
    share = torch.tensor([rule.top_p for rule in rules], device=scaled.device)[:, None]
    most = torch.tensor([rule.top_k or vocabulary for rule in rules], device=scaled.device)[:, None]
    bounded = (share < 1) | (most < vocabulary)
    depth = min(vocabulary, MOST_SORTED)
    while True:
        best = scaled.topk(depth, dim=-1).values
        chances = (best - total).exp()
        before = chances.cumsum(-1) - chances
        reached = (before[:, -1:] > share + slack) | (most < depth) | ~bounded
        if depth == vocabulary or bool(reached.all()):
            break
        depth = vocabulary
    few = (before < share - slack).sum(-1, keepdim=True).clamp(min=1).minimum(most)
    many = (before < share + slack).sum(-1, keepdim=True).clamp(min=1).minimum(most)
    padded = torch.nn.functional.pad(best, (0, 1), value=-math.inf)
    last, following = padded.gather(1, few - 1), padded.gather(1, few)
    # Two that are next to each other in rank and closer than rounding may have to change places.
    swapped = last - following < slack
    floor = torch.where(swapped, last + slack, last)
    certain = ~(bounded & (floor > best[:, :1]))[:, 0]
    lowest = padded.gather(1, many - 1) - slack
    fewer = scaled.masked_fill(bounded & (scaled < floor), -math.inf)
    if not bool((slack > 0).any()):
        return fewer, fewer, certain
    return fewer, scaled.masked_fill(bounded & (scaled < lowest), -math.inf), certain
