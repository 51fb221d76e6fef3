"""Weights and tokenizer from a folder or the hub, and what the batch has to know of them."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import psutil
import torch
import transformers
from torch import Tensor
from transformers.utils import logging as transformers_logging

from taskmill.errors import ModelError, ModelMemoryError
from taskmill.models.local.linear import FasterLinears
from taskmill.models.local.prompts import Template
from taskmill.models.local.row import THINK_CLOSE, THINK_OPEN
from taskmill.models.local.sampling import Rule

_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers whose whole state is keys and values."""


class Recipe(NamedTuple):
    """What makes two copies of a model the same."""

    path: str
    device: str
    dtype: str
    adapters: tuple[str, ...] = ()


class Loaded:
    """A model in memory. `exact` says that its rounding is fine enough to tell sure choices from others."""

    def __init__(self, recipe: Recipe, module: Any, tokenizer: Any) -> None:
        self.device = recipe.device
        self.module = module
        self.tokenizer = tokenizer
        self.template = Template(tokenizer, recipe.path)
        config = module.config.get_text_config(decoder=True)
        self.layers: int = config.num_hidden_layers
        self.window: int = _window(config, tokenizer)
        self.ends = _ends(module, tokenizer) | self.template.turn_ends
        self.pad: int = next(
            (n for n in (tokenizer.pad_token_id, tokenizer.eos_token_id) if n is not None), 0
        )
        self.exact = module.dtype == torch.float32
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.token_bytes: int = 2 * self.layers * heads * width * module.dtype.itemsize
        self.card = _card(module.generation_config)
        # The cache argument was renamed in transformers 5, and not every model takes all of the others.
        takes = inspect.signature(module.forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        self._takes_positions = "position_ids" in takes
        self._takes_logits_to_keep = "logits_to_keep" in takes
        self._linears = FasterLinears(module)

    def forward(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Any | None
    ) -> Tensor:
        """One pass. Returns the logits (rows, vocabulary; float32) of the last column.

        Without a cache it is computed as the module does by itself, the same on each call; with one, the fastest way.
        """
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": cache is not None}
        if cache is not None:
            given[self._cache_name] = cache
        if mask is not None:
            given["attention_mask"] = mask
        if positions is not None and self._takes_positions:
            given["position_ids"] = positions
        if self._takes_logits_to_keep:
            given["logits_to_keep"] = 1
        # Not inference mode: what a user's hook takes out of a pass should be a tensor like any other.
        with torch.no_grad(), nullcontext() if cache is None else self._linears.used():
            logits: Tensor = self.module(**given).logits
        return logits[:, -1].float()

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones too (a tool call may be made of them)."""
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def thinking_tokens(self, tokens: Sequence[int], *, opened: bool) -> int:
        """How many of an answer's tokens come before the end of its think block; all, where that never came."""
        if THINK_CLOSE not in self.decode(tokens):
            return len(tokens) if opened or THINK_OPEN in self.decode(tokens) else 0
        return bisect_left(
            range(len(tokens)), True, key=lambda count: THINK_CLOSE in self.decode(tokens[: count + 1])
        )

    def free_memory(self) -> int:
        """Bytes that are free where the model is."""
        if self.device.startswith("cuda"):
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(psutil.virtual_memory().available)


def settle(path: str, device: str | None, dtype: str | None, adapters: tuple[str, ...]) -> Recipe:
    """The recipe with what was left open filled in, for this machine."""
    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        known = str(torch.device(device))
    except RuntimeError as problem:
        raise ModelError(f"device={device!r} is none that torch knows: {_first_line(problem)}") from None
    if known == "cuda":
        known = "cuda:0"
    dtype = dtype or ("bfloat16" if known.startswith("cuda") else "float32")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ModelError(f"dtype={dtype!r} is none that torch knows: say 'float32', 'bfloat16' or 'float16'")
    return Recipe(path, known, dtype, adapters)


def load(recipe: Recipe) -> Loaded:
    """Load what `recipe` names.

    Raises:
        ModelMemoryError: when there is no memory for the weights.
        ModelError: when it can't be found or read, or is of a kind that can't be batched.
    """
    where = f"the model {recipe.path!r} could not be loaded on {recipe.device!r}"
    try:
        with _quietly():
            tokenizer = transformers.AutoTokenizer.from_pretrained(recipe.path)
            module = transformers.AutoModelForCausalLM.from_pretrained(
                recipe.path, dtype=getattr(torch, recipe.dtype)
            )
            for adapter in recipe.adapters:
                module = _merged(module, adapter)
            module = module.to(recipe.device).eval()
    except (torch.OutOfMemoryError, MemoryError) as problem:
        raise ModelMemoryError(
            f"{where}: there is not enough memory for its weights ({_first_line(problem)}). "
            "Load it in a smaller dtype, or on a device with more memory"
        ) from problem
    except Exception as problem:
        raise ModelError(f"{where}: {type(problem).__name__}: {_first_line(problem)}") from problem
    _check_kind(recipe, module)
    return Loaded(recipe, module, tokenizer)


def _merged(module: Any, adapter: str) -> Any:
    """The module with an adapter's weights added to its own: it stays a plain module of the same class."""
    peft: Any = import_module("peft")
    return peft.PeftModel.from_pretrained(module, adapter).merge_and_unload()


def _check_kind(recipe: Recipe, module: Any) -> None:
    config = module.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
    if kinds or getattr(module, "_is_stateful", False):
        raise ModelError(
            f"the model {recipe.path!r} keeps more than keys and values between tokens "
            f"({', '.join(sorted(kinds)) or 'a recurrent state'}), and its rows can't join and leave a batch: "
            "serve it by an endpoint (vLLM, llama.cpp) and give its address"
        )


def _window(config: Any, tokenizer: Any) -> int:
    known = getattr(config, "max_position_embeddings", None)
    if known:
        return int(known)
    length = tokenizer.model_max_length
    # Tokenizers that know no limit say a number of thirty digits.
    return int(length) if length < 1 << 31 else 2048


def _ends(module: Any, tokenizer: Any) -> frozenset[int]:
    ends = module.generation_config.eos_token_id
    found = set(ends if isinstance(ends, list | tuple) else [] if ends is None else [ends])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(int(end) for end in found)


def _card(config: Any) -> Rule:
    """The model card's own sampling. A card that says not to sample and gives no temperature says nothing here."""
    plain = Rule()
    temperature = getattr(config, "temperature", None)
    return Rule(
        temperature=plain.temperature if temperature is None else float(temperature),
        top_p=float(getattr(config, "top_p", None) or plain.top_p),
        # 50 is what older versions of transformers write where nobody has said anything.
        top_k=int(getattr(config, "top_k", None) or 0) if getattr(config, "do_sample", False) else 0,
        repetition_penalty=float(getattr(config, "repetition_penalty", None) or plain.repetition_penalty),
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without progress bars on standard error, which belongs to the display of the run."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _first_line(problem: BaseException) -> str:
    said = str(problem).strip().split("\n", 1)[0]
    return said or "no reason given"
