"""Chooses a recipe from the amount of text and the time, for `xl-export train` without a configuration.

A dataset has its vocabulary, and the number of its tokens says how much text it is.
The text decides the vocabulary and the largest useful model (TEXTS). The time decides the rest: the speed of
the largest model is measured on this machine; if the time is too short to train it, the next smaller one is
taken (SIZES). The number of steps follows from the speed, so the schedule ends with the time.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from runtimes.base.errors import TextError
from runtimes.base.files import open_file, reading
from runtimes.base.progress import working
from runtimes.base.text import TextDecoder
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import Sampler
from runtimes.contract.spec import VOCAB
from runtimes.contract.vocabulary import Vocab
from trainer.data.dataset import open_dataset
from trainer.data.text import build_vocab, refuse_no_text, takes_bytes
from trainer.model.config import ModelConfig
from trainer.model.model import count_parameters
from trainer.run.checkpoint import load_run
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig, ScheduleConfig
from trainer.training.parallel import joined
from trainer.training.state import Training


class Size(NamedTuple):
    """A model, and what suits it."""

    layers: int
    d_model: int
    lr: float
    dropout: float  # at most: a small model cannot learn a text by heart


SIZES = (  # from small to large
    Size(2, 64, 4e-3, 0.1),
    Size(3, 128, 3e-3, 0.2),
    Size(4, 192, 2e-3, 0.3),
    Size(6, 256, 1.5e-3, 0.3),
    Size(8, 384, 1e-3, 0.3),
    Size(12, 512, 5e-4, 0.3),
)


class Text(NamedTuple):
    """What suits a text of at least this many bytes."""

    num_bytes: int
    subwords: int  # size of the vocabulary
    bytes_per_token: float  # approximate, for English in such a vocabulary
    largest: int  # index in SIZES
    batch: int
    segment: int
    dropout: float
    passes: int  # passes over the text; with more the model learns it by heart


TEXTS = (
    Text(0, 300, 1.2, largest=0, batch=4, segment=32, dropout=0.2, passes=60),
    Text(30_000, 1024, 2.6, largest=1, batch=8, segment=64, dropout=0.3, passes=40),
    Text(400_000, 2048, 3.1, largest=2, batch=8, segment=64, dropout=0.2, passes=40),
    Text(4_000_000, 4096, 3.5, largest=4, batch=8, segment=128, dropout=0.1, passes=20),
    Text(40_000_000, 8192, 3.9, largest=5, batch=16, segment=128, dropout=0.05, passes=8),
)
EXPECTED = (  # from this number of trained tokens on, if there is enough text: the row of TEXTS is the most
    (0, "fragments of words: this is too little training"),
    (1e6, "mostly real words and short phrases in the style of the text, without meaning"),
    (5e6, "mostly grammatical sentences in the style of the text, without a thread"),
    (5e7, "grammatical sentences that stay with a subject for a while"),
    (5e8, "paragraphs that stay with their subject"),
)
TOKENS_PER_PARAMETER = 5  # with fewer, a smaller model learns more in the same time
STEPS_SHARE = 0.85  # of the time for training steps; the rest is for validations, checkpoints and the start
VALIDATIONS = 20
LATE_SHARE = 0.1  # of the time by which a training may end late before its schedule is shortened
TUNING_PASSES = 10
TUNING_RATE = 0.3  # of the learning rate of the run that is tuned
TRAINING_SHARE = 0.9  # of a text; the rest is held out
MIN_TEXT_BYTES = 200  # enough to fill a batch, and to leave some for validation
SAMPLE_BYTES = 1 << 20  # bytes of the text that are read for a plan
MEASURING_SECONDS = 4.0  # seconds
Device = Literal["cpu", "cuda", "mps"]


def tokens_per_second(config: TrainConfig) -> float:
    """The training speed on this machine, measured for a few seconds with random tokens."""
    with joined(config.device) as ranks:
        training = Training.start(config, ranks)
        tokens = np.random.default_rng(0).integers(
            0, config.model.vocab_size, (config.batch, 8 * config.longest.segment + 1)
        )
        for _ in range(2):  # the first steps allocate
            float(training.advance(tokens).nats)
        began = time.perf_counter()
        trained = 0
        while (passed := time.perf_counter() - began) < MEASURING_SECONDS:
            step = training.advance(tokens)
            float(step.nats)  # waits for a GPU
            trained += step.tokens
    return trained / passed


def plan(
    *,
    text: str | None = None,
    data: str | None = None,
    minutes: float,
    vocab: str | None = None,
    max_size: int | None = None,
    steps: int | None = None,
    device: Device = "cpu",
) -> tuple[TrainConfig, str]:
    """A configuration for a text file or a dataset, and a paragraph on what it is and what to expect.

    vocab, max_size, steps: the user's choice in place of the plan's. A dataset has its own vocabulary.
    """
    limits: int | None = None  # of a vocabulary that is learned later, from the whole text
    is_text = True
    if data is not None:
        dataset = open_dataset(data)
        tokens = len(dataset.train)
        row = next(
            row for row in reversed(TEXTS) if tokens >= TRAINING_SHARE * row.num_bytes / row.bytes_per_token
        )
        size = dataset.vocab.size
        is_text = dataset.vocab.kind != "ids"
        about = f"{data} has {tokens:,} tokens for training and a vocabulary of {size:,}. The plan: "
    else:
        assert text is not None
        num_bytes, sample = _beginning(text, is_bytes=vocab is not None and takes_bytes(vocab))
        row = next(row for row in reversed(TEXTS) if num_bytes >= row.num_bytes)
        vocab = vocab or _vocab(num_bytes, sample)
        if vocab in ("subword", "word"):
            size = max_size or row.subwords
            bytes_per_token = row.bytes_per_token
            limits = size if vocab == "subword" else max_size
        else:
            known = build_vocab(vocab, lambda: [sample], lambda: [sample])
            size = known.size
            bytes_per_token = _bytes_per_token(known, sample)
        tokens = int(TRAINING_SHARE * num_bytes / bytes_per_token)
        about = f"{text} has {_size(num_bytes)}. The plan: {_words(vocab, limits)}; "
    most = row.passes * tokens
    for choice in SIZES[row.largest :: -1]:
        config = _recipe(choice, row, vocab_size=max(2, size), device=device)
        with working("planning: measuring the speed of this machine"):
            rate = 0.0 if steps else tokens_per_second(config)
        trained = rate * 60 * minutes * STEPS_SHARE
        # Either the time is enough for all useful passes over the text, or for enough tokens.
        if steps or trained >= min(most, TOKENS_PER_PARAMETER * count_parameters(config.model)):
            break
    timed = _timed(config, steps=steps, tokens=min(trained, most), minutes=minutes)
    up_to = "" if limits is None else "up to "
    sentences = [
        f"{about}{choice.layers} layers of {choice.d_model}, {up_to}{count_parameters(config.model):,} "
        f"parameters, dropout {config.model.dropout:g}; {_time(timed, rate)}, about "
        f"{_total(timed) / max(1, tokens):.2g} passes."
    ]
    if is_text:
        sentences.append(_expected(timed, row))
    if not steps:
        more_time = "More time would help (--minutes)."
        sentences.append(more_time if trained < most else "More data would help more than more time.")
    chosen = dataclasses.replace(
        timed,
        text=text,
        data=data,
        vocab=vocab or TrainConfig.vocab,
        max_size=limits,
        model=dataclasses.replace(timed.model, vocab_size=0),  # the text or the dataset decides it
        # A top-p below 1 would never draw a rare token of ids, such as an end.
        sampling=Sampler(temperature=0.8, top_p=0.9 if is_text else 1.0),
    )
    return chosen, " ".join(sentences)


def plan_tuning(
    run: Path,
    *,
    text: str | None = None,
    data: str | None = None,
    minutes: float,
    steps: int | None = None,
    device: Device | None = None,
) -> tuple[TrainConfig, str]:
    """A configuration for training the best weights of `run` on other text, and a paragraph on it.

    The sizes and the vocabulary are the run's. The learning rate is lower, with a warm-up of its own.
    device: by default the run's; another one trains without autocast.
    """
    trained = load_run(run)
    base = trained.config
    config = dataclasses.replace(
        base,
        start_from=str(run),
        text=text,
        data=data,
        corpus=None,
        vocab=TrainConfig.vocab if text is None else str(run / VOCAB),
        min_count=1,
        max_size=None,
        training=base.longest,
        mem_len_schedule=(),
        segment_schedule=(),
        optimizer=dataclasses.replace(base.optimizer, lr=TUNING_RATE * base.optimizer.lr),
        averaging=None,
        device=device or base.device,
        autocast=base.autocast if device in (None, base.device) else "none",
    )
    if text is not None:
        num_bytes, sample = _beginning(text, is_bytes=trained.vocab.kind == "byte")
        tokens = int(TRAINING_SHARE * num_bytes / _bytes_per_token(trained.vocab, sample))
    else:
        tokens = len(open_dataset(str(data)).train)
    with working("planning: measuring the speed of this machine"):
        rate = 0.0 if steps else tokens_per_second(config)
    most = min(rate * 60 * minutes * STEPS_SHARE, TUNING_PASSES * tokens)
    config = _timed(config, steps=steps, tokens=most, minutes=minutes)
    passes = _total(config) / max(1, tokens)
    return config, (
        f"Tuning {run} on {text or data}: {_time(config, rate)}, about {passes:.2g} passes, learning rate "
        f"{config.optimizer.lr:.2g} ({TUNING_RATE:g} of the run's) after a warm-up of "
        f"{config.schedule.warmup_steps} steps. The optimiser starts fresh."
    )


def _total(config: TrainConfig) -> int:
    """The number of tokens of the whole training."""
    return config.steps * config.batch * config.training.segment


def _expected(config: TrainConfig, row: Text) -> str:
    expected = [words for least, words in EXPECTED if _total(config) >= least]
    return f"Expect {expected[: max(2, TEXTS.index(row) + 1)][-1]}."


def _recipe(size: Size, row: Text, *, vocab_size: int, device: Device) -> TrainConfig:
    head_dim = 32 if size.d_model < 256 else 64
    return TrainConfig(
        model=ModelConfig(
            layers=size.layers,
            d_model=size.d_model,
            heads=size.d_model // head_dim,
            head_dim=head_dim,
            d_ff=4 * size.d_model,
            dropout=min(row.dropout, size.dropout),
            pre_norm=True,  # learns much sooner in the first steps, and these runs are short
            vocab_size=vocab_size,
        ),
        training=MemoryRule(mem_len=row.segment, segment=row.segment, mask="full"),
        evaluation=MemoryRule(mem_len=2 * row.segment, segment=row.segment),
        empty_memory_schedule=((0, 10),),
        batch=row.batch,
        optimizer=OptimizerConfig(kind="adamw", lr=size.lr, betas=(0.9, 0.98), weight_decay=0.1),
        device=device,
    )


def _timed(config: TrainConfig, *, steps: int | None, tokens: float, minutes: float) -> TrainConfig:
    """The configuration with `steps` steps, or enough for `tokens` tokens; the schedule fits them."""
    per_step = config.batch * config.training.segment
    steps = steps or max(VALIDATIONS, int(tokens / per_step))
    return dataclasses.replace(
        config,
        steps=steps,
        schedule=ScheduleConfig(warmup_steps=min(200, steps // 10), min_lr=config.optimizer.lr / 50),
        patience=VALIDATIONS // 2,
        log_every=max(1, min(20, steps // 50)),
        validate_every=max(10, steps // VALIDATIONS),
        # A validation costs at most about 1 % of the time between two of them.
        validate_tokens=max(1 << 12, steps * per_step // 64),
        checkpoint_every=max(1, int(steps / max(1.0, minutes))),
    )


def steps_in_time(done: int, planned: int, *, elapsed: float, seconds: float) -> int:
    """The number of steps of a training that shall end after `seconds`, once `done` of them took `elapsed`
    seconds: fewer than planned on a machine that became slower than the plan assumed.
    """
    fitting = max(done + 1, int(done * seconds / elapsed))
    return fitting if fitting < (1 - LATE_SHARE) * planned else planned


def _beginning(text: str, *, is_bytes: bool) -> tuple[int, str]:
    """The size of a text file in bytes, and its beginning as text. Raises TextError for one that is too short
    or no text, before anything is measured. is_bytes: whether any bytes will do.
    """
    path = Path(text)
    refuse_no_text(path)
    with reading(path), open_file(path) as stream:
        sample = stream.read(SAMPLE_BYTES)
    if len(sample) < MIN_TEXT_BYTES:
        raise TextError(f"{text} has {len(sample)} bytes; give a text of at least a few thousand characters.")
    decoded = sample.decode("utf-8", errors="ignore") if is_bytes else TextDecoder(text).decode(sample)
    return path.stat().st_size, decoded


def _vocab(num_bytes: int, sample: str) -> str:
    """Subwords if their library is there; otherwise characters, or bytes if there are very many of them."""
    if num_bytes >= TEXTS[1].num_bytes and importlib.util.find_spec("tokenizers") is not None:
        return "subword"
    return "char" if len(set(sample)) <= 1000 else "byte"


def _bytes_per_token(vocab: Vocab, sample: str) -> float:
    return len(sample.encode()) / max(1, len(vocab.encode(sample)))


def _words(vocab: str, size: int | None) -> str:
    kinds = {"char": "characters as tokens", "byte": "bytes as tokens", "word": "words as tokens"}
    if vocab == "subword":
        return f"a vocabulary of up to {size:,} subwords"
    return kinds.get(vocab, f"the vocabulary in {vocab}")


def _time(config: TrainConfig, rate: float) -> str:
    if not rate:
        return f"{config.steps:,} steps"
    seconds = _total(config) / rate / STEPS_SHARE
    minutes = f"{seconds / 60:.2g}"
    return f"{config.steps:,} steps, about {minutes} minute{'s' * (minutes != '1')} at {rate:,.0f} tokens/s"


def _size(num_bytes: int) -> str:
    if num_bytes >= 1_000_000:
        return f"{num_bytes / 1e6:,.1f} MB"
    return f"{num_bytes / 1000:,.1f} kB"
