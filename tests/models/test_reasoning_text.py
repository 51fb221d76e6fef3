from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmill.models.reasoning import split_reasoning


@pytest.mark.parametrize(
    ("text", "reasoning", "said"),
    [
        ("hello", None, "hello"),
        ("<think>\nhm\n</think>\n\nhello", "hm", "hello"),
        ("\n\n<think>hm</think>hello", "hm", "hello"),
        ("<REASONING_SCRATCHPAD>hm</REASONING_SCRATCHPAD>hello", "hm", "hello"),
        ("<think>\n\n</think>\n\nhello", None, "hello"),
        # Cut by the length limit inside the block.
        ("<think>I was going to", "I was going to", ""),
        ("<REASONING_SCRATCHPAD>I was going to", "I was going to", ""),
        # The template had opened the block.
        ("hm, so\n</think>\n\nhello", "hm, so", "hello"),
        ("hm</think>hello", "hm", "hello"),
        ("hm\n</REASONING_SCRATCHPAD>\nhello", "hm", "hello"),
        # Several blocks, one of them after some text.
        ("<think>a</think>first\n<think>b</think>\nsecond", "a\n\nb", "first\n\nsecond"),
        # Talked about, not used.
        ("the tag `<think>` opens, `</think>` closes", None, "the tag `<think>` opens, `</think>` closes"),
        ('print("</think>")', None, 'print("</think>")'),
        ("a <think> in mid-line", None, "a <think> in mid-line"),
        ("<think>it ends with `</think>` I know</think>yes", "it ends with `</think>` I know", "yes"),
    ],
)
def test_thinking_is_taken_out_of_the_text(text: str, reasoning: str | None, said: str) -> None:
    assert split_reasoning(text) == (reasoning, said)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "a", "\n", "`", " ", "<", ">"]), max_size=30).map(
        "".join
    )
)
def test_no_word_is_lost_whatever_the_text(text: str) -> None:
    reasoning, said = split_reasoning(text)
    assert (reasoning or "").count("a") + said.count("a") == text.count("a")


@given(st.text().filter(lambda text: "<" not in text))
def test_text_without_tags_is_untouched(text: str) -> None:
    assert split_reasoning(text) == (None, text)
