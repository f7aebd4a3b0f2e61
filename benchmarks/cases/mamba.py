"""One token of a Mamba with random weights: an artefact in fp32 and int8, PyTorch, and llama.cpp.

--config gives the number of layers, the width and the vocabulary; `mamba-130m` is the size of a published
model. All sides have the same weights and generate greedily, and the cost of a token does not depend on how
many came before. PyTorch is the model of `transformers` with its own cache. llama.cpp runs in this process,
as the package `xllamacpp`, on GGUF files in fp32 and in Q8_0, with the matrices quantised that its own
quantiser would choose. It is left out if the packages are missing.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import runtimes
import xl_export
from benchmarks import measure
from benchmarks.checked_sessions import agreed
from benchmarks.harness import Document, Job, Row, megabytes, number
from benchmarks.serving import llama
from runtimes.base.logits import log_sum_exp
from runtimes.contract.spec import WEIGHTS
from runtimes.contract.vocabulary import IdsVocab
from xl_export.adapters import from_transformers

PYTORCH = "PyTorch"
PROMPT_TOKENS = 32  # read before the comparison
TURN_TOKENS = 16  # timed tokens of one turn of a side
WARMUP_TOKENS = 2  # untimed ones before them
CHECKED_TOKENS = 16  # the trace compares several times as many
COMPARED_TOKENS = 10  # of llama.cpp: the likeliest ones
TOLERANCES = {"fp32": 1e-3, "int8": 1.0, "Q8_0": 1.0}  # nats; another model is off by several


class Side(Protocol):
    """A model that reads a prompt and generates greedily."""

    def log_probs(self, prompt: list[int]) -> np.ndarray:
        """Those of the token after the prompt [V]; NaN for a token that is not reported."""

    def turn(self, tokens: int) -> float:
        """Milliseconds per token, for tokens one after another."""


class _Stepped:
    """A side in Python. step(token, state) returns logits [V] and the next state; None begins a text."""

    def __init__(self, step: Callable[[int, Any], tuple[np.ndarray, Any]]) -> None:
        self.step = step
        self.state: Any = None
        self.token = 0

    def log_probs(self, prompt: list[int]) -> np.ndarray:
        self.state = None
        for token in prompt:
            logits, self.state = self.step(token, self.state)
        log_probs: np.ndarray = logits - log_sum_exp(logits)
        return log_probs

    def turn(self, tokens: int) -> float:
        began = time.perf_counter()
        for _ in range(tokens):
            logits, self.state = self.step(self.token, self.state)
            self.token = int(logits.argmax())
        return (time.perf_counter() - began) * 1e3 / tokens


class _LlamaCpp:
    """llama.cpp's server without HTTP. Its first token comes from the prompt, and is not timed."""

    def __init__(self, path: Path, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 4 * PROMPT_TOKENS
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_gpu_layers = 0
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def log_probs(self, prompt: list[int]) -> np.ndarray:
        answer = self._ask(prompt, 1, n_probs=COMPARED_TOKENS)
        (token,) = answer["choices"][0]["logprobs"]["content"]
        found = np.full(max(each["id"] for each in token["top_logprobs"]) + 1, np.nan)
        for each in token["top_logprobs"]:
            found[each["id"]] = each["logprob"]
        return found

    def turn(self, tokens: int) -> float:
        return float(self._ask([0], tokens + 1)["timings"]["predicted_ms"] / tokens)

    def _ask(self, prompt: list[int], tokens: int, **options: Any) -> Any:
        fixed = {"ignore_eos": True, "cache_prompt": False, "samplers": ["top_k"], "top_k": 1}
        return self._server.handle_completions({"prompt": prompt, "n_predict": tokens, **fixed, **options})


@dataclass
class _Named:
    """A side and the size of what a step reads."""

    side: Side
    name: str
    precision: str
    weight_bytes: int


def run(job: Job) -> Iterator[Row]:
    """A row for each side; nothing is timed before all of them agree. repeats: turns of each side."""
    model = random_model(job)
    sides = [*_ours_and_pytorch(job, model)]
    if missing := llama.missing():
        job.say(f"llama.cpp is left out: {missing}")
    else:
        job.say(f"writing files for llama.cpp (xllamacpp {version('xllamacpp')})")
        sides += _llama_sides(job, model)
    compare([each.side for each in sides], [each.precision for each in sides], job.config.model.vocab_size)
    torch.set_num_threads(job.threads)  # the trace uses all
    turns = job.repeats(job.config.repeats)
    job.say(f"timing {turns} turns of {TURN_TOKENS} tokens of each side")
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(turns):
        for each, ms in zip(sides, found, strict=True):
            time.sleep(measure.REST_SECONDS)
            each.side.turn(WARMUP_TOKENS)
            ms.append(each.side.turn(TURN_TOKENS))
    for each, ms in zip(sides, found, strict=True):
        yield {
            "side": each.name,
            "precision": each.precision,
            "weight_bytes": each.weight_bytes,
            "token_ms": measure.timing(ms),
        }


def random_model(job: Job) -> Any:
    """A MambaForCausalLM with matrices of variance 1/columns, and no bias of zero."""
    from transformers import MambaConfig, MambaForCausalLM

    size = job.config.model
    torch.manual_seed(0)
    model = MambaForCausalLM(
        MambaConfig(vocab_size=size.vocab_size, hidden_size=size.d_model, num_hidden_layers=size.layers)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("conv1d.bias"):
                parameter.normal_(std=0.1)
            elif parameter.ndim > 1 and not name.endswith("A_log"):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def _ours_and_pytorch(job: Job, model: Any) -> Iterator[_Named]:
    module: Any = from_transformers(model)
    rule = xl_export.MemoryRule(mem_len=CHECKED_TOKENS, segment=1)
    vocab = IdsVocab(job.config.model.vocab_size)
    for precision in ("fp32", "int8"):
        job.say(f"tracing in {precision} and comparing with PyTorch")
        artefact = xl_export.trace(
            module, job.folder / precision, vocab=vocab, rule=rule, precision=precision
        )
        yield _Named(
            _Stepped(_artefact_step(artefact, job.threads)),
            "artefact",
            precision,
            (artefact / WEIGHTS).stat().st_size,
        )
    step = _Stepped(lambda token, state: _pytorch_step(module, token, state))
    yield _Named(step, PYTORCH, "fp32", sum(x.nbytes for x in model.parameters()))


def _artefact_step(artefact: Path, threads: int) -> Callable[[int, Any], tuple[np.ndarray, Any]]:
    session = runtimes.open_session(artefact, threads=threads, device="cpu")

    def step(token: int, memory: Any) -> tuple[np.ndarray, Any]:
        logits, memory = session.predict(np.array([[token]]), memory or session.start(1))
        return logits[0], memory

    return step


def _pytorch_step(module: Any, token: int, state: Any) -> tuple[np.ndarray, Any]:
    with torch.inference_mode():
        logits, state = module.original(torch.tensor([[token]]), state)
    return logits[0, -1].numpy(), state


def _llama_sides(job: Job, model: Any) -> Iterator[_Named]:
    for precision in ("fp32", "Q8_0"):
        path = job.folder / f"{precision}.gguf"
        write_gguf(path, model, quantised=precision == "Q8_0")
        yield _Named(_LlamaCpp(path, job.threads), "llama.cpp", precision, path.stat().st_size)


def write_gguf(path: Path, model: Any, *, quantised: bool) -> None:
    """Writes a MambaForCausalLM as llama.cpp's converter does.

    quantised: matrices are in Q8_0, or in fp16 if their rows have no multiple of 32 values.
    """
    import gguf

    logging.getLogger("gguf").setLevel(logging.WARNING)
    config = model.config
    writer = gguf.GGUFWriter(str(path), "mamba")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    llama.add_numbers(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MAMBA, config.num_hidden_layers)
    eight_bits = gguf.GGMLQuantizationType.Q8_0
    for name, parameter in model.named_parameters():  # a tied output layer is no second one
        weights = parameter.detach().numpy()
        raw = None
        if name.endswith("A_log"):
            weights = -np.exp(weights)
        elif name.endswith("conv1d.weight"):
            weights = weights[:, 0]
        elif quantised and weights.ndim == 2 and weights.shape[1] % 32:
            weights = weights.astype(np.float16)
        elif quantised and weights.ndim == 2:
            weights, raw = gguf.quants.quantize(weights, eight_bits), eight_bits
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, np.ascontiguousarray(weights), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare(sides: list[Side], precisions: list[str], vocab_size: int) -> None:
    """Raises ArtefactError if a side gives the token after a prompt another probability than the first.

    The first is the artefact in fp32, which the trace has compared with PyTorch.
    """
    prompt = np.random.default_rng(0).integers(0, vocab_size, PROMPT_TOKENS).tolist()
    expected = sides[0].log_probs(prompt)
    for side, precision in zip(sides[1:], precisions[1:], strict=True):
        found = side.log_probs(prompt)
        difference = float(np.nanmax(np.abs(found - expected[: len(found)])))
        agreed(difference, TOLERANCES[precision], f"a side in {precision} differs from the artefact in fp32")


def unavailable() -> str | None:
    """Why this machine cannot measure it, or None."""
    absent = importlib.util.find_spec("transformers") is None
    return "transformers is not installed; pip install 'xl-export[transformers]'" if absent else None


def _least(row: Row, document: Document) -> float:
    return 1e3 * float(row["weight_bytes"]) / float(document["limits"]["read_bytes"])


KEYS = ("side", "precision")
COLUMNS = {
    "side": "side",
    "weights": "precision",
    "MB of weights": megabytes("weight_bytes"),
    "at least, ms": _least,
    "ms per token": "token_ms",
    "times": lambda row, document: row["token_ms"]["median"] / _least(row, document),
    "tokens/s": lambda row, _: number(1e3 / row["token_ms"]["median"]),
}
NOTE = "*At least* is the time to read the weights once, at the machine's best rate."
