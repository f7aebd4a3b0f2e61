"""Models to measure: random weights of a size, and a real artefact of them by `xl_export.export`.

Speed does not depend on the weights. None of them is zero, since the answers are checked with them too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Job
from runtimes.base.files import write_json
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import Form
from runtimes.contract.vocabulary import ByteVocab, IdsVocab, SpecialTokens, Vocab, save_vocab
from trainer.model.config import ModelConfig
from trainer.model.model import LanguageModel
from trainer.run.checkpoint import save_tensors
from trainer.run.config import TrainConfig
from trainer.run.history import CONFIG, MODEL
from xl_export import export

Weights = dict[str, np.ndarray]  # the names of trainer.model.model.LanguageModel's state dict


def random_weights(model: ModelConfig, *, seed: int = 0) -> Weights:
    """Weights: float32 matrices of variance 1/columns, so that all layers count; norms near 1."""
    draw = np.random.default_rng(seed)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in LanguageModel(model).state_dict().items()}
    weights = {}
    for name, shape in shapes.items():
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        weights[name] = scale * draw.standard_normal(shape, np.float32) + np.float32(
            name.endswith("norm.weight")
        )
    return weights


def write_run(
    folder: Path, model: ModelConfig, rule: MemoryRule, weights: Weights, *, ids: bool = False
) -> Path:
    """A run folder of these weights, as if training had ended there.

    ids: whether its vocabulary has ids, even if it has 256 tokens.
    """
    folder.mkdir(parents=True)
    # A model of bytes has their vocabulary; any other has ids, the first of which begins a text.
    is_bytes = model.vocab_size == 256 and not ids
    vocab: Vocab = ByteVocab() if is_bytes else IdsVocab(model.vocab_size, special=SpecialTokens(beginning=0))
    config = TrainConfig(
        model=model, training=rule, evaluation=rule, vocab="byte" if is_bytes else "word", text=None
    )
    write_json(folder / CONFIG, to_json(config))
    save_vocab(folder, vocab)
    save_tensors(folder / MODEL, {name: torch.from_numpy(array) for name, array in weights.items()})
    return folder


def run_of(job: Job, *, ids: bool = False) -> Path:
    """The run that is measured: from --config, or with random weights; ids: as in `write_run`."""
    if job.config.run and not ids:
        return Path(job.config.run)
    run = job.folder / "run"
    if not run.exists():
        write_run(run, job.config.model, job.rule, random_weights(job.config.model), ids=ids)
    return run


def artefact_of(job: Job, form: Form = "ring", *, ids: bool = False) -> Path:
    """The artefact of that run; the export has compared it with PyTorch."""
    job.say(f"{form} memory of {job.rule.mem_len} tokens: exporting and comparing with PyTorch")
    artefact: Path = export(run_of(job, ids=ids), job.folder / form, memory=form, rule=job.rule)
    return artefact
