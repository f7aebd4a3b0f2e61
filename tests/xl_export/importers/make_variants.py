"""Writes `tests/data/variants/`: what the public code computes for options that no oracle of `tests/data/`
has.

    python tests/xl_export/importers/make_variants.py KIMIYOUNG ADAPTIVE_SPAN [NAME ...]

NAME is a variant; all are written when none is named. The first arguments are clones of
kimiyoung/transformer-xl at 44781ed (the folder `pytorch/`, with the patches that `tests/data/README.md`
names) and of facebookresearch/adaptive-span at 27b815f. Weights are random, tokens too; nothing of the
programs is kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

OUT = Path(__file__).parents[2] / "data" / "variants"
SEGMENTS = (8, 8, 5, 8, 3)
SIZES: dict[str, Any] = {
    "n_token": 60,
    "n_layer": 2,
    "n_head": 2,
    "d_model": 12,
    "d_head": 5,
    "d_inner": 14,
    "dropout": 0.1,
    "dropatt": 0.2,
}
CLUSTERS: dict[str, Any] = {"cutoffs": [10, 25], "div_val": 2}
LENGTHS: dict[str, Any] = {"tgt_len": 8, "ext_len": 0, "mem_len": 4}
KIMIYOUNG: dict[str, dict[str, Any]] = {  # of the model; `eval`: its lengths, mask and clamp afterwards
    "kimiyoung-pre-norm": {"pre_lnorm": True, "eval": {"mem_len": 9, "same_length": True, "clamp_len": 6}},
    "kimiyoung-clusters": CLUSTERS
    | {"tie_projs": [True, False, True], "tie_weight": False, "eval": {"mem_len": 9}},
    "kimiyoung-one-table": {
        "cutoffs": [10, 25],
        "d_embed": 8,
        "tie_projs": [False, True, False],
        "eval": {"mem_len": 9, "same_length": True},
    },
    "kimiyoung-shaw": {"attn_type": 1, "eval": {"mem_len": 20, "same_length": True}},
    "kimiyoung-shaw-clamp-pre-norm": {
        "attn_type": 1,
        "pre_lnorm": True,
        "eval": {"mem_len": 9, "clamp_len": 5},
    },
    "kimiyoung-absolute": {"attn_type": 2, "eval": {"mem_len": 0}},
    "kimiyoung-absolute-clamp-pre-norm": {
        "attn_type": 2,
        "pre_lnorm": True,
        "eval": {"mem_len": 0, "clamp_len": 4},
    },
    "kimiyoung-per-layer": {"attn_type": 3, "d_head": 6, "eval": {"mem_len": 0}},
    "kimiyoung-per-layer-pre-norm": {"attn_type": 3, "d_head": 6, "pre_lnorm": True, "eval": {"mem_len": 0}},
}
IO = {"adapt_io_enabled": True, "adapt_io_divval": 2, "adapt_io_cutoffs": [10, 25]}
SPANS = {
    "adapt_span_enabled": True,
    "adapt_span_loss": 0,
    "adapt_span_ramp": 4,
    "adapt_span_init": 0.3,
    "adapt_span_cache": True,
}
ADAPTIVE_SPAN: dict[str, dict[str, Any]] = {
    "adaptive-span-fixed": {},
    "adaptive-span-io-tied-persistent": {
        "adapt_io_params": IO | {"adapt_io_tied": True},
        "spans": SPANS,
        "persistent": 3,
    },
    "adaptive-span-io": {"adapt_io_params": IO | {"adapt_io_tied": False}, "spans": SPANS},
    "adaptive-span-persistent-fixed": {"persistent": 3},
    # The softmax lies outside the spans, so that the epsilon of the normalisation counts; a window shorter
    # than the span.
    "adaptive-span-outside": {"spans": SPANS, "attn_span": 140, "positions": 12.0},
    "adaptive-span-outside-persistent": {"spans": SPANS, "attn_span": 140, "positions": 6.0, "persistent": 3},
}


def randomise(model: torch.nn.Module) -> torch.Tensor:
    """Weights large enough that every term shows, the same every time; and a stream [2, N + 1] of tokens."""
    draw = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if name.endswith("current_val"):
                parameter.uniform_(0.1, 0.7, generator=draw)
            elif "norm" in name and name.endswith("weight"):
                parameter.normal_(1, 0.1, generator=draw)
            else:
                parameter.normal_(0, 0.3, generator=draw)
    return torch.randint(0, SIZES["n_token"], (2, sum(SEGMENTS) + 1), generator=draw)


def write(name: str, stream: torch.Tensor, nll: list[torch.Tensor], settings: dict[str, Any]) -> None:
    arrays = {
        "tokens": stream[:, :-1].numpy(),
        "targets": stream[:, 1:].numpy(),
        "segments": np.array(SEGMENTS),
    }
    np.savez_compressed(OUT / name / "expected.npz", **arrays, nll=torch.cat(nll, dim=1).numpy())
    (OUT / name / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")
    (OUT / name / "vocab.txt").write_text("".join(f"word{i}\n" for i in range(SIZES["n_token"])))


def make_kimiyoung(name: str, options: dict[str, Any]) -> None:
    from mem_transformer import MemTransformerLM  # type: ignore[import-not-found]

    options = dict(options)
    chosen = {"same_length": False, "clamp_len": -1} | options.pop("eval")
    model = MemTransformerLM(**SIZES | LENGTHS | options).eval()
    stream = randomise(model)
    (OUT / name).mkdir(parents=True, exist_ok=True)
    torch.save(model, OUT / name / "model.pt")
    model.reset_length(8, 0, chosen["mem_len"])
    model.same_length, model.clamp_len, model.crit.keep_order = (
        chosen["same_length"],
        chosen["clamp_len"],
        True,
    )
    memory, nll, at = (), [], 0
    for length in SEGMENTS:
        piece = stream[:, at : at + length + 1].T.contiguous()
        loss, *memory = model(piece[:-1], piece[1:], *memory)
        nll.append(loss.detach().T)
        at += length
    mask = "same-length" if chosen["same_length"] else "full"
    settings = {"mem_len": chosen["mem_len"], "segment": 8, "mask": mask, "clamp_len": chosen["clamp_len"]}
    if options.get("attn_type") == 3:
        del settings["clamp_len"]
    write(name, stream, nll, settings)


def make_adaptive_span(name: str, options: dict[str, Any]) -> None:
    from models import TransformerSeq  # type: ignore[import-not-found]

    io, spans = (
        options.get("adapt_io_params", {"adapt_io_enabled": False}),
        options.get("spans", {"adapt_span_enabled": False}),
    )
    model = TransformerSeq(
        vocab_size=60,
        hidden_size=12,
        inner_hidden_size=14,
        nb_heads=3,
        nb_layers=2,
        attn_span=options.get("attn_span", 11),
        dropout=0.1,
        emb_dropout=0.1,
        adapt_io_params=io,
        adapt_span_params=spans,
        pers_mem_params={"pers_mem_size": options.get("persistent", 0)},
    ).eval()
    stream = randomise(model)
    if "positions" in options:
        with torch.no_grad():
            model.key_pe.mul_(options["positions"] / 0.3)
            for part, parameter in model.named_parameters():
                if part.endswith("current_val"):
                    parameter.mul_(0.2)
                elif part.endswith(("persistent_memory.key", "proj_query.weight")):
                    parameter.mul_(2)
    (OUT / name).mkdir(parents=True, exist_ok=True)
    state = {f"module.{key}": tensor for key, tensor in model.state_dict().items()}
    torch.save(
        {"iter_no": 0, "model": state, "logger": {}, "optimizer": {}, "scheduler_iter": 0},
        OUT / name / "checkpoint.pt",
    )
    cache = [torch.zeros(2, layer.attn.attn.get_cache_size(), 12) for layer in model.layers]
    nll, at = [], 0
    for length in SEGMENTS:
        targets = stream[:, at + 1 : at + length + 1].contiguous()
        with torch.no_grad():
            out, cache, _ = model(stream[:, at : at + length], cache, target=targets)
        nll.append(out if io["adapt_io_enabled"] else -out.gather(2, targets[:, :, None])[:, :, 0])
        at += length
    write(name, stream, nll, {"segment": 8} | ({"ramp": 4} if spans["adapt_span_enabled"] else {}))


if __name__ == "__main__":
    sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/utils", sys.argv[2]]
    wanted = sys.argv[3:] or [*KIMIYOUNG, *ADAPTIVE_SPAN]
    for name in wanted:
        make, table = (
            (make_kimiyoung, KIMIYOUNG) if name in KIMIYOUNG else (make_adaptive_span, ADAPTIVE_SPAN)
        )
        make(name, table[name])
