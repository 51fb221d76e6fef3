"""Searching a workspace by name and by content, bounded in files, bytes, results and time."""

from __future__ import annotations

import asyncio
import fnmatch
import posixpath
import re
import time
from collections.abc import Callable
from typing import Any

from taskmill.errors import ToolArgumentsError, ToolError
from taskmill.sandbox.base import Sandbox
from taskmill.tools.files import place
from taskmill.tools.threads import THREADS

MOST_FILES = 20_000
LARGEST_FILE = 4 * 1024 * 1024
MOST_BYTES = 256 * 1024 * 1024
MATCH_SECONDS = 20.0
"""Seconds a regular expression may work in one search."""

LONGEST_PATTERN = 5_000
"""Characters of a pattern: one of that length is made ready in a tenth of a second."""

LONGEST_LINE = 300
_CHUNK = 4 * 1024 * 1024
_SKIPPED_FOLDERS = frozenset({".git", ".hg", ".svn", "node_modules", "__pycache__"})


async def by_name(sandbox: Sandbox, path: str, pattern: str, *, ignore_case: bool, limit: int) -> str:
    """The files under `path` whose name fits the glob, one a line."""
    path, files, more = await _listed(sandbox, path)
    fits = glob_matcher(pattern, ignore_case=ignore_case)
    found = [posixpath.join(path, file) for file in files if fits(file)]
    if not found:
        return f"No file fits {pattern!r} ({len(files):,} looked at{more})."
    lines = found[:limit]
    if len(found) > limit:
        lines.append(f"[{len(found) - limit:,} more files]")
    if more:
        lines.append(f"[{more.removeprefix(', ')}]")
    return "\n".join(lines)


async def by_content(
    sandbox: Sandbox, path: str, pattern: str, *, glob: str | None, ignore_case: bool, limit: int
) -> str:
    """Lines under `path` where a match of the regular expression starts, as `path:line|text`.

    `re` keeps the whole process still while it backtracks, so the `regex` engine is used, which lets other
    threads run and has a deadline. Raises `ToolArgumentsError` for a pattern that is none, `ToolError` when
    the deadline passes.
    """
    import regex

    _check_length(pattern)
    flags = regex.MULTILINE | (regex.IGNORECASE if ignore_case else 0)
    try:
        expression = await THREADS.run(regex.compile, pattern=pattern, flags=flags)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ToolArgumentsError(
            f"argument 'pattern': {pattern!r} is no regular expression: {error}"
        ) from None
    path, files, more = await _listed(sandbox, path)
    if glob is not None:
        fits = glob_matcher(glob, ignore_case=ignore_case)
        files = [file for file in files if fits(file)]

    found: list[str] = []
    skipped = 0
    searched = 0
    total = 0
    seconds = MATCH_SECONDS
    chunk: list[tuple[str, str]] = []
    chunk_bytes = 0
    for position, file in enumerate(files):
        name = posixpath.join(path, file)
        if position % 100 == 99:
            await asyncio.sleep(0)  # files of a local workspace are read on the loop
        try:
            data = await sandbox.read_bytes(place(sandbox, name), limit=LARGEST_FILE + 1)
        except (OSError, ToolError):
            data = b"\0"  # gone meanwhile, or not for reading
        if len(data) > LARGEST_FILE or b"\0" in data[:8192]:
            skipped += 1
        else:
            searched += 1
            chunk.append((name, data.decode(errors="replace")))
            chunk_bytes += len(data)
            total += len(data)
        full = total > MOST_BYTES
        if chunk and (chunk_bytes >= _CHUNK or full or position == len(files) - 1):
            began = time.monotonic()
            found += await THREADS.run(
                _match_all, expression=expression, texts=chunk, most=limit + 1 - len(found), seconds=seconds
            )
            seconds -= time.monotonic() - began
            chunk, chunk_bytes = [], 0
        if len(found) > limit:
            break
        if full:
            more += f", the files after {name!r} were not searched: {MOST_BYTES:,} bytes are the limit"
            break
    notes = [f"{skipped:,} binary or very large files skipped"] if skipped else []
    notes += [more.removeprefix(", ")] if more else []
    if not found:
        return f"No match in {searched:,} files{''.join(', ' + note for note in notes)}."
    if len(found) > limit:
        found[limit:] = [f"[more matches follow; the first {limit:,} are shown]"]
    return "\n".join(found + [f"[{note}]" for note in notes])


def _match_all(expression: Any, texts: list[tuple[str, str]], most: int, seconds: float) -> list[str]:
    found: list[str] = []
    ends = time.monotonic() + seconds
    for name, text in texts:
        number, counted, start = 1, 0, 0
        while start <= len(text) and len(found) < most:
            left = ends - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError
                match = expression.search(text, start, timeout=left, concurrent=True)
            except TimeoutError:
                raise ToolError(
                    f"the search was given up after {MATCH_SECONDS:g} s, in {name!r}: this regular expression "
                    "takes too long; make it simpler, or search fewer files"
                ) from None
            if match is None or (match.start() == len(text) and text.endswith("\n")):
                break
            number += text.count("\n", counted, match.start())
            counted = match.start()
            begin = text.rfind("\n", 0, match.start()) + 1
            end = text.find("\n", match.start())
            end = len(text) if end < 0 else end
            line = text[begin:end].removesuffix("\r")
            if len(line) > LONGEST_LINE:
                line = line[:LONGEST_LINE] + " […]"
            found.append(f"{name}:{number}|{line}")
            start = end + 1
    return found


def _check_length(pattern: str) -> None:
    if len(pattern) > LONGEST_PATTERN:
        raise ToolArgumentsError(
            f"a pattern of {len(pattern):,} characters is too long; it may have {LONGEST_PATTERN:,}. "
            "Search for less at once."
        )


def glob_matcher(pattern: str, *, ignore_case: bool = False) -> Callable[[str], bool]:
    """Whether a relative path fits a glob.

    A pattern without a slash is for the last part of the path. `**` stands for any number of folders, none
    included; `*` and `?` stay within one part.
    """
    if not pattern.strip():
        raise ToolArgumentsError("argument 'pattern' is blank; give a glob such as '*.py'")
    _check_length(pattern)
    parts = pattern.removeprefix("./").strip("/").split("/")
    flags = re.IGNORECASE if ignore_case else 0
    tests = [re.compile(fnmatch.translate(re.sub(r"\*+", "*", part)), flags) for part in parts]
    wild = [part == "**" for part in parts]
    anywhere = len(parts) == 1 and not wild[0]

    def fits(path: str) -> bool:
        names = path.split("/")
        if anywhere:
            return tests[0].match(names[-1]) is not None
        # Which parts of the pattern may be next, after each name: as a set, so that nothing backtracks.
        states = _skip({0}, wild)
        for name in names:
            nexts = set()
            for state in states:
                if state == len(parts):
                    continue
                if wild[state]:
                    nexts.add(state)
                elif tests[state].match(name):
                    nexts.add(state + 1)
            states = _skip(nexts, wild)
        return len(parts) in states

    return fits


def _skip(states: set[int], wild: list[bool]) -> set[int]:
    for state in sorted(states):
        while state < len(wild) and wild[state]:
            state += 1
            states.add(state)
    return states


async def _listed(sandbox: Sandbox, path: str) -> tuple[str, list[str], str]:
    """The folder, the files under it (for a file: itself), and a word when there are more."""
    path = "" if posixpath.normpath(path) == "." else path
    try:
        files = await sandbox.list_files(place(sandbox, path), limit=MOST_FILES)
    except FileNotFoundError:
        raise ToolError(f"There is no folder {path!r}.") from None
    except NotADirectoryError:
        return posixpath.dirname(path), [posixpath.basename(path)], ""
    more = f", only the first {MOST_FILES:,} files" if len(files) >= MOST_FILES else ""
    return path, [file for file in files if _SKIPPED_FOLDERS.isdisjoint(file.split("/")[:-1])], more
