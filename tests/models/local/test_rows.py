"""When a turn ends, and what its text is then."""

from __future__ import annotations

from collections.abc import Sequence

from taskmill.models.local.row import Made, Row, Task
from taskmill.models.local.sampling import Rule

END = 0


def play(*pieces: str | bytes, stop: tuple[str, ...] = (), limit: int = 100, opened: bool = False) -> Made:
    """A turn of tokens that stand for these texts (or parts of a character), as far as it goes."""
    table = [b"<end>", *(piece.encode() if isinstance(piece, str) else piece for piece in pieces)]

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(table[token] for token in tokens).decode("utf-8", "replace")

    made: list[Made] = []
    task = Task((7,), limit, Rule(0.0), None, stop, opened=opened)
    row = Row(task, made.append, ends=frozenset({END}), decode=decode)
    for token in [*range(1, len(table)), END]:
        if row.accept(token, None):
            break
    return made[0]


def test_the_end_token_ends_a_turn_and_is_counted_and_not_shown() -> None:
    made = play("Hello", " there")
    assert (made.text, made.finish, made.tokens) == ("Hello there", "stop", (1, 2, END))


def test_the_limit_ends_a_turn() -> None:
    made = play("a", "b", "c", limit=2)
    assert (made.text, made.finish, made.tokens) == ("ab", "length", (1, 2))


def test_a_stop_text_is_found_across_tokens_and_not_shown() -> None:
    made = play("One", ". T", "HE E", "ND and", " more", stop=("THE END", "nothing"))
    assert (made.text, made.finish, len(made.tokens)) == ("One. ", "stop", 4)


def test_the_first_of_several_stop_texts_counts() -> None:
    assert play("a1", "b2c", stop=("c", "2")).text == "a1b"


def test_a_stop_text_of_letters_that_come_in_parts() -> None:
    star = "☃".encode()
    assert play("x", star[:1], star[1:2], star[2:], "y", stop=("☃",)).text == "x"
    assert play("x", star[:1], star[1:2], star[2:], "y", stop=("z",)).text == "x☃y"


def test_what_is_thought_is_not_searched() -> None:
    made = play("<th", "ink>", "stop here? ", "</think>", "Hello ", "stop", "!", stop=("stop",))
    assert made.text == "<think>stop here? </think>Hello "
    opened = play("stop here? ", "</think>", "Hello ", "stop", stop=("stop",), opened=True)
    assert opened.text == "stop here? </think>Hello "


def test_what_only_looks_like_thinking_is_searched() -> None:
    assert play("<th", "ree stop", "s", stop=("stop",)).text == "<three "
    assert play("<", "stop", stop=("stop",)).text == "<"
