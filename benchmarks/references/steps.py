"""Training steps of the papers' public code, with the weights of a model of this project.

The code runs in this process, in turns with this project's own steps, so that both are timed alike.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtimes.base.errors import ConfigError
from trainer.run.config import TrainConfig
from trainer.training.optimizer import make_optimizer
from trainer.training.schedule import first_token
from trainer.training.state import Training


@contextmanager
def _modules_of(folder: Path, file: str, project: str) -> Iterator[None]:
    """A block in which the folder's modules can be imported.

    They were written for the PyTorch of 2019, on a GPU: masks of bytes are booleans today, and a version of
    CUDA is asked for at import.
    """
    if not (folder / file).is_file():
        raise ConfigError(f"{folder} has no {file}; give the folder of {project} that holds it.")
    before, version, byte = list(sys.path), torch.version.cuda, Tensor.byte
    # At the end, because one of the projects has a module named as a package of this one.
    sys.path += [str(folder), str(folder / "utils")]
    torch.version.cuda = version or "10.0"
    try:
        yield
    finally:
        sys.path[:], torch.version.cuda, Tensor.byte = before, version, byte  # type: ignore[method-assign]


def transformer_xl_step(folder: Path, training: Training, tokens_BN: np.ndarray) -> Callable[[], float]:
    """A function that trains one step of the code of Dai et al. 2019 and returns its loss in nats.

    It begins with the weights of `training`, and has the same tokens and the same optimiser (fused Adam).
    """
    config, m = training.config, training.config.model
    with _modules_of(folder, "mem_transformer.py", "kimiyoung/transformer-xl (pytorch/)"):
        module: Any = importlib.import_module("mem_transformer")
    rule = config.training
    reference = module.MemTransformerLM(
        m.vocab_size,
        m.layers,
        m.heads,
        m.d_model,
        m.head_dim,
        m.d_ff,
        0.0,
        0.0,
        d_embed=m.d_model,
        tgt_len=rule.segment,
        ext_len=0,
        mem_len=rule.mem_len,
        same_length=rule.mask == "same-length",
    )
    ours = training.model
    names = {
        "word_emb.emb_layers.0.weight": ours.vocabulary.table["0"],
        "crit.out_layers.0.weight": ours.vocabulary.table["0"],
        "crit.out_layers.0.bias": ours.vocabulary.output_bias["0"],
        "r_w_bias": ours.get_parameter("positions.u")[0],
        "r_r_bias": ours.get_parameter("positions.v")[0],
    }
    for i in range(m.layers):
        part, block = f"layers.{i}", f"blocks.{i}"
        own = {name: tensor for name, tensor in ours.state_dict().items() if name.startswith(f"{block}.")}
        names[f"{part}.dec_attn.qkv_net.weight"] = torch.cat(
            [own[f"{block}.{name}.weight"] for name in ("query", "key", "value")]
        )
        names[f"{part}.dec_attn.r_net.weight"] = ours.get_parameter(f"positions.project.{i}.weight")
        names[f"{part}.dec_attn.o_net.weight"] = own[f"{block}.out.weight"]
        for kind in ("weight", "bias"):
            names[f"{part}.dec_attn.layer_norm.{kind}"] = own[f"{block}.attention_norm.{kind}"]
            names[f"{part}.pos_ff.layer_norm.{kind}"] = own[f"{block}.feed_forward_norm.{kind}"]
            names[f"{part}.pos_ff.CoreNet.0.{kind}"] = own[f"{block}.expand.{kind}"]
            names[f"{part}.pos_ff.CoreNet.3.{kind}"] = own[f"{block}.contract.{kind}"]
    _copy(reference, names)
    optimizer = make_optimizer(config, reference)
    memory: list[tuple[Tensor, ...]] = [()]

    def step(piece: Tensor) -> float:
        byte, Tensor.byte = Tensor.byte, Tensor.bool  # type: ignore[method-assign]
        try:
            loss, *after = reference(piece[:, :-1].T.contiguous(), piece[:, 1:].T.contiguous(), *memory[0])
        finally:
            Tensor.byte = byte  # type: ignore[method-assign]
        memory[0] = tuple(after)
        optimizer.zero_grad()
        loss.mean().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), config.optimizer.clip)
        optimizer.step()
        return float(loss.detach().mean())

    return _reading(step, config, tokens_BN)


def adaptive_span_step(folder: Path, training: Training, tokens_BN: np.ndarray) -> Callable[[], float]:
    """The same for the code of Sukhbaatar et al. 2019a, with learned spans and that code's own Adagrad."""
    config, m = training.config, training.config.model
    assert m.span is not None
    with _modules_of(folder, "adaptive_span.py", "facebookresearch/adaptive-span"):
        models: Any = importlib.import_module("models")
        adagrad: Any = importlib.import_module("adagrad_with_grad_clip")
    S, ours = m.span.maximum, training.model
    reference = models.TransformerSeq(
        vocab_size=m.vocab_size,
        hidden_size=m.d_model,
        nb_heads=m.heads,
        nb_layers=m.layers,
        attn_span=S,
        emb_dropout=0.0,
        adapt_io_params={"adapt_io_enabled": False},
        inner_hidden_size=m.d_ff,
        dropout=0.0,
        adapt_span_params={
            "adapt_span_enabled": True,
            "adapt_span_loss": m.span.penalty,
            "adapt_span_ramp": m.span.ramp,
            "adapt_span_init": m.span.initial,
            "adapt_span_cache": True,
        },
        pers_mem_params={"pers_mem_size": 0},
    )
    names = {
        "in_emb.weight": ours.vocabulary.table["0"],
        "out_emb.weight": ours.vocabulary.output_table["0"],
        "out_emb.bias": ours.vocabulary.output_bias["0"],
        # Column l is for the distance S - l. A token does not see itself.
        "key_pe": ours.get_parameter("positions.table")[1:].flip(0).T[None],
    }
    parts = {"proj_query": "query", "proj_key": "key", "proj_val": "value", "proj_out": "out"}
    for i in range(m.layers):
        for theirs, name in parts.items():
            names[f"layers.{i}.attn.{theirs}.weight"] = ours.get_parameter(f"blocks.{i}.{name}.weight")
        share = ours.get_parameter(f"blocks.{i}.span.share")
        names[f"layers.{i}.attn.attn.adaptive_span._mask.current_val"] = share[:, None, None]
        pairs = (("norm1", "attention_norm"), ("norm2", "feed_forward_norm"), ("ff.fc1", "expand"))
        for theirs, name in (*pairs, ("ff.fc2", "contract")):
            for kind in ("weight", "bias"):
                names[f"layers.{i}.{theirs}.{kind}"] = ours.get_parameter(f"blocks.{i}.{name}.{kind}")
    _copy(reference, names)
    settings = config.optimizer
    optimizer = adagrad.AdagradWithGradClip(reference.parameters(), lr=settings.lr, grad_clip=settings.clip)
    spans = [layer.attn.attn.adaptive_span for layer in reference.layers]
    memory = [[torch.zeros(config.batch, span.get_cache_size(), m.d_model) for span in spans]]

    def step(piece: Tensor) -> float:
        optimizer.zero_grad()
        log_probs, memory[0], _ = reference(piece[:, :-1], memory[0])
        nats = F.nll_loss(log_probs.flatten(0, 1), piece[:, 1:].flatten())
        (nats + sum(span.get_loss() for span in spans)).backward()
        optimizer.step()
        for span in spans:
            span.clamp_param()
        return float(nats.detach())

    return _reading(step, config, tokens_BN)


def _copy(reference: nn.Module, values: dict[str, Tensor]) -> None:
    """Gives every parameter of the public code its value; raises ConfigError where it has others."""
    own = dict(reference.named_parameters())
    if missing := sorted(own.keys() - values.keys()):
        raise ConfigError(
            f"the public code has a parameter {missing[0]}, which is not known; give its published version."
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(values[name])


def _reading(
    step: Callable[[Tensor], float], config: TrainConfig, tokens_BN: np.ndarray
) -> Callable[[], float]:
    """The step on the segments of the lanes, one after the other, as `Training.advance` reads them."""
    T, at, epoch = config.training.segment, 0, 0

    def next_step() -> float:
        nonlocal at, epoch
        if at + T >= tokens_BN.shape[1]:
            epoch += 1
            at = first_token(config, epoch, length=tokens_BN.shape[1], segment=T)
        piece = torch.from_numpy(tokens_BN[:, at : at + T + 1])
        at += T
        return step(piece)

    return next_step
