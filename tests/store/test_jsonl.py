from __future__ import annotations

import json
import math
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, Struct

from taskmill.records import ErrorRecord, Message, ToolCall, ToolSpec, Trace
from taskmill.store.jsonl import (
    MAX_DEPTH,
    canonical,
    content_hash,
    encode_json,
    encode_row,
    is_whole,
    lines,
    strict_loads,
)

NAN, INF = math.nan, math.inf


def read_back(value: Any) -> Any:
    """Encode, and read with readers that disagree with each other on everything but clean JSON."""
    line = encode_row(value)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    read = orjson.loads(line)
    assert strict_loads(line[:-1]) == read
    return read


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


# -- values JSON has no word for --------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "word"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf")])
def test_a_number_that_is_not_finite_becomes_null_with_a_note_beside_it(number: float, word: str) -> None:
    assert read_back({"loss": number, "n": 1}) == {"loss": None, "loss__nonfinite": word, "n": 1}


def test_in_lists_the_note_stands_in_the_owning_object_and_says_which() -> None:
    assert read_back({"a": {"scores": [1.0, NAN, [INF]]}}) == {
        "a": {"scores": [1.0, None, [None]], "scores__nonfinite": {"1": "nan", "2.0": "inf"}}
    }


def test_a_null_that_was_one_gets_no_note() -> None:
    assert read_back({"a": None, "b": "null", "c": [None]}) == {"a": None, "b": "null", "c": [None]}


def test_nonfinite_numbers_are_found_in_records_and_mappings_too() -> None:
    trace = Trace("r", "completed", rewards={"main": NAN}, metrics=MappingProxyType({"x": INF}))
    read = read_back(trace)
    assert read["rewards"] == {"main": None, "main__nonfinite": "nan"}
    assert read["metrics"] == {"x": None, "x__nonfinite": "inf"}


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b", "\udfff\ud800", "x" * 10_000 + "\ud83d"])
def test_an_unpaired_surrogate_is_spelled_out(text: str) -> None:
    read = read_back({"t": text, "list": [text], text: 1})
    spelled = text.encode("utf-8", "backslashreplace").decode()
    assert read == {"t": spelled, "list": [spelled], spelled: 1}
    assert "\\ud" in spelled


def test_a_pair_of_surrogates_in_one_text_is_a_character() -> None:
    assert read_back({"t": "\N{GRINNING FACE}"}) == {"t": "\N{GRINNING FACE}"}


@pytest.mark.parametrize(
    "text", ["a\0b", "\x01\x1f\x7f", "\u2028\u2029\x85\x0b\x0c\x1c", "\r\n\t", "\ufeff", '"\\']
)
def test_odd_characters_come_back_and_never_break_the_line(text: str, tmp_path: Path) -> None:
    assert read_back({"t": text}) == {"t": text}
    path = tmp_path / "log.jsonl"
    path.write_bytes(encode_row({"t": text}) * 2)
    assert [json.loads(line) for _, line in lines(path)] == [{"t": text}] * 2


def test_huge_numbers_and_texts() -> None:
    assert json.loads(encode_row({"n": 2**64 + 1, "m": -(10**300)})) == {"n": 2**64 + 1, "m": -(10**300)}
    bits = (10**5000).bit_length()
    assert read_back({"n": 10**5000, "k": [10**5000]}) == {
        "n": None,
        "n__omitted": f"an integer of {bits} bits",
        "k": [None],
        "k__omitted": {"0": f"an integer of {bits} bits"},
    }
    text = "ä\0" * 1_250_000
    assert read_back({"t": text}) == {"t": text}


@pytest.mark.parametrize("depth", [1100, 5000])
def test_what_is_nested_too_deep_for_readers_is_cut_where_it_gets_too_deep(depth: int) -> None:
    assert b"nested deeper than" in encode_row({"tree": nested(depth), "n": 1})
    assert read_back({"tree": nested(depth), "n": 1})["n"] == 1


def test_objects_that_are_no_data_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"pathlib\.\w*Path"):
        encode_row({"where": Path("x")})


class Tagged(Struct, tag="kind", tag_field="is", omit_defaults=True):
    text: str
    parts: list[str] = []
    n: int = 3


def test_a_record_that_needs_care_looks_like_one_that_does_not() -> None:
    for make in (
        lambda text: Message("assistant", text, tool_calls=(ToolCall("1", "ls"),)),
        lambda text: Tagged(text, ["a"]),
        lambda text: Tagged(text, n=4),
        lambda text: ErrorRecord("E", text, 2),
        lambda text: {"spec": ToolSpec("t", text, Raw(b'{"type":"object"}')), 3: text},
    ):
        clean = read_back(make("-"))
        assert json.loads(encode_row(make("\ud800")).replace(b"\\\\ud800", b"-")) == clean


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_whatever_is_stored_a_strict_reader_takes_it(value: Any) -> None:
    line = encode_row({"value": value})
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in {line!r}"))
    strict_loads(line[:-1])
    assert line.count(b"\n") == 1
    strict_loads(encode_json({"value": value}))


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.integers())))
def test_clean_values_come_back_as_they_were(value: Any) -> None:
    if any(0xD800 <= ord(c) < 0xE000 for c in repr(value)):
        return
    assert json.loads(encode_row(value)) == value


# -- hashing ----------------------------------------------------------------------------------------------------


def test_the_canonical_spelling_does_not_depend_on_the_order_of_keys() -> None:
    one, two = {"b": 1, "a": {"y": [1, 2], "x": "é"}}, {"a": {"x": "é", "y": [1, 2]}, "b": 1}
    assert canonical(one) == canonical(two) == '{"a":{"x":"é","y":[1,2]},"b":1}'.encode()
    assert content_hash(one) == content_hash(two)
    assert len(content_hash(one)) == 16
    assert content_hash({"a": [2, 1]}) != content_hash({"a": [1, 2]})


def test_odd_values_have_a_hash_too() -> None:
    odd = [{"t": "\ud800"}, {"t": "\ud801"}, {"t": NAN}, {"t": INF}, {"t": None}, {"t": 10**5000}]
    assert len({content_hash(value) for value in odd}) == len(odd)


def test_the_hash_of_a_row_is_the_same_in_every_process_and_version() -> None:
    spelled = b'["What is 2+2?",null,null]'
    assert content_hash(["What is 2+2?", None, None]) == blake2b(spelled, digest_size=16).digest()
    assert content_hash(["What is 2+2?", None, None]).hex() == "4d16d30ac0bcbf24cf0e5a7cbe9ac485"


# -- reading ----------------------------------------------------------------------------------------------------


def test_lines_end_at_newlines_only_and_know_their_offsets(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\r\n\nb\xc2\x85c\n\xe2\x80\xa8d")
    assert list(lines(path)) == [(0, b"a\r"), (3, b""), (4, b"b\xc2\x85c"), (9, b"\xe2\x80\xa8d")]
    assert next(lines(path, 4)) == (4, b"b\xc2\x85c")


def test_a_reader_of_a_live_log_is_not_given_half_a_row(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"a":1}\n{"a":')
    assert [line for _, line in lines(path, whole=True)] == [b'{"a":1}']
    path.write_bytes(b'{"a":1}\n{"a":2}')
    assert [line for _, line in lines(path, whole=True)] == [b'{"a":1}', b'{"a":2}']


@pytest.mark.parametrize("row", [{"a": [1, {"b": "é😀"}], "c": None}, {"n": 1e300, "t": "\u2028"}, [1, 2]])
def test_only_all_of_a_row_is_whole(row: Any) -> None:
    line = encode_row(row)[:-1]
    assert is_whole(line)
    assert not any(is_whole(line[:cut]) for cut in range(len(line)))


def test_a_number_out_of_range_does_not_make_half_a_row_whole() -> None:
    assert is_whole(b'{"a":1e999,"b":2}')
    assert not is_whole(b'{"a":1e999,"b":')
    assert is_whole(b'{"a":' + b"1" * 5000 + b"}")
    assert not is_whole(b"123")
    assert not is_whole(b"\0" * 512)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1, "a": 2}', "'a' stands twice"),
        (b'{"a":1,"a":2}', "'a' stands twice"),
        (b'{"a":1,"b":{"c":1,"c" :2},"t":"x\\":y"}', "'c' stands twice"),
        (b'{"a":NaN}', "NaN is not a JSON number"),
        (b'{"a":-Infinity}', "-Infinity is not a JSON number"),
        (b'{"a":1e999}', "beyond the range of a float"),
        (b'{"a":"\\ud83d"}', r"unpaired surrogate \(\\ud83d\)"),
        (b'{"\\udc00":1}', r"unpaired surrogate \(\\udc00\)"),
        (b'{"a":"\xff"}', r"not UTF-8 \(byte 6"),
        (b'{"a":"\xed\xa0\x80"}', "not UTF-8"),
        (b'{"a":' + b"9" * 5000 + b"}", "5000 digits is too long"),
        (b"[" * 300 + b"]" * 300, "nested deeper than"),
        (b"[" * 100_000, "nested deeper than"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "nested deeper than"),
        (b'{"a": 1', "not JSON: .* at character 8"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a":"x\ny"}', "not JSON"),
        (b'{"a":1} {"b":2}', "not JSON: Extra data"),
        (b"", "not JSON"),
        (b"\0\0\0", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
    ],
)
def test_a_line_from_outside_is_refused_with_its_reason(line: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        strict_loads(line)


@pytest.mark.parametrize(
    "line",
    [
        b'{"a":1,"b":{"a":2},"c":[{"a":3}]}',
        b'{ "a" : 1 , "b" :\t"x\\": \\"y" }',
        b'{"t":"he said \\":\\" and \\": twice"}',
        b'{"t":"\\ud83d\\ude00 \\u0000 \\u2028"}',
        b'{"n":123456789012345678901234567890,"m":-0,"x":1.5e-7}',
        b'"a text"',
        b"null",
        b" [1,2] ",
        (b"[" * (MAX_DEPTH - 1)) + (b"]" * (MAX_DEPTH - 1)),
    ],
)
def test_sound_lines_are_read_as_everybody_reads_them(line: bytes) -> None:
    assert strict_loads(line) == json.loads(line)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["1", '"x"', '"\\":"', '"a":', '{"a":1}'])),
        max_size=4,
    )
)
def test_equal_names_are_found_however_the_line_is_spaced(pairs: list[tuple[str, str]]) -> None:
    for colon in (":", " :", ": ", "\t:"):
        line = "{" + ",".join(f'"{name}"{colon}{value}' for name, value in pairs) + "}"
        try:
            expected = json.loads(line)
        except ValueError:
            with pytest.raises(ValueError):
                strict_loads(line.encode())
            continue
        if len({name for name, _ in pairs}) < len(pairs):
            with pytest.raises(ValueError, match="stands twice"):
                strict_loads(line.encode())
        else:
            assert strict_loads(line.encode()) == expected


def test_indented_json_ends_with_a_newline_and_reads_back() -> None:
    text = encode_json({"a": [1, 2], "b": NAN})
    assert text.startswith(b'{\n  "a"')
    assert text.endswith(b"}\n")
    assert msgspec.json.decode(text) == {"a": [1, 2], "b": None, "b__nonfinite": "nan"}
