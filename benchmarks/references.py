"""The papers' public code, trained and scored like this project's models: the same text, steps and optimiser.

The code is not part of this project. The user names a folder with a checkout of it:

- `transformer-xl`: https://github.com/kimiyoung/transformer-xl (PyTorch part), for Dai et al. 2019;
- `adaptive-span`: https://github.com/facebookresearch/adaptive-span, for Sukhbaatar et al. 2019a and 2019b.

What today's PyTorch asks of it is changed from outside; no file of it is changed.
"""

from __future__ import annotations

import ast
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtimes.base.errors import ConfigError
from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig
from trainer.model.model import LanguageModel
from trainer.run.config import TrainConfig
from trainer.training.optimizer import make_optimizer, set_rate_and_clip
from trainer.training.schedule import first_token, learning_rate
from trainer.training.state import Training


class ReferenceModel(nn.Module):
    """A model of public code. A subclass sets `model`, and overrides `empty`, `losses` and `weights_of`."""

    marker: str  # the file by which the folder of the code is recognised
    model: nn.Module

    def __init__(self, folder: Path, config: ModelConfig, rule: MemoryRule) -> None:
        super().__init__()
        self.rule = rule

    def empty(self, lanes: int) -> list[Tensor]:
        """The memory of new streams, in the project's own form."""
        raise NotImplementedError

    def losses(self, tokens: Tensor, targets: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The loss in nats [B, T] of each target after tokens int64 [B, T], and the memory after them."""
        raise NotImplementedError

    def weights_of(self, ours: LanguageModel) -> dict[str, Tensor]:
        """The weights of a model of this project, by the names that the code gives them."""
        raise NotImplementedError

    def copy_weights(self, ours: LanguageModel) -> None:
        """Gives every parameter the value that it has in `ours`."""
        values = self.weights_of(ours)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(values[name])

    def penalty(self) -> Tensor:
        """What training minimises besides the mean loss."""
        return torch.zeros(())

    def constrain(self) -> None:
        """Puts parameters back into their range after a step."""

    def mean_span(self) -> float | None:
        """The mean learned span in tokens; None where spans are not learned."""
        return None


class ReferenceSession:
    """A reference as a session that `evaluate` can score: it is fed as it was trained."""

    def __init__(self, model: ReferenceModel) -> None:
        self.model = model.eval()
        self.rule = model.rule
        self.identity = "reference"

    def start(self, lanes: int) -> list[Tensor]:
        return self.model.empty(lanes)

    def score(
        self, tokens: np.ndarray, targets: np.ndarray, memory: list[Tensor]
    ) -> tuple[np.ndarray, list[Tensor]]:
        """log p [B, T] of the targets, and the memory after the tokens. A target of -1 is padding."""
        with torch.no_grad():
            nats, after = self.model.losses(
                torch.from_numpy(tokens), torch.from_numpy(targets).clamp(min=0), memory
            )
        return -nats.numpy(), after


ATTENTION_TYPES = {"relative": 0, "shaw": 1, "absolute": 2, "per-layer": 3}  # of Transformer-XL's --attn_type
INITIAL = Namespace(init="normal", init_std=0.02, proj_init_std=0.01)  # the defaults of its train.py


class TransformerXL(ReferenceModel):
    """`MemTransformerLM` of Dai et al. 2019, with the values that its `train.py` starts from."""

    marker = "mem_transformer.py"

    def __init__(self, folder: Path, config: ModelConfig, rule: MemoryRule) -> None:
        super().__init__(folder, config, rule)
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
            attn_type=ATTENTION_TYPES[config.positions],
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

    def weights_of(self, ours: LanguageModel) -> dict[str, Tensor]:
        names = {
            "word_emb.emb_layers.0.weight": ours.vocabulary.table["0"],
            "crit.out_layers.0.weight": ours.vocabulary.table["0"],
            "crit.out_layers.0.bias": ours.vocabulary.output_bias["0"],
            "r_w_bias": ours.get_parameter("positions.u")[0],
            "r_r_bias": ours.get_parameter("positions.v")[0],
        }
        for i in range(ours.config.layers):
            part = f"layers.{i}"
            block = f"blocks.{i}"
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
        return names


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


class AdaptiveSpan(ReferenceModel):
    """`TransformerSeq` of Sukhbaatar et al. 2019a and 2019b.

    Attention reaches `mem_len` tokens back, and never the token itself.
    """

    marker = "adaptive_span.py"

    def __init__(self, folder: Path, config: ModelConfig, rule: MemoryRule) -> None:
        super().__init__(folder, config, rule)
        sys.path.insert(0, str(folder))
        span = config.span
        self.width = config.d_model
        self.model = import_module("models").TransformerSeq(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            nb_heads=config.heads,
            nb_layers=config.layers,
            attn_span=rule.mem_len,
            emb_dropout=config.embedding_dropout or 0.0,
            inner_hidden_size=config.d_ff or 1,
            dropout=config.attention_dropout,
            adapt_io_params={"adapt_io_enabled": False},
            adapt_span_params={
                "adapt_span_enabled": span is not None,
                "adapt_span_loss": span.penalty if span else 0.0,
                "adapt_span_ramp": span.ramp if span else 32,
                "adapt_span_init": span.initial if span else 0.0,
                "adapt_span_cache": True,  # as all its launch scripts do
            },
            pers_mem_params={"pers_mem_size": config.persistent},
        )
        layers = self.model.get_submodule("layers").children()
        attentions: list[Any] = [layer.get_submodule("attn.attn") for layer in layers]
        self.attentions = attentions
        self.spans = [attention.adaptive_span for attention in attentions] if span else []

    def empty(self, lanes: int) -> list[Tensor]:
        lengths = [attention.get_cache_size() for attention in self.attentions]
        return [torch.zeros(lanes, length, self.width) for length in lengths]

    def losses(self, tokens: Tensor, targets: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        log_probs, memory, _ = self.model(tokens, memory, target=targets)
        return F.nll_loss(log_probs.transpose(1, 2), targets, reduction="none"), memory

    def penalty(self) -> Tensor:
        return torch.stack([span.get_loss() for span in self.spans]).sum() if self.spans else torch.zeros(())

    def constrain(self) -> None:
        for span in self.spans:
            span.clamp_param()

    def mean_span(self) -> float | None:
        shares = [span._mask.current_val.detach() for span in self.spans]
        return float(torch.stack(shares).mean()) * self.spans[0]._max_span if shares else None

    def weights_of(self, ours: LanguageModel) -> dict[str, Tensor]:
        names = {
            "in_emb.weight": ours.vocabulary.table["0"],
            "out_emb.weight": ours.vocabulary.output_table["0"],
            "out_emb.bias": ours.vocabulary.output_bias["0"],
            # Column l is for the distance S - l. A token does not see itself.
            "key_pe": ours.get_parameter("positions.table")[1:].flip(0).T[None],
        }
        parts = {"proj_query": "query", "proj_key": "key", "proj_val": "value", "proj_out": "out"}
        for i in range(ours.config.layers):
            for theirs, name in parts.items():
                names[f"layers.{i}.attn.{theirs}.weight"] = ours.get_parameter(f"blocks.{i}.{name}.weight")
            share = ours.get_parameter(f"blocks.{i}.span.share")
            names[f"layers.{i}.attn.attn.adaptive_span._mask.current_val"] = share[:, None, None]
            pairs = (("norm1", "attention_norm"), ("norm2", "feed_forward_norm"), ("ff.fc1", "expand"))
            for theirs, name in (*pairs, ("ff.fc2", "contract")):
                for kind in ("weight", "bias"):
                    names[f"layers.{i}.{theirs}.{kind}"] = ours.get_parameter(f"blocks.{i}.{name}.{kind}")
        return names


PROJECTS: dict[str, type[ReferenceModel]] = {"transformer-xl": TransformerXL, "adaptive-span": AdaptiveSpan}
REFERENCE_HELP = (
    "A folder with the public code of Transformer-XL or adaptive-span, which is trained too; may be repeated."
)


def code_folders(folders: Sequence[Path]) -> dict[str, Path]:
    """The folder with the modules of each reference; raises ConfigError for a folder that has none."""
    found: dict[str, Path] = {}
    for folder in folders:
        places = [folder, folder / "pytorch"]
        here = {
            project: at.resolve()
            for project, model in PROJECTS.items()
            for at in places
            if (at / model.marker).is_file()
        }
        if not here:
            markers = " or ".join(model.marker for model in PROJECTS.values())
            raise ConfigError(
                f"{folder} has no {markers}; give the folder of a checkout, whose address is in "
                "`benchmarks/references.py`."
            )
        found |= here
    return found


def reference_model(project: str, folder: Path, config: TrainConfig) -> ReferenceModel:
    """The model of the code in `folder`."""
    path = list(sys.path)
    try:
        return PROJECTS[project](folder, config.model, config.training)
    finally:
        sys.path[:] = path  # one of the projects has modules that are named as packages of this one


class ReferenceTraining:
    """A reference that trains step by step on lanes [B, N], with this project's optimiser and schedule.

    A step reads the next segment of every lane. At the end of the lanes the streams start again with empty
    memory, and at the token at which this project's training begins that pass.
    """

    def __init__(self, model: ReferenceModel, config: TrainConfig, tokens_BN: np.ndarray) -> None:
        self.model = model
        self.config = config
        self.tokens_BN = tokens_BN
        self.optimizer = make_optimizer(config, model.train())
        self.memory = model.empty(config.batch)
        self.number = self.at = self.epoch = 0

    def step(self) -> float:
        """The mean loss of one step in nats, before the step."""
        model = self.model
        config = self.config
        T = self.config.training.segment
        if self.at + T >= self.tokens_BN.shape[1]:
            self.memory = model.empty(config.batch)
            self.epoch += 1
            self.at = first_token(config, self.epoch, length=self.tokens_BN.shape[1], segment=T)
        piece = torch.from_numpy(self.tokens_BN[:, self.at : self.at + T + 1].astype(np.int64))
        nats, self.memory = model.losses(piece[:, :-1].contiguous(), piece[:, 1:].contiguous(), self.memory)
        self.optimizer.zero_grad()
        objective: torch.Tensor = nats.mean() + model.penalty()
        objective.backward()  # type: ignore[no-untyped-call]
        set_rate_and_clip(self.optimizer, learning_rate(config, self.number), config.optimizer.clip)
        self.optimizer.step()
        model.constrain()
        self.number += 1
        self.at += T
        return float(nats.detach().mean())


def reference_step(
    project: str, folder: Path, training: Training, tokens_BN: np.ndarray
) -> Callable[[], float]:
    """A function that trains one step of the code in `folder` and returns its loss in nats.

    It begins with the weights of `training`, and reads the same lanes [B, N] with the same optimiser.
    """
    model = reference_model(project, folder, training.config)
    model.copy_weights(training.model)
    return ReferenceTraining(model, training.config, tokens_BN).step
