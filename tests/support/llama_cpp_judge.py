"""What llama.cpp computes from GGUF files, and the blocks that ggml's own functions make of values.

A script for the environment that has llama.cpp. Its argument is a JSON file: `tokens` (rows of numbers), `models`
(pairs of a file and the array of logits to write), `blocks` (the name of a function, the array of values, bytes of a
block, the array to write) and `vocabularies` (a file, texts, and the JSON file of their tokens to write). Everything is
computed by one thread of a processor, keys and values are float32.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib  # pyright: ignore[reportMissingImports]
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def logits(file: str, tokens: list[list[int]]) -> Array:
    """The logits of rows of tokens [rows, tokens, vocabulary]."""
    settings = lib.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(file.encode(), settings)
    assert model, f"llama.cpp does not load {file}"
    width = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    found: list[Array] = []
    for row in tokens:
        shape = lib.llama_context_default_params()
        shape.n_ctx = shape.n_batch = shape.n_ubatch = 64
        shape.n_threads = shape.n_threads_batch = 1
        shape.type_k = shape.type_v = shape.flash_attn_type = 0
        context = lib.llama_init_from_model(model, shape)
        batch = lib.llama_batch_init(len(row), 0, 1)
        batch.n_tokens = len(row)
        for number, token in enumerate(row):
            batch.token[number], batch.pos[number] = token, number
            batch.n_seq_id[number], batch.seq_id[number][0], batch.logits[number] = 1, 0, 1
        assert lib.llama_decode(context, batch) == 0
        found.append(np.ctypeslib.as_array(lib.llama_get_logits(context), (len(row), width)).copy())
        lib.llama_free(context)
    return np.stack(found)


def texts_as_tokens(file: str, texts: list[str]) -> list[list[int]]:
    """The tokens of texts, with those that the file puts around a text; control tokens in a text are found."""
    settings = lib.llama_model_default_params()
    settings.n_gpu_layers, settings.vocab_only = 0, True
    model = lib.llama_model_load_from_file(file.encode(), settings)
    assert model, f"llama.cpp does not load {file}"
    vocabulary, found = lib.llama_model_get_vocab(model), list[list[int]]()
    for text in texts:
        data = text.encode()
        room = (lib.llama_token * (len(data) + 8))()
        count = lib.llama_tokenize(vocabulary, data, len(data), room, len(room), True, True)
        assert count >= 0, text
        found.append(list(room[:count]))
    return found


def blocks(function: str, values: Array, size: int) -> Array:
    """Blocks of float32 values [blocks, elements]: uint8 [blocks, bytes]."""
    base = ctypes.CDLL(str(next((Path(str(lib.__file__)).parent / "lib").glob("libggml-base.*"))))
    made = np.zeros((len(values), size), "u1")
    getattr(base, function)(
        ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(made.ctypes.data), ctypes.c_int64(values.size)
    )
    return made


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    for file, texts, out in job["vocabularies"]:
        Path(out).write_text(json.dumps(texts_as_tokens(file, texts)))
    for file, out in job["models"]:
        np.save(out, logits(file, job["tokens"]))
    for function, values, size, out in job["blocks"]:
        np.save(out, blocks(function, np.load(values), size))
