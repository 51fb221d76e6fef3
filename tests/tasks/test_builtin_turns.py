"""The endless tasksets of several turns: names to sort, squares to read."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from taskmill.errors import ConfigurationError, TasksetError
from taskmill.tasks.builtin import alphabet_sort
from taskmill.tasks.builtin.alphabet_sort import (
    LONGEST_LIST,
    AlphabetSortData,
    AlphabetSortTask,
    AlphabetSortTaskConfig,
    AlphabetSortTaskset,
    attempt_score,
    name_lists,
)
from taskmill.tasks.builtin.color_codeword import ColorCodewordTaskset
from tests.tasks.reference import answered, said, solved

TRUTH = ["Ada Zimmer", "Bela Young", "Cora Xu"]
RIGHT = "Ada Zimmer\nBela Young\nCora Xu"
NEARLY = "Ada Zimmer\nBela Young\nCora Yu"
WRONG = "Cora Xu\nBela Young\nAda Zimmer"


def task_of(turns: list[list[str]], sort_by: Any = "first", **config: Any) -> AlphabetSortTask:
    return AlphabetSortTask(
        AlphabetSortData(idx=0, turns=turns, sort_by=sort_by), AlphabetSortTaskConfig(**config)
    )


# -- alphabet_sort --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempts", "lowest", "highest"),
    [
        ([RIGHT], 1.0, 1.0),
        ([RIGHT.upper()], 1.0, 1.0),
        (["\n  Ada   Zimmer \n\nBela Young\nCora Xu\n"], 1.0, 1.0),
        ([NEARLY], 0.9, 0.99),
        ([WRONG], 0.1, 0.8),
        ([""], 0.0, 0.0),
        ([], 0.0, 0.0),
        ([WRONG, RIGHT], 1.0, 1.0),
        ([WRONG, NEARLY, RIGHT], 1.0, 1.0),
        ([WRONG, NEARLY], 0.9, 0.99),
        ([RIGHT, WRONG], 0.0, 0.0),
        ([RIGHT, RIGHT], 0.0, 0.0),
        ([NEARLY, WRONG, RIGHT], 0.0, 0.0),
    ],
)
def test_attempts_count_only_if_each_is_better(attempts: list[str], lowest: float, highest: float) -> None:
    assert lowest <= attempt_score(attempts, TRUTH) <= highest


async def test_a_conversation_of_several_turns() -> None:
    task = task_of([["Cora Abel", "Ada Moss"], ["Bela Reed"]])
    trace = await solved(task)
    first, one, second, two = [turn.content for turn in trace.messages]
    assert first.startswith("Sort these names alphabetically by FIRST name: Cora Abel, Ada Moss\n")
    assert one == "<alphabetical_sorted>\nAda Moss\nCora Abel\n</alphabetical_sorted>"
    assert "by FIRST name: Bela Reed\n" in second
    assert two == (
        "<combined_alphabetical_sorted>\nAda Moss\nBela Reed // new name!\nCora Abel\n</combined_alphabetical_sorted>"
    )
    assert trace.reward == 1.0
    assert trace.metrics == {"turns_right": 1.0}


def test_names_are_sorted_by_the_name_that_was_asked_for() -> None:
    names = ["Cora Abel", "Ada Moss", "Bela Reed"]
    assert task_of([names], "first").data.truth(0) == ["Ada Moss", "Bela Reed", "Cora Abel"]
    assert task_of([names], "last").data.truth(0) == ["Cora Abel", "Ada Moss", "Bela Reed"]


async def test_the_power_is_taken_turn_by_turn_or_of_the_average() -> None:
    turns = [["Ada Moss"], ["Bela Reed"]]
    answers = ["<alphabetical_sorted>Ada Moss</alphabetical_sorted>", "I don't know"]
    assert (await answered(task_of(turns), answers)).reward == 0.5
    assert (await answered(task_of(turns, power_per_turn=False), answers)).reward == 0.5**4
    assert (await answered(task_of(turns, power_per_turn=False, similarity_power=1), answers)).reward == 0.5


def test_the_tag_of_another_turn_does_not_count() -> None:
    task = task_of([["Ada Moss"]])
    assert (
        task.sorted_well(said("<combined_alphabetical_sorted>Ada Moss</combined_alphabetical_sorted>")) == 0.0
    )
    assert task.sorted_well(said()) == 0.0


def test_a_new_name_that_is_not_marked_costs_something() -> None:
    task = task_of([["Ada Moss"], ["Bela Reed"]])
    first = "<alphabetical_sorted>Ada Moss</alphabetical_sorted>"
    bare = "<combined_alphabetical_sorted>Ada Moss\nBela Reed</combined_alphabetical_sorted>"
    assert 0.5 < task.sorted_well(said(first, bare)) < 0.9


def test_no_list_has_two_names_whose_order_is_open() -> None:
    for names in name_lists():
        for part in (0, 1):
            assert len({name.split(" ")[part].lower() for name in names}) == len(names)


def test_no_pass_repeats_another(monkeypatch: pytest.MonkeyPatch) -> None:
    few = name_lists()[:3]
    monkeypatch.setattr(alphabet_sort, "name_lists", lambda: few)
    fields = {"min_turns": 1, "max_turns": 1, "min_names_per_turn": 3, "max_names_per_turn": 3}
    usable = [names for names in few if len(names) >= 3]
    tasks = list(itertools.islice(AlphabetSortTaskset(**fields).load(), 10 * len(usable)))
    assert [task.data.idx for task in tasks] == list(range(len(tasks)))
    for place, task in enumerate(tasks):
        assert set(task.data.turns[0]) <= set(usable[place % len(usable)])
    passes = {
        str([task.data.turns for task in tasks[start : start + len(usable)]])
        for start in range(0, len(tasks), len(usable))
    }
    assert len(passes) == 10


def test_all_lists_are_gone_through_and_then_again() -> None:
    tasks = AlphabetSortTaskset(max_turns=1, max_names_per_turn=1).select(2 * len(name_lists()))
    owners = [set(names) for names in name_lists()] * 2
    assert all(task.data.turns[0][0] in names for task, names in zip(tasks, owners, strict=True))
    half = len(name_lists())
    assert [task.data.turns for task in tasks[:half]] != [task.data.turns for task in tasks[half:]]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"min_turns": 4}, "max_turns=3: Input should be at least min_turns, which is 4"),
        ({"min_turns": 2, "max_turns": 1}, "max_turns=1: Input should be at least min_turns, which is 2"),
        ({"min_names_per_turn": 6}, "max_names_per_turn=5: Input should be at least min_names_per_turn"),
        ({"max_turns": 0}, "max_turns=0: Input should be greater than or equal to 1"),
        ({"task": {"similarity_power": 0}}, "task.similarity_power=0: Input should be greater than 0"),
        ({"task": {"similarity_pwr": 1}}, "did you mean 'task.similarity_power'?"),
    ],
)
def test_what_can_not_be_meant_is_said_with_its_field(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        AlphabetSortTaskset(**fields)
    assert why in str(raised.value)


def test_a_configuration_that_yields_nothing_says_which_fields_to_change() -> None:
    taskset = AlphabetSortTaskset(min_turns=4, max_turns=4, min_names_per_turn=4, max_names_per_turn=4)
    with pytest.raises(TasksetError, match=rf"the longest has {LONGEST_LIST}\); lower min_turns, max_turns"):
        taskset.select(1)
    just = AlphabetSortTaskset(min_turns=3, max_turns=3, min_names_per_turn=5, max_names_per_turn=5)
    assert len(just.select(3)) == 3


# -- color_codeword -------------------------------------------------------------------------------------------


async def test_the_squares_spell_the_word() -> None:
    for task in ColorCodewordTaskset().select(50):
        data = task.data
        colors = [color for turn in data.turns for color in turn]
        assert "".join(data.letters[color] for color in colors) == data.answer
        assert len(set(data.letters.values())) == len(data.letters)
        assert all(1 <= len(turn) <= 2 for turn in data.turns)
        assert 3 <= len(colors) <= 6
        trace = await solved(task)
        asked = [turn.content for turn in trace.messages if turn.role == "user"]
        assert len(asked) == len(data.turns)
        assert f"Square {len(colors)}: a solid {colors[-1]} square." in asked[-1]
        assert ["Give the code word" in question for question in asked] == [False] * (len(asked) - 1) + [True]


def test_only_the_last_answer_in_the_tags_is_the_word() -> None:
    task = ColorCodewordTaskset(min_squares=4, max_squares=4).select(1)[0]
    word = task.data.answer
    assert task.correct(said("OK", f"<codeword>{word.lower()}</codeword>")) == 1.0
    assert task.correct(said(word)) == 0.0
    assert task.correct(said(f"<codeword>{word}</codeword>", "OK")) == 0.0
    assert task.letters_right(said(f"<codeword>{word[:3]}</codeword>")) == 0.75
    assert task.letters_right(said(f"<codeword>{word}XXXX</codeword>")) == 0.5


def test_each_task_has_a_seed_of_its_own() -> None:
    tasks = ColorCodewordTaskset(seed=5).select(100)
    assert [task.data.seed for task in tasks] == list(range(5, 105))
    assert len({task.data.answer for task in tasks}) > 95
    with pytest.raises(
        ConfigurationError, match="max_squares=2: Input should be at least min_squares, which is 3"
    ):
        ColorCodewordTaskset(max_squares=2)
