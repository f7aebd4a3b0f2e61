"""A module is compared with itself before it is traced: each way to be wrong is refused in a sentence."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from runtimes import check
from runtimes.base.errors import UserError
from runtimes.cli.info import info_command
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH, load_spec
from runtimes.contract.tensors import AnyForm
from tests.xl_export.tracing import modules
from tests.xl_export.tracing.modules import RULE, VOCAB
from xl_export import trace
from xl_export.artefact.traced import module_spec
from xl_export.artefact.validate import validate
from xl_export.artefact.write import finite_arrays
from xl_export.tracing.module import ModuleStep, digest_of, facts_of, form_of, refuse_other_modules
from xl_export.tracing.ring import ring_write
from xl_export.tracing.session import ModuleSession
from xl_export.tracing.verify import check_module, drift_of


@pytest.mark.parametrize(
    ("kind", "form"), [(modules.Base, "hidden"), (modules.Ring, "ring"), (modules.Gru, "own")]
)
def test_right_modules_pass_and_their_form_is_recognised(kind: type[nn.Module], form: str) -> None:
    step = ModuleStep(kind().eval())
    found, shapes = form_of(step, facts_of(step.module), RULE, None)
    assert (found, bool(shapes)) == (form, form == "own")
    assert check_module(step, RULE, found) == ()


def test_a_policy_may_forget_everything_at_the_end_of_an_episode() -> None:
    rule = MemoryRule(mem_len=modules.M, segment=1)
    assert check_module(ModuleStep(modules.Episodes().eval()), rule, "own") == ()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (modules.MemoryNotAdvanced, "memory tensor 0 of MemoryNotAdvanced is the same after every text"),
        (modules.MemoryNotRead, "the answers of MemoryNotRead do not depend on its memory"),
        (modules.RingPositionsIgnored, "a text that starts at position 0 with the memory of another one"),
        (modules.PaddingSeen, "after padding at negative positions"),
        (modules.FutureSeen, "before a token that changes"),
        (modules.WholeMemorySeen, "in segments and token by token"),
        (modules.RowsMixed, "at position 16 beside texts at other positions"),
        (modules.ManyRowsMixed, "at position 16 beside texts at other positions"),
        (modules.AColumnForEachRow, r"raised IndexError .*with tokens \[9, 4\]"),
        (modules.OnePositionForAll, "at position 0 beside texts at other positions"),
        (modules.OtherLogProb, "by log_prob and by logits"),
        (
            modules.Raises,
            r"Raises.step raised LookupError \(no such row\).*your code\) with .*positions .* from 4 to 7",
        ),
        (modules.Random, "to the same text twice"),
        (
            modules.MemoryGrows,
            r"gives a memory of float32 \[3, 12, 8\], and .*start one of float32 \[3, 6, 8\]",
        ),
        (modules.OtherVocabulary, "gives logits .* 257.*expected .*256"),
        (modules.NotFinite, "gives log-probabilities that are not numbers"),
        (modules.RingNotZero, "the ring with which RingNotZero starts is not zero"),
    ],
)
def test_wrong_modules_are_refused(kind: type[nn.Module], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        trace(kind(), tmp_path / "artefact", vocab=VOCAB, rule=RULE)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


Stack = modules.Stack
PLAIN, FULL_8 = MemoryRule(mem_len=8, segment=4), MemoryRule(mem_len=8, segment=4, mask="full")


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (Stack(8, 8), PLAIN),
        (Stack(11, 8), PLAIN),
        (Stack(8, 8, full=True), FULL_8),
        (modules.Gru(), MemoryRule(mem_len=64, segment=4)),  # a recurrent memory has no length
        (modules.Delayed(), MemoryRule(mem_len=2, segment=1)),
        (modules.Delayed(every=3), MemoryRule(mem_len=6, segment=1)),
    ],
)
def test_the_rule_may_say_how_far_a_module_looks(module: nn.Module, rule: MemoryRule) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_module(ModuleStep(module.eval()), rule, "own")


@pytest.mark.parametrize(
    ("module", "rule", "message"),
    [
        (
            Stack(6, 6),
            PLAIN,
            "the memory of Stack holds 6 tokens and the rule says mem_len=8; give mem_len=6",
        ),
        (Stack(16, 16, stride=2), PLAIN, "Stack looks back 16 tokens and the rule says mem_len=8"),
        (Stack(11, 11), PLAIN, "Stack looks back 11 tokens and the rule says mem_len=8; give mem_len=11"),
        (
            Stack(8, 8),
            MemoryRule(mem_len=0, segment=4),
            "Stack looks back 8 tokens and the rule says mem_len=0",
        ),
        (
            Stack(8, 8),
            FULL_8,
            r"looks back 8 tokens, however a text is cut; with mask=\"full\" the last one .* looks back 11",
        ),
    ],
)
def test_a_rule_that_the_module_does_not_have_is_refused(
    module: nn.Module, rule: MemoryRule, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trace(module, tmp_path / "artefact", vocab=VOCAB, rule=rule)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("module", "found"), [(Stack(8, 5), 5), (Stack(8, 8, stride=3), 6)])
def test_a_memory_that_is_held_and_not_read_is_warned_about(module: nn.Module, found: int) -> None:
    """Weights that decay to zero, as those of a learned span, are no other rule."""
    with pytest.warns(UserWarning, match=f"Stack looks back {found} tokens and the rule says mem_len=8"):
        check_module(ModuleStep(module.eval()), PLAIN, "hidden")


@pytest.mark.parametrize(
    "module",
    [
        modules.Base(),
        modules.Ring(),
        modules.Gru(),
        modules.Rope(torch.float64),
        modules.RopeByDistance(),
        modules.AddsPositions(lambda positions: positions % 48, 48),
        modules.AddsPositions(lambda positions: positions.clamp(max=99), 100),
    ],
)
def test_answers_that_do_not_drift(module: nn.Module) -> None:
    step = ModuleStep(module.eval())
    assert drift_of(step, RULE, form_of(step, facts_of(module), RULE, None)[0]) is None


@pytest.mark.parametrize(
    ("module", "first", "last"),
    [
        (modules.Rope(), 1 << 8, 1 << 16),  # float32 has 24 bits, and the tolerance leaves 10 of them
        (modules.Rope(torch.float16), 4, 1 << 8),
        (modules.IntPositions(), 1 << 31, 1 << 31),
        (modules.Sinusoids(), 4, 4),
    ],
)
def test_answers_that_drift_with_the_position(module: nn.Module, first: int, last: int) -> None:
    step = ModuleStep(module.eval())
    drift = drift_of(step, RULE, form_of(step, facts_of(module), RULE, None)[0])
    assert drift is not None
    assert first <= drift.position <= last
    assert f"from about position {drift.position:,} on" in drift.sentence


@pytest.mark.usefixtures("fast_traces")
def test_a_drift_is_a_warning_and_a_fact_of_the_artefact(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Rope gives other answers to the same text from about position"):
        artefact = trace(modules.Rope(), tmp_path / "a", vocab=VOCAB, rule=RULE)
    position = load_spec(artefact).drifts_from
    assert position
    text = CliRunner().invoke(info_command, [str(artefact)], catch_exceptions=False).output
    assert f"drifts      the same text has other answers from about position {position:,} on\n" in text
    assert check(artefact).passed


def test_the_tolerance_follows_the_roundings_of_the_module(tmp_path: Path) -> None:
    """Whose logits are up to 500; those of other tests are up to 3."""
    module = modules.Base()
    with torch.no_grad():
        module.out.weight *= 200
    exact = [weight.clone() for weight in module.parameters()]
    spec = load_spec(trace(module, tmp_path / "a", vocab=VOCAB, rule=RULE))
    assert spec.tolerance == 16 * spec.rounding > 1e-4
    assert spec.mean_tolerance == max(1e-4, 16 * spec.mean_rounding) < spec.tolerance
    assert all(torch.equal(*pair) for pair in zip(exact, module.parameters(), strict=True))
    assert "rounding    answers change by " in CliRunner().invoke(info_command, [str(tmp_path / "a")]).output
    with torch.no_grad():
        module.out.weight *= 1000
    with pytest.raises(UserError, match="if each weight is rounded once more"):
        trace(module, tmp_path / "b", vocab=VOCAB, rule=RULE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_module_in_half_precision_is_told_to_call_float(dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=r"bias of Base is b?float16; .*call module.float\(\) first"):
        refuse_other_modules(modules.Base().to(dtype))


FULL = MemoryRule(mem_len=modules.M, segment=modules.T, mask="full")


@pytest.mark.parametrize(("kind", "form"), [(modules.WholeMemorySeen, "hidden"), (modules.RingFull, "ring")])
def test_the_full_rule_lets_the_cut_matter(kind: type[nn.Module], form: AnyForm) -> None:
    check_module(ModuleStep(kind().eval()), FULL, form)


@pytest.mark.parametrize(
    ("kind", "form", "message"),
    [
        (modules.RingFutureSeen, "ring", "before a token that changes"),
        (modules.RingOwnFutureHidden, "ring", "after a step that was padded at its end"),
        (modules.RingFromSegmentEnd, "ring", "after a step that was padded at its end"),
        (modules.PaddingSeen, "hidden", "after padding at negative positions"),
        (modules.SegmentSeen, "own", "after padding at negative positions"),
    ],
)
def test_wrong_modules_are_refused_under_the_full_rule(
    kind: type[nn.Module], form: AnyForm, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_module(ModuleStep(kind().eval()), FULL, form)


def test_right_modules_with_unusual_tensors_pass() -> None:
    counting = modules.Counting().eval()
    check_module(ModuleStep(counting), RULE, "own")
    finite_arrays(counting)  # its mask has infinities
    assert len(digest_of(counting)) == 64
    check_module(
        ModuleStep(modules.WithoutMemory().eval()), MemoryRule(mem_len=0, segment=modules.T), "hidden"
    )
    counting.alpha.data.fill_(float("inf"))
    with pytest.raises(UserError, match="alpha holds values that are not finite"):
        finite_arrays(counting)


def test_the_digest_of_a_module_covers_buffers_that_are_not_saved() -> None:
    digests = set()
    for base in (1e4, 5e5):
        module = modules.Counting().eval()
        module.register_buffer("frequencies", base ** -torch.arange(4.0), persistent=False)
        digests.add(digest_of(module))
    assert len(digests) == 2


def test_a_ring_has_gradients() -> None:
    ring, new = torch.randn(2, 1, 5, 2), torch.randn(2, 1, 3, 2)
    positions = torch.tensor([[3, 4, 5], [0, 1, 2]])
    ring, new = (x.double().requires_grad_() for x in (ring, new))
    assert torch.autograd.gradcheck(lambda a, b: ring_write(a, b, positions), (ring, new))


def test_a_form_that_the_tensors_do_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"memory is ring and the module's tensors are 1 of \[6, 8\] a row"):
        trace(modules.Base(), tmp_path / "artefact", vocab=VOCAB, rule=RULE, memory="ring")


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    module = modules.Base()
    module.sizes = modules.Sizes(vocab_size=9, layers=1, d_model=modules.D)
    with pytest.raises(UserError, match="the vocabulary has 256 symbols and the module 9"):
        trace(module, tmp_path / "artefact", vocab=VOCAB, rule=RULE)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (modules.Base, modules.ShortPositions, "a text that goes on beyond token"),
        (modules.Base, modules.PaddingSeen, "rows with padding"),
        (modules.Signs, modules.ShortSigns, "a text that goes on beyond token"),
        (modules.Ring, modules.RingFull, "2 streams"),
    ],
)
def test_a_traced_graph_is_compared_where_positions_are_unusual(
    right: type[nn.Module], wrong: type[nn.Module], message: str
) -> None:
    """A module stands for the graph of another one; rows of unequal lengths are fed to a ring alone."""
    sessions = []
    for kind in (right, right, wrong):
        step = ModuleStep(kind().eval())
        vocab = VOCAB if step.language_model else None
        sessions.append(ModuleSession(step, vocab, module_spec(step, vocab, RULE, None)))
    validate({GRAPH: sessions[1]}, sessions[0])
    with pytest.raises(UserError, match=message):
        validate({GRAPH: sessions[2]}, sessions[0])
