"""A training step in PyTorch: what memory costs, what bf16 and spans save, and the papers' public code.

The public code is not part of this project. `--reference` names its folders:

- Transformer-XL, https://github.com/kimiyoung/transformer-xl
- adaptive spans, https://github.com/facebookresearch/adaptive-span

Each starts with the weights of this project's model, reads the same tokens, and must have the same losses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.checked_sessions import agreed
from benchmarks.configs import BenchmarkConfig
from benchmarks.harness import Document, Job, Row, option
from benchmarks.measure import take_turns, timing
from runtimes.base.errors import ConfigError
from runtimes.contract.rule import MemoryRule
from trainer.model.attention import relative_attention
from trainer.model.config import ModelConfig, SpanConfig, VocabularyConfig
from trainer.model.model import LanguageModel
from trainer.model.naive import naive_attention
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig
from trainer.training.optimizer import make_optimizer, set_rate_and_clip
from trainer.training.schedule import learning_rate
from trainer.training.state import Training

COMPARED_STEPS = 4
LOSS_TOLERANCE_NATS = 2e-3
SPAN_TOKENS = 100  # mean length of a learned span, which is far shorter than the longest that is possible
MARKERS = {"transformer-xl": "mem_transformer.py", "adaptive-span": "adaptive_span.py"}
OPTIONS = (
    option(
        "--reference",
        "A folder with the public code of Transformer-XL or adaptive-span, which is trained too; may be "
        "repeated.",
        multiple=True,
        type=click.Path(path_type=Path),
    ),
)
Step = Callable[[], float]  # trains one step and returns its loss


def run(job: Job) -> Iterator[Row]:
    """Rows with memory and without, in bf16, with spans, and of the public code of --reference."""
    config = job.config
    folders = dict(map(code_folder, job["reference"] or ()))
    if config.model.vocabulary.cutoffs and folders:
        raise ConfigError(
            f"{config.name} has an adaptive softmax, which is not compared; give another --config."
        )
    recipes = _recipes(config, job.threads)
    for name in ("fp32", "no memory", "spans"):
        job.say(f"{name}: comparing the attention of training with the naive one")
        check_attention(recipes[name])
    trainings = {name: _start(recipe) for name, recipe in recipes.items()}
    trainings["whole spans"].span_lengths.spans = []  # every key is computed
    sides: dict[str, Step] = {name: _stepper(training) for name, training in trainings.items()}
    for project, public, name in (
        ("transformer-xl", "reference", "fp32"),
        ("adaptive-span", "reference spans", "spans"),
    ):
        if project in folders:
            job.say(f"{public}: comparing the losses of {COMPARED_STEPS} steps from the same weights")
            ours, theirs = (_start(recipes[name]) for _ in range(2))
            step, public_step = _stepper(ours), reference_step(project, folders[project], theirs)
            worst = max(abs(step() - public_step()) for _ in range(COMPARED_STEPS))
            agreed(
                worst,
                LOSS_TOLERANCE_NATS,
                f"the losses differ from the losses of the code in {folders[project]}",
            )
            sides[public] = reference_step(project, folders[project], _start(recipes[name]))
            recipes[public] = recipes[name]
    repeats = job.repeats(config.repeats)
    job.say(f"timing {repeats} steps for each")
    times = take_turns(sides, repeats=repeats)
    tokens = {name: recipes[name].batch * recipes[name].training.segment for name in times}
    per_token = {name: timing(ms, per=tokens[name]) for name, ms in times.items()}
    for name, token in per_token.items():
        public = "reference spans" if "spans" in name else "reference"
        is_compared = public in per_token and name not in (public, "no memory")
        yield {
            "side": name,
            "mem_len": recipes[name].training.mem_len,
            "batch": recipes[name].batch,
            "token_ms": token,
            "over_no_memory": token["median"] / per_token["no memory"]["median"],
            "times_as_fast_as_public": per_token[public]["median"] / token["median"] if is_compared else None,
        }


def _recipes(config: BenchmarkConfig, threads: int) -> dict[str, TrainConfig]:
    """The recipes that are timed. Spans: two layers, a quarter of the size, the recipe of adaptive spans."""
    T = config.segment
    S = 4 * config.mem_len
    rule = MemoryRule(mem_len=T, segment=T, mask="full")
    plain = TrainConfig(
        model=config.model,
        training=rule,
        evaluation=rule,
        vocab="byte",
        batch=config.training_batch,
        threads=threads,
    )
    model = ModelConfig(
        layers=2,
        d_model=config.model.d_model,
        heads=config.model.heads,
        head_dim=config.model.head_dim,
        d_ff=config.model.d_ff or config.model.d_model,
        vocab_size=config.model.vocab_size,
        positions="learned",
        context=S + 1,
        span=SpanConfig(maximum=S, initial=min(1.0, SPAN_TOKENS / S), penalty=5e-7, epsilon=1e-8),
        vocabulary=VocabularyConfig(tie_weights=False, scale=False),
        initialization="uniform-fan-in",
    )
    far = MemoryRule(mem_len=S, segment=4 * T, include_self=False, initial_memory="zeros")
    spans = dataclasses.replace(
        plain,
        model=model,
        training=far,
        evaluation=far,
        # At this rate spans stay where they are, so all sides compute the same.
        optimizer=OptimizerConfig(kind="adagrad", lr=1e-5, clip=0.03),
    )
    return {
        "fp32": plain,
        "no memory": dataclasses.replace(plain, training=dataclasses.replace(rule, mem_len=0)),
        "bf16": dataclasses.replace(plain, autocast="bf16"),
        "spans": spans,
        "whole spans": spans,
    }


def check_attention(config: TrainConfig) -> None:
    """Raises ArtefactError if fast and naive attention differ, over two segments in float64.

    The weights are large and random, and the spans are shorter than the memory. With the weights that
    training starts from, distance biases are 0 and span masks are 1, and an attention without them would
    pass.
    """
    torch.manual_seed(0)
    model = LanguageModel(dataclasses.replace(config.model, layers=1, vocab_size=50)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for span in model.spans():
        torch.nn.init.uniform_(span.share, 0, 4 / span.span.maximum)
    rule = dataclasses.replace(config.training, segment=8, mem_len=min(8, config.training.mem_len))
    tokens = torch.randint(0, 50, (2, 16))
    answers = []
    for attention in (relative_attention, naive_attention):
        memory = model.start(2, rule)
        logits = []
        for at in (0, 8):
            piece = tokens[:, at : at + 8]
            piece_logits, memory = model(piece, memory, torch.full((2,), at), rule, attention=attention)
            logits.append(piece_logits)
        answers.append(torch.cat(logits, dim=1))
    worst = (answers[0] - answers[1]).abs().max().item()
    agreed(worst, 1e-9, "fast and naive attention differ", "of a logit")


def _start(recipe: TrainConfig) -> Training:
    return Training.start(dataclasses.replace(recipe, steps=1 << 20))


def _stepper(training: Training) -> Step:
    tokens = _tokens(training.config)
    return lambda: float(training.advance(tokens).nats)


def _tokens(recipe: TrainConfig) -> np.ndarray:
    shape = (recipe.batch, 64 * recipe.training.segment + 1)
    return np.random.default_rng(0).integers(0, recipe.model.vocab_size, shape)


def code_folder(folder: Path) -> tuple[str, Path]:
    """The project whose code is in a checkout, and the folder of its modules."""
    for project, marker in MARKERS.items():
        for place in (folder, folder / "pytorch"):
            if (place / marker).is_file():
                return project, place.resolve()
    raise ConfigError(
        f"{folder} has no {' or '.join(MARKERS.values())}; give a checkout of one of the projects."
    )


def reference_step(project: str, folder: Path, training: Training) -> Step:
    """A step of public code that starts with the weights of `training` and reads the same tokens."""
    config, ours = training.config, training.model
    build = _transformer_xl if project == "transformer-xl" else _adaptive_span
    with _modules_of(folder):
        model, losses, memory, weights, spans = build(config.model, config.training, config.batch, ours)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    optimizer = make_optimizer(config, model.train())
    tokens = torch.from_numpy(_tokens(config))
    T = config.training.segment
    steps = 0

    def step() -> float:
        nonlocal memory, steps
        at = steps * T % (tokens.shape[1] - 1)
        piece = tokens[:, at : at + T + 1]
        nats, memory = losses(piece[:, :-1].contiguous(), piece[:, 1:].contiguous(), memory)
        optimizer.zero_grad()
        objective: Tensor = nats.mean() + sum(span.get_loss() for span in spans)
        objective.backward()  # type: ignore[no-untyped-call]
        set_rate_and_clip(optimizer, learning_rate(config, steps), config.optimizer.clip)
        optimizer.step()
        for span in spans:
            span.clamp_param()
        steps += 1
        return float(nats.detach().mean())

    return step


@contextlib.contextmanager
def _modules_of(folder: Path) -> Iterator[None]:
    """Python imports modules from this folder first; a project has modules named like ours."""
    path = list(sys.path)
    sys.path[:0] = [str(folder), str(folder / "utils")]
    try:
        yield
    finally:
        sys.path[:] = path


Reference = tuple[torch.nn.Module, Callable[..., Any], Any, dict[str, Tensor], Sequence[Any]]


def _transformer_xl(config: ModelConfig, rule: MemoryRule, batch: int, ours: LanguageModel) -> Reference:
    """`MemTransformerLM` of Dai et al. (2019): the model, its losses, memory, weights and spans (none)."""
    _accept_masks_of_bytes()
    model: Any = import_module("mem_transformer").MemTransformerLM(
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
        attn_type=0,
        clamp_len=-1 if rule.clamp_len is None else rule.clamp_len,
    )

    def losses(tokens: Tensor, targets: Tensor, memory: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        nats, *after = model(tokens.T.contiguous(), targets.T.contiguous(), *memory)
        return nats.T, after

    own = ours.state_dict()
    weights = {
        "word_emb.emb_layers.0.weight": ours.vocabulary.table["0"],
        "crit.out_layers.0.weight": ours.vocabulary.table["0"],
        "crit.out_layers.0.bias": ours.vocabulary.output_bias["0"],
        "r_w_bias": own["positions.u"][0],
        "r_r_bias": own["positions.v"][0],
    }
    for i in range(config.layers):
        theirs, block = f"layers.{i}.", f"blocks.{i}."
        packed = [own[f"{block}{name}.weight"] for name in ("query", "key", "value")]
        weights[f"{theirs}dec_attn.qkv_net.weight"] = torch.cat(packed)
        weights[f"{theirs}dec_attn.r_net.weight"] = own[f"positions.project.{i}.weight"]
        weights[f"{theirs}dec_attn.o_net.weight"] = own[f"{block}out.weight"]
        for kind in ("weight", "bias"):
            weights[f"{theirs}dec_attn.layer_norm.{kind}"] = own[f"{block}attention_norm.{kind}"]
            weights[f"{theirs}pos_ff.layer_norm.{kind}"] = own[f"{block}feed_forward_norm.{kind}"]
            weights[f"{theirs}pos_ff.CoreNet.0.{kind}"] = own[f"{block}expand.{kind}"]
            weights[f"{theirs}pos_ff.CoreNet.3.{kind}"] = own[f"{block}contract.{kind}"]
    return model, losses, [], weights, ()


def _accept_masks_of_bytes() -> None:
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


def _adaptive_span(config: ModelConfig, rule: MemoryRule, batch: int, ours: LanguageModel) -> Reference:
    """`TransformerSeq` of Sukhbaatar et al. (2019): the model, its losses, memory, weights and spans.

    Attention reaches `mem_len` tokens back, and never the token itself.
    """
    span = config.span
    assert span is not None
    model: Any = import_module("models").TransformerSeq(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        nb_heads=config.heads,
        nb_layers=config.layers,
        attn_span=rule.mem_len,
        emb_dropout=config.embedding_dropout or 0.0,
        inner_hidden_size=config.d_ff,
        dropout=config.attention_dropout,
        adapt_io_params={"adapt_io_enabled": False},
        adapt_span_params={
            "adapt_span_enabled": True,
            "adapt_span_loss": span.penalty,
            "adapt_span_ramp": span.ramp,
            "adapt_span_init": span.initial,
            "adapt_span_cache": True,  # as all its launch scripts do
        },
        pers_mem_params={"pers_mem_size": config.persistent},
    )

    def losses(tokens: Tensor, targets: Tensor, memory: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        log_probs, after, _ = model(tokens, memory, target=targets)
        return F.nll_loss(log_probs.transpose(1, 2), targets, reduction="none"), after

    attentions = [layer.attn.attn for layer in model.layers]
    memory = [torch.zeros(batch, each.get_cache_size(), config.d_model) for each in attentions]
    own = ours.state_dict()
    weights = {
        "in_emb.weight": ours.vocabulary.table["0"],
        "out_emb.weight": ours.vocabulary.output_table["0"],
        "out_emb.bias": ours.vocabulary.output_bias["0"],
        # Column l is for the distance S - l. A token does not see itself.
        "key_pe": own["positions.table"][1:].flip(0).T[None],
    }
    for i in range(config.layers):
        theirs, block = f"layers.{i}.", f"blocks.{i}."
        for name in ("query", "key", "value", "out"):
            short = {"key": "key", "value": "val"}.get(name, name)
            weights[f"{theirs}attn.proj_{short}.weight"] = own[f"{block}{name}.weight"]
        weights[f"{theirs}attn.attn.adaptive_span._mask.current_val"] = own[f"{block}span.share"][
            :, None, None
        ]
        pairs = (("norm1", "attention_norm"), ("norm2", "feed_forward_norm"), ("ff.fc1", "expand"))
        for their_name, name in (*pairs, ("ff.fc2", "contract")):
            for kind in ("weight", "bias"):
                weights[f"{theirs}{their_name}.{kind}"] = own[f"{block}{name}.{kind}"]
    return model, losses, memory, weights, [each.adaptive_span for each in attentions]


SIDES = {
    "spans": f"learned spans of {SPAN_TOKENS} tokens, 2 layers",
    "whole spans": "the same, with every key computed",
    "reference": "public code of Transformer-XL, fp32",
    "reference spans": "public code of adaptive spans, fp32",
}


def _over_no_memory(row: Row, document: Document) -> float | None:
    return row["over_no_memory"] if row["side"] in ("fp32", "no memory") else None


KEYS = ("side", "mem_len")
COLUMNS = {
    "what is trained": lambda row, _: SIDES.get(row["side"], row["side"]),
    "memory, tokens": "mem_len",
    "ms per trained token": "token_ms",
    "times the cost without memory": _over_no_memory,
    "times as fast as the public code": "times_as_fast_as_public",
}
