from __future__ import annotations

import math
import random

import pytest

from taskmill.errors import ConfigurationError
from taskmill.tools import (
    DISTRIBUTIONS,
    TOOLSETS,
    known_tools,
    load_distributions,
    register_distribution,
    register_toolset,
    select_toolsets,
    tool,
)
from taskmill.tools import distributions as distributions_module
from taskmill.tools import toolsets as toolsets_module
from taskmill.tools.toolsets import expand, offer


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch):
    monkeypatch.setattr(toolsets_module, "_registered", {})
    monkeypatch.setattr(distributions_module, "_user", {})
    for name in ("TAVILY_API_KEY", "EXA_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_every_tool_there_is():
    assert known_tools() == (
        "execute_code",
        "memory",
        "patch",
        "process",
        "read_file",
        "search_files",
        "terminal",
        "todo",
        "web_extract",
        "web_search",
        "write_file",
    )
    assert known_tools(["wiki_find", "todo"]) == tuple(sorted([*known_tools(), "wiki_find"]))


@pytest.mark.parametrize("name", ["terminal", "file", "code_execution", "todo", "memory"])
def test_toolsets_are_made_of_the_tools_they_name(name):
    assert tuple(made.spec.name for made in TOOLSETS[name].tools()) == TOOLSETS[name].names


def test_what_is_missing_is_left_out_with_a_word(monkeypatch):
    offered = offer(["file", "web", "todo"])
    assert offered.toolsets == ("file", "todo")
    assert offered.left_out == {"web": "no key of a search provider: set TAVILY_API_KEY or EXA_API_KEY"}
    assert [made.spec.name for made in offered.tools] == [*TOOLSETS["file"].names, "todo"]

    monkeypatch.setenv("EXA_API_KEY", "k")
    assert offer(["web"]).toolsets == ("web",)
    assert [made.spec.name for made in TOOLSETS["web"].tools()] == ["web_search", "web_extract"]


def test_composites_stand_for_their_parts():
    assert expand(["coding", "file"]) == ["terminal", "file", "code_execution"]
    assert "memory" not in expand(["all"])
    assert TOOLSETS["coding"].names == ("terminal", "process", *TOOLSETS["file"].names, "execute_code")


def test_a_toolset_of_ones_own():
    @tool
    def weigh() -> None: ...

    register_toolset("kitchen", [weigh], description="For cooks.")
    assert "weigh" in known_tools()
    assert offer(["kitchen"]).tools == (weigh,)
    register_distribution("cook", {"kitchen": 100})
    assert select_toolsets("cook", random.Random(1)) == ("kitchen",)
    with pytest.raises(ConfigurationError, match="'weigh' is already in toolset 'kitchen'"):
        register_toolset("other", [weigh])
    with pytest.raises(ConfigurationError, match="'file' is built in"):
        register_toolset("file", [weigh])


def test_an_unknown_toolset_is_answered_with_its_neighbour():
    with pytest.raises(ConfigurationError, match=r"'termnal' is not known \(did you mean 'terminal'\?\)"):
        offer(["termnal"])


def test_the_distributions_there_are():
    assert sorted(DISTRIBUTIONS) == [
        "balanced",
        "default",
        "development",
        "minimal",
        "reasoning",
        "research",
        "safe",
        "terminal_only",
        "terminal_web",
    ]
    assert all(set(chances) <= set(TOOLSETS) for chances in DISTRIBUTIONS.values())
    assert dict(DISTRIBUTIONS["terminal_only"]) == {"terminal": 100, "file": 100}
    assert len(DISTRIBUTIONS) == 9


def test_a_draw_is_the_same_for_the_same_seed_and_independent_for_each_toolset():
    draws = [select_toolsets("balanced", random.Random(f"0:{n}")) for n in range(400)]
    assert draws == [select_toolsets("balanced", random.Random(f"0:{n}")) for n in range(400)]
    assert all(list(draw) == sorted(draw) for draw in draws)
    for toolset in DISTRIBUTIONS["balanced"]:
        assert 150 < sum(toolset in draw for draw in draws) < 250
    together = sum({"file", "terminal"} <= set(draw) for draw in draws)
    assert 60 < together < 140


def test_chances_of_nought_and_hundred_are_certain():
    register_distribution("sure", {"file": 100, "terminal": 0})
    assert {select_toolsets("sure", random.Random(n)) for n in range(200)} == {("file",)}


def test_when_none_comes_out_the_likeliest_is_taken():
    register_distribution("rare", {"file": 0.001, "terminal": 0.002, "todo": 0.002})
    assert {select_toolsets("rare", random.Random(n)) for n in range(50)} == {("terminal",)}


def test_an_unknown_distribution_is_answered_with_its_neighbour():
    with pytest.raises(ConfigurationError, match=r"'defualt' is not known \(did you mean 'default'\?\)"):
        select_toolsets("defualt", random.Random(1))


@pytest.mark.parametrize(
    ("chances", "said"),
    [
        ({}, "must map toolsets to chances"),
        ([("file", 1)], "must map toolsets to chances"),
        ({"fil": 1}, r"toolset 'fil' is not known \(did you mean 'file'\?\)"),
        ({"file": 101}, "file: must be a percentage from 0 to 100, not 101"),
        ({"file": -1}, "file: must be a percentage"),
        ({"file": math.nan}, "file: must be a percentage"),
        ({"file": "100"}, "file: must be a percentage"),
        ({"file": True}, "file: must be a percentage"),
        ({"file": 0}, "at least one chance must be over 0"),
        ({"memory": 50}, "memory outlives a rollout"),
    ],
)
def test_a_distribution_that_cannot_be_meant_is_refused(chances, said):
    with pytest.raises(ConfigurationError, match=f"distribution 'mine'.*{said}"):
        register_distribution("mine", chances)
    assert "mine" not in DISTRIBUTIONS


def test_distributions_from_a_file(tmp_path):
    path = tmp_path / "distributions.toml"
    path.write_text("[mine]\nterminal = 100\ntodo = 25.5\n[other]\nfile = 1\n")
    assert load_distributions(path) == ["mine", "other"]
    assert dict(DISTRIBUTIONS["mine"]) == {"terminal": 100, "todo": 25.5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[good]\nfile = 1\n[bad]\nfile = 200\n",
            r"distributions.toml', table \[bad\], file: must be a percentage",
        ),
        ("file = 100\n", r"table \[file\]: must map toolsets"),
        ("", "has no table"),
        ("[bad", "is not TOML"),
    ],
)
def test_a_file_with_a_fault_adds_nothing(tmp_path, text, said):
    path = tmp_path / "distributions.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        load_distributions(path)
    assert len(DISTRIBUTIONS) == 9
    with pytest.raises(ConfigurationError, match="can't be read"):
        load_distributions(tmp_path / "nowhere.toml")
