"""Changing texts: one exact replacement, or a patch over many files that is applied whole or not at all.

The patch format is the one models are trained on (V4A): files named by `*** Update File:`, `*** Add File:`,
`*** Delete File:` between `*** Begin Patch` and `*** End Patch`, changes found by their surroundings and not by
line numbers.
"""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from msgspec import Struct
from msgspec.structs import replace as replace_fields

from taskmill.errors import ToolArgumentsError, ToolError, ToolRefusedError
from taskmill.sandbox.base import Sandbox
from taskmill.tools.files import as_text, load, place, to_bytes
from taskmill.tools.threads import THREADS

NEAREST_SECONDS = 1.0
"""How long a place that is nearly the one asked for is looked for."""

NEAREST_CHARACTERS = 4_000_000
"""Characters of the largest text in which one is looked for."""

_OFF_LOOP = 100_000  # characters of a text from which on applying a patch takes longer than a hop to a thread

_UNIFIED = re.compile(r"-\d+(?:,\d+)? \+\d+(?:,\d+)?(?: @@ ?(?P<anchor>.*))?\Z")


async def replace(path: str, text: str, old: str, new: str, *, every: bool) -> tuple[str, int]:
    """`text` with `old` replaced by `new`, and how often.

    Raises `ToolRefusedError` unless `old` stands there exactly once (or `every` and at least once), with what
    there is instead. In a file with CRLF line ends, `old` and `new` may be written with LF.
    """
    if old == "":
        raise ToolRefusedError("old_string is empty; to make a file or to replace all of it, use write_file")
    if old == new:
        raise ToolRefusedError("old_string and new_string are the same; nothing would change")
    if "\r\n" in text and "\r\n" not in old:
        old, new = old.replace("\n", "\r\n"), new.replace("\r\n", "\n").replace("\n", "\r\n")
    count = text.count(old)
    if count == 0:
        near = ""
        if len(text) <= NEAREST_CHARACTERS:
            near = await THREADS.run(_nearest, text=text, old=old, ends=time.monotonic() + NEAREST_SECONDS)
        raise ToolRefusedError(f"old_string does not stand in {path}.{near}")
    if count > 1 and not every:
        lines: list[str] = []
        at = text.find(old)
        while at >= 0 and len(lines) < 10:
            lines.append(str(text.count("\n", 0, at) + 1))
            at = text.find(old, at + len(old))
        raise ToolRefusedError(
            f"old_string stands {count} times in {path} (lines {', '.join(lines)}); give more of its "
            "surroundings so that it is unique, or set replace_all"
        )
    return text.replace(old, new), count


def _nearest(text: str, old: str, ends: float) -> str:
    """The place that looks most like `old`, of those looked at until `ends`: mostly a matter of blanks."""
    # Its first lines are enough to find it, and no more are shown.
    wanted = [line.strip() for line in old[:10_000].splitlines() if line.strip()]
    lines = text.splitlines()
    if not wanted:
        return ""
    best, number = 0.0, 0
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted[0][:200])
    for position, line in enumerate(lines, 1):
        if time.monotonic() > ends:
            break
        matcher.set_seq1(line.strip()[:200])
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
            best, number = matcher.ratio(), position
    if best < 0.6:
        return ""
    shown = "\n".join(line[:200] for line in lines[number - 1 : number - 1 + min(len(wanted) + 1, 6)])
    return f" The nearest is at line {number}:\n{shown}"


class Hunk(Struct, frozen=True):
    """One change: where to look for it (`anchors`), and its lines, each with its sign (` `, `-` or `+`).

    `at_end` ties it to the end of the file. `line` is its place in the patch, for messages.
    """

    anchors: tuple[str, ...]
    lines: tuple[tuple[str, str], ...]
    at_end: bool
    line: int


class FileChange(Struct, frozen=True):
    """What a patch does to one file: `content` for `add`, `hunks` for `update`, `target` where it moves to."""

    kind: str
    path: str
    content: str = ""
    hunks: tuple[Hunk, ...] = ()
    target: str | None = None


def parse(patch: str) -> list[FileChange]:
    """The changes a patch asks for; raises `ToolArgumentsError` with the line that can't be meant."""
    lines = patch.replace("\r\n", "\n").strip("\n").split("\n")
    start = next((n for n, line in enumerate(lines) if line.strip() == "*** Begin Patch"), None)
    if start is None:
        raise _bad(1, "a patch begins with '*** Begin Patch'")
    end = next((n for n, line in enumerate(lines) if line.strip() == "*** End Patch"), None)
    if end is None or end < start:
        raise _bad(len(lines), "a patch ends with '*** End Patch'; this one may be cut off")
    changes: list[FileChange] = []
    at = start + 1
    while at < end:
        line = lines[at]
        if not line.strip():
            at += 1
            continue
        kind, _, path = line.removeprefix("*** ").partition(" File: ")
        path = path.strip()
        if not line.startswith("*** ") or kind not in ("Update", "Add", "Delete") or not path:
            raise _bad(
                at + 1,
                f"expected '*** Update File: …', '*** Add File: …' or '*** Delete File: …', not {line!r}",
            )
        body = at + 1
        at = body
        while at < end and not (lines[at].startswith("*** ") and " File: " in lines[at]):
            at += 1
        if kind == "Delete":
            changes.append(FileChange("delete", path))
        elif kind == "Add":
            changes.append(FileChange("add", path, content=_added(lines, body, at)))
        else:
            changes.append(_update(path, lines, body, at))
    if not changes:
        raise _bad(start + 1, "the patch names no file")
    return changes


def _bad(line: int, reason: str) -> ToolArgumentsError:
    return ToolArgumentsError(f"argument 'patch', line {line}: {reason}")


def _added(lines: Sequence[str], at: int, end: int) -> str:
    while end > at and not lines[end - 1].strip():
        end -= 1
    content = []
    for number in range(at, end):
        line = lines[number]
        if line and not line.startswith("+"):
            raise _bad(number + 1, f"each line of an added file begins with '+', not {line!r}")
        content.append(line[1:])
    return "".join(line + "\n" for line in content)


def _update(path: str, lines: Sequence[str], at: int, end: int) -> FileChange:
    target = None
    if at < end and lines[at].startswith("*** Move to: "):
        target = lines[at].removeprefix("*** Move to: ").strip()
        at += 1
    while end > at and not lines[end - 1].strip():
        end -= 1
    hunks: list[Hunk] = []
    while at < end:
        first = at
        anchors = []
        while at < end and lines[at].startswith("@@"):
            anchor = lines[at][2:].strip().removesuffix("@@").strip()
            unified = _UNIFIED.match(anchor)
            anchor = (unified["anchor"] or "") if unified else anchor
            if anchor.strip():
                anchors.append(anchor.strip())
            at += 1
        body: list[tuple[str, str]] = []
        at_end = False
        while at < end and not lines[at].startswith("@@"):
            line = lines[at]
            at += 1
            if line.strip() == "*** End of File":
                at_end = True
                break
            if line and line[0] not in " -+":
                raise _bad(at, f"each line of a change begins with ' ', '-' or '+', not {line!r}")
            # Models leave out the blank of an empty line that is kept.
            body.append((line[0], line[1:]) if line else (" ", ""))
        if not any(sign != " " for sign, _ in body):
            raise _bad(first + 1, "this change neither takes out nor puts in a line")
        hunks.append(Hunk(tuple(anchors), tuple(body), at_end, first + 1))
    if not hunks and target is None:
        raise _bad(at, f"no change is given for {path!r}")
    return FileChange("update", path, hunks=tuple(hunks), target=target)


def change(path: str, text: str, hunks: Sequence[Hunk]) -> str:
    """`text` with the hunks applied in their order; raises `ToolRefusedError` for one that has no place.

    A change must have exactly one place after the one before it, or an anchor (`@@ …`) that tells which. Lines
    are compared as they are, then without blanks at their end, then without blanks around them; lines that
    are kept stay as they are in the file.
    """
    crlf = "\r\n" in text
    if crlf:
        text = text.replace("\r\n", "\n")
    ends_with_newline = text.endswith("\n") or not text
    lines = text.removesuffix("\n").split("\n") if text else []
    result: list[str] = []
    done = 0
    for hunk in hunks:
        start = done
        for anchor in hunk.anchors:
            start = _after_anchor(path, lines, anchor, start, hunk)
        position = _position(path, lines, start, hunk)
        result += lines[done:position]
        done = position
        for sign, line in hunk.lines:
            if sign == "+":
                result.append(line)
                continue
            if sign == " ":
                result.append(lines[done])
            done += 1
    result += lines[done:]
    changed = "\n".join(result)
    if result and ends_with_newline:
        changed += "\n"
    return changed.replace("\n", "\r\n") if crlf else changed


_COMPARISONS: tuple[Callable[[str], str], ...] = (lambda line: line, str.rstrip, str.strip)


def _after_anchor(path: str, lines: Sequence[str], anchor: str, start: int, hunk: Hunk) -> int:
    for fits in (lambda line: line.strip() == anchor, lambda line: anchor in line):
        for number in range(start, len(lines)):
            if fits(lines[number]):
                return number + 1
    raise ToolRefusedError(
        f"patch, line {hunk.line}: there is no line {anchor!r} in {path} where the change would be"
    )


def _position(path: str, lines: Sequence[str], start: int, hunk: Hunk) -> int:
    wanted = [text for sign, text in hunk.lines if sign != "+"]
    if not wanted:
        return start if hunk.anchors and not hunk.at_end else len(lines)
    for comparison in _COMPARISONS:
        looked_for = [comparison(line) for line in wanted]
        there = [comparison(line) for line in lines]
        first = looked_for[0]
        last = len(there) - len(wanted)
        places = [
            number
            for number in range(start, last + 1)
            if there[number] == first and there[number : number + len(wanted)] == looked_for
        ]
        if hunk.at_end:
            places = [number for number in places if number == last]
        if len(places) == 1 or (places and hunk.anchors):
            return places[0]
        if places:
            numbers = ", ".join(str(number + 1) for number in places[:10])
            raise ToolRefusedError(
                f"patch, line {hunk.line}: this change fits {len(places)} places in {path} (lines {numbers}); "
                "give more lines around it, or say where with '@@ line before it'"
            )
    after = f" after line {start}" if start else ""
    raise ToolRefusedError(
        f"patch, line {hunk.line}: these lines do not stand in {path}{after}:\n" + "\n".join(wanted[:8])
    )


async def apply(patch: str, sandbox: Sandbox) -> str:
    """Apply a patch to the files of a workspace, all of it or nothing, and say what was done.

    Everything is read and worked out before the first file is written. If a write fails or is cancelled, the
    files written so far are put back.
    """
    changes = [_normal(step, sandbox) for step in parse(patch)]
    before: dict[str, str | None] = {}
    now: dict[str, str | None] = {}

    async def current(path: str, *, wanted: bool) -> str | None:
        if path not in now:
            try:
                before[path] = as_text(path, await load(sandbox, path), exact=True)
            except ToolRefusedError:
                raise
            except ToolError:
                if wanted:
                    raise
                before[path] = None
            now[path] = before[path]
        if wanted and now[path] is None:
            raise ToolRefusedError(f"{path!r} is deleted or moved earlier in this patch")
        return now[path]

    said = []
    for step in changes:
        if step.kind == "add":
            if await current(step.path, wanted=False) is not None:
                raise ToolRefusedError(f"{step.path!r} is there already; update it, or delete it first")
            now[step.path] = step.content
            said.append(f"added {step.path}")
            continue
        text = await current(step.path, wanted=True)
        assert text is not None
        if step.kind == "delete":
            now[step.path] = None
            said.append(f"deleted {step.path}")
            continue
        if len(text) > _OFF_LOOP:
            text = await THREADS.run(change, path=step.path, text=text, hunks=step.hunks)
        else:
            text = change(step.path, text, step.hunks)
        lines = [sign for hunk in step.hunks for sign, _ in hunk.lines]
        counts = f"(+{lines.count('+')} -{lines.count('-')})"
        if step.target is None or step.target == step.path:
            now[step.path] = text
            said.append(f"updated {step.path} {counts}")
            continue
        if await current(step.target, wanted=False) is not None:
            raise ToolRefusedError(f"{step.target!r} is there already; {step.path!r} can't be moved to it")
        now[step.path], now[step.target] = None, text
        said.append(f"moved {step.path} to {step.target} {counts}")

    touched = []
    try:
        for path, content in now.items():
            if content != before[path]:
                touched.append(path)
                await _put(sandbox, path, content)
    except BaseException:
        for path in reversed(touched):
            await _put(sandbox, path, before[path])
        raise
    return "Patch applied: " + ", ".join(said) + "."


def _normal(step: FileChange, sandbox: Sandbox) -> FileChange:
    """The change with one spelling for each path, so that a file named twice is one file."""

    def spelled(path: str) -> str:
        path = posixpath.normpath(place(sandbox, path))
        return path.removeprefix(sandbox.cwd.rstrip("/") + "/")

    return replace_fields(
        step, path=spelled(step.path), target=None if step.target is None else spelled(step.target)
    )


async def _put(sandbox: Sandbox, path: str, content: str | None) -> None:
    if content is not None:
        await sandbox.write_bytes(place(sandbox, path), to_bytes(content))
        return
    try:
        await sandbox.remove(place(sandbox, path))
    except FileNotFoundError:
        pass  # put back before it was made
