"""Which tools each row of a run is offered, and that it is the same at every resume."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskmill.errors import ConfigurationError
from taskmill.models.base import Request
from taskmill.tools import register_distribution, tool
from taskmill.tools.distributions import _user
from tests.batch.mill import Mill, add, answering, prompt_of, prompts_of, says


def offers(model: Any) -> dict[str, tuple[str, ...]]:
    """What each prompt's first request offered."""
    found: dict[str, tuple[str, ...]] = {}
    for request in model.requests:
        found.setdefault(prompt_of(request), tuple(spec.name for spec in request.tools))
    return found


def used(stored: Any) -> dict[str, list[str]]:
    return {prompts_of([row])[0]: row["toolsets_used"] for row in stored.rows}


@pytest.fixture
def half() -> Any:
    """A distribution in which each draw matters."""
    register_distribution("half", {"terminal": 50, "file": 50, "todo": 50})
    yield "half"
    del _user["half"]


async def test_terminal_only_offers_terminal_and_file_to_every_row(mill: Mill) -> None:
    mill.prompts("a", "b")
    model = answering()

    stored = await mill.run(model, distribution="terminal_only")

    names = {"terminal", "process", "read_file", "write_file", "patch", "search_files"}
    assert all(set(offered) == names for offered in offers(model).values())
    assert used(stored) == {"a": ["file", "terminal"], "b": ["file", "terminal"]}


async def test_each_toolset_is_drawn_independently_for_every_row(mill: Mill, half: str) -> None:
    mill.prompts(*[str(number) for number in range(200)])

    stored = await mill.run(distribution=half, sync="none")

    drawn = [frozenset(toolsets) for toolsets in used(stored).values()]
    for toolset in ("terminal", "file", "todo"):
        assert 60 < sum(toolset in names for names in drawn) < 160
    assert len(set(drawn)) == 7, "every combination but none at all"


async def test_a_resumed_row_is_offered_what_it_would_have_had(mill: Mill, half: str) -> None:
    prompts = [str(number) for number in range(60)]
    mill.prompts(*prompts)
    first = answering()
    await mill.run(first, distribution=half, run_name="whole")

    await mill.run(distribution=half, max_samples=20)
    mill.prompts("new", *reversed(prompts))
    second = answering()
    await mill.run(second, distribution=half, resume=True)

    again = offers(second)
    assert len(again) == 41
    assert all(again[prompt] == offers(first)[prompt] for prompt in again if prompt != "new")


async def test_another_seed_draws_anew(mill: Mill, half: str) -> None:
    mill.prompts(*[str(number) for number in range(40)])
    one, other, same = answering(), answering(), answering()
    await mill.run(one, distribution=half, run_name="one", seed=1)
    await mill.run(other, distribution=half, run_name="other", seed=2)
    await mill.run(same, distribution=half, run_name="same", seed=1, num_workers=1, batch_size=40)

    assert offers(one) == offers(same)
    assert offers(one) != offers(other)


async def test_equal_rows_are_drawn_for_each_by_itself(mill: Mill, half: str) -> None:
    mill.prompts(*["same"] * 40)
    stored = await mill.run(distribution=half)
    assert len({tuple(row["toolsets_used"]) for row in stored.rows}) > 3


async def test_a_toolset_whose_needs_are_missing_is_left_out_with_a_word_on_why(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TAVILY_API_KEY", "EXA_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    mill.prompts("a")
    model = answering()

    stored = await mill.run(model, distribution="terminal_web")

    assert used(stored) == {"a": ["file", "terminal"]}
    assert "web_search" not in offers(model)["a"]
    notes = [event["message"] for event in mill.told("note")]
    assert any("'web' is left out" in note and "TAVILY_API_KEY" in note for note in notes)


async def test_a_distribution_of_which_nothing_is_there_is_refused_and_says_why(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TAVILY_API_KEY", "EXA_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    register_distribution("web_alone", {"web": 100})
    try:
        mill.prompts("a")
        with pytest.raises(ConfigurationError, match=r"web_alone.*web.*TAVILY_API_KEY"):
            await mill.run(distribution="web_alone")
    finally:
        del _user["web_alone"]


async def test_own_tools_are_offered_to_every_row_beside_the_drawn_ones(mill: Mill, half: str) -> None:
    mill.prompts(*[str(number) for number in range(10)])
    model = answering()

    stored = await mill.run(model, distribution=half, tools=[add])

    assert all("add" in offered for offered in offers(model).values())
    assert all("own" in toolsets for toolsets in used(stored).values())


async def test_an_own_tool_may_not_have_the_name_of_another(mill: Mill) -> None:
    @tool(name="terminal")
    def mine() -> str:
        """Mine."""
        return ""

    mill.prompts("a")
    for tools in ([mine], [add, add]):
        with pytest.raises(ConfigurationError, match=r"two tools are called '(terminal|add)'"):
            await mill.run(tools=tools)


async def test_without_any_tool_none_is_offered_and_none_is_recorded(mill: Mill) -> None:
    mill.prompts("a")
    model = answering()

    stored = await mill.run(model)

    assert model.requests[0].tools == ()
    assert used(stored) == {"a": []}


async def test_independent_calls_of_one_turn_may_run_side_by_side(mill: Mill) -> None:
    from taskmill.models.base import Completion
    from taskmill.records import Message, ToolCall
    from tests.batch.mill import turn_of

    together = asyncio.Event()
    running = 0

    @tool
    async def meet(number: int) -> int:
        """Wait for the other."""
        nonlocal running
        running += 1
        if running == 2:
            together.set()
        await together.wait()
        return number

    def script(request: Request) -> Any:
        if turn_of(request):
            return says()
        calls = tuple(ToolCall(f"c{n}", "meet", f'{{"number": {n}}}') for n in (1, 2))
        return Completion(Message("assistant", reasoning="hm", tool_calls=calls), finish_reason="tool_calls")

    mill.prompts("a")
    stored = await mill.run(answering(script), tools=[meet])

    observations = stored.rows[0]["conversations"][3]["value"]
    assert observations.index('"c1"') < observations.index('"c2"')
    assert stored.rows[0]["tool_stats"]["meet"] == {"count": 2, "success": 2, "failure": 0}
