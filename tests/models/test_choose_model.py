from __future__ import annotations

import subprocess
import sys

import pytest

from taskmill.errors import ConfigurationError
from taskmill.models import ScriptedModel, open_model
from taskmill.models.endpoint import Timeouts
from taskmill.models.retry import Retrying, RetryPolicy
from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import refusal
from tests.models.semantics import asking


async def test_a_name_and_an_endpoint_make_a_model_with_retries_and_cost() -> None:
    async with FakeEndpoint([refusal(500), "hello"]) as endpoint:
        model = open_model(
            "m",
            base_url=endpoint.url,
            timeouts=Timeouts(attempt=5),
            prices={"m": {"input": 1, "output": 1}},
            policy=RetryPolicy(base=0),
        )
        assert isinstance(model, Retrying)
        completion = await model.complete(asking("hi"))
        await model.close()
    assert (model.name, completion.attempts, completion.cost) == ("m", 2, 15 / 1e6)


def test_a_model_is_taken_as_it_is() -> None:
    model = ScriptedModel(["x"])
    assert open_model(model) is model


@pytest.mark.parametrize(
    ("model", "base_url", "says"),
    [
        ("gpt-4o", None, "set base_url"),
        (None, "http://localhost/v1", "set model"),
        ("", "http://localhost/v1", "set model"),
        ("m", "localhost/v1", "base_url='localhost/v1'"),
    ],
)
def test_what_is_missing_is_said(model: str | None, base_url: str | None, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        open_model(model, base_url=base_url)


def test_a_model_object_takes_no_address() -> None:
    with pytest.raises(ConfigurationError, match="base_url"):
        open_model(ScriptedModel([]), base_url="http://localhost/v1")


def test_the_protocol_and_the_scripted_model_pull_in_nothing_heavy() -> None:
    code = (
        "import sys, taskmill, taskmill.models, taskmill.models.base, taskmill.models.scripted\n"
        "heavy = {'aiohttp', 'pydantic', 'mcp', 'genai_prices', 'xllamacpp'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
