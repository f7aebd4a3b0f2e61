"""llama.cpp's own server on a Llama of random weights that has a given number of bytes.

`python -m benchmarks.serving.llama MODEL.gguf THREADS STREAMS CONTEXT` serves a file until SIGTERM, and
prints its address. It needs the packages `xllamacpp`, which holds llama.cpp, and `gguf`, which writes files.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from trainer.model.config import ModelConfig

PACKAGES = ("xllamacpp", "gguf")
STEP = 32  # of the width of the feed-forward network
SPECIAL = 3  # tokens: the unknown one, the beginning and the end


def missing() -> str | None:
    """Why llama.cpp cannot be measured here, or None."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed; pip install {' '.join(PACKAGES)}" if absent else None


def feed_forward_width(model: ModelConfig, num_bytes: int) -> int:
    """The width of the feed-forward network with which a Llama of this depth and width has about `num_bytes`
    bytes in fp32.
    """
    attention = 4 * model.d_model * model.heads * model.head_dim
    words = num_bytes / 4 - 2 * (model.vocab_size + SPECIAL) * model.d_model
    width = (words / model.layers - attention) / (3 * model.d_model)
    return max(STEP, round(width / STEP) * STEP)


def write_model(path: Path, model: ModelConfig, num_bytes: int, *, context: int) -> None:
    """Writes a Llama of the sizes of the model with random weights in fp32.

    The special tokens come before those of the model.
    """
    import gguf

    width = feed_forward_width(model, num_bytes)
    draw = np.random.default_rng(0)
    inner = model.heads * model.head_dim
    vocabulary = model.vocab_size + SPECIAL
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(model.d_model)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    add_numbers(writer, vocabulary)
    shapes = {"token_embd": (vocabulary, model.d_model), "output": (vocabulary, model.d_model)}
    for layer in range(model.layers):
        block = f"blk.{layer}."
        shapes |= {block + f"attn_{name}": (inner, model.d_model) for name in "qkv"}
        shapes[block + "attn_output"] = (model.d_model, inner)
        shapes |= {block + f"ffn_{name}": (width, model.d_model) for name in ("gate", "up")}
        shapes[block + "ffn_down"] = (model.d_model, width)
    norms = [f"blk.{layer}.{kind}_norm" for layer in range(model.layers) for kind in ("attn", "ffn")]
    for name, shape in shapes.items():
        weights = draw.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        if name == "output":
            weights[:SPECIAL] = 0  # a logit of 0 is never the largest; these tokens would have no text
        writer.add_tensor(f"{name}.weight", weights)
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(model.d_model, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_numbers(writer: Any, vocabulary: int) -> None:
    """Adds special tokens, and numbers, so that each token is an event of a server's stream."""
    import gguf

    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    numbers = [f"\u2581{token}".encode() for token in range(vocabulary - SPECIAL)]  # with a blank before each
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>", *numbers])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * len(numbers)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def serve(path: str, threads: int, streams: int, context: int) -> None:
    """Serves the file with `streams` slots, each of `context` tokens, until SIGTERM."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = context * streams
    params.n_parallel = streams
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    file, *numbers = sys.argv[1:]
    serve(file, *map(int, numbers))
