"""Finding the answer in what a model said, and scoring it: the small finite tasksets."""

from __future__ import annotations

import json
import sys
import types
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from taskmill.errors import ConfigurationError, RewardError, TasksetError
from taskmill.tasks.builtin import gsm8k
from taskmill.tasks.builtin._shared import inside, number_in, similarity
from taskmill.tasks.builtin.gsm8k import Gsm8kTaskset
from taskmill.tasks.builtin.jsonl import JsonlTaskset
from taskmill.tasks.builtin.reverse_text import ReverseTextTaskset
from tests.tasks.reference import answered, said, solved


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", "42"),
        ("So it is 7.\n#### 42\n", "42"),
        ("#### 41\nNo, wait.\n#### 42", "42"),
        ("####42 apples", "42"),
        ("#### $1,234.00", "1234"),
        ("#### **1,425**", "1425"),
        ("#### -14", "-14"),
        ("#### \u221214", "-14"),
        ("#### $-3.50", "-3.5"),
        (r"#### \boxed{42}", "42"),
        ("####\n42", "42"),
        ("#### the answer\n42", "42"),
        (r"The answer is \boxed{42}. I had 3 tries.", "42"),
        (r"\boxed{\$1{,}234}", "1234"),
        (r"\boxed{\text{42}}", "42"),
        ("First 6*24 = 144, then 144-50 = 94 apples are left.", "94"),
        ("It is 5-3", "3"),
        ("They pay $18.", "18"),
        ("25%", "25"),
        ("0.5", "0.5"),
        ("about .5", "0.5"),
        ("1,234,567", "1234567"),
        ("no number", None),
        ("", None),
        ("room a12", None),
    ],
)
def test_the_number_of_an_answer(text: str, number: str | None) -> None:
    assert number_in(text) == (None if number is None else Decimal(number))


def test_the_last_pair_of_tags_counts() -> None:
    assert inside("<a>one</a> or <a> two\nlines </a>", "a") == "two\nlines"
    assert inside("I write <a> and then <a>that</a>", "a") == "that"
    assert inside("<a></a>", "a") == ""
    assert inside("<a>open", "a") is None
    assert inside("<ab>other</ab>", "a") is None


def test_similarity_of_long_texts_is_not_cut_short() -> None:
    text = "the quick brown fox " * 30
    assert similarity(text, text[:-1] + "!") > 0.99
    assert similarity(text, text) == 1.0
    assert similarity("", "") == 1.0
    assert similarity("", text) == 0.0


# -- reverse_text ---------------------------------------------------------------------------------------------


def test_reversed_texts_are_scored_by_their_likeness() -> None:
    tasks = ReverseTextTaskset().select()
    assert len({task.data.prompt for task in tasks}) == len(tasks) == 200
    task = next(task for task in tasks if len(task.data.answer) > 200 or task.data.idx == 150)
    right = task.data.answer
    almost = right[:-1] + "#"
    assert task.likeness(said(f"<reversed_text>\n{right}\n</reversed_text>")) == 1.0
    assert 0.9 < task.likeness(said(f"<reversed_text>{almost}</reversed_text>")) < 1.0
    assert task.likeness(said(right)) == 0.0
    assert task.likeness(said("<reversed_text></reversed_text>")) == 0.0
    assert task.likeness(said()) == 0.0
    assert task.likeness(said("first", f"<reversed_text>{right}</reversed_text>")) == 1.0


# -- gsm8k ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Says what the hub is like: why it can't be reached, or `None`."""

    def is_like(lacks: str | None) -> None:
        gsm8k._lacking.cache_clear()
        monkeypatch.setattr(gsm8k, "_unreachable", lambda: lacks)

    yield is_like  # type: ignore[misc]
    gsm8k._lacking.cache_clear()


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A stand-in for the package that loads datasets; what it was asked for."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*what: str, split: str) -> list[dict[str, str]]:
        asked.append((*what, split))
        return [{"question": f"What is {n} + 1?", "answer": f"{n + 1}\n#### {n + 1}"} for n in range(3)]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_auto_is_the_sample_with_a_word_where_the_hub_is_away(hub: Any, dataset: Any) -> None:
    hub("the hub can't be reached (ConnectError)")
    with pytest.warns(
        UserWarning, match=r"gsm8k: the hub can't be reached \(ConnectError\); its small sample"
    ):
        taskset = Gsm8kTaskset()
    assert taskset.config.source == "sample"  # type: ignore[attr-defined]
    assert len(taskset.select()) == 32
    assert dataset == []


def test_auto_is_the_hub_where_it_answers_and_stays_so(hub: Any, dataset: Any) -> None:
    hub(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taskset = Gsm8kTaskset(split="train")
    # What another process is given is decided already.
    hub("the hub can't be reached")
    again = Gsm8kTaskset(taskset.config.model_dump(mode="json"))
    assert [task.data.prompt for task in again.select(2)] == ["What is 0 + 1?", "What is 1 + 1?"]
    assert dataset == [("openai/gsm8k", "main", "train")]


def test_auto_does_not_wait_long_for_a_hub_that_is_silent(hub: Any, dataset: Any, monkeypatch: Any) -> None:
    import threading

    silent = threading.Event()
    hub(None)
    monkeypatch.setattr(gsm8k, "_unreachable", silent.wait)
    monkeypatch.setattr(gsm8k, "REACH_SECONDS", 0.05)
    with pytest.warns(UserWarning, match=r"the hub did not answer within 0\.05 s"):
        taskset = Gsm8kTaskset()
    silent.set()
    assert taskset.config.source == "sample"  # type: ignore[attr-defined]


def test_the_hub_asked_for_by_name_never_becomes_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TasksetError, match=r"needs the package 'datasets'.*pip install 'taskmill\[hub\]'"):
        Gsm8kTaskset(source="hub").select(1)

    def fails(*what: str, split: str) -> None:
        raise OSError("no such host")

    broken = types.ModuleType("datasets")
    broken.load_dataset = fails  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", broken)
    with pytest.raises(TasksetError, match=r"'openai/gsm8k' from the hub \(OSError: no such host\)"):
        Gsm8kTaskset(source="hub").select(1)


def test_right_numbers_count_however_they_are_written() -> None:
    task = Gsm8kTaskset(source="sample").select()[21]
    assert task.data.answer.endswith("#### 1,425")
    for answer in ("#### 1425", "#### 1,425.0", r"\boxed{1425}", "It has $1,425.", "1425.00 books"):
        assert task.correct(said(answer)) == 1.0
    for answer in ("#### 1426", "1,425 or 1,426", "", "none"):
        assert task.correct(said(answer)) == 0.0


# -- jsonl ----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    def write(*rows: Any) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("scorer", "answer", "text", "reward"),
    [
        ("exact", "Paris", " Paris\n", 1.0),
        ("exact", "Paris", "paris", 0.0),
        ("exact", "Paris", "It is Paris", 0.0),
        ("exact", ["Paris", "Lutetia"], "Lutetia", 1.0),
        ("exact", 42, "42", 1.0),
        ("contains", "Paris", "It is Paris.", 1.0),
        ("contains", "Paris", "It is Rome.", 0.0),
        ("number", 1234, "The answer is 1,234.0", 1.0),
        ("number", "#### 7", "7", 1.0),
        ("number", 7, "seven", 0.0),
        ("regex", r"\b\d{4}-\d\d-\d\d\b", "on 2024-05-06 it was", 1.0),
        ("regex", r"^yes$", "yes and no", 0.0),
        ("similarity", "abcd", "abcd", 1.0),
        ("similarity", "abcd", "abcx", 0.75),
        ("similarity", "abcd", "", 0.0),
    ],
)
async def test_scorers(file: Any, scorer: str, answer: Any, text: str, reward: float) -> None:
    (task,) = JsonlTaskset(path=file({"prompt": "?", "answer": answer}), scorer=scorer).select()
    trace = await answered(task, [text])
    assert (trace.reward, trace.errors) == (reward, ())


async def test_capitals_may_make_no_difference(file: Any) -> None:
    path = file({"prompt": "?", "answer": "Paris"})
    for scorer in ("exact", "contains", "regex", "similarity"):
        (task,) = JsonlTaskset(path=path, scorer=scorer, ignore_case=True).select()
        assert (await answered(task, ["PARIS"])).reward == 1.0


async def test_a_pattern_that_never_ends_is_an_error_and_no_zero(file: Any, monkeypatch: Any) -> None:
    from taskmill.tasks.builtin import jsonl

    monkeypatch.setattr(jsonl, "_PATTERN_SECONDS", 0.05)
    (task,) = JsonlTaskset(path=file({"prompt": "?", "answer": "^(a|aa)+$"}), scorer="regex").select()
    trace = await answered(task, ["a" * 60 + "b"])
    assert trace.reward is None
    assert trace.errors[0].type == RewardError.__name__


async def test_a_row_is_what_the_fields_say(file: Any) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
    path = file(
        {"q": turns, "a": "^Hi", "how": "Hi!", "id": 7, "tags": ["x"]},
        "",
        "   ",
        {"q": "Bye?", "a": "B", "how": "B"},
    )
    taskset = JsonlTaskset(
        path=path,
        prompt_field="q",
        answer_field="a",
        scorer="regex",
        solution_field="how",
        system_prompt="Speak.",
    )
    first, second = taskset.select()
    assert first.data.other == {"id": 7, "tags": ["x"]}
    assert (first.data.idx, first.data.line, second.data.idx, second.data.line) == (0, 1, 1, 4)
    trace = await solved(first)
    assert [(turn.role, turn.content) for turn in trace.messages][-2:] == [
        ("user", "Hi?"),
        ("assistant", "Hi!"),
    ]
    assert trace.reward == 1.0


def test_a_pattern_alone_is_no_solution(file: Any) -> None:
    (task,) = JsonlTaskset(path=file({"prompt": "?", "answer": "a+"}), scorer="regex").select()
    assert task.solve is None


@pytest.mark.parametrize(
    ("row", "fields", "why"),
    [
        ("{", {}, "line 2: not JSON"),
        ("[1]", {}, "line 2: a JSON object is needed, not [1]"),
        ('{"prompt": "?", "prompt": "!", "answer": 1}', {}, "line 2: the field 'prompt' stands twice"),
        ({"answer": "x"}, {}, "line 2: there is no field 'prompt', only 'answer'"),
        (
            {"prompt": "?", "response": "x"},
            {},
            "line 2: there is no field 'answer', only 'prompt', 'response'",
        ),
        (
            {"prompt": "", "answer": "x"},
            {},
            "line 2: the field 'prompt' must be a text or a list of messages",
        ),
        (
            {"prompt": [{"role": "boss", "content": "?"}], "answer": "x"},
            {},
            "line 2: the field 'prompt': role='boss'",
        ),
        (
            {"prompt": "?", "answer": None},
            {},
            "line 2: the field 'answer' must be a text or a number, not None",
        ),
        ({"prompt": "?", "answer": []}, {}, "line 2: the field 'answer' is an empty list"),
        (
            {"prompt": "?", "answer": "x"},
            {"scorer": "number"},
            "line 2: the field 'answer' has no number: 'x'",
        ),
        ({"prompt": "?", "answer": "("}, {"scorer": "regex"}, "line 2: the field 'answer' is no pattern"),
        ({"prompt": "?", "answer": "x"}, {"solution_field": "how"}, "line 2: the field 'how' must be a text"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_line(file: Any, row: Any, fields: Any, why: str) -> None:
    good = {"prompt": "?", "answer": "1", "how": "1"}
    taskset = JsonlTaskset(path=file(good, row, good), **fields)
    assert taskset.select(1)[0].data.answers == ["1"]
    with pytest.raises(TasksetError) as raised:
        taskset.select()
    assert why in str(raised.value)
    assert "rows.jsonl" in str(raised.value)


def test_files_that_hold_nothing(tmp_path: Path, file: Any) -> None:
    with pytest.raises(TasksetError, match=r"there\.jsonl can't be read: No such file"):
        JsonlTaskset(path=str(tmp_path / "there.jsonl")).select(1)
    with pytest.raises(TasksetError, match="has no row"):
        JsonlTaskset(path=file("")).select(1)
    with pytest.raises(ConfigurationError, match="'path' is required"):
        JsonlTaskset()
    with pytest.raises(ConfigurationError, match="scorer='fuzzy'"):
        JsonlTaskset(path="x", scorer="fuzzy")


def test_rows_are_read_as_they_are_asked_for(file: Any) -> None:
    path = file(*({"prompt": "?", "answer": n} for n in range(5)), "not JSON")
    assert [task.data.answers for task in JsonlTaskset(path=path).draw(5)] == [[str(n)] for n in range(5)]


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "?", "answer": "x"}\n')
    assert JsonlTaskset(path=str(path)).select()[0].data.prompt == "?"
