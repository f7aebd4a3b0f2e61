"""The named sizes of models that cases measure, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.model.config import ModelConfig, VocabularyConfig

if TYPE_CHECKING:
    from trainer.run.config import TrainConfig

LONGEST = 1 << 14  # tokens; the masks of a recomputed window take 2 bytes for each pair of its positions


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """One size of model, and how much each case measures with it."""

    name: str
    model: ModelConfig
    segment: int  # tokens in a step (T)
    mem_len: int  # (M)
    attention_lengths: tuple[int, ...] = ()  # of sliding-window and decode, in place of mem_len
    repeats: int = 1  # timed calls that take long
    token_repeats: int = 1  # timed calls of one token
    streams: tuple[int, ...] = (1, 8, 32)  # of batch
    consecutive: int = 1000  # timed tokens of latency
    growing_positions: tuple[int, ...] = (0, 1000, 10_000)  # of growing-cache: tokens already read
    training_batch: int = 8  # rows of a training step
    texts: int = 1000  # of score
    alone: int = 60  # how many of them are also scored one by one

    @classmethod
    def of(cls, name: str, recipe: TrainConfig, **more: Any) -> BenchmarkConfig:
        """The size of a recipe's model with its rule of evaluation."""
        rule = recipe.evaluation
        return cls(name=name, model=recipe.model, segment=rule.segment, mem_len=rule.mem_len, **more)


CONFIGS = {
    config.name: config
    for config in (
        BenchmarkConfig(
            name="demo",  # of `xl-export demo`: a step is so short that what is beside it can be seen
            segment=64,
            attention_lengths=(128,),
            repeats=24,
            mem_len=128,
            token_repeats=200,
            model=ModelConfig(layers=3, d_model=128, heads=4, head_dim=32, d_ff=512, vocab_size=256),
        ),
        BenchmarkConfig(
            name="tales",  # of `examples/stories/tales`, with random weights
            segment=128,
            attention_lengths=(224,),
            repeats=24,
            mem_len=224,
            token_repeats=60,
            growing_positions=(0, 250, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000),
            model=ModelConfig(layers=4, d_model=192, heads=3, head_dim=64, d_ff=640, vocab_size=2560),
        ),
        BenchmarkConfig(
            name="small",
            segment=32,
            attention_lengths=(64, 128, 256, 512, 1024),
            repeats=24,
            mem_len=512,
            token_repeats=100,
            model=ModelConfig(layers=6, d_model=256, heads=4, head_dim=64, d_ff=1024, vocab_size=256),
        ),
        BenchmarkConfig(
            name="medium",  # about 10 million parameters, as a page may load
            segment=32,
            attention_lengths=(512,),
            repeats=24,
            mem_len=512,
            token_repeats=60,
            model=ModelConfig(layers=6, d_model=384, heads=6, head_dim=64, d_ff=1536, vocab_size=256),
        ),
        BenchmarkConfig(
            name="enwik8-base",
            segment=128,
            attention_lengths=(800, 1800, 2800, 3800),
            repeats=5,
            mem_len=1600,
            token_repeats=50,
            model=ModelConfig(layers=12, d_model=512, heads=8, head_dim=64, d_ff=2048, vocab_size=256),
            training_batch=8,
        ),
        BenchmarkConfig(
            name="wt103-base",
            segment=64,
            attention_lengths=(640,),
            repeats=3,
            mem_len=640,
            token_repeats=30,
            training_batch=1,
            model=ModelConfig(
                layers=16,
                d_model=410,
                heads=10,
                head_dim=41,
                d_ff=2100,
                vocab_size=267735,
                vocabulary=VocabularyConfig(cutoffs=(20000, 40000, 200000)),
            ),
        ),
        BenchmarkConfig(
            name="enwik8-large",
            segment=128,
            attention_lengths=(3800,),
            repeats=3,
            mem_len=3800,
            token_repeats=20,
            training_batch=1,
            model=ModelConfig(layers=24, d_model=1024, heads=8, head_dim=128, d_ff=3072, vocab_size=256),
        ),
    )
}
