"""A module is compared with itself before it is traced: each way to be wrong is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from runtimes.base.errors import UserError
from runtimes.contract.rule import MemoryRule
from tests.xl_export.tracing import modules
from tests.xl_export.tracing.modules import RULE, VOCAB
from xl_export import trace
from xl_export.tracing.module import facts_of, form_of
from xl_export.tracing.verify import check_module


@pytest.mark.parametrize(
    ("kind", "form"), [(modules.Base, "hidden"), (modules.Ring, "ring"), (modules.Gru, "own")]
)
def test_right_modules_pass_and_their_form_is_recognised(kind: type[nn.Module], form: str) -> None:
    module = kind().eval()
    found, shapes = form_of(module, facts_of(module), RULE, None)
    assert (found, bool(shapes)) == (form, form == "own")
    check_module(module, RULE, found)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (modules.MemoryNotAdvanced, "memory tensor 0 of MemoryNotAdvanced is the same after every text"),
        (modules.MemoryNotRead, "the answers of MemoryNotRead do not depend on its memory"),
        (modules.PositionsIgnored, "a text that starts at position 0 with the memory of another one"),
        (modules.PaddingSeen, "after padding at negative positions"),
        (modules.FutureSeen, "before a token that changes"),
        (modules.WholeMemorySeen, "in segments and token by token"),
        (modules.RowsMixed, "to a text beside another one"),
        (modules.Random, "to the same text twice"),
        (
            modules.MemoryGrows,
            r"gives a memory of float32 \[2, 10, 8\], and .*start one of float32 \[2, 6, 8\]",
        ),
        (modules.OtherVocabulary, "gives logits .* 257.*expected .*256"),
        (modules.NotFinite, "gives log-probabilities that are not finite"),
        (modules.NotZero, "is not zero, and every stream starts with zeros"),
        (modules.NoStep, "NoStep has no `step`"),
    ],
)
def test_wrong_modules_are_refused(kind: type[nn.Module], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        trace(kind(), tmp_path / "artefact", vocab=VOCAB, rule=RULE)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_full_rule_lets_the_cut_matter() -> None:
    module = modules.WholeMemorySeen().eval()
    check_module(module, MemoryRule(mem_len=modules.M, segment=modules.T, mask="full"), "hidden")


def test_a_form_that_the_tensors_do_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"memory is ring and the module's tensors are 1 of \[6, 8\] a row"):
        trace(modules.Base(), tmp_path / "artefact", vocab=VOCAB, rule=RULE, memory="ring")


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    module = modules.Base()
    module.sizes = modules.Sizes(vocab_size=9, layers=1, d_model=modules.D)
    with pytest.raises(UserError, match="the vocabulary has 256 symbols and the module 9"):
        trace(module, tmp_path / "artefact", vocab=VOCAB, rule=RULE)
