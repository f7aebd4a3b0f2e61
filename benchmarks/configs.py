"""Sizes of the models that are measured, by name or from a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtimes.base.errors import ConfigError
from runtimes.base.files import read_json
from runtimes.base.records import from_json
from trainer.model.config import ModelConfig, VocabularyConfig
from trainer.run.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """One size of model, and how often it is timed."""

    name: str
    model: ModelConfig
    segment: int = 64  # number of tokens of a step (T)
    mem_len: int = 512  # number of remembered tokens (M)
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)  # attention lengths of `sliding-window` and `steps`
    repeats: int = 5  # timed calls of whole segments and windows
    token_repeats: int = 50  # timed calls of one token
    training_batch: int = 8  # rows of a training step
    run: str | None = None  # folder of a trained run; weights are random without one


CONFIGS = {
    config.name: config
    for config in (
        BenchmarkConfig(
            name="demo",  # the model of `xl-export demo`
            segment=64,
            mem_len=128,
            lengths=(128,),
            repeats=24,
            token_repeats=200,
            model=ModelConfig(layers=3, d_model=128, heads=4, head_dim=32, d_ff=512, vocab_size=256),
        ),
        BenchmarkConfig(
            name="tales",  # 2.2 million parameters
            segment=128,
            mem_len=224,
            lengths=(224,),
            repeats=24,
            token_repeats=60,
            model=ModelConfig(layers=4, d_model=192, heads=3, head_dim=64, d_ff=640, vocab_size=2560),
        ),
        BenchmarkConfig(
            name="small",
            segment=32,
            mem_len=512,
            repeats=24,
            token_repeats=100,
            model=ModelConfig(layers=6, d_model=256, heads=4, head_dim=64, d_ff=1024, vocab_size=256),
        ),
        BenchmarkConfig(
            name="enwik8-base",
            segment=128,
            mem_len=1600,
            lengths=(800, 1800, 2800, 3800),
            model=ModelConfig(layers=12, d_model=512, heads=8, head_dim=64, d_ff=2048, vocab_size=256),
        ),
        BenchmarkConfig(
            name="wt103-base",
            segment=64,
            mem_len=640,
            lengths=(640,),
            repeats=3,
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
            name="mamba-130m",  # for the case `mamba`, which has no heads
            segment=1,
            repeats=10,
            model=ModelConfig(layers=24, d_model=768, heads=12, head_dim=64, d_ff=1536, vocab_size=50280),
        ),
        BenchmarkConfig(
            name="enwik8-large",
            segment=128,
            mem_len=3800,
            lengths=(3800,),
            repeats=3,
            token_repeats=20,
            training_batch=1,
            model=ModelConfig(layers=24, d_model=1024, heads=8, head_dim=128, d_ff=3072, vocab_size=256),
        ),
    )
}


def find_config(text: str) -> BenchmarkConfig:
    """A named size; or the size of a run, whose weights are used too; or the size in a JSON file.

    The file is the config.json of a run, or has the fields of a `ModelConfig`.
    """
    if text in CONFIGS:
        return CONFIGS[text]
    path = Path(text)
    if not path.exists():
        raise ConfigError(
            f"--config is {text!r:.80}; give one of {', '.join(CONFIGS)}, the folder of a run, or a JSON "
            "file with the sizes of a model."
        )
    file = path / "config.json" if path.is_dir() else path
    document = read_json(file)
    if not isinstance(document, dict) or "model" not in document:
        return BenchmarkConfig(name=path.stem, model=from_json(ModelConfig, document, where=str(file)))
    run = TrainConfig.from_json(document, where=str(file))
    return BenchmarkConfig(
        name=file.resolve().parent.name if file.name == "config.json" else path.stem,
        model=run.model,
        segment=run.evaluation.segment,
        mem_len=run.evaluation.mem_len,
        run=str(path) if path.is_dir() else None,
    )
