"""A run as ShareGPT: the conversations alone, as they are stored."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Raw, Struct

from taskmill.export import Rows
from taskmill.store.files import replace


class _Stored(Struct):
    conversations: Raw


_decode = msgspec.json.Decoder(_Stored).decode


def write(rows: Rows) -> None:
    """Write `rows` to the path of their report."""
    replace(rows.report.path, _lines(rows))


def _lines(rows: Rows) -> Iterator[bytes]:
    for line in rows:
        rows.report.written += 1
        yield b'{"conversations":%b}\n' % bytes(_decode(line).conversations)
