"""A model of a stream of measurements: trains it to predict the next sample, and exports it.

    python train.py FOLDER [--steps STEPS]

Each step of the artefact reads samples and returns how surprising each was (in nats, before it was seen), and
what it expects next.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from stream import CHANNELS, make_stream
from torch import Tensor, nn
from torch.nn import functional as F

import runtimes
import xl_export

D, HEADS, LAYERS, M, T = 48, 4, 2, 64, 32


class Layer(nn.Module):
    """Attention over memory and segment, and a feed-forward network; norms before both."""

    def __init__(self) -> None:
        super().__init__()
        self.by_distance = nn.Parameter(torch.zeros(HEADS, M + 1))  # a learned bias for each distance
        self.query, self.key_value, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.norm_attention, self.norm_feed_forward = nn.LayerNorm(D), nn.LayerNorm(D)
        self.feed_forward = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor, context: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
        query = self.query(self.norm_attention(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        pair = self.key_value(self.norm_attention(context)).chunk(2, dim=-1)
        key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in pair)
        bias = self.by_distance[:, distance].masked_fill(hidden[:, None], float("-inf"))
        answer = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + self.out(answer.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_feed_forward(x))


class SensorModel(nn.Module):
    """Its memory is the last M inputs of each layer [B, M, D], and what it expects of the next sample.

    So the surprise of a sample is computed in the graph, and a saved stream continues with it exactly.
    """

    inputs = {"sample": xl_export.features(CHANNELS)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(CHANNELS, D)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.expect = nn.Linear(D, 2 * CHANNELS)  # means, and logarithms of deviations

    def start(self, batch: int) -> list[Tensor]:
        return [*(torch.zeros(batch, M, D) for _ in range(LAYERS)), torch.zeros(batch, 2 * CHANNELS)]

    def step(
        self, inputs: dict[str, Tensor], positions: Tensor, memory: list[Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        sample, (*past, expected_first) = inputs["sample"], memory
        length = sample.shape[1]
        distance = torch.arange(length)[:, None] + M - torch.arange(M + length)  # of each query from each key
        hidden = (distance < 0) | (distance > M) | (distance > positions[:, :, None].clamp(min=0))
        x, after = self.encoder(sample), []
        for layer, old in zip(self.layers, past, strict=True):
            context = torch.cat([old, x], dim=1)
            after.append(context[:, length:].detach())
            x = layer(x, context, distance.clamp(0, M), hidden)
        expected = self.expect(x)
        before = torch.cat([expected_first[:, None], expected], dim=1)[:, :length]
        before = torch.where(positions[..., None] > 0, before, 0.0)  # nothing was seen before position 0
        mean, log_deviation = before.chunk(2, dim=-1)
        error = (sample - mean) * torch.exp(-log_deviation)
        surprise = (error**2 / 2 + log_deviation + math.log(2 * math.pi) / 2).sum(-1)
        mean, log_deviation = expected.chunk(2, dim=-1)
        outputs = {"surprise": surprise, "expected": mean, "deviation": log_deviation.exp()}
        return outputs, [*after, expected[:, -1].detach()]


def train(model: SensorModel, steps: int, lanes: int = 16) -> None:
    """Trains on streams side by side, segment by segment, with the memory that each segment leaves."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    streams = [make_stream(min(steps, 400) * T, seed)[0] for seed in range(100, 100 + lanes)]
    samples, at, memory = torch.from_numpy(np.stack(streams)), 0, model.start(lanes)
    for step in range(1, steps + 1):
        if at == samples.shape[1]:
            at, memory = 0, model.start(lanes)
        positions = (at + torch.arange(T)).expand(lanes, T)
        outputs, memory = model.step({"sample": samples[:, at : at + T]}, positions, memory)
        loss = outputs["surprise"].mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        at += T
        if step % 200 == 0 or step == steps:
            print(f"step {step}: {loss.item():.2f} nats per sample")


def share_found(normal: np.ndarray, scores: np.ndarray, wrong: np.ndarray) -> float:
    """The share of faulty samples above a threshold that one of 1,000 normal samples exceeds."""
    return float((scores[wrong] > np.quantile(normal, 0.999)).mean())


def surprises(session: runtimes.Session, samples: np.ndarray) -> np.ndarray:
    """The surprise of each sample of a stream, fed in segments."""
    memory, found = session.start(1), []
    for at in range(0, len(samples), T):
        outputs, memory = session.step({"sample": samples[None, at : at + T]}, memory)
        found.append(outputs["surprise"][0])
    return np.concatenate(found)


def linear_errors(samples: np.ndarray, order: int = 32) -> np.ndarray:
    """How far each sample is from the best linear prediction from those before it, in standard deviations."""

    def before(stream: np.ndarray) -> np.ndarray:
        padded = np.concatenate([np.repeat(stream[:1], order, axis=0), stream])
        rows = [padded[order - age : len(padded) - age] for age in range(1, order + 1)]
        return np.concatenate([*rows, np.ones((len(stream), 1), np.float32)], axis=1)

    normal = [make_stream(400 * T, seed)[0] for seed in range(100, 116)]  # what the model was trained on
    inputs, targets = np.concatenate([before(stream) for stream in normal]), np.concatenate(normal)
    weights = np.linalg.lstsq(inputs, targets, rcond=None)[0]
    deviation = (targets - inputs @ weights).std(axis=0)
    return np.abs((samples - before(samples) @ weights) / deviation).max(axis=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a model of two sensors and exports it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2500)
    given = parser.parse_args()
    if given.folder.exists():
        parser.error(f"{given.folder} exists; give the name of a new folder.")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model is no faster with more
    model = SensorModel()
    train(model, given.steps)
    artefact = xl_export.trace(model, given.folder, rule=xl_export.MemoryRule(mem_len=M, segment=T))
    print(runtimes.check(artefact).sentence)

    session = runtimes.open_session(artefact)
    normal, _ = make_stream(30_000, 8)
    samples, wrong = make_stream(30_000, 7, faults=True)
    by_surprise = share_found(surprises(session, normal), surprises(session, samples), wrong)
    by_line = share_found(linear_errors(normal), linear_errors(samples), wrong)
    print(f"faulty samples found, at one false alarm in 1,000: {by_surprise:.0%}")
    print(f"by a linear prediction from 32 samples: {by_line:.0%}")
