from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmill.errors import ToolArgumentsError
from taskmill.tools.arguments import parse_arguments


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        (' \n{"a": "ü\\u0000"}\n', {"a": "ü\0"}),
        ("", {}),
        ("  ", {}),
        ("null", {}),
        ("{}", {}),
    ],
)
def test_arguments_that_need_no_mending(text, value):
    assert parse_arguments(text) == (value, None)


@pytest.mark.parametrize(
    ("text", "value", "note"),
    [
        ('"{\\"x\\":1}"', {"x": 1}, "JSON inside a JSON string"),
        ('""', {}, "JSON inside a JSON string"),
        ('{"a": 1}"', {"a": 1}, "dropped '\"' after the end"),
        ('{"a": {"b": 2}}}', {"a": {"b": 2}}, "dropped '}' after the end"),
        ('{"a": 1}</tool_call>', {"a": 1}, "dropped '</tool_call>' after the end"),
        ('```json\n{"a": 1}\n```', {"a": 1}, "code fence taken off"),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}, "control characters in a text"),
        ("{'a': True, 'b': None}", {"a": True, "b": None}, "syntax mended"),
        ('{"a": 1,}', {"a": 1}, "syntax mended"),
        ('{a: "b"}', {"a": "b"}, "syntax mended"),
    ],
)
def test_arguments_that_leave_no_doubt_are_mended_and_marked(text, value, note):
    assert parse_arguments(text) == (value, note)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"cmd": "ls"', "stop before the object is closed"),
        ('{"cmd": "ls', "stop before the object is closed"),
        ('{"cmd": "rm -r build', "stop before the object is closed"),
        ('{"a": {"b": 1}', "stop before the object is closed"),
        ('{"cmd": "ls}', "stop before the object is closed"),
        ('{"a": 1}{"b": 2}', "more text after the end"),
        ('{"a": 1}, "b": 2}', "more text after the end"),
        ('[{"a": 1}]', "not a list"),
        ("12", "not a number"),
        ("true", "not a boolean"),
        ('"ls -l"', "not valid JSON"),
        ("ls -l", "not valid JSON"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": "say "hi" now"}', "not valid JSON"),
        ("{" * 100_000, "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
    ],
)
def test_arguments_that_leave_a_doubt_are_refused_with_the_reason(text, said):
    with pytest.raises(ToolArgumentsError, match=said):
        parse_arguments(text)


OBJECTS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@given(OBJECTS, st.booleans())
def test_json_is_taken_as_it_is(value, ascii_only):
    assert parse_arguments(json.dumps(value, ensure_ascii=ascii_only)) == (value, None)


@given(OBJECTS.filter(bool), st.data())
def test_no_part_of_an_object_is_taken_for_the_whole(value, data):
    text = json.dumps(value)
    cut = data.draw(st.integers(1, len(text) - 1))
    with pytest.raises(ToolArgumentsError):
        parse_arguments(text[:cut])
