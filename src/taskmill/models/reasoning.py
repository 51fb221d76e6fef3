"""Thinking that a model wrote into its text: found, taken out, and kept as reasoning.

Endpoints that know a model's format hand its thinking over in a field of its own. Others pass the raw text
on, in one of these shapes:

- a block, `<think>…</think>` or `<REASONING_SCRATCHPAD>…</REASONING_SCRATCHPAD>`, at the start of the text or
  of a line;
- a block without its end, because the length limit fell inside it: all that follows is reasoning;
- an end without its start, because the chat template had already written the opening tag into the prompt.

A tag in the middle of a line, or one in quotes or backticks, is something the model talks about and stays
where it is.
"""

from __future__ import annotations

import re

_OPENING = re.compile(r"(?:\A|(?<=\n))[ \t]*<(think|REASONING_SCRATCHPAD)>")
_CLOSING = {
    "think": re.compile(r"(?<![`'\"\\])</think>(?![`'\"])"),
    "REASONING_SCRATCHPAD": re.compile(r"(?<![`'\"\\])</REASONING_SCRATCHPAD>(?![`'\"])"),
}


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Take the thinking out of `text`: the reasoning (`None` where there is none) and what is left to be said."""
    if "<think>" not in text and "</think>" not in text and "REASONING_SCRATCHPAD>" not in text:
        return None, text
    thoughts: list[str] = []
    spoken: list[str] = []
    position = _end_of_open_block(text, thoughts)
    while opening := _OPENING.search(text, position):
        spoken.append(text[position : opening.start()])
        closing = _CLOSING[opening[1]].search(text, opening.end())
        if closing is None:
            thoughts.append(text[opening.end() :])
            position = len(text)
            break
        thoughts.append(text[opening.end() : closing.start()])
        position = closing.end()
    if not thoughts:
        return None, text
    spoken.append(text[position:])
    reasoning = "\n\n".join(thought.strip() for thought in thoughts if thought.strip())
    return reasoning or None, "".join(spoken).strip("\n")


def _end_of_open_block(text: str, thoughts: list[str]) -> int:
    """Where the text goes on after a block whose opening tag stood in the prompt; 0 where there is no such block."""
    first_opening = _OPENING.search(text)
    for closing_tag in _CLOSING.values():
        closing = closing_tag.search(text)
        if closing is not None and (first_opening is None or closing.start() < first_opening.start()):
            thoughts.append(text[: closing.start()])
            return closing.end()
    return 0
