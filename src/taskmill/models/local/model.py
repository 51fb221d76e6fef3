"""The local model: a request becomes tokens, a batch that is always running makes more, they become a completion."""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from taskmill.errors import ConfigurationError, ContextWindowError, ModelError
from taskmill.models.base import Completion, Request
from taskmill.models.catalog import HOW_TO_GET_LOCAL, is_model_folder, local_folder
from taskmill.models.sleeping import import_sleeping
from taskmill.records import Message, Usage

if TYPE_CHECKING:
    from taskmill.models.local.engine import Engine
    from taskmill.models.local.loading import Loaded
    from taskmill.models.local.prompts import Prompt
    from taskmill.models.local.row import Made, Task
    from taskmill.models.local.sampling import Rule

MAX_BATCH_SIZE = 64
"""Rows that share a forward pass at most, where nobody says another number."""

DEFAULT_MAX_TOKENS = 1024
"""Tokens of an answer, where nobody says how many it may have."""

HOW_TO_INSTALL = "install it with `pip install 'taskmill[local]'`"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class LocalModel:
    """Answers with a Hugging Face model inside this process; `path` is its folder, or its id on the hub.

    Requests that are under way together share forward passes: a request joins the running batch when it comes and
    leaves it when its answer ends. What it is answered does not depend on who is in the batch with it: in fp32 the same
    request with the same seed gives the same tokens alone and in company.

    Making one costs nothing. Weights are loaded by the first request, in a thread, and shared by all models of equal
    `path`, `device`, `dtype` and `adapters` in this process, as the running batch is; the last one closed lets them go.

    Args:
        path: a folder with `config.json`, or an id such as "Qwen/Qwen3-0.6B"; "local:" before it does no harm, and
            "local" alone is the small model that `taskmill models fetch local` makes.
        device: what torch calls it ("cpu", "cuda:1"); by default the first GPU, else the CPU.
        dtype: what torch calls it ("float32", "bfloat16"); by default bfloat16 on CUDA and float32 elsewhere.
        adapters: folders or ids of PEFT adapters of the mergeable kinds (LoRA and its like), added to the weights in
            this order; needs the package `peft`.
        max_batch_size: rows in one forward pass. Where models share a batch, the smallest number holds.
        context: tokens a conversation with its answer may have, where that is to be less than the model's window.
        memory: bytes for keys and values, of running rows and of turns kept for reuse; by default half of what is free
            on the device after loading.
        card_sampling: whether the model card's own sampling (`generation_config.json`: temperature, top-p, top-k,
            repetition penalty) holds where the request leaves it open. Otherwise that is temperature 1 and no more.
        name: the model's name in records; by default the last part of `path`.

    Raises:
        ConfigurationError: when torch or transformers are not installed, or an argument can't be meant.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str | None = None,
        dtype: str | None = None,
        adapters: Sequence[str | Path] = (),
        max_batch_size: int = MAX_BATCH_SIZE,
        context: int | None = None,
        memory: int | None = None,
        card_sampling: bool = False,
        name: str | None = None,
    ) -> None:
        for field, value in (("max_batch_size", max_batch_size), ("context", context), ("memory", memory)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{field}={value!r} must be at least 1")
        missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
        if missing:
            raise ConfigurationError(
                f"a local model needs {' and '.join(missing)}, not installed here: {HOW_TO_INSTALL}"
            )
        self.path = _place(path)
        self.device = device
        self.dtype = dtype
        self.adapters = tuple(_place(adapter) for adapter in adapters)
        self.max_batch_size = max_batch_size
        self.context = context
        self.memory = memory
        self.card_sampling = card_sampling
        self._name = name or Path(self.path).name
        self._used: _Used | None = None
        self._opening = threading.Lock()

    @property
    def name(self) -> str:
        """The model's name, as it stands in records."""
        return self._name

    async def complete(self, request: Request) -> Completion:
        """Answer `request` in the running batch.

        The answer ends at its end token, before a stop text (one that is said, not one that is thought), after
        `max_tokens`, or where the window ends. `token_ids` and `logprobs` count the end token too; log-probabilities
        are those of the model itself, before temperature and top-p.

        Raises:
            ContextWindowError: when the conversation alone fills the window, naming its tokens and the limit.
            BadRequestError: when the chat template refuses the conversation.
            ModelMemoryError: when there is no memory for it, even alone.
            ModelError: when the model can't be loaded, or its forward pass raises.
        """
        engine, loaded, prompt = await self._asked(request)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Made] = loop.create_future()

        def settle(made: Made | BaseException) -> None:
            if answered.done():
                return
            if isinstance(made, BaseException):
                answered.set_exception(made)
            else:
                answered.set_result(made)

        def deliver(made: Made | BaseException) -> None:
            # A loop that has ended refuses, and has nobody in it who waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, made)

        from taskmill.models.local.row import Row

        row = Row(self._task(request, loaded, prompt), deliver, ends=loaded.ends, decode=loaded.decode)
        engine.submit(row)
        try:
            made = await answered
        except asyncio.CancelledError:
            row.cancel()
            raise
        return self._completion(request, loaded, prompt, made)

    async def reference(self, request: Request) -> Completion:
        """Answer `request` alone and by the plain `generate` of transformers: slow, and what tests compare with.

        The running batch waits meanwhile. Raises what `complete` does.
        """
        from taskmill.models.local.reference import generate

        engine, loaded, prompt = await self._asked(request)
        task = self._task(request, loaded, prompt)
        made = await asyncio.wrap_future(engine.run(lambda batcher: generate(loaded, task)))
        return self._completion(request, loaded, prompt, made)

    async def count_tokens(self, request: Request) -> int:
        """How many tokens `request` takes up before it is answered."""
        engine, loaded = await self._ready()
        return len((await self._prompt(engine, loaded, request)).tokens)

    async def window(self) -> int:
        """Tokens that a conversation with its answer may have."""
        _, loaded = await self._ready()
        return self._limit(loaded)

    def module(self) -> Any:
        """The torch module itself, for hooks; blocks until it is loaded.

        It is shared by all models of this recipe and runs in another thread. A pass may hold rows of many
        conversations, padded on the left, and may compute tokens again: a hook that is to see one conversation at a
        time wants `max_batch_size=1`. Turns kept for reuse are forgotten when hooks are added or taken away.
        """
        return self._open().loaded.result().module

    def tokenizer(self) -> Any:
        """The tokenizer; blocks until it is loaded."""
        return self._open().loaded.result().tokenizer

    async def close(self) -> None:
        """Let go of the weights, unless another model uses them. A later request loads them again."""
        used, self._used = self._used, None
        if used is not None:
            used.let_go()
            await asyncio.to_thread(used.engine.join)

    # -- inside -----------------------------------------------------------------------------------------------

    def _open(self) -> Engine:
        """The engine, which may still be loading. Imports torch: not for the event loop."""
        with self._opening:
            if self._used is None:
                import_sleeping("torch")
                from taskmill.models.local.engine import engine_for, leave
                from taskmill.models.local.loading import settle

                recipe = settle(self.path, self.device, self.dtype, self.adapters)
                engine = engine_for(recipe, id(self), max_rows=self.max_batch_size, memory=self.memory)
                # A model that is dropped without being closed lets go too.
                self._used = _Used(engine, weakref.finalize(self, leave, engine, id(self)))
            return self._used.engine

    async def _ready(self) -> tuple[Engine, Loaded]:
        engine = self._used.engine if self._used is not None else await asyncio.to_thread(self._open)
        try:
            return engine, await asyncio.wrap_future(engine.loaded)
        except Exception:
            await self.close()  # so that the next request tries again
            raise

    async def _asked(self, request: Request) -> tuple[Engine, Loaded, Prompt]:
        engine, loaded = await self._ready()
        prompt = await self._prompt(engine, loaded, request)
        limit, tokens = self._limit(loaded), len(prompt.tokens)
        if tokens >= limit:
            raise ContextWindowError(
                f"the conversation has {tokens} tokens, and the window of {self._name!r} has {limit}, "
                "its answer included: shorten it, or take a model with a larger window"
            )
        return engine, loaded, prompt

    async def _prompt(self, engine: Engine, loaded: Loaded, request: Request) -> Prompt:
        try:
            made = engine.prompts.submit(loaded.template.prompt, request)
        except RuntimeError:  # its thread has been told to end
            raise ModelError(f"the model {self._name!r} was closed while this turn was under way") from None
        return await asyncio.wrap_future(made)

    def _limit(self, loaded: Loaded) -> int:
        return loaded.window if self.context is None else min(self.context, loaded.window)

    def _task(self, request: Request, loaded: Loaded, prompt: Prompt) -> Task:
        from taskmill.models.local.row import Task

        sampling = request.sampling
        room = self._limit(loaded) - len(prompt.tokens)
        return Task(
            prompt=prompt.tokens,
            limit=min(
                room, DEFAULT_MAX_TOKENS if sampling.max_tokens is None else max(1, sampling.max_tokens)
            ),
            rule=self._rule(request, loaded),
            seed=sampling.seed,
            stop=sampling.stop,
            logprobs=sampling.logprobs,
            opened=prompt.opened,
        )

    def _rule(self, request: Request, loaded: Loaded) -> Rule:
        from taskmill.models.local.sampling import Rule

        rule = loaded.card if self.card_sampling else Rule()
        sampling = request.sampling
        if sampling.temperature is not None:
            rule = rule._replace(temperature=sampling.temperature)
        if sampling.top_p is not None:
            rule = rule._replace(top_p=sampling.top_p)
        return rule

    def _completion(self, request: Request, loaded: Loaded, prompt: Prompt, made: Made) -> Completion:
        call_id = "call_" + request.digest(self._name)[:12]
        turn = loaded.template.turn(made.text, request, opened=prompt.opened, call_id=call_id)
        thought = loaded.thinking_tokens(made.tokens, opened=prompt.opened) if turn.reasoning else 0
        return Completion(
            Message("assistant", turn.content, reasoning=turn.reasoning, tool_calls=turn.calls),
            usage=Usage(len(prompt.tokens), len(made.tokens), made.cached, thought),
            finish_reason="tool_calls" if turn.calls and made.finish == "stop" else made.finish,
            model=self._name,
            cost=0.0,
            seconds=made.seconds,
            waiting=made.waiting,
            token_ids=made.tokens if request.sampling.logprobs else None,
            logprobs=made.logprobs,
        )


class _Used(NamedTuple):
    engine: Engine
    let_go: Any


def _place(path: str | Path) -> str:
    """A folder as an absolute path; a hub id as it is; "local" is the small model made by `taskmill models fetch`."""
    if isinstance(path, str):
        path = path.removeprefix("local:")
    if path == "local":
        path = local_folder()
        if not is_model_folder(path):
            raise ConfigurationError(f"the small local model is not here: {HOW_TO_GET_LOCAL}")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if isinstance(path, str) and _HUB_ID.fullmatch(path):
        return path
    raise ConfigurationError(
        f"there is no model folder {str(path)!r}: give a folder with a config.json, or an id such as 'Qwen/Qwen3-0.6B'"
    )
