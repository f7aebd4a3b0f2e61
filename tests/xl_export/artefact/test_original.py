"""A module and its artefact are compared with the loop of the model that they stand for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from runtimes.base.errors import ArtefactError
from runtimes.cli.info import info_command
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import load_spec
from runtimes.contract.vocabulary import IdsVocab
from runtimes.tasks.check import check
from tests.xl_export.tracing.modules import RULE, VOCAB, Base, M, T
from xl_export import Sizes, trace
from xl_export.artefact.original import OriginalStreams
from xl_export.artefact.traced import module_spec
from xl_export.tracing.module import ModuleStep, features
from xl_export.tracing.session import ModuleSession

CUT = 3
CUT_RULE = MemoryRule(mem_len=CUT, segment=T)


class Cut(Base):
    """A wrong glue of `Base` that remembers only CUT tokens. It keeps every promise of its own rule."""

    def start(self, batch: int) -> list[Tensor]:
        return [each[:, :CUT] for each in super().start(batch)]

    def distance(self, tokens: Tensor) -> Tensor:
        return super().distance(tokens)[:, M - CUT :]

    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        return super().hidden(distance, positions) | (distance > CUT)


def original(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """`Base` over the whole text."""
    net = Base()
    text = tokens if state is None else torch.cat([state, tokens], dim=1)
    x = net.table(text)
    place = torch.arange(text.shape[1])
    answer = net.attend(x, net.key(x), net.value(x), place[:, None] - place, place[None])
    return net.out(x + answer)[:, -tokens.shape[1] :], text


class Sums(nn.Module):
    """Two outputs, of which `last` has no value for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = {"x": features(2)}

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, 2)]

    def step(self, inputs: Any, positions: Tensor, memory: Any) -> Any:
        goes_on = positions[:, :1] > 0
        sums = inputs["x"].cumsum(1) + torch.where(goes_on, memory[0], 0.0)[:, None]
        return {"sums": sums, "last": sums[:, -1]}, [sums[:, -1]]


def summed(inputs: Any, state: Any) -> Any:
    sums = inputs["x"].cumsum(1) + (0 if state is None else state[:, None])
    return {"sums": sums, "last": sums[:, -1]}, sums[:, -1]


def doubled(inputs: Any, state: Any) -> Any:
    outputs, state = summed(inputs, state)
    return outputs | {"last": 2 * outputs["last"]}, state


class OddToken(nn.Module):
    """A recurrent model in which roundings change the answers to token 0 by much, and those to no other.

    wrong: the change of every logit in steps of more tokens than `right_up_to`.
    """

    def __init__(self, wrong: float = 0.0, right_up_to: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wrong, self.right_up_to = wrong, right_up_to
        self.sizes = Sizes(vocab_size=40, layers=1, d_model=8)
        self.table, self.out, self.cell = nn.Embedding(40, 8), nn.Linear(8, 40), nn.GRUCell(8, 8)
        self.odd = nn.Parameter(torch.tensor(0.7))

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, 8)]

    def step(self, tokens: Tensor, positions: Tensor, memory: Any) -> Any:
        h, logits = memory[0], []
        odd = torch.sin(self.odd * 4e5) * (torch.arange(40) == 0) / 2
        signs = 1.0 - 2.0 * (torch.arange(40) % 2)
        for n in range(tokens.shape[1]):
            h = self.cell(self.table(tokens[:, n]), h)
            wrong = self.wrong * signs * (tokens.shape[1] > self.right_up_to)
            logits.append(self.out(h) + odd * (tokens[:, n, None] == 0) + wrong)
        return torch.stack(logits, 1), [h]


def difference(
    module: Any,
    original: Any,
    rule: MemoryRule = RULE,
    up_to: int | None = None,
    fixed_rows: int | None = None,
) -> float:
    step = ModuleStep(module.eval(), fixed_rows)
    vocab = VOCAB if step.language_model else None
    spec = dataclasses.replace(module_spec(step, vocab, rule, None), fixed_rows=fixed_rows)
    return OriginalStreams(original, step, spec, up_to).difference(ModuleSession(step, vocab, spec))


def test_a_module_agrees_with_its_original() -> None:
    assert difference(Base(), original) < 1e-5
    assert difference(Cut(), original, CUT_RULE, up_to=CUT + 1) < 1e-5
    assert difference(Sums(), summed) < 1e-5


def test_a_cut_cache_is_refused_from_its_first_wrong_token_on() -> None:
    wrong = rf"Cut differs .* from token {CUT + 2} .* equals_up_to={CUT + 1} "
    with pytest.raises(ArtefactError, match=wrong):
        difference(Cut(), original, CUT_RULE)
    with pytest.raises(ArtefactError, match=wrong):
        difference(Cut(), original, CUT_RULE, up_to=CUT + 2)


def test_a_limit_within_a_whole_segment_is_compared_up_to_its_last_token() -> None:
    for up_to in (2, CUT + 1):
        assert difference(Cut(), original, CUT_RULE, up_to, fixed_rows=1) < 1e-5
    longer = MemoryRule(mem_len=CUT, segment=CUT)
    assert difference(Cut(), original, longer, CUT + 1, fixed_rows=1) < 1e-5
    with pytest.raises(ArtefactError, match=f"from token {CUT + 2} "):
        difference(Cut(), original, longer, CUT + 2, fixed_rows=1)


def test_the_original_reads_only_the_end_of_a_long_text_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xl_export.artefact.original.IN_PIECES", 5)
    later: list[list[int]] = []  # the lengths of the later pieces of each text

    def counted(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        if state is None:
            later.append([])
        else:
            later[-1].append(tokens.shape[1])
        return original(tokens, state)

    assert difference(Base(), counted) < 1e-5
    assert 0 < max(map(sum, later)) <= 5


def test_every_output_of_a_named_step_is_compared() -> None:
    with pytest.raises(ArtefactError, match=r"Sums differs from its original .* the original does\.$"):
        difference(Sums(), doubled)


@pytest.mark.usefixtures("fast_traces")
def test_one_ill_conditioned_token_leaves_the_tolerance_of_the_mean(tmp_path: Path) -> None:
    def traced(module: Any) -> Path:
        right = OddToken()

        def original(tokens: Tensor, state: Any) -> Any:
            logits, (h,) = right.step(tokens, tokens, [torch.zeros(1, 8) if state is None else state])
            return logits, h

        module.step_tokens = T if module.right_up_to else 1
        return trace(module, tmp_path / "a", vocab=IdsVocab(40), rule=RULE, original=original, force=True)

    spec = load_spec(traced(OddToken()))
    assert spec.mean_tolerance < 0.005 < 0.1 < spec.tolerance
    assert check(tmp_path / "a").passed
    with pytest.raises(ArtefactError, match=r"differs from its original by .* in the mean"):
        traced(OddToken(0.01))
    with pytest.raises(ArtefactError, match=r"in segments and token by token, by .* nats in the mean"):
        traced(OddToken(0.01, right_up_to=1))


@pytest.mark.usefixtures("fast_traces")
def test_the_difference_and_the_limit_are_facts_of_the_artefact(tmp_path: Path) -> None:
    module: Any = Cut()
    with pytest.raises(ArtefactError, match="Cut differs from its original"):
        trace(module, tmp_path / "a", vocab=VOCAB, rule=CUT_RULE, original=original)
    assert not (tmp_path / "a").exists()
    module.equals_up_to = CUT + 1
    artefact = trace(module, tmp_path / "a", vocab=VOCAB, rule=CUT_RULE, original=original)
    spec = load_spec(artefact)
    assert spec.original_difference is not None
    assert spec.original_difference < 1e-5
    assert spec.equals_up_to == CUT + 1
    text = CliRunner().invoke(info_command, [str(artefact)], catch_exceptions=False).output
    assert "original    agrees with the model's own loop to " in text
    assert f"cut         equals the original only for texts of up to {CUT + 1} tokens\n" in text
