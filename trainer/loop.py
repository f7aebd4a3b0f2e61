"""Training with segment recurrence: text → RUN. A run killed at any moment resumes from its last checkpoint.

Each of B lanes reads its own contiguous part of the text, T tokens a step, and carries its memory from one
segment to the next (section 3.2); at the end of the lanes the streams start again at position 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from runtimes.errors import ArtefactError, ConfigError, UserError
from runtimes.files import atomic_file, atomic_folder, read_bytes, read_json, refuse_existing, write_json, writing
from runtimes.records import from_json, to_json
from runtimes.scoring import Score, evaluate
from runtimes.spec import VOCAB
from runtimes.torch_session import TorchSession
from runtimes.vocab import Vocab
from trainer.checkpoint import CONFIG, MODEL, load_tensors, matching_vocab, save_tensors
from trainer.config import TrainConfig
from trainer.model import LanguageModel
from trainer.objective import segment_loss
from trainer.text import build_vocab, lanes, load_splits

STATE, METRICS, VALID, TEST = "training.safetensors", "metrics.jsonl", "valid.txt", "test.txt"
VALIDATION_LANES = 8


def train(config: TrainConfig, out: Path | str, *, force: bool = False, progress: bool = True) -> Path:
    """Trains a new run in the folder `out` and returns it.

    The folder appears whole, with its held-out texts and a checkpoint of step 0. Raises UserError for an
    existing `out` (unless it is a run and `force`), a text that does not fit the configuration, or a loss that is not finite.
    """
    out = Path(out)
    refuse_existing(out, force=force, marker=METRICS)
    if config.text is not None:  # so that the run can be resumed from any folder
        config = dataclasses.replace(config, text=str(Path(config.text).resolve()))
    splits = load_splits(config.text)
    vocab = build_vocab(config.vocab, splits, min_count=config.min_count)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab.size))
    tokens_BN = lanes(vocab.encode(splits.train), config.batch, config.training.segment)
    training = Training.start(config)
    with atomic_folder(out, force=force, marker=METRICS) as folder:
        write_json(folder / CONFIG, to_json(config))
        write_json(folder / VOCAB, vocab.to_json())
        (folder / VALID).write_bytes(splits.valid)
        (folder / TEST).write_bytes(splits.test)
        (folder / METRICS).touch()
        training.save(folder, text_hash(tokens_BN))
    return _continue(training, out, vocab, tokens_BN, progress=progress)


def resume(run: Path | str, *, progress: bool = True) -> Path:
    """Continues a run from its last checkpoint, bit for bit as if it had never stopped (CPU, same threads)."""
    run = Path(run)
    if not (run / STATE).is_file():
        raise ArtefactError(f"{run} cannot be resumed: it has no {STATE}; start a new run with `xl-export train --out RUN`.")
    config = from_json(TrainConfig, read_json(run / CONFIG), where=str(run / CONFIG))
    vocab = matching_vocab(run, config)
    tokens_BN = lanes(vocab.encode(load_splits(config.text).train), config.batch, config.training.segment)
    training = Training.start(config)
    training.restore(run, text_hash(tokens_BN))
    _trim_metrics(run / METRICS, training.step)
    for name in (STATE, MODEL, METRICS):  # what a kill in the middle of writing one of them left behind
        for leftover in run.glob(f".{name}.*"):
            leftover.unlink(missing_ok=True)
    return _continue(training, run, vocab, tokens_BN, progress=progress)


@dataclass
class Training:
    """All that changes while training: what a checkpoint holds, besides the step it was made at."""

    config: TrainConfig
    model: LanguageModel
    optimizer: torch.optim.Adam
    memory: list[Tensor]
    step: int = 0

    @classmethod
    def start(cls, config: TrainConfig) -> Training:
        """Step 0, from the configuration's seed; raises ConfigError where this machine has too little memory."""
        config.refuse_if_too_large()
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        model = LanguageModel(config.model).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
        for parameter in model.parameters():  # Adam makes these at its first step; a checkpoint needs them at step 0
            optimizer.state[parameter] = {"step": torch.tensor(0.0)} | {
                moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")
            }
        return cls(config, model, optimizer, model.start(config.batch, config.training))

    def advance(self, tokens_BN: np.ndarray) -> float:
        """One step over the next segment of every lane; returns its loss, nats per token, before the update."""
        T = self.config.training.segment
        at = self.step % ((tokens_BN.shape[1] - 1) // T) * T
        piece = torch.from_numpy(tokens_BN[:, at : at + T + 1])
        positions = torch.full((len(piece),), at)  # 0 starts every lane anew: the memory then is invisible
        progress = self.step / self.config.steps
        loss, self.memory = segment_loss(
            self.model, piece[:, :-1], piece[:, 1:], self.memory, positions, self.config.training, progress=progress
        )
        _refuse_infinite("loss", loss.objective.item(), self.step + 1)
        self.optimizer.zero_grad()
        loss.objective.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        _refuse_infinite("norm of the gradient", norm.item(), self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        self.optimizer.step()
        self.model.constrain()
        self.step += 1
        return loss.nats.item()

    def tensors(self) -> dict[str, Tensor]:
        """The state as named tensors, sharing storage where it is updated in place."""
        named = {f"model.{name}": parameter.data for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                named[f"{moment}.{name}"] = self.optimizer.state[parameter][moment]
        named |= {f"memory.{layer}": tensor for layer, tensor in enumerate(self.memory)}
        return named | {"random": torch.get_rng_state()}

    def save(self, folder: Path, text: str) -> None:
        """Writes the checkpoint: first what resuming reads, as one file, then the weights that others read."""
        save_tensors(folder / STATE, self.tensors(), {"step": str(self.step), "text": text})
        save_tensors(folder / MODEL, self.model.state_dict())

    def restore(self, run: Path, text: str) -> None:
        """Back to the last checkpoint of `run`; `text` must be the hash of the text it was trained on."""
        mine = self.tensors()
        saved, facts = load_tensors(run / STATE, expected=mine)
        if not re.fullmatch(r"\d{1,15}", facts.get("step", ""), re.ASCII) or int(facts["step"]) > self.config.steps:
            raise ArtefactError(f"{run / STATE} does not say which step it was made at; start a new run.")
        if facts.get("text") != text:
            raise ConfigError(f"the text that {run} was trained on has changed since; restore it, or start a new run.")
        for name, tensor in mine.items():
            tensor.copy_(saved[name])
        torch.set_rng_state(saved["random"])
        self.step = int(facts["step"])
        for state in self.optimizer.state.values():
            state["step"].fill_(float(self.step))
        save_tensors(run / MODEL, self.model.state_dict())


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine to zero, for step 0, 1, …, steps - 1."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def validate(training: Training, vocab: Vocab, tokens: np.ndarray) -> Score:
    """The score of held-out tokens by the very `evaluate` that scores artefacts."""
    session = TorchSession(training.model.eval(), vocab, training.config.evaluation, identity="training")
    score = evaluate(session, tokens, lanes=min(VALIDATION_LANES, len(tokens) - 1))
    training.model.train()
    return score


def text_hash(tokens: np.ndarray) -> str:
    """Identity of the training text, as tokens in lanes."""
    return hashlib.sha256(tokens.tobytes()).hexdigest()


def _continue(training: Training, run: Path, vocab: Vocab, tokens_BN: np.ndarray, *, progress: bool) -> Path:
    config, text = training.config, text_hash(tokens_BN)
    held_out = vocab.encode(read_bytes(run / VALID))
    per_step = config.batch * config.training.segment
    began, first = time.perf_counter(), training.step
    with tqdm(total=config.steps, initial=first, unit="step", disable=None if progress else True, dynamic_ncols=True) as bar:
        while training.step < config.steps:
            loss = training.advance(tokens_BN)
            step, last = training.step, training.step == config.steps
            speed = (step - first) * per_step / (time.perf_counter() - began)
            facts = f"loss {loss:.3f} nats, {loss / math.log(2):.3f} bits/token, {speed:,.0f} tokens/s"
            bar.set_postfix_str(facts, refresh=False)  # tqdm draws at most ten times a second, not at every step
            bar.update()
            if step % config.log_every == 0 or last:
                rate = learning_rate(config, step - 1)
                _log(
                    run, step=step, loss_nats=loss, bits_per_token=loss / math.log(2), learning_rate=rate, tokens_per_second=speed
                )
            if (step % config.validate_every == 0 or last) and len(held_out) > 1:
                bits = validate(training, vocab, held_out).bits_per_token
                _refuse_infinite("validation score", bits, step)
                _log(run, step=step, validation_bits_per_token=bits)
                if progress:
                    bar.write(f"step {step}: validation {bits:.4f} bits/token ({config.evaluation})")
            if step % config.checkpoint_every == 0 or last:
                training.save(run, text)
    return run


def _refuse_infinite(what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise UserError(
            f"the {what} became {value} at step {step}; the last checkpoint is kept: "
            "start again with a lower learning_rate or a longer warmup_steps."
        )


def _log(run: Path, **facts: Any) -> None:
    with writing(run / METRICS), open(run / METRICS, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(facts) + "\n")


def _trim_metrics(path: Path, step: int) -> None:
    """Drops what was logged after the checkpoint, and a line that a kill cut short."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    with atomic_file(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")
