"""Who takes part: a name, what answers for it, and what only it is told. A recipe of a few hundred bytes."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from taskmill.errors import BadRequestError, ConfigurationError, ModelError
from taskmill.models.base import Completion, Model, Reasoning, Request, Sampling
from taskmill.models.families import public_url
from taskmill.models.scripted import Line, as_completion
from taskmill.programs.conversation.stop import count
from taskmill.programs.conversation.templates import Template, check_template

Visibility = Literal["none", "speaker", "all"]
Kind = Literal["local", "embedded", "endpoint", "scripted", "function", "person", "model"]

Answer = Callable[[Request], Line | Awaitable[Line]]
"""A function that answers: it is given the request and returns a text. It may be async."""


class Person(Struct, frozen=True):
    """Somebody who types. `ask` is shown what was said last and returns the answer; by default, on the terminal."""

    ask: Callable[[str], str] | None = None


@dataclass(frozen=True, init=False)
class Participant:
    """One who takes part in conversations. Making one opens nothing.

    `model` is what answers:

    - the name of a model, with `base_url`, the address of an OpenAI-style endpoint (its key stands in the environment
      variable `api_key_env`);
    - the id or the folder of a Hugging Face model, without a `base_url`; it runs in this process, or on a device;
    - `"embedded"`, or a path that ends in `.gguf`;
    - a list of texts: what it says, one turn after another;
    - a function of the request that returns a text;
    - `Person()`, who types;
    - an object with the methods of `taskmill.models.Model`, for conversations of this process that are not stored.

    `system_prompt` and `context` are told to this participant alone: the one as part of its system block, the other
    as a turn of the moderator. Both may wait for a row of data. `tools` are toolsets by name, functions, or tools; it
    may call them up to `max_tool_rounds` times before it speaks. `context_window` is in tokens; where neither it nor
    the model says one, none is assumed. `thinking` asks the model to think (or not to), where it can be asked. `dtype`,
    `adapters` and `card_sampling` are for local models: see `taskmill.models.local.LocalModel`.
    """

    name: str
    model: Any
    system_prompt: Template | None = None
    context: Template | None = None
    tools: tuple[Any, ...] = ()
    max_tool_rounds: int = 8
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    thinking: bool | None = None
    base_url: str | None = None
    api_key_env: str = "MODEL_API_KEY"
    context_window: int | None = None
    dtype: str | None = None
    adapters: tuple[str, ...] = ()
    card_sampling: bool = False

    def __init__(self, name: str, model: Any, **fields: Any) -> None:
        values: dict[str, Any] = {
            key: info.default
            for key, info in type(self).__dataclass_fields__.items()
            if key not in ("name", "model")
        }
        unknown = fields.keys() - values.keys()
        if unknown:
            raise ConfigurationError(
                f"participant {name!r}: there is no field {min(unknown)!r}; there are {', '.join(sorted(values))}"
            )
        if isinstance(model, os.PathLike):
            model = os.fspath(model)
        values |= fields | {"name": name, "model": tuple(model) if isinstance(model, list) else model}
        for key in ("tools", "stop", "adapters"):
            values[key] = (values[key],) if isinstance(values[key], str) else tuple(values[key])
        for key, value in values.items():
            object.__setattr__(self, key, value)
        self._check()

    def _check(self) -> None:
        where = f"participant {self.name!r}"
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigurationError(f"a participant needs a name that is not blank, not {self.name!r}")
        kind = self.kind
        if self.base_url is not None and public_url(self.base_url) != self.base_url:
            raise ConfigurationError(
                f"{where}: base_url={public_url(self.base_url)!r} was given with a user or a query. Recipes are "
                "stored, and no secret belongs in them: put the key into the environment, and the name of its "
                "variable in api_key_env"
            )
        if self.base_url is not None and kind != "endpoint":
            raise ConfigurationError(
                f"{where}: base_url goes with the name of a model, not with {self.model!r:.100}"
            )
        for key in ("max_tokens", "context_window", "max_tool_rounds"):
            if getattr(self, key) is not None:
                count(where, key, getattr(self, key))
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigurationError(f"{where}: seed={self.seed!r} must be a whole number")
        for key, least, most in (("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0)):
            value = getattr(self, key)
            if value is not None and not (isinstance(value, int | float) and least <= value <= most):
                raise ConfigurationError(
                    f"{where}: {key}={value!r} must be a number from {least:g} to {most:g}"
                )
        check_template(self.system_prompt, f"{where}: system_prompt")
        check_template(self.context, f"{where}: context")

    @property
    def kind(self) -> Kind:
        """What answers for it. Raises `ConfigurationError` for what can't."""
        model = self.model
        if isinstance(model, str):
            if not model.strip():
                raise ConfigurationError(f"participant {self.name!r}: its model has a blank name")
            if self.base_url is not None:
                return "endpoint"
            return "embedded" if model == "embedded" or model.endswith(".gguf") else "local"
        if isinstance(model, Person):
            return "person"
        if isinstance(model, tuple):
            return "scripted"
        if hasattr(model, "complete") and hasattr(model, "close"):
            return "model"
        if callable(model):
            return "function"
        raise ConfigurationError(
            f"participant {self.name!r}: model={model!r:.100} is the name of a model, a list of answers, a function of "
            "the request, Person(), or a model object"
        )

    @property
    def brings_model(self) -> bool:
        """Whether its class opens a model of its own."""
        return type(self).open is not Participant.open

    @property
    def sampling(self) -> Sampling:
        """How it samples; the seed is that of a turn, and not here."""
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens, stop=self.stop
        )

    @property
    def reasoning(self) -> Reasoning | None:
        """What is asked about thinking."""
        return None if self.thinking is None else Reasoning(enabled=self.thinking)

    @property
    def model_name(self) -> str:
        """What answers, as records show it."""
        kind = self.kind
        if kind in ("endpoint", "local", "embedded"):
            return str(self.model)
        if kind == "model":
            return str(self.model.name)
        return kind if kind != "function" else getattr(self.model, "__name__", "function")

    def set(self, **fields: Any) -> Participant:
        """A copy with other values."""
        return type(self)(**{key: getattr(self, key) for key in type(self).__dataclass_fields__} | fields)

    def open(self) -> Model | None:
        """A model of this participant's own, for classes that bring one; `None` has it opened by its recipe.

        It is opened once for each process or device that runs conversations, and closed by whoever opened it.
        """
        return None


class ScriptedAnswers:
    """The model of a participant whose answers are given; `spoken` calls were answered before."""

    def __init__(self, name: str, answers: Sequence[Line], spoken: int) -> None:
        self._name = name
        self._answers = answers
        self._next = spoken

    @property
    def name(self) -> str:
        """See `Model`."""
        return "scripted"

    async def complete(self, request: Request) -> Completion:
        """The next answer. Raises `BadRequestError` when there is none left."""
        if self._next >= len(self._answers):
            raise BadRequestError(
                f"participant {self._name!r} has no answer left: {len(self._answers)} were given, and this is call "
                f"{self._next + 1}"
            )
        line = self._answers[self._next]
        self._next += 1
        if isinstance(line, BaseException):
            raise line
        return as_completion(line, model=self.name)

    async def close(self) -> None:
        """Nothing to let go of."""


class FunctionAnswers:
    """The model of a participant whose answers a function makes."""

    def __init__(self, function: Answer, name: str) -> None:
        self._function = function
        self._name = name

    @property
    def name(self) -> str:
        """See `Model`."""
        return self._name

    async def complete(self, request: Request) -> Completion:
        """What the function says; what it raises goes on as it is."""
        from inspect import isawaitable

        said: Any = self._function(request)
        if isawaitable(said):
            said = await said
        if isinstance(said, BaseException):
            raise said
        if not isinstance(said, str) and not hasattr(said, "role") and not isinstance(said, Completion):
            raise ModelError(f"the function {self._name!r} returned {said!r:.200}; a text is needed")
        return as_completion(said, model=self._name)

    async def close(self) -> None:
        """Nothing to let go of."""


class Typist:
    """The model of a participant who types."""

    def __init__(self, person: Person, name: str) -> None:
        self._ask = person.ask or _on_the_terminal
        self._name = name

    @property
    def name(self) -> str:
        """See `Model`."""
        return "person"

    async def complete(self, request: Request) -> Completion:
        """Show what was said last and wait for the answer, in a thread, so that others go on."""
        import asyncio

        heard = request.messages[-1].content if request.messages else ""
        said = await asyncio.to_thread(self._ask, f"{heard}\n\n{self._name}> ")
        return as_completion(said, model=self.name)

    async def close(self) -> None:
        """Nothing to let go of."""


def _on_the_terminal(shown: str) -> str:
    return input(shown)
