"""The backbone of TorchRL's `TransformerModule` (`torchrl.modules.CausalTransformer`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from xl_export.adapters.known import refuse_unknown
from xl_export.tracing.module import features

# Classes and attributes of CausalTransformer.
KNOWN = """
_TransformerBlock blocks dropout head_dim hidden_size in_proj input_size max_seq_len mlp norm norm1
norm2 num_heads num_layers out_proj pos_emb qkv
"""


def from_torchrl(transformer: Any, heads: Mapping[str, nn.Module]) -> nn.Module:
    """A module for `trace` around the `transformer` of a TransformerModule: observations in, and an output of
    each head, which reads what the transformer returns.

    Its cache has a place for each step of an episode; trace it with
    `MemoryRule(mem_len=transformer.max_seq_len - 1, segment=1)`. It keeps all promises. TorchRL refuses a
    longer episode; here it begins anew, so `trace` may warn that a token looks back fewer steps.
    """
    refuse_unknown(transformer, KNOWN)
    return TorchRL(transformer, heads)


class TorchRL(nn.Module):
    def __init__(self, transformer: Any, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.transformer = transformer
        self.heads = nn.ModuleDict(heads)
        self.inputs = {"observation": features(transformer.input_size)}

    def start(self, batch: int) -> list[Tensor]:
        return list(self.transformer.new_kv_cache(batch))

    def step(
        self, inputs: dict[str, Tensor], positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        place = positions.clamp(min=0) % self.transformer.max_seq_len
        cache = tuple(past.clone() for past in memory)  # it writes in place
        x, cache = self.transformer(inputs["observation"], place, kv_cache=cache)
        return {name: head(x) for name, head in self.heads.items()}, list(cache)
