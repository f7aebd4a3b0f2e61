"""Small modules of a user: right ones with each kind of memory, and ways to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtimes.contract.rule import MemoryRule
from runtimes.contract.vocabulary import ByteVocab, IdsVocab
from xl_export.tracing.module import Sizes, constant, features, ids
from xl_export.tracing.ring import ring_distances, ring_write

Memory = Sequence[Tensor]
Result = tuple[Any, list[Tensor]]
VOCAB, D, HEADS, M, T = ByteVocab(), 8, 2, 6, 4
RULE = MemoryRule(mem_len=M, segment=T)
LARGE = IdsVocab(9000)
PADDING = 250  # the first id of the padding of a vocabulary


class Base(nn.Module):
    """One layer of attention with a learned bias for each distance; its memory holds the last M inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes = Sizes(vocab_size=VOCAB.size, layers=1, d_model=D, heads=HEADS)
        self.table, self.out = nn.Embedding(VOCAB.size, D), nn.Linear(D, VOCAB.size)
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(HEADS, M + 1))

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, M, D)]

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        x = self.table(tokens)
        context = torch.cat([memory[0], x], dim=1)
        answer = self.attend(x, self.key(context), self.value(context), self.distance(tokens), positions)
        return self.out(x + answer), [context[:, tokens.shape[1] :]]

    def distance(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        return torch.arange(length)[:, None] + M - torch.arange(M + length)

    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        return (distance < 0) | (distance > M) | (distance > positions[:, :, None].clamp(min=0))

    def attend(self, x: Tensor, key: Tensor, value: Tensor, distance: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (self.query(x), key, value))
        mask = self.hidden(distance, positions)[:, None]
        bias = self.bias[:, distance.clamp(0, M)]
        bias = bias if bias.ndim == 4 else bias[None]
        bias = (bias.transpose(0, 1) if bias.shape[0] == HEADS else bias).masked_fill(mask, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


class Shifted(Base):
    """Its terms by distance are shifted by a view of a padded tensor, as in the published Transformer-XL."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Parameter(torch.randn(M + T, D))

    def attend(self, x: Tensor, key: Tensor, value: Tensor, distance: Tensor, positions: Tensor) -> Tensor:
        query = self.query(x)
        batch, length, count = query.shape[0], query.shape[1], key.shape[1]
        term = query @ self.distances[M + T - count :].T  # column j: distance M + T - 1 - j
        padded = torch.cat([term.new_zeros(batch, length, 1), term], dim=2)
        shifted = padded.view(batch, count + 1, length)[:, 1:].view_as(term)
        scores = query @ key.transpose(1, 2) + shifted
        return scores.masked_fill(self.hidden(distance, positions), float("-inf")).softmax(dim=-1) @ value


class Ring(Base):
    """The same with keys and values in a ring."""

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, HEADS, M + T, D // HEADS) for _ in range(2)]

    def write(self, ring: Tensor, new: Tensor, positions: Tensor) -> Tensor:
        return ring_write(ring, new.unflatten(-1, (HEADS, -1)).transpose(1, 2), positions)

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        x, distance = self.table(tokens), ring_distances(positions, M + T)
        rings = [
            self.write(ring, y, positions)
            for ring, y in zip(memory, (self.key(x), self.value(x)), strict=True)
        ]
        key, value = (ring.to(x.dtype).transpose(1, 2).flatten(2) for ring in rings)
        return self.out(x + self.attend(x, key, value, distance, positions)), rings


class RingReadTwice(Ring):
    """It looks at its old memory beside writing it, which a buffer that is written in place does not have."""

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        logits, rings = super().step(tokens, positions, memory)
        old = memory[0][:, 0, :1].sum(dim=-1) * (positions[:, :1] > 99)
        return logits + old[:, :, None], rings


class Gru(nn.Module):
    """A recurrent network: its memory is a state [B, D] of its own shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes = Sizes(vocab_size=VOCAB.size, layers=1, d_model=D)
        self.table, self.cell, self.out = (
            nn.Embedding(VOCAB.size, D),
            nn.Linear(2 * D, 2 * D),
            nn.Linear(D, VOCAB.size),
        )

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, D)]

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        """h = a h + (1 - a) x with a constant decay a, a whole segment as one product of matrices."""
        x, length = self.table(tokens), tokens.shape[1]
        decay = torch.linspace(0.5, 0.9, D)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        weights = torch.where(distance[..., None] >= 0, decay ** distance[..., None].clamp(min=0), 0.0)
        # A state from before position 0 counts for nothing, and neither does padding.
        text = (positions >= 0)[:, :, None]
        state = torch.where(positions[:, :1] > 0, memory[0], 0.0)
        carried = state[:, None] * decay ** (torch.arange(length)[:, None] + 1)
        h = torch.einsum("ijd,bjd->bid", weights, x * text * (1 - decay)) + carried
        return self.out(h), [h[:, -1]]


class Episodes(Gru):
    """Forgets everything after M + 1 tokens, as TorchRL's transformer does."""

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        return super().step(tokens, torch.where(positions < 0, positions, positions % (M + 1)), memory)


class Lstm(nn.Module):
    """PyTorch's own recurrent cell, token by token: its memory is two states [B, D]."""

    step_tokens = 1

    def __init__(self, vocab_size: int = VOCAB.size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes = Sizes(vocab_size=vocab_size, layers=1, d_model=D)
        self.table, self.out = nn.Embedding(vocab_size, D), nn.Linear(D, vocab_size)
        self.cell = nn.LSTMCell(D, D)

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, D) for _ in range(2)]

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        begun = positions[:, :1] > 0  # before position 0 there is no state
        h, c = self.cell(self.table(tokens[:, 0]), [torch.where(begun, each, 0.0) for each in memory])
        return self.out(h)[:, None], [h, c]


class LargeLstm(Lstm):
    """The same over a large vocabulary, with its output layer in a method."""

    def __init__(self) -> None:
        super().__init__(LARGE.size)

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        begun = positions[:, :1] > 0
        h, c = self.cell(self.table(tokens[:, 0]), [torch.where(begun, each, 0.0) for each in memory])
        return h[:, None], [h, c]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.out(hidden)


class Selective(nn.Module):
    """A selective state space as in Mamba: decay, input and output of the state depend on the token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes = Sizes(vocab_size=VOCAB.size, layers=1, d_model=D)
        self.table, self.out = nn.Embedding(VOCAB.size, D), nn.Linear(D, VOCAB.size)
        self.gate, self.delta = nn.Linear(D, D), nn.Linear(D, D)
        self.reads, self.writes = nn.Linear(D, M), nn.Linear(D, M)
        self.rate = nn.Parameter(-torch.rand(D, M) - 0.1)

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, D, M)]

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        """h_t = exp(d_t A) h_{t-1} + d_t B_t x_t and y_t = C_t h_t, a whole segment at once."""
        x, length = self.table(tokens), tokens.shape[1]
        delta = F.softplus(self.delta(x)) * (positions >= 0)[:, :, None]  # padding changes no state
        decay = torch.cumsum(delta[..., None] * self.rate, dim=1)  # [B, T, D, M]
        added = (delta * x)[..., None] * self.writes(x)[:, :, None]
        past = torch.arange(length)[:, None] >= torch.arange(length)
        between = (decay[:, :, None] - decay[:, None]).masked_fill(
            ~past[None, :, :, None, None], float("-inf")
        )
        begun = torch.where(positions[:, :1, None] > 0, memory[0], 0.0)
        h = torch.einsum("bijdm,bjdm->bidm", between.exp(), added) + decay.exp() * begun[:, None]
        y = torch.einsum("bidm,bim->bid", h, self.reads(x)) * F.silu(self.gate(x))
        return self.out(x + y), [h[:, -1]]


class Stack(Base):
    """Layers of one head, each with a memory of its last inputs [B, held, D].

    window: how far each layer looks back. full: a token looks further by its place in the segment. stride: of
    the distances that a token sees.
    """

    def __init__(
        self, held: int, window: int, *, full: bool = False, stride: int = 1, layers: int = 2
    ) -> None:
        super().__init__()
        self.sizes = Sizes(vocab_size=VOCAB.size, layers=layers, d_model=D)
        self.held, self.window, self.full, self.stride = held, window, full, stride
        self.layers = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(layers))

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, self.held, D) for _ in self.layers]

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        x, after, length = self.table(tokens), [], tokens.shape[1]
        distance = torch.arange(length)[:, None] + self.held - torch.arange(self.held + length)
        reach = self.window + (torch.arange(length)[:, None] if self.full else 0)
        seen = (distance >= 0) & (distance <= reach) & (distance <= positions[:, :, None].clamp(min=0))
        seen = seen & (distance % self.stride == 0)
        for layer, past in zip(self.layers, memory, strict=True):
            context = torch.cat([past, x], dim=1)
            after.append(context[:, length:])
            query, key, value = (
                part[:, -length:] if not i else part for i, part in enumerate(layer(context).chunk(3, dim=-1))
            )
            x = x + F.relu(F.scaled_dot_product_attention(query, key, value, attn_mask=seen))
        return self.out(x), after


class Padded(Base):
    """Right: the last ids of its vocabulary are padding, and can never follow; the first one hardly can."""

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        logits, after = super().step(tokens, positions, memory)
        logits = logits.masked_fill(torch.arange(VOCAB.size) == 0, -100.0)
        return logits.masked_fill(torch.arange(VOCAB.size) >= PADDING, float("-inf")), after


class PaddedRing(Padded, Ring):
    """The same in a ring, which servers need."""


def altered(name: str, change: Callable[..., Result]) -> type[nn.Module]:
    """`Base` whose step gives `change(logits, memory after the step, tokens, memory before it)`."""

    def step(self: Base, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        return change(*Base.step(self, tokens, positions, memory), tokens, list(memory))

    return type(name, (Base,), {"step": step})


MemoryNotAdvanced = altered("MemoryNotAdvanced", lambda y, after, tokens, before: (y, before))
MemoryGrows = altered("MemoryGrows", lambda y, after, *_: (y, [torch.cat([after[0], after[0]], 1)]))
RowsMixed = altered("RowsMixed", lambda y, after, *_: (y * y.mean(dim=0, keepdim=True), after))
ManyRowsMixed = altered("ManyRowsMixed", lambda y, after, *_: (y + y.mean(0) if len(y) > 8 else y, after))
AColumnForEachRow = altered(
    "AColumnForEachRow", lambda y, after, *_: (y * torch.ones(8)[torch.arange(len(y))][:, None, None], after)
)
Random = altered("Random", lambda y, after, *_: (y + torch.rand_like(y), after))
NotFinite = altered("NotFinite", lambda y, after, *_: (y * 3e38 * 3e38, after))
BranchOnValues = altered(
    "BranchOnValues", lambda y, after, tokens, _: (y * 2 if tokens[0, 0] > 1000 else y, after)
)


class AssertOnValues(Base):
    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        logits, after = super().step(tokens, positions, memory)
        assert torch.isfinite(logits).all()
        return logits, after


class MemoryNotRead(Base):
    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        column = torch.arange(distance.shape[-1])
        return super().hidden(distance, positions) | (column < M)


class RingPositionsIgnored(Ring):
    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        return distance > M


class PaddingSeen(Base):
    """It hides old memory by the positions, and not the padding in the segment of a text's first token."""

    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        before = (distance > positions[:, :, None]) & (torch.arange(distance.shape[-1]) < M)
        return (distance < 0) | (distance > M) | before


class FutureSeen(Base):
    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        return (distance > M) | (distance > positions[:, :, None].clamp(min=0))


class WholeMemorySeen(Base):
    """The full mask under a same-length rule: the last token of a segment sees more than M."""

    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        return (distance < 0) | (distance > positions[:, :, None].clamp(min=0))


class RingNotZero(Ring):
    def start(self, batch: int) -> list[Tensor]:
        return [torch.ones(batch, HEADS, M + T, D // HEADS) for _ in range(2)]


class OtherVocabulary(Base):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(D, VOCAB.size + 1)


class OnePositionForAll(Base):
    """It masks every row by the positions of the first one."""

    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        return super().hidden(distance, positions[:1]).expand(len(positions), -1, -1)


class RingFutureSeen(Ring):
    """It sees the whole ring: at position 0 the tokens to come are hidden, as if they were from before it."""

    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        return distance > positions[:, :, None].clamp(min=0)


class RingOwnFutureHidden(Ring):
    """The full mask, but of all tokens to come, only those in its own segment are hidden."""

    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        to_come = positions.shape[1] - 1 - torch.arange(positions.shape[1])[:, None]
        return (distance > positions[:, :, None].clamp(min=0)) | (distance >= M + T - to_come)


class RingFull(Ring):
    """The full mask: a token sees what the memory holds, and the tokens before it in its segment."""

    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        offset = torch.arange(positions.shape[1])[:, None]
        return (distance > positions[:, :, None].clamp(min=0)) | (distance > M + offset)


class RingFromSegmentEnd(RingFull):
    """Its answers depend on how many tokens follow in the segment, and its memory does not."""

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        logits, after = super().step(tokens, positions, memory)
        return logits * (1 + positions[:, -1:, None] - positions[..., None]), after


class OtherLogProb(Base):
    def log_prob(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return hidden.gather(1, targets[:, None])[:, 0]  # forgets to normalise


class Raises(Base):
    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        if int(positions.max()) > M:
            raise LookupError("no such row\nin the table")
        return super().step(tokens, positions, memory)


class Counting(Base):
    """Right: a tensor of its memory counts tokens, and it has tensors without axes and with infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.alpha = nn.Parameter(torch.tensor(1.0))

    def start(self, batch: int) -> list[Tensor]:
        return [*super().start(batch), torch.zeros(batch, 1)]

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        logits, after = super().step(tokens, positions, memory[:1])
        return self.alpha * logits, [*after, memory[1] + tokens.shape[1]]


class Large(Base):
    """A vocabulary of more than 8,192 words, and buffers with the names of the graph's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = Sizes(vocab_size=LARGE.size, layers=1, d_model=D, heads=HEADS)
        self.table, self.out = nn.Embedding(LARGE.size, D), nn.Linear(D, LARGE.size)
        for name in ("targets", "input_ids", "position_ids"):
            self.register_buffer(name, torch.randn(D))

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        x = self.table(tokens) + self.targets + self.input_ids + self.position_ids
        context = torch.cat([memory[0], x], dim=1)
        answer = self.attend(x, self.key(context), self.value(context), self.distance(tokens), positions)
        return x + answer, [context[:, tokens.shape[1] :]]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.out(hidden)


class WithoutMemory(Base):
    """Right, under a memory length of 0: its memory never makes a difference."""

    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        return (distance != 0)[None].expand(len(positions), -1, -1)


class SegmentSeen(WithoutMemory):
    """Without memory, but a token sees the earlier ones of its segment, padding too."""

    def start(self, batch: int) -> list[Tensor]:
        return []

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        x = self.table(tokens)
        count = torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.out(x.cumsum(dim=1) / count), []


class ShortPositions(Base):
    """It forgets where it is beyond 32 bits."""

    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        return super().hidden(distance, positions % (1 << 32))


class Rope(Base):
    """Keys and values [B, M, D] whose keys were turned by their positions when they were written.

    angles: of positions in this type.
    """

    def __init__(self, angles: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.angles = angles
        self.register_buffer("frequencies", 0.3 ** torch.arange(D // 2))

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, M, D) for _ in range(2)]

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None].to(self.angles) * self.frequencies.to(self.angles)
        cos, sin = angles.cos().float(), angles.sin().float()
        one, other = x.chunk(2, dim=-1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        x, distance, length = self.table(tokens), self.distance(tokens), tokens.shape[1]
        key = torch.cat([memory[0], self.turned(self.key(x), positions)], dim=1)
        value = torch.cat([memory[1], self.value(x)], dim=1)
        scores = self.scores(x, key, positions, distance)
        weights = scores.masked_fill(self.hidden(distance, positions), float("-inf")).softmax(dim=-1)
        return self.out(x + weights @ value), [key[:, length:], value[:, length:]]

    def scores(self, x: Tensor, key: Tensor, positions: Tensor, distance: Tensor) -> Tensor:
        return self.turned(self.query(x), positions) @ key.transpose(1, 2)


class RopeByDistance(Rope):
    """It keeps keys as they are, and turns them in each step by their places in the memory."""

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        return super().step(tokens, torch.where(positions > M, M, positions), memory)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return x

    def scores(self, x: Tensor, key: Tensor, positions: Tensor, distance: Tensor) -> Tensor:
        turn = super().turned
        place = torch.arange(key.shape[1])
        return turn(self.query(x), place[M:]) @ turn(key, place).transpose(1, 2)


class AddsPositions(Base):
    """Vectors of `rows(positions)` are added to its answers."""

    def __init__(self, rows: Callable[[Tensor], Tensor], count: int) -> None:
        super().__init__()
        self.rows = rows
        self.vectors = nn.Embedding(count, VOCAB.size)

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        logits, after = super().step(tokens, positions, memory)
        return logits + self.vectors(self.rows(positions.clamp(min=0))), after


class Sinusoids(Base):
    """Sinusoids of positions, without an end, are added to its answers."""

    def step(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Result:
        logits, after = super().step(tokens, positions, memory)
        return logits + torch.sin(positions[..., None] * 0.01 * torch.arange(VOCAB.size)), after


class Delayed(nn.Module):
    """Right, with one token in a step: frames move through its tensors, or every other step through one."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = features(3)
        self.every = every
        self.encoder, self.out = nn.Linear(3, D), nn.Linear(2 * D, 2)

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, D), torch.zeros(batch, D)]

    def step(self, x: Tensor, positions: Tensor, memory: Memory) -> Result:
        moves = positions[:, :1] % self.every == self.every - 1
        newest, older = (torch.where(positions[:, :1] > 0, past, 0.0) for past in memory)
        after = [torch.where(moves, self.encoder(x)[:, 0], newest), torch.where(moves, newest, older)]
        return self.out(torch.cat([newest, older], dim=1))[:, None], after


class IntPositions(Base):
    """Its positions are negative, as those of padding, where 32 bits end."""

    def hidden(self, distance: Tensor, positions: Tensor) -> Tensor:
        return super().hidden(distance, positions.int())


class Policy(nn.Module):
    """No language model: inputs of all kinds, outputs of all shapes, and it knows nothing of positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = {"observation": features(5), "previous": ids(3), "goal": constant(2)}
        self.encoder, self.previous, self.goal = nn.Linear(5, D), nn.Embedding(3, D), nn.Linear(2, D)
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.action, self.worth = nn.Linear(D, 3), nn.Linear(D, 1)

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, M, D)]

    def step(self, inputs: dict[str, Tensor], positions: Tensor, memory: Memory) -> Result:
        x = self.encoder(inputs["observation"]) + self.previous(inputs["previous"])
        x = x + self.goal(inputs["goal"])[:, None]
        length = x.shape[1]
        context = torch.cat([memory[0], x], dim=1)
        distance = torch.arange(length)[:, None] + M - torch.arange(M + length)
        scores = self.query(x) @ self.key(context).transpose(1, 2) / D**0.5
        y = x + self.weights(scores, distance) @ self.value(context)
        outputs = {"action": self.action(y), "worth": self.worth(y)[..., 0], "features": y[:, -1]}
        return outputs | {"best": outputs["action"].argmax(dim=-1)}, [context[:, length:]]

    def weights(self, scores: Tensor, distance: Tensor) -> Tensor:
        return scores.masked_fill((distance < 0) | (distance > M), float("-inf")).softmax(dim=-1)


class WholeSegments(Policy):
    """A token sees its whole segment, so the answers depend on how a stream is cut."""

    def weights(self, scores: Tensor, distance: Tensor) -> Tensor:
        return scores.softmax(dim=-1)


class MixedRows(Policy):
    """Its rows are normalised together."""

    def step(self, inputs: dict[str, Tensor], positions: Tensor, memory: Memory) -> Result:
        outputs, after = super().step(inputs, positions, memory)
        return {"action": outputs["action"] + outputs["action"].mean(dim=0, keepdim=True)}, after


class Signs(nn.Module):
    """Returns only ids, and hides the memory of an earlier text by positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = features(4)
        self.encoder, self.out = nn.Linear(4, D), nn.Linear(D, 64)

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, M, D)]

    def step(self, values: Tensor, positions: Tensor, memory: Memory) -> Result:
        x = self.encoder(values)
        length = x.shape[1]
        context = torch.cat([memory[0], x], dim=1)
        distance = torch.arange(length)[:, None] + M - torch.arange(M + length)
        before = (positions[:, :, None] - distance < 0) & (distance > 0)
        hidden = (distance < 0) | (distance > M) | before
        weights = (~hidden).float()
        mean = weights / weights.sum(dim=-1, keepdim=True) @ context
        return {"signs": (self.out(mean) > 0).long()}, [context[:, length:]]


class Bounded(Signs):
    """It returns ids of what its memory holds, and bounded numbers that do not read it."""

    def step(self, values: Tensor, positions: Tensor, memory: Memory) -> Result:
        outputs, after = super().step(values, positions, memory)
        return outputs | {"newest": values.clamp(-1, 1)}, after


class ShortSigns(Signs):
    """It forgets where it is beyond 32 bits."""

    def step(self, values: Tensor, positions: Tensor, memory: Memory) -> Result:
        return super().step(values, positions % (1 << 32), memory)


class Frames(nn.Module):
    """One input and one output without names: images in, and features out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = features(2, 4, 4)
        self.encoder, self.mix = nn.Conv2d(2, D, 4), nn.Linear(2 * D, D)

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, D)]

    def step(self, images: Tensor, positions: Tensor, memory: Memory) -> Result:
        """h = 0.5 h + x, a whole segment as one product of matrices; padding counts for nothing."""
        length = images.shape[1]
        x = self.encoder(images.flatten(0, 1)).view(-1, length, D) * (positions >= 0)[..., None]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        weights = torch.where(distance >= 0, 0.5 ** distance.clamp(min=0), 0.0)
        carried = memory[0][:, None] * 0.5 ** (torch.arange(length)[:, None] + 1)
        h = weights @ x + carried * (positions >= 0)[..., None]
        return h.tanh(), [h[:, -1]]


def _overflowing(kind: type[Signs]) -> Signs:
    module = kind()
    module.encoder.weight.data *= 100
    return module


class Wide(nn.Module):
    """Matrices that are wide enough to be quantised: a table of ids, and one that is split into two as
    nn.MultiheadAttention does. Its memory holds the last M inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = {"x": features(40), "previous": ids(50)}
        self.table, self.both, self.out = nn.Embedding(50, 32), nn.Linear(40, 64), nn.Linear(32, 40)
        for small in self.out.parameters():  # outputs as of an untrained policy
            small.data *= 0.03

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, M, 32)]

    def step(self, inputs: Any, positions: Tensor, memory: Memory) -> Result:
        one, other = self.both.weight.chunk(2)
        x = F.linear(inputs["x"], one) * F.linear(inputs["x"], other).sigmoid()
        context = torch.cat([memory[0], x + self.table(inputs["previous"])], dim=1)
        length = x.shape[1]
        value = self.out(context[:, M:] + context[:, :length])
        return {"value": value, "best": value.argmax(-1)}, [context[:, length:]]


TRACED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "padded": (Padded, {"vocab": VOCAB}),  # ids with the logit -inf
    "padded ring": (PaddedRing, {"vocab": VOCAB}),
    "lstm": (Lstm, {"vocab": VOCAB}),  # graphs of 1 and of T tokens
    "large lstm": (LargeLstm, {"vocab": LARGE}),
    "selective": (Selective, {"vocab": VOCAB}),
    "policy": (Policy, {"without": {"padding"}}),
    "policy of 2 rows": (Policy, {"without": {"padding"}, "rows": 2}),
    "policy of 2 graphs": (Policy, {"without": {"padding"}, "rows": 1, "tokens": (1, T)}),
    **{
        f"wide in {precision}": (
            Wide,
            {"without": {"padding"}, "precision": precision, "memory_precision": memory},
        )
        for precision, memory in (
            ("fp16", "fp16"),
            ("int8-stored", "fp32"),
            ("int8", "fp16"),
            ("int4", "fp32"),
        )
    },
    # Large inputs overflow in the memory, and the outputs do not show it.
    "signs": (partial(_overflowing, Signs), {}),
    "bounded": (partial(_overflowing, Bounded), {}),
    # It keeps every promise, although its author declines some; its outputs stay finite when its memory
    # overflows.
    "frames": (Frames, {"without": {"padding", "cuts", "rows", "unequal"}}),
}
"""Modules that several files of tests use as artefacts, and options of `trace`."""
