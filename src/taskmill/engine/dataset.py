"""A file of prompts, indexed by byte offset and read row by row when a row's turn comes.

The file may be far larger than memory, so indexing keeps nothing but what it yields. Lines end at byte 0x0A
and nowhere else: a prompt may hold U+2028, U+0085 or a carriage return.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from taskmill.errors import ConfigurationError, StoreError
from taskmill.store.jsonl import canonical, content_hash, lines, strict_loads
from taskmill.store.ledger import PlannedRow

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BREATH = 500
"""Lines between two looks up from reading."""

IMAGE_FIELDS = ("image", "docker_image")


class PromptRow(Struct, frozen=True):
    """One usable row: the prompt, where it runs, and every other field it came with."""

    prompt: str
    image: str | None
    cwd: str | None
    extra: dict[str, Any]


class SkippedLine(Struct, frozen=True):
    """A line that is not a usable row: its number (from 1) and why."""

    line: int
    reason: str


def parse_row(line: bytes) -> PromptRow:
    """Read one line.

    Raises:
        ValueError: saying what is wrong with it.
    """
    value = strict_loads(line)
    if not isinstance(value, dict):
        raise ValueError(f'not an object but {_kind(value)}: write it as {{"prompt": …}}')
    if "prompt" not in value:
        raise ValueError("no field 'prompt'")
    prompt = value.pop("prompt")
    if not isinstance(prompt, str):
        raise ValueError(f"'prompt' is {_kind(prompt)}, not a string")
    if not prompt.strip():
        raise ValueError("'prompt' is blank")
    if not value:
        return PromptRow(prompt, None, None, value)
    images = {name: value.pop(name) for name in IMAGE_FIELDS if name in value}
    for name, image in images.items():
        if image is not None and (not isinstance(image, str) or not image.strip()):
            raise ValueError(f"{name!r} is {_kind(image)}, not the name of a container image")
    named = {image for image in images.values() if image is not None}
    if len(named) > 1:
        raise ValueError("'image' and 'docker_image' name two different images")
    cwd = value.pop("cwd", None)
    if cwd is not None and (not isinstance(cwd, str) or not cwd.strip() or "\0" in cwd):
        raise ValueError(f"'cwd' is {_kind(cwd)}, not a directory")
    return PromptRow(prompt, next(iter(named), None), cwd, value)


def sample_key(prompt: str, image: str | None, cwd: str | None) -> bytes:
    """What makes two rows the same sample: 16 bytes of hash over prompt, image and working directory."""
    return content_hash([prompt, image, cwd], finite=True)


def row_detail(row: PromptRow) -> bytes:
    """16 bytes of hash over everything a row says, so that rows with one prompt can be told apart."""
    return content_hash([row.prompt, row.image, row.cwd, row.extra], finite=True)


def index_rows(
    path: Path, *, limit: int | None = None, on_skip: Callable[[SkippedLine], None] | None = None
) -> Iterator[PlannedRow | None]:
    """Yield the usable rows of `path` in order, at most `limit`, telling `on_skip` about the others.

    A `None` stands for many lines that were none, so that whoever reads can look up meanwhile.
    """
    index = passed_over = 0
    for number, (offset, line) in enumerate(lines(path), start=1):
        if limit is not None and index >= limit:
            return
        start = offset
        if number == 1 and line.startswith(BYTE_ORDER_MARK):
            line = line[len(BYTE_ORDER_MARK) :]
            start += len(BYTE_ORDER_MARK)
        if passed_over >= BREATH:
            passed_over = 0
            yield None
        passed_over += 1
        if not line.strip():
            continue
        try:
            row = parse_row(line)
        except ValueError as problem:
            if on_skip is not None:
                on_skip(SkippedLine(number, str(problem)))
            continue
        yield PlannedRow(index, start, sample_key(row.prompt, row.image, row.cwd), row_detail(row))
        index += 1


class FileStamp(NamedTuple):
    """What changes when a file is changed or replaced."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, file: int | Path) -> FileStamp:
        """The stamp of an open file or a path."""
        found = os.stat(file)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class Indexed(NamedTuple):
    """What indexing a file found besides its rows: how many lines are none, and the stamp the file bore."""

    skipped: int
    stamp: FileStamp


class DatasetReader:
    """Reads rows back by the offset the index gave. One open file, one row in memory.

    A row is checked against its hash, unless the file still bears the stamp it was `indexed` with.
    """

    def __init__(self, path: Path, indexed: FileStamp | None = None) -> None:
        self._path = path
        self._file = path.open("rb")
        self._indexed = indexed

    def read(self, planned: PlannedRow) -> PromptRow:
        """The row at `planned.offset`.

        Raises:
            StoreError: the file is no longer what was indexed.
        """
        self._file.seek(planned.offset)
        line = self._file.readline()
        try:
            row = parse_row(line)
        except ValueError as problem:
            raise self._changed(planned) from problem
        if FileStamp.of(self._file.fileno()) != self._indexed and row_detail(row) != planned.detail:
            raise self._changed(planned)
        return row

    def _changed(self, planned: PlannedRow) -> StoreError:
        return StoreError(
            f"{str(self._path)!r} was changed while the run read it: the row at byte {planned.offset} is not what "
            "was planned. Leave the file alone during a run; resume reads it anew."
        )

    def close(self) -> None:
        self._file.close()


def require_file(path: Path) -> None:
    """Raise for a dataset that isn't there or isn't a file, naming it."""
    if not path.exists():
        raise FileNotFoundError(f"no dataset at {str(path)!r}")
    if not path.is_file():
        raise ConfigurationError(f"dataset_file={str(path)!r} is not a file: give a JSONL file of prompts")


def task_fields(row: PromptRow) -> Mapping[str, Any]:
    """A row as the task of a trace."""
    fields: dict[str, Any] = {"prompt": row.prompt}
    if row.image is not None:
        fields["image"] = row.image
    if row.cwd is not None:
        fields["cwd"] = row.cwd
    return fields | {"row": row.extra} if row.extra else fields


def extra_json(row: PromptRow) -> str:
    """The row's own metadata as one JSON string, so that mixed types never break a table's schema."""
    return canonical(row.extra).decode() if row.extra else "{}"


def _kind(value: object) -> str:
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)
