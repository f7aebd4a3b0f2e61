"""The embedding and the output layer, with a plain or an adaptive softmax.

In an adaptive softmax rare tokens have narrower tables. Tokens are sorted by frequency, and those below the
first cutoff form the shortlist. Each tail cluster has one column next to the shortlist, and log p(token) =
log p(its cluster) + log p(token | cluster). Sources: Grave et al. 2017, section 4; for the input and for
ties, Baevski and Auli 2019, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.model.config import Cluster, ModelConfig


class Vocabulary(nn.Module):
    """Input embedding and output layer of one model; parameter lists have one entry for each cluster."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.clusters, D = config.clusters, config.d_model
        self.scale = D**0.5 if config.vocabulary.scale else 1.0

        def tables(wanted: bool) -> nn.ParameterDict:
            sizes = {str(i): (c.last - c.first, c.width) for i, c in enumerate(self.clusters) if wanted}
            return nn.ParameterDict({i: nn.Parameter(torch.empty(size)) for i, size in sizes.items()})

        def projections(wanted: list[bool]) -> nn.ParameterDict:
            sizes = {str(i): (D, c.width) for i, c in enumerate(self.clusters) if wanted[i]}
            return nn.ParameterDict({i: nn.Parameter(torch.empty(size)) for i, size in sizes.items()})

        self.table = tables(True)
        self.projection = projections([c.projected for c in self.clusters])
        self.output_table = tables(not config.vocabulary.tie_weights)
        self.output_projection = projections([c.projected and not c.tied_projection for c in self.clusters])
        self.output_bias = nn.ParameterDict(
            {str(i): nn.Parameter(torch.zeros(c.last - c.first)) for i, c in enumerate(self.clusters)}
        )
        tails = len(self.clusters) - 1
        width = self.clusters[0].width
        self.cluster_table = nn.Parameter(torch.empty(tails, width)) if tails else None
        self.cluster_bias = nn.Parameter(torch.zeros(tails)) if tails else None

    def reset_to_uniform(self) -> None:
        """Draws the values of PyTorch's own layers: Normal(0, 1) in embeddings, U(±1/√n) elsewhere.

        n is the number of inputs. Tables that input and output share are embeddings (public code of
        Sukhbaatar et al. 2019b).
        """
        for table in self.table.values():
            nn.init.normal_(table)
        for projection in self.output_projection.values():
            nn.init.uniform_(projection, *_fan_in_range(projection.shape[0]))
        layers = [self.output_table, self.projection, self.output_bias]
        for name, parameter in ((name, parameter) for layer in layers for name, parameter in layer.items()):
            nn.init.uniform_(parameter, *_fan_in_range(self.clusters[int(name)].width))
        for parameter in (self.cluster_table, self.cluster_bias):
            if parameter is not None:
                nn.init.uniform_(parameter, *_fan_in_range(self.clusters[0].width))

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings [..., D] of tokens int64 [...]."""
        if len(self.clusters) == 1:
            rows = F.embedding(tokens, self.table["0"])
            return (F.linear(rows, self.projection["0"]) if self.clusters[0].projected else rows) * self.scale
        flat = tokens.flatten()
        vectors = []
        for i, cluster in enumerate(self.clusters):
            inside = self._inside(flat, cluster)
            rows = F.embedding(flat[inside] - cluster.first, self.table[str(i)])
            vectors.append((inside, F.linear(rows, self.projection[str(i)]) if cluster.projected else rows))
        # Shapes are asked of tensors, not with `len`, which would fix them where the model is traced.
        embedded = vectors[0][1].new_zeros(flat.shape[0], vectors[0][1].shape[-1])
        for inside, rows in vectors:
            embedded = embedded.index_copy(0, inside, rows.to(embedded.dtype))
        return embedded.view(*tokens.shape, embedded.shape[-1]) * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns values over the vocabulary [..., V] for hidden states [..., D].

        They are logits for a plain softmax, and log-probabilities for an adaptive one.
        """
        head = self._head(hidden)
        if len(self.clusters) == 1:
            return head
        head = head.log_softmax(dim=-1)
        shortlist = self.clusters[0].last
        parts = [head[..., :shortlist]]
        for i in range(1, len(self.clusters)):
            parts.append(head[..., shortlist + i - 1, None] + self._within(hidden, i).log_softmax(dim=-1))
        return torch.cat(parts, dim=-1)

    def log_prob(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Returns log p(target) [N] of hidden states [N, D].

        The logits of a cluster are computed only for the targets inside it.
        """
        head = self._head(hidden).log_softmax(dim=-1)
        shortlist = self.clusters[0].last
        column = targets
        for i in range(1, len(self.clusters)):
            column = torch.where(targets >= self.clusters[i].first, shortlist + i - 1, column)
        log_probs = head.gather(1, column[:, None])[:, 0]
        for i, cluster in enumerate(self.clusters[1:], start=1):
            inside = self._inside(targets, cluster)
            within = self._within(hidden[inside], i).log_softmax(dim=-1)
            log_probs = log_probs.index_add(
                0, inside, within.gather(1, (targets[inside] - cluster.first)[:, None])[:, 0]
            )
        return log_probs

    def _head(self, hidden: Tensor) -> Tensor:
        """Returns logits of the shortlist and of the tail clusters, [..., n_0 + clusters - 1]."""
        table, bias = self._output(0)
        if self.cluster_table is not None and self.cluster_bias is not None:
            table, bias = torch.cat([table, self.cluster_table]), torch.cat([bias, self.cluster_bias])
        return at_least_fp32(F.linear(self._project(hidden, 0), table, bias))

    def _within(self, hidden: Tensor, i: int) -> Tensor:
        return at_least_fp32(F.linear(self._project(hidden, i), *self._output(i)))

    def _output(self, i: int) -> tuple[Tensor, Tensor]:
        tables = self.output_table if str(i) in self.output_table else self.table
        return tables[str(i)], self.output_bias[str(i)]

    def _project(self, hidden: Tensor, i: int) -> Tensor:
        if not self.clusters[i].projected:
            return hidden
        projections = self.output_projection if str(i) in self.output_projection else self.projection
        return torch.matmul(hidden, projections[str(i)])

    @staticmethod
    def _inside(tokens: Tensor, cluster: Cluster) -> Tensor:
        return ((tokens >= cluster.first) & (tokens < cluster.last)).nonzero()[:, 0]


def _fan_in_range(inputs: int) -> tuple[float, float]:
    return -(inputs**-0.5), inputs**-0.5


def at_least_fp32(logits: Tensor) -> Tensor:
    """Returns logits in fp32 where autocast made them shorter.

    On the CPU, autocast computes softmax and mean in the precision of their input.
    """
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
