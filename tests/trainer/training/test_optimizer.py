"""Adam, Muon and Adagrad: their first steps against the formulas, and against the libraries where these do
the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtimes.base.errors import MissingPackageError
from trainer.model.config import SpanConfig, VocabularyConfig
from trainer.model.model import LanguageModel
from trainer.run.config import TrainConfig
from trainer.training.optimizer import make_optimizer, optimizer_tensors, set_rate_and_clip

Make = Callable[..., TrainConfig]
Gradients = list[tuple[list[float], list[list[float]]]]
CLIP, RATE = 0.5, 0.1


class Two(nn.Module):
    """One tensor with a small gradient, one with a large one, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.large = nn.Parameter(torch.tensor([[3.0, -4.0]]))
        self.unused = nn.Parameter(torch.tensor([5.0]))


def stepped(config: TrainConfig, gradients: Gradients) -> tuple[Two, list[float], dict[str, Tensor]]:
    model = Two()
    optimizer = make_optimizer(config, model)
    norms = []
    for small, large in gradients:
        model.small.grad, model.large.grad = torch.tensor(small), torch.tensor(large)
        norms.append(float(set_rate_and_clip(optimizer, RATE, CLIP)))
        optimizer.step()
    return model, norms, optimizer_tensors(optimizer, model)


GRADIENTS: Gradients = [([0.3, 0.0], [[3.0, 4.0]]), ([-0.1, 0.2], [[0.0, 0.4]])]


def test_adagrad_clips_each_tensor_and_sums_unclipped_gradients(make_config: Make) -> None:
    model, norms, state = stepped(make_config(optimizer="adagrad"), GRADIENTS)
    assert norms == pytest.approx([(0.3**2 + 25) ** 0.5, (0.1**2 + 0.2**2 + 0.4**2) ** 0.5])
    # small: norms 0.3 and 0.22 are below the clip of 0.5
    assert model.small.tolist() == pytest.approx(
        [1 - 0.1 * 0.3 / 0.3 + 0.1 * 0.1 / 0.1**0.5, 2 - 0.1 * 0.2 / 0.2], abs=1e-6
    )
    # large: the norm 5 makes the first step ten times smaller; the second is not clipped
    assert model.large[0].tolist() == pytest.approx([3 - 0.01, -4 - 0.01 - 0.1 * 0.4 / 16.16**0.5], abs=1e-6)
    assert state["sum.large"][0].tolist() == pytest.approx([9.0, 16.16])
    assert model.unused.item() == 5
    assert state["step.unused"].item() == 0


def assert_same_steps(
    model: nn.Module, library: Two, optimizer: torch.optim.Optimizer, norms: Sequence[float]
) -> None:
    """The library's own optimiser reaches the weights of `model`, with gradients clipped by hand."""
    for (small, large), norm in zip(GRADIENTS, norms, strict=True):
        factor = min(1.0, CLIP / norm)
        library.small.grad, library.large.grad = torch.tensor(small) * factor, torch.tensor(large) * factor
        optimizer.step()
    for name, parameter in library.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], parameter, rtol=1e-5, atol=1e-7)


def test_adam_clips_the_whole_gradient(make_config: Make) -> None:
    model, norms, state = stepped(make_config(), GRADIENTS)
    library = Two()
    optimizer = torch.optim.Adam(library.parameters(), lr=RATE, fused=False)
    assert_same_steps(model, library, optimizer, norms)
    assert state["exp_avg.large"].shape == (1, 2)
    assert (state["step.large"].item(), state["step.unused"].item()) == (2, 0)


def test_adamw_shrinks_matrices_and_nothing_else(make_config: Make) -> None:
    recipe = {"betas": (0.8, 0.95), "epsilon": 1e-6, "clip": CLIP}
    # `large` is a matrix, `small` is not.
    model, norms, _ = stepped(make_config(optimizer="adamw", weight_decay=0.3, **recipe), GRADIENTS)
    library = Two()
    optimizer = torch.optim.AdamW(
        [{"params": [library.small], "weight_decay": 0.0}, {"params": [library.large], "weight_decay": 0.3}],
        lr=RATE,
        betas=(0.8, 0.95),
        eps=1e-6,
        fused=False,
    )
    assert_same_steps(model, library, optimizer, norms)


def test_muon_changes_linear_layers_and_adamw_the_rest(make_config: Make) -> None:
    recipe = {"betas": (0.8, 0.95), "epsilon": 1e-6, "weight_decay": 0.3}
    config = make_config(optimizer="muon", vocab_size=20, **recipe)
    model = LanguageModel(config.model)
    library = copy.deepcopy(model)
    named = dict(library.named_parameters())
    linear = {f"{name}.weight" for name, module in library.named_modules() if isinstance(module, nn.Linear)}
    tables = {name for name in named if name.startswith("vocabulary.table")}
    others = named.keys() - linear - tables
    optimizers = [
        torch.optim.Muon(
            [named[name] for name in linear], lr=RATE, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [
                {"params": [named[name] for name in tables], "weight_decay": 0.3},
                {"params": [named[name] for name in others], "weight_decay": 0.0},
            ],
            lr=RATE,
            betas=(0.8, 0.95),
            eps=1e-6,
            fused=False,
        ),
    ]
    optimizer = make_optimizer(config, model)
    for _ in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            named[name].grad = parameter.grad.clone()
        set_rate_and_clip(optimizer, RATE, 1e9)
        for either in (optimizer, *optimizers):
            either.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=1e-5, atol=1e-6)
    assert optimizer_tensors(optimizer, model).keys() == {
        *(f"momentum_buffer.{name}" for name in linear),
        *(f"{kind}.{name}" for name in named.keys() - linear for kind in ("step", "exp_avg", "exp_avg_sq")),
    }


def test_muon_names_the_pytorch_that_it_needs(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    config = make_config(optimizer="muon", vocab_size=20)
    with pytest.raises(MissingPackageError, match=r"needs PyTorch 2\.9"):
        make_optimizer(config, LanguageModel(config.model))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("sizes", "decayed", "kept"),
    [
        (
            {"vocabulary": VocabularyConfig(cutoffs=(4, 8), div_val=2)},
            ("vocabulary.table.0", "vocabulary.cluster_table", "blocks.0.query.weight"),
            ("positions.u", "positions.v", "blocks.0.attention_norm.weight", "blocks.0.expand.bias"),
        ),
        (
            {
                "sublayers": "all-attention",
                "persistent": 4,
                "d_ff": 0,
                "positions": "learned",
                "context": 9,
                "span": SpanConfig(maximum=8),
            },
            ("blocks.0.persistent.key", "blocks.1.out.weight"),
            ("positions.table", "blocks.0.span.share"),
        ),
    ],
)
def test_what_decays(
    make_config: Make, optimizer: str, sizes: dict[str, Any], decayed: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    config = make_config(optimizer=optimizer, weight_decay=0.1, vocab_size=20, **sizes)
    model = LanguageModel(config.model)
    groups = make_optimizer(config, model).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {name: decay[id(model.get_parameter(name))] for name in (*decayed, *kept)} == {
        **dict.fromkeys(decayed, 0.1),
        **dict.fromkeys(kept, 0.0),
    }
    assert len(decay) == len(list(model.parameters()))
