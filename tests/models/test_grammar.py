"""Whatever a model says under a grammar is a well-formed turn, and a value that the tool's schema allows."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskmill.errors import ConfigurationError
from taskmill.models.grammar import Bounds, literal, offered_schema, turn_grammar, value_grammar
from taskmill.models.plainchat import read_turn
from taskmill.records import ToolSpec

from .gbnf import Speaker

NAMES = st.text(st.sampled_from('abcXY_ "\\é\n'), min_size=1, max_size=6)
SCALARS = st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=5)


def flat_schemas() -> st.SearchStrategy[dict]:
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("string")},
            optional={"minLength": st.integers(0, 4), "maxLength": st.integers(4, 300)},
        ),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["integer", "number"])}, optional={"minimum": st.just(0)}
        ),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]),
        st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
        SCALARS.map(lambda value: {"const": value}),
    )


def objects(children: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    def with_required(properties: dict) -> st.SearchStrategy[dict]:
        names = st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([])
        return names.map(lambda chosen: {"type": "object", "properties": properties, "required": chosen})

    return st.dictionaries(NAMES, children, max_size=3).flatmap(with_required)


SCHEMAS = st.recursive(
    flat_schemas(),
    lambda children: st.one_of(
        objects(children),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": children},
            optional={"minItems": st.integers(0, 2), "maxItems": st.integers(2, 4)},
        ),
        st.lists(children, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


def allows(schema: dict, value: object) -> bool:
    """A plain reading of the JSON Schema standard, for the part that tools use."""
    if "const" in schema:
        return same(value, schema["const"])
    if "enum" in schema:
        return any(same(value, option) for option in schema["enum"])
    if "anyOf" in schema:
        return any(allows(option, value) for option in schema["anyOf"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if kind_of(value) not in kinds and not (kind_of(value) == "integer" and "number" in kinds):
        return False
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)
    if isinstance(value, list):
        fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9)
        return fits and all(allows(schema["items"], item) for item in value)
    if isinstance(value, dict):
        known = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(known) and all(
            allows(known[name], item) for name, item in value.items()
        )
    return not isinstance(value, int | float) or value >= schema.get("minimum", -(10**12))


def same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {
        str: "string",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names[type(value)]


def spec(name: str, schema: dict | bool) -> ToolSpec:
    return ToolSpec(name, f"The tool {name}.", msgspec.Raw(msgspec.json.encode(schema)))


TERMINAL = spec(
    "terminal",
    {
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
        "required": ["command"],
    },
)
TODO = spec(
    "todo", {"type": "object", "properties": {"items": {"type": "array", "items": {"type": "string"}}}}
)
TOOLS = (TERMINAL, TODO)


@settings(max_examples=120, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_what_is_said_under_a_schema_is_json_that_the_schema_allows(schema: dict, seed: int) -> None:
    rng = random.Random(seed)
    speaker = Speaker(value_grammar(schema), rng, often=rng.random())
    for _ in range(4):
        said = speaker.say()
        assert allows(schema, json.loads(said)), said


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, objects(flat_schemas()), min_size=1, max_size=3), st.integers(0, 2**32))
def test_a_turn_that_must_be_a_call_reads_back_as_that_call(schemas: dict, seed: int) -> None:
    tools = [spec(name, schema) for name, schema in schemas.items()]
    speaker = Speaker(turn_grammar(tools, calling="must", thought="The user wants"), random.Random(seed))
    turn = read_turn(speaker.say(), call_id="c1")
    (call,) = turn.calls
    assert turn.reasoning
    assert turn.reasoning.startswith("The user wants")
    assert turn.content == ""
    schema = offered_schema(next(tool for tool in tools if tool.name == call.name))
    assert allows(schema, json.loads(call.arguments))


@pytest.mark.parametrize("seed", range(20))
def test_a_free_turn_is_a_call_or_an_answer_and_both_happen(seed: int) -> None:
    speaker = Speaker(turn_grammar(TOOLS, calling="may"), random.Random(seed))
    turns = [read_turn(speaker.say(), call_id="c1") for _ in range(30)]
    assert all(turn.reasoning for turn in turns)
    assert all(bool(turn.calls) != bool(turn.content) for turn in turns)
    assert {bool(turn.calls) for turn in turns} == {True, False}


def test_an_answer_holds_no_tag_and_has_at_most_the_sentences_allowed() -> None:
    bounds = Bounds(sentences=3, sentence=20, thoughts=0)
    speaker = Speaker(turn_grammar(bounds=bounds), random.Random(3))
    for _ in range(200):
        said = speaker.say()
        assert "<think" not in said
        assert "</" not in said
        assert len(said) <= 1 + 3 * (20 + 1)


def test_a_free_answer_may_hold_anything_but_is_no_call() -> None:
    speaker = Speaker(turn_grammar(TOOLS, calling="may", bounds=Bounds(sentences=0)), random.Random(4))
    turns = [read_turn(speaker.say(), call_id="c1") for _ in range(60)]
    assert {bool(turn.calls) for turn in turns} == {True, False}
    assert any("<" in turn.content for turn in turns)


def test_an_answer_begins_as_it_is_told_to() -> None:
    speaker = Speaker(turn_grammar(TOOLS, thought="The output", answer="The result is"), random.Random(2))
    turns = [read_turn(speaker.say(), call_id="c1") for _ in range(20)]
    assert all(turn.reasoning.startswith("The output ") for turn in turns)
    assert all(turn.content.startswith("The result is ") for turn in turns)


def test_without_thoughts_there_is_no_think_block() -> None:
    speaker = Speaker(turn_grammar(TOOLS, calling="must", bounds=Bounds(thoughts=0)), random.Random(1))
    assert speaker.say().startswith("<tool_call>\n")


def test_a_text_argument_stops_at_the_bound() -> None:
    speaker = Speaker(value_grammar({"type": "string"}, bounds=Bounds(text=12)), random.Random(1))
    assert max(len(json.loads(speaker.say())) for _ in range(300)) == 12


def test_a_small_model_is_offered_required_arguments_or_all_where_none_is() -> None:
    assert list(offered_schema(TERMINAL)["properties"]) == ["command"]
    assert list(offered_schema(TODO)["properties"]) == ["items"]
    assert list(offered_schema(TERMINAL, optional=True)["properties"]) == ["command", "timeout"]


def test_a_schema_that_refers_to_itself_ends() -> None:
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["name"],
            }
        },
    }
    speaker = Speaker(value_grammar(tree), random.Random(5), often=0.9)
    for _ in range(20):
        assert json.loads(speaker.say())["name"]


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        (False, "false"),
        ({"enum": []}, "enum"),
        ({"$ref": "#/nowhere"}, "#/nowhere"),
        ({"$ref": "http://x/y"}, "http://x/y"),
    ],
)
def test_a_schema_without_values_is_named(schema: object, word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        value_grammar(schema)


@given(st.text(max_size=30))
def test_a_literal_says_its_text(text: str) -> None:
    assert Speaker(f"root ::= {literal(text)}", random.Random(0)).say() == text


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (
            '<think>\nWe look.\n</think>\n<tool_call>\n{"name": "terminal", "arg',
            '<tool_call>\n{"name": "terminal", "arg',
        ),
        (
            '<think>\nWe look.\n</think>\n<tool_call>\n{"tool": 1}\n</tool_call>',
            '<tool_call>\n{"tool": 1}\n</tool_call>',
        ),
        ("<think>\nWe look.\n</think>\nDone.", "Done."),
        ("<think>\nWe look.", ""),
    ],
)
def test_a_turn_that_was_cut_off_keeps_what_was_said(text: str, content: str) -> None:
    turn = read_turn(text, call_id="c1")
    assert turn.reasoning == "We look."
    assert turn.content == content
    assert turn.calls == ()


def test_a_closing_tag_inside_an_argument_is_part_of_it() -> None:
    arguments = '{"command": "echo </tool_call> > x"}'
    turn = read_turn(
        f'<tool_call>\n{{"name": "terminal", "arguments": {arguments}}}\n</tool_call>', call_id="c1"
    )
    assert turn.calls[0].arguments == arguments
