"""A sample of text by the present weights, which shows what a score does not."""

from __future__ import annotations

import numpy as np
import torch

from runtimes.base.errors import MissingPackageError
from runtimes.contract.vocabulary import Vocab
from runtimes.tasks.sample import Draw
from trainer.model.model import LanguageModel
from trainer.model.projected import ProjectedModel
from trainer.run.config import TrainConfig
from trainer.training.shard import gathered

PROMPT_TOKENS = 64  # tokens of the held-out text that are continued


def sample_text(model: LanguageModel, config: TrainConfig, vocab: Vocab, held_out: np.ndarray) -> str:
    """How the model continues the beginning of the held-out text, by `config.sample_tokens` tokens.

    The same seed is used each time, and no random state of training changes. Tokens without a text, or whose
    library is not installed, are written as ids. Collective: every process computes the same text.
    """
    prompt = np.asarray(held_out[:PROMPT_TOKENS], np.int64)
    was_training = model.training
    model.eval()
    with gathered(model):
        tokens = _continued(model, config, prompt)
    model.train(was_training)
    try:
        decoder = vocab.decoder()
    except MissingPackageError:
        return " ".join(map(str, tokens))
    decoder.prime(prompt.tolist())  # so that a word after the prompt begins with a blank
    return "".join(map(decoder, tokens)) + decoder.rest()


def _continued(model: LanguageModel, config: TrainConfig, prompt: np.ndarray) -> list[int]:
    """The ids that the model draws after a prompt [N], fed in segments and then one by one."""
    rule = config.evaluation
    device = model.vocabulary.table["0"].device
    projected = ProjectedModel(model, rule, around=gathered)
    rng = np.random.default_rng(config.seed)
    memory = projected.start(1)
    pieces = [prompt[at : at + rule.segment] for at in range(0, len(prompt), rule.segment)]
    draw = Draw([config.sampling], config.model.vocab_size)
    tokens: list[int] = []
    position = 0
    while len(tokens) < config.sample_tokens:
        piece = torch.from_numpy(pieces.pop(0) if pieces else np.array(tokens[-1:])).to(device)[None]
        hidden, memory = projected.step(piece, memory, torch.tensor([position], device=device))
        position += piece.shape[1]
        if not pieces:
            with torch.inference_mode():
                logits = model.vocabulary.logits(hidden[:, -1]).float().cpu().numpy()
            tokens.append(int(draw(logits, [rng.random()])[0]))
    return tokens
