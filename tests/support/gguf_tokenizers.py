"""Tokenizers of GGUF files, as llama.cpp's converter writes them into the metadata, and texts to compare them with.

The vocabularies are small, and trained here on a few sentences by the `tokenizers` library.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support.gguf import model_parts, save_gguf
from tests.support.oracles import judge

SENTENCES = [
    "A checkpoint is data, for reading and for writing; every tensor is accounted for.",
    "naïve café größe 北京 こんにちは здравствуй  two  spaces\tand tabs 12345 3.14 don't I'LL they've",
    "def read(self):\n    return self.values[0:10]  # the first ten\n\n\nmore",
    "The quick brown fox jumps over the lazy dog, again and again and again; 2026-11-28 10:20:30.",
]
TEXTS = [
    "", " ", "Hello world", "  two leading spaces", "trailing  ", "a\tb\nc\r\n\n\nd", "1234567890 and 3.14159, -7",
    "naïve café größe 北京 こんにちは",
    "emoji 😀👍🏽 and \u00a0 a space", "don't I'LL they've we'd", "def f(x):\n    return x",
    "<|end|> in the middle <|end|>", "<s>a</s> b </s>  c", "<think> user </think>", "CamelCase_snake-case/path.ext",
    "aaaaaaaaaaaaaaaaaaaaaaaa", "\u0416\u0438\u0437\u043d\u044c", "x" * 300, "a  b   c    d     e", "▁ is a sign",
]  # fmt: skip
DECOMPOSED = "cafe\u0301 A\u030angstro\u0308m"
CONTROL = ["<|begin|>", "<|end|>", "<|pad|>"]


@cache
def _trained(kind: str) -> tuple[list[str], list[str]]:
    """Tokens by their numbers, and merges."""
    found = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.pre_tokenizer = level if kind == "bytes" else pre_tokenizers.Metaspace()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if kind == "bytes" else []
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=letters, show_progress=False)
    found.train_from_iterator(SENTENCES * 3, trainer)
    model = json.loads(found.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def bytes_metadata(pre: str | None, **more: Any) -> dict[str, Any]:
    """A byte-level vocabulary; keys are those after `tokenizer.ggml.`, None leaves one out."""
    tokens, merges = _trained("bytes")
    stated = {
        "model": "gpt2", "pre": pre, "tokens": [*CONTROL, *tokens, "<think>"], "merges": merges,
        "token_type": [3, 3, 3, *[1] * len(tokens), 4], "bos_token_id": 0, "eos_token_id": 1, "padding_token_id": 2,
        "add_bos_token": True,
    }  # fmt: skip
    return _named({**stated, **more})


def pieces_metadata(**more: Any) -> dict[str, Any]:
    """A vocabulary of SentencePiece's pieces, whose scores mean the merges."""
    trained, _merges = _trained("pieces")
    pieces = [one for one in trained if len(one) > 1] + [one for one in trained if len(one) == 1]
    stated = {
        "model": "llama", "pre": "default",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{one:02X}>" for one in range(256)), *pieces, "<think>", "    "],
        "scores": [*[0.0] * 259, *(-float(one) for one in range(len(pieces))), 0.0, -1000.0],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4, 4], "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0,
    }  # fmt: skip
    return _named({**stated, **more})


def _named(stated: dict[str, Any]) -> dict[str, Any]:
    """Metadata by their full keys."""
    rows = {
        key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}": value
        for key, value in stated.items()
    }
    return {key: value for key, value in rows.items() if value is not None}


def readings(folder: Path, *, auto: bool = True, **how: Any) -> list[Any]:
    """What transformers makes of the texts with a folder's tokenizer: numbers, and text again.

    Args:
        folder: with a tokenizer, or a GGUF file that `gguf_file` names.
        auto: whether the class follows from the model's config.
        how: arguments of `from_pretrained`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = AutoTokenizer if auto else PreTrainedTokenizerFast
    found = kind.from_pretrained(str(folder), **how)
    rows: list[Any] = []
    for text in TEXTS:
        numbers = found.encode(text)
        bare = found.encode(text, add_special_tokens=False)
        rows.append([numbers, bare, found.decode(numbers), found.decode(bare, skip_special_tokens=True)])
    pair = found("a b", "c d")["input_ids"]
    names = [found.bos_token, found.eos_token, found.unk_token, found.pad_token, found.chat_template]
    return [rows, pair, names]


TEMPLATE = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
# label of the model → the metadata of its tokenizer.
MADE = {
    "llama-bpe": ("llama", bytes_metadata("llama-bpe")),
    "llama-bpe-end": ("llama", bytes_metadata("llama-bpe", add_eos_token=True, add_bos_token=False)),
    "llama-tekken": ("mistral", bytes_metadata("tekken")),
    "llama-pieces": ("llama", pieces_metadata()),
    "llama-pieces-plain": ("mixtral", pieces_metadata(add_bos_token=False, add_eos_token=True, add_space_prefix=True)),
    "qwen2": ("qwen2", bytes_metadata("qwen2", add_bos_token=False)),
    "qwen3": ("qwen3", bytes_metadata("qwen2", add_bos_token=None, bos_token_id=None)),
    "qwen3-moe": ("qwen3-moe", bytes_metadata("qwen2", add_bos_token=False)),
    "phi3-pieces": ("phi3", pieces_metadata()),
    "phi3-4o": ("phi3", bytes_metadata("gpt-4o", add_bos_token=False)),
    "gemma": ("gemma", pieces_metadata(add_space_prefix=False)),
    "gemma2": ("gemma2", pieces_metadata(add_space_prefix=False)),
    "gemma3": ("gemma3", pieces_metadata()),
    "gpt2": ("gpt2", bytes_metadata("gpt-2", add_bos_token=None)),
}  # fmt: skip


def file_of(label: str, tokenizer: dict[str, Any], folder: Path, **more: Any) -> Path:
    """A GGUF file of a model with another vocabulary."""
    metadata, tensors = model_parts(judge.source(label))
    rows = len(tokenizer.get("tokenizer.ggml.tokens", ()))
    for name in ("token_embd.weight", "output.weight"):
        if name in tensors:
            width = tensors[name].shape[1]
            tensors[name] = tensors[name][:1].repeat(max(rows, 1), axis=0).reshape(max(rows, 1), width)
    metadata = {key: value for key, value in metadata.items() if not key.endswith(".vocab_size")}
    folder.mkdir(exist_ok=True)
    return save_gguf(folder / "model.gguf", {**metadata, **tokenizer, **more}, tensors)
