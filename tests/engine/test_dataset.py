from __future__ import annotations

import json
from pathlib import Path

import pytest

from taskmill.engine.dataset import DatasetReader, SkippedLine, index_rows, parse_row
from taskmill.errors import StoreError


def write(path: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    path.write_bytes(b"\n".join(lines) + end)
    return path


def index(path: Path, limit: int | None = None) -> tuple[list[str], list[SkippedLine]]:
    skipped: list[SkippedLine] = []
    rows = list(index_rows(path, limit=limit, on_skip=skipped.append))
    reader = DatasetReader(path)
    prompts = [reader.read(row).prompt for row in rows]
    reader.close()
    return prompts, skipped


def test_a_line_ends_at_the_newline_byte_and_nowhere_else(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three\rfour"
    path = write(tmp_path / "p.jsonl", json.dumps({"prompt": text}, ensure_ascii=False).encode())
    raw = write(tmp_path / "q.jsonl", '{"prompt": "a\u2028b\u0085c"}'.encode())

    assert index(path) == ([text], [])
    assert index(raw) == (["a\u2028b\u0085c"], [])


def test_a_byte_order_mark_blank_lines_and_a_missing_last_newline_are_nothing(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl", b'\xef\xbb\xbf{"prompt": "a"}', b"", b"  \t", b'{"prompt": "b"}', end=b""
    )

    assert index(path) == (["a", "b"], [])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"123", "a number"),
        (b'"a prompt string"', "a string"),
        (b'["prompt"]', "a list"),
        (b"null", "null"),
        (b'{"prompt": null}', "'prompt' is null"),
        (b'{"prompt": 123}', "'prompt' is a number"),
        (b'{"prompt": "  "}', "blank"),
        (b'{"text": "a"}', "no field 'prompt'"),
        (b'{"prompt": "a"', ""),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt'"),
        (b'{"prompt": "a", "score": NaN}', "NaN"),
        (b'{"prompt": "\\ud83d"}', "surrogate"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "a", "image": 3}', "'image'"),
        (b'{"prompt": "a", "image": "x", "docker_image": "y"}', "two different images"),
        (b'{"prompt": "a", "cwd": ["x"]}', "'cwd'"),
        (b'{"prompt": ' + b"[" * 100_000 + b"}", ""),
    ],
)
def test_an_odd_row_is_skipped_with_its_line_and_a_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write(tmp_path / "p.jsonl", b'{"prompt": "good"}', line, b'{"prompt": "good too"}')

    prompts, skipped = index(path)

    assert prompts == ["good", "good too"]
    assert [skip.line for skip in skipped] == [2]
    assert reason.lower() in skipped[0].reason.lower()


def test_other_fields_are_kept_and_the_special_ones_are_found() -> None:
    row = parse_row(
        b'{"prompt": "p", "docker_image": "python:3.12", "cwd": "sub", "id": 7, "tags": ["a", {"b": 1}]}'
    )

    assert (row.prompt, row.image, row.cwd) == ("p", "python:3.12", "sub")
    assert row.extra == {"id": 7, "tags": ["a", {"b": 1}]}


def test_a_limit_takes_the_first_usable_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", b'{"prompt": "a"}', b"x", b'{"prompt": "b"}', b"y", b'{"prompt": "c"}')

    prompts, skipped = index(path, limit=2)

    assert prompts == ["a", "b"]
    assert [skip.line for skip in skipped] == [2]


def test_a_file_changed_after_it_was_indexed_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", b'{"prompt": "a"}', b'{"prompt": "b"}')
    rows = list(index_rows(path))
    write(path, b'{"prompt": "a"}', b'{"prompt": "c"}')
    reader = DatasetReader(path)

    assert reader.read(rows[0]).prompt == "a"
    with pytest.raises(StoreError, match="was changed while the run read it"):
        reader.read(rows[1])
    reader.close()
