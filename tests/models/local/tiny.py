"""Models of a few thousand random weights with a vocabulary of their own: all the behaviour, none of the waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from taskmill.models import Request, Sampling
from taskmill.records import Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WORDS = (
    "The quick brown fox jumps over the lazy dog while seven wizards boil tea by the sea. "
    "What is the capital of France? Tell me a story about a ship, a storm and a lighthouse keeper. "
    "user assistant system tool answer question think call name arguments 0123456789"
)


def tiny_folder(
    folder: Path,
    *,
    template: str | None = CHATML,
    window: int = 512,
    sliding: int | None = None,
    seed: int = 0,
) -> Path:
    """A Llama of two layers, or a Mistral with a sliding window, saved as transformers saves models."""
    letters = Tokenizer(models.BPE())
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    letters.train_from_iterator(
        [WORDS] * 4,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<|pad|>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": window,
        # Large weights: random ones of the usual size make all tokens about equally likely.
        "initializer_range": 0.35,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = (
            LlamaForCausalLM(LlamaConfig(**shape))
            if sliding is None
            else MistralForCausalLM(MistralConfig(**shape, sliding_window=sliding))
        )
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def asking(text: str, *before: Message, **sampling: Any) -> Request:
    """A request of one user's turn, after those `before`."""
    return Request((*before, Message("user", text)), sampling=Sampling(**{"max_tokens": 12, **sampling}))
