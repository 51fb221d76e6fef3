"""The race that picks a token: it is the softmax, it knows its nucleus, and it knows when it is too close to call."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from taskmill.models.local.sampling import Rule, choose, draw, log_probabilities, penalised, stream

VOCABULARY = 700  # two blocks and a part of one


def logits_of(seed: int, rows: int = 1, spread: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * spread


def race(logits: torch.Tensor, rule: Rule, count: int, seed: int = 0) -> Counter[int]:
    numbers = stream(seed)
    tokens: Counter[int] = Counter()
    for _ in range(0, count, 500):
        noise = [draw(numbers, VOCABULARY) for _ in range(500)]
        tokens.update(choice.token for choice in choose(logits.expand(500, -1), [rule] * 500, noise))
    return tokens


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    logits, count = logits_of(1), 10_000
    chances = (logits[0] / temperature).softmax(-1)
    seen = race(logits, Rule(temperature), count)
    for token in chances.topk(8).indices.tolist():
        chance = chances[token].item()
        assert abs(seen[token] / count - chance) < 5 * math.sqrt(chance * (1 - chance) / count)
    tail = chances.topk(50).indices.tolist()
    rest = 1 - chances[tail].sum().item()
    outside = sum(times for token, times in seen.items() if token not in tail) / count
    assert abs(outside - rest) < 5 * math.sqrt(rest * (1 - rest) / count) + 1e-9


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.9])
def test_top_p_leaves_the_smallest_set_that_reaches_it(top_p: float) -> None:
    logits = logits_of(2)
    ordered = logits[0].softmax(-1).sort(descending=True)
    before = ordered.values.cumsum(-1) - ordered.values
    nucleus = set(ordered.indices[before < top_p].tolist())
    seen = race(logits, Rule(1.0, top_p), 6_000)
    assert set(seen) <= nucleus
    assert len(seen) > 0.6 * len(nucleus)


def test_a_flat_nucleus_is_searched_beyond_the_likeliest() -> None:
    seen = race(torch.zeros((1, VOCABULARY)), Rule(1.0, 0.99), 6_000)
    assert len(seen) > 600


def test_top_k_and_the_penalty_are_as_written_on_a_model_card() -> None:
    logits = logits_of(3)
    likeliest = logits[0].topk(3).indices.tolist()
    assert set(race(logits, Rule(1.0, 1.0, 3), 2_000)) == set(likeliest)
    shaped = penalised(logits, [Rule(repetition_penalty=2.0)], [[likeliest[0], 5]])
    assert shaped[0, likeliest[0]] == logits[0, likeliest[0]] / 2
    assert shaped[0, 5] == (logits[0, 5] * 2 if logits[0, 5] < 0 else logits[0, 5] / 2)
    assert (shaped[0, 6:9] == logits[0, 6:9]).all()


def test_rows_of_every_kind_go_side_by_side() -> None:
    logits = logits_of(4, rows=4)
    rules = [Rule(0.0), Rule(1.0), Rule(0.0), Rule(0.8, 0.5)]
    noise = [None if rule.greedy else draw(stream(row), VOCABULARY) for row, rule in enumerate(rules)]
    together = choose(logits, rules, noise)
    alone = [choose(logits[r : r + 1], [rules[r]], [noise[r]])[0] for r in range(4)]
    assert together == alone
    assert [together[0].token, together[2].token] == logits[[0, 2]].argmax(-1).tolist()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    rule=st.builds(
        Rule,
        st.sampled_from([0.0, 0.3, 1.0, 1.5]),
        st.sampled_from([1.0, 0.95, 0.6, 0.1]),
        st.sampled_from([0, 1, 20]),
    ),
    spread=st.sampled_from([0.05, 1.0, 6.0]),
)
def test_a_sure_choice_stays_the_same_under_any_small_change(seed: int, rule: Rule, spread: float) -> None:
    margin = 0.05
    logits = logits_of(seed, rows=20, spread=spread)
    rules = [rule] * 20
    noise = [None if rule.greedy else draw(stream(seed + row), VOCABULARY) for row in range(20)]
    chosen = choose(logits, rules, noise, margin=margin)
    for other in range(4):
        shift = torch.rand(logits.shape, generator=torch.Generator().manual_seed(other)) - 0.5
        # Half of the margin up or down, and the extremes of it.
        shift = (shift if other < 2 else shift.sign() / 2) * margin * 0.99
        moved = choose(logits + shift, rules, noise)
        for before, after in zip(chosen, moved, strict=True):
            assert not before.sure or before.token == after.token


def test_few_choices_are_unsure_at_the_usual_margin() -> None:
    logits = logits_of(6, rows=500)
    noise = [draw(stream(row), VOCABULARY) for row in range(500)]
    for rule in (Rule(1.0), Rule(0.7, 0.9)):
        chosen = choose(logits, [rule] * 500, noise, margin=1e-3)
        assert sum(not choice.sure for choice in chosen) < 15


def test_log_probabilities_are_the_models_own() -> None:
    logits = logits_of(7, rows=3)
    given_back = log_probabilities(logits, [0, 2], [11, 690])
    expected = logits.log_softmax(-1)
    assert given_back == pytest.approx([expected[0, 11].item(), expected[2, 690].item()], abs=1e-5)
