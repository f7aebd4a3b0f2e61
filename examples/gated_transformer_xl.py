"""A model of your own from training to an artefact: a gated Transformer-XL (GTrXL, Parisotto et al. 2020).

    python gated_transformer_xl.py FOLDER [STEPS]

It trains for some seconds on the built-in corpus, exports the step by tracing it, checks the artefact and
continues a text with it. The module has `sizes`, `start` and `step`, and nothing else of this project: change
what you like.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import runtimes
import xl_export
from runtimes.contract.rule import MemoryRule
from runtimes.contract.vocabulary import CharVocab
from trainer.data.text import built_in_corpus

D, HEADS, LAYERS, M, T = 64, 4, 2, 48, 32


class Gate(nn.Module):
    """The GRU gate in the place of a residual (section 3.2, equation 5): its bias lets x pass at first."""

    def __init__(self) -> None:
        super().__init__()
        self.of_y, self.of_x, self.new_x = (
            nn.Linear(D, 3 * D),
            nn.Linear(D, 2 * D, bias=False),
            nn.Linear(D, D),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        reset, update, new = self.of_y(y).chunk(3, dim=-1)
        reset_x, update_x = self.of_x(x).chunk(2, dim=-1)
        z = torch.sigmoid(update + update_x - 2.0)
        return (1 - z) * x + z * torch.tanh(new + self.new_x(torch.sigmoid(reset + reset_x) * x))


class Layer(nn.Module):
    """Attention over memory and segment, and a feed-forward network; norms before both, gates after both."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key_value, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.by_distance = nn.Parameter(torch.zeros(HEADS, M + 1))  # a learned bias for each distance
        self.norms, self.gates = (
            nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)]),
            nn.ModuleList([Gate(), Gate()]),
        )
        self.feed_forward = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x: Tensor, context: Tensor, distance: Tensor, hidden: Tensor) -> Tensor:
        query = self.query(self.norms[0](x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        pair = self.key_value(self.norms[0](context)).chunk(2, dim=-1)
        key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in pair)
        bias = self.by_distance[:, distance].masked_fill(hidden[:, None], float("-inf"))
        answer = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = self.gates[0](x, F.relu(self.out(answer.transpose(1, 2).flatten(2))))
        return self.gates[1](x, F.relu(self.feed_forward(self.norms[1](x))))


class GatedTransformerXL(nn.Module):
    """Its memory is the last M inputs of each layer: tensors [B, M, D]."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.sizes = xl_export.Sizes(vocab_size=vocab_size, layers=LAYERS, d_model=D, heads=HEADS, d_ff=4 * D)
        self.table, self.layers = nn.Embedding(vocab_size, D), nn.ModuleList(Layer() for _ in range(LAYERS))

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, M, D) for _ in range(LAYERS)]

    def step(self, tokens: Tensor, positions: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        length = tokens.shape[1]
        distance = torch.arange(length)[:, None] + M - torch.arange(M + length)  # of each query from each key
        # The M tokens before a token are visible, but nothing from before position 0, where its text begins.
        hidden = (distance < 0) | (distance > M) | (distance > positions[:, :, None].clamp(min=0))
        x, after = self.table(tokens), []
        for layer, past in zip(self.layers, memory, strict=True):
            context = torch.cat([past, x], dim=1)
            after.append(context[:, length:].detach())
            x = layer(x, context, distance.clamp(0, M), hidden)
        return x, after

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.table.weight.T


def train(model: GatedTransformerXL, tokens: Tensor, steps: int, lanes: int = 16) -> None:
    """Trains on `lanes` texts side by side, segment by segment, with the memory that each segment leaves."""
    rows = tokens[: len(tokens) // lanes * lanes].view(lanes, -1)
    optimizer, at, memory = torch.optim.Adam(model.parameters(), 3e-3), 0, model.start(lanes)
    for step in range(1, steps + 1):
        if at + T + 1 > rows.shape[1]:
            at, memory = 0, model.start(lanes)
        hidden, memory = model.step(rows[:, at : at + T], (at + torch.arange(T)).expand(lanes, T), memory)
        loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), rows[:, at + 1 : at + T + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        at += T
        if step % 100 == 0 or step == steps:
            print(f"step {step}: {loss.item() / 0.6931:.2f} bits per character")


if __name__ == "__main__":
    words = sys.argv[1:]
    if not 1 <= len(words) <= 2 or words[0].startswith("-") or not all(word.isdigit() for word in words[1:]):
        print("Error: give a new folder: python gated_transformer_xl.py FOLDER [STEPS]", file=sys.stderr)
        sys.exit(2)
    folder, text = Path(words[0]), built_in_corpus().decode("utf-8")
    if folder.exists():
        print(f"Error: {folder} exists; give the name of a new folder.", file=sys.stderr)
        sys.exit(2)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model is no faster with more
    vocab = CharVocab.build(text)
    model = GatedTransformerXL(vocab.size)
    nn.init.normal_(model.table.weight, std=D**-0.5)
    train(model, torch.from_numpy(vocab.encode(text)), int(words[1]) if words[1:] else 300)

    rule = MemoryRule(mem_len=M, segment=T)
    artefact = xl_export.trace(model, folder / "artefact", vocab=vocab, rule=rule)
    report = runtimes.check(artefact)
    print(f"{'passed' if report.passed else 'FAILED'}: {report.sentence}")
    session = runtimes.open_session(artefact)
    print(repr("The " + "".join(piece.text for piece in runtimes.generate(session, "The ", max_tokens=60))))
