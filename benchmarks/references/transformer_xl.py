"""The public PyTorch code of Dai et al. 2019 (kimiyoung/transformer-xl) as a reference."""

from __future__ import annotations

import ast
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.references.model import ReferenceModel
from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig

MARKER = "mem_transformer.py"  # the file that tells the code's folder
KINDS = {"relative": 0, "shaw": 1, "absolute": 2, "per-layer": 3}  # its --attn_type
INITIAL = Namespace(init="normal", init_std=0.02, proj_init_std=0.01)  # the defaults of its train.py


class TransformerXL(ReferenceModel):
    """Its `MemTransformerLM`, with the values that its `train.py` starts from."""

    def __init__(self, folder: Path, config: ModelConfig, rule: MemoryRule) -> None:
        super().__init__(rule)
        _mend_pytorch()
        sys.path[:0] = [str(folder), str(folder / "utils")]
        self.model = import_module("mem_transformer").MemTransformerLM(
            config.vocab_size,
            config.layers,
            config.heads,
            config.d_model,
            config.head_dim,
            config.d_ff,
            config.dropout,
            config.attention_dropout,
            tie_weight=config.vocabulary.tie_weights,
            tgt_len=rule.segment,
            ext_len=0,
            mem_len=rule.mem_len,
            same_length=rule.mask == "same-length",
            attn_type=KINDS[config.positions],
            clamp_len=-1 if rule.clamp_len is None else rule.clamp_len,
        )
        initialise = _functions(folder / "train.py", ("init_weight", "init_bias", "weights_init"))
        self.model.apply(initialise["weights_init"])
        embedding = self.model.get_submodule("word_emb")
        embedding.apply(initialise["weights_init"])  # as train.py does after the shared output

    def empty(self, lanes: int) -> list[Tensor]:
        return []

    def losses(self, tokens: Tensor, targets: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        nats_TB, *memory = self.model(tokens.T.contiguous(), targets.T.contiguous(), *memory)
        return nats_TB.T, memory


def _functions(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """These functions of a script that cannot be imported, because it trains when it is."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    space: dict[str, Any] = {"nn": nn, "args": INITIAL}
    exec(compile(ast.Module(body=list(wanted), type_ignores=[]), str(path), "exec"), space)
    return space


def _mend_pytorch() -> None:
    """Gives this process what the code expects of PyTorch 0.4: a version of CUDA, and masks of bytes."""
    torch.version.cuda = torch.version.cuda or "10.0"
    if Tensor.masked_fill.__name__ == "with_bytes":  # done already
        return
    for name in ("masked_fill", "masked_fill_"):
        original = getattr(Tensor, name)

        def with_bytes(x: Tensor, mask: Tensor, value: float, original: Any = original) -> Tensor:
            answer: Tensor = original(x, mask.bool(), value)
            return answer

        setattr(Tensor, name, with_bytes)
