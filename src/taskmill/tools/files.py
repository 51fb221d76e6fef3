"""Tools that read, write, change and search files, all through the rollout's sandbox."""

from __future__ import annotations

import posixpath
from difflib import get_close_matches
from typing import Literal

from taskmill.errors import ToolArgumentsError, ToolError, ToolRefusedError
from taskmill.sandbox.base import Sandbox
from taskmill.tools.base import ToolContext
from taskmill.tools.function import tool

LARGEST_FILE = 16 * 1024 * 1024
"""Bytes of the largest file these tools read or write."""

LONGEST_LINE = 2_000
SHOWN_LINES = 2_000


@tool(timeout=60)
async def read_file(path: str, offset: int = 1, limit: int = SHOWN_LINES, *, context: ToolContext) -> str:
    """Read a text file of the workspace. Each line is shown as `number|text`.

    Args:
        path: The file; a relative path starts at the first working directory, also after a `cd`.
        offset: The first line to show, counted from 1; negative counts from the end.
        limit: How many lines to show.
    """
    data = await load(context.sandbox, path)
    text = as_text(path, data)
    if not text:
        return f"{path} is empty."
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    total = len(lines)
    first = max(1, total + 1 + offset if offset < 0 else offset or 1)
    if first > total:
        raise ToolRefusedError(f"{path} has {total} lines; line {first} is after its end")
    last = min(total, first + max(1, min(limit, SHOWN_LINES)) - 1)
    shown = []
    for number in range(first, last + 1):
        line = lines[number - 1].removesuffix("\r")
        if len(line) > LONGEST_LINE:
            line = f"{line[:LONGEST_LINE]} [… {len(line) - LONGEST_LINE:,} more characters in this line]"
        shown.append(f"{number}|{line}")
    if first > 1 or last < total:
        shown.append(f"[lines {first} to {last} of {total}]")
    if "\r\n" in text:
        shown.append("[lines end with CRLF]")
    return "\n".join(shown)


@tool(exclusive=True, timeout=60)
async def write_file(path: str, content: str, *, context: ToolContext) -> str:
    """Write a whole text file of the workspace, making its folders. What was in it is replaced.

    Args:
        path: The file; a relative path starts at the first working directory, also after a `cd`.
        content: Everything that shall stand in the file.
    """
    data = to_bytes(content)
    if len(data) > LARGEST_FILE:
        raise ToolRefusedError(f"{len(data):,} bytes are too many for one file; at most {LARGEST_FILE:,}")
    await context.sandbox.write_bytes(place(context.sandbox, path), data)
    lines = content.count("\n") + (not content.endswith("\n") and content != "")
    return f"Wrote {len(data):,} bytes ({lines:,} lines) to {path}."


@tool(exclusive=True, timeout=120)
async def patch(
    mode: Literal["replace", "patch"] = "replace",
    path: str | None = None,
    old_string: str | None = None,
    new_string: str | None = None,
    replace_all: bool = False,
    patch: str | None = None,
    *,
    context: ToolContext,
) -> str:
    """Change files of the workspace.

    Mode `replace` puts `new_string` in the place of `old_string` in the file `path`; `old_string` must stand
    there exactly once, so give enough of its surroundings, without line numbers.

    Mode `patch` applies a patch over one or more files, completely or not at all:

    *** Begin Patch
    *** Update File: path/to/file.py
    @@ def function_near_the_change
     an unchanged line
    -a line to take out
    +a line to put in
    *** Add File: path/to/new.py
    +its first line
    *** Delete File: path/to/old.py
    *** End Patch

    Args:
        mode: `replace` or `patch`.
        path: For mode replace, the file.
        old_string: For mode replace, the exact text to take out.
        new_string: For mode replace, the text to put in; empty to delete.
        replace_all: For mode replace, replace every place instead of exactly one.
        patch: For mode patch, the patch.
    """
    from taskmill.tools import patching

    if mode == "patch":
        if not patch:
            raise ToolArgumentsError("argument 'patch' is missing: mode patch needs the text of the patch")
        return await patching.apply(patch, context.sandbox)
    if path is None or old_string is None or new_string is None:
        given = {"path": path, "old_string": old_string, "new_string": new_string}
        absent = ", ".join(repr(name) for name, value in given.items() if value is None)
        raise ToolArgumentsError(f"argument {absent} is missing: mode replace needs it")
    before = as_text(path, await load(context.sandbox, path), exact=True)
    after, count = await patching.replace(path, before, old_string, new_string, every=replace_all)
    await context.sandbox.write_bytes(place(context.sandbox, path), to_bytes(after))
    return f"Replaced {count} {'place' if count == 1 else 'places'} in {path}."


@tool(timeout=120)
async def search_files(
    pattern: str,
    target: Literal["content", "files"] = "content",
    path: str = ".",
    glob: str | None = None,
    ignore_case: bool = False,
    limit: int = 100,
    *,
    context: ToolContext,
) -> str:
    """Search the files of the workspace, by what is in them or by their names.

    Target `content` looks for a regular expression and shows `path:line|text` of each line where a match
    starts. Target `files` lists the files whose name fits a glob such as `*.py` or `src/**/test_*.py`.

    Args:
        pattern: A regular expression (Python) for content, a glob for files.
        target: `content` or `files`.
        path: The folder (or file) to search in; by default the first working directory.
        glob: For content, only files whose name fits.
        ignore_case: Whether upper and lower case are the same.
        limit: How many results to show at most.
    """
    from taskmill.tools import search

    limit = max(1, min(limit, 1_000))
    if target == "files":
        return await search.by_name(context.sandbox, path, pattern, ignore_case=ignore_case, limit=limit)
    return await search.by_content(
        context.sandbox, path, pattern, glob=glob, ignore_case=ignore_case, limit=limit
    )


def place(sandbox: Sandbox, path: str) -> str:
    """A path as the sandbox takes it: what is relative starts where the first command started.

    Not where the terminal stands now: a path in a patch means one file, whatever was done before.
    """
    return posixpath.join(sandbox.cwd, path)


async def load(sandbox: Sandbox, path: str) -> bytes:
    """The bytes of a file; raises `ToolError` in words a model can act on."""
    try:
        data = await sandbox.read_bytes(place(sandbox, path), limit=LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ToolError(f"There is no file {path!r}.{await _similar(sandbox, path)}") from None
    except IsADirectoryError:
        raise ToolError(f"{path!r} is a folder; list it with search_files, target files") from None
    except NotADirectoryError:
        raise ToolError(f"{path!r}: a part of this path is a file, not a folder") from None
    if len(data) > LARGEST_FILE:
        raise ToolRefusedError(f"{path!r} is larger than the {LARGEST_FILE:,} bytes that can be read")
    return data


def as_text(path: str, data: bytes, *, exact: bool = False) -> str:
    """The text in `data`; raises `ToolRefusedError` for what is no text.

    `exact` also refuses what would not come out the same when it is written again.
    """
    if b"\0" in data[:8192]:
        raise ToolRefusedError(f"{path!r} is a binary file of {len(data):,} bytes, not a text")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if exact:
            raise ToolRefusedError(
                f"{path!r} is not UTF-8 (byte {error.start}); change it with a program in the workspace"
            ) from None
        return data.decode(errors="replace")


def to_bytes(text: str) -> bytes:
    """UTF-8; raises `ToolRefusedError` for half a surrogate pair, which is no character."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ToolRefusedError(
            f"character {error.start} is a lone surrogate, \\u{ord(text[error.start]):04x}, and can't be written"
        ) from None


async def _similar(sandbox: Sandbox, path: str) -> str:
    """A word on files with nearly this name, because a wrong folder is the most frequent mistake."""
    try:
        files = await sandbox.list_files(sandbox.cwd, limit=2_000)
    except (OSError, ToolError):
        return ""
    name = posixpath.basename(path)
    same = [file for file in files if posixpath.basename(file) == name]
    near = same[:3] or get_close_matches(path, files, n=3)
    return f" Did you mean {', '.join(repr(file) for file in near)}?" if near else ""
