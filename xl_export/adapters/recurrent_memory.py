"""The model of recurrent-memory-transformer-pytorch (`RecurrentMemoryTransformer`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from xl_export.adapters.from_forward import from_forward
from xl_export.adapters.known import refuse_unknown
from xl_export.tracing.module import Sizes

# Classes and attributes of models that agreed with the loop of RecurrentMemoryTransformerWrapper.
KNOWN = """
Attend Attention GEGLU RotaryEmbedding add_write_to_next_write_mem always_have_read_memories attend
attn_dropout causal cpu_config emb_gradient_frac enhanced_xl_recurrence expand_streams heads
ignore_index inv_freq layers learned_value_residual_mix memory_tokens next_write_mem_stop_grad norm
null_kv num_memory_tokens pos_emb read_memory_emb reduce_streams rotary_pos_emb seq_len to_kv
to_logits to_out to_q token_emb use_custom_causal_attn_mask use_flash use_xl_memories xl_mem_len
"""
# A step always reads memories, and hides tokens by the mask of a causal model with `memory_not_causal`.
NEEDED = ("always_have_read_memories", "causal", "use_custom_causal_attn_mask")


def from_recurrent_memory(model: Any) -> nn.Module:
    """A module for `trace` around a causal RecurrentMemoryTransformer: ids in and logits out.

    The memory moves when `seq_len` tokens are complete, as in `RecurrentMemoryTransformerWrapper.generate`.
    Trace it with `MemoryRule(mem_len=model.seq_len, segment=…)`, with a segment up to `seq_len`, and
    `without={"padding"}`. Raises ConfigError for a model
    without `always_have_read_memories`, or with options that this function does not know.
    """
    refuse_unknown(model, KNOWN, needed=NEEDED)
    head = model.layers[0][0].branch
    memory: list[tuple[int, ...]] = [(model.num_memory_tokens, model.memory_tokens.shape[1])]
    if model.use_xl_memories:
        one = model.xl_mem_len, 2, head.heads, head.to_q.out_features // head.heads
        memory += [one] * len(model.layers)
    sizes = Sizes(vocab_size=model.to_logits.out_features, layers=len(model.layers), d_model=memory[0][1])
    return from_forward(RecurrentMemory(model), memory=memory, sizes=sizes, moves_every=model.seq_len)


class RecurrentMemory(nn.Module):
    """Keys and values of the last segment come first in the lists of the model; here, rows come first."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.attends = [part for part in model.modules() if type(part).__name__ == "Attend"]

    def forward(self, x: Tensor, mems: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        read, *before = mems
        # The model starts without keys and values. Here they are zeros, which are in no memory it writes.
        written = before[0].ne(0).flatten(2).any(-1)[:, None, None] if before else None

        def hide(_: nn.Module, args: Any, given: dict[str, Any]) -> Any:
            assert written is not None
            count = args[1].shape[2] - written.shape[3]
            seen = nn.functional.pad(written, (0, count), value=True)
            return args, given | {"mask": seen if given["mask"] is None else given["mask"] & seen}

        def turn(rotary: Any, args: Any, _: Tensor) -> Tensor:
            place = args[0].float()  # torch.onnx makes a double of an int64 times a float32
            turned: Tensor = rotary.forward(place)
            if written is None:
                return turned
            # In the first segment no keys come before, so its places have smaller numbers.
            L = self.model.xl_mem_len
            first = rotary.forward(torch.where(place >= 10_000 + L - 1, place - L, place))
            return torch.where(written[..., -1:], turned, first)

        hooks = []
        if before:
            hooks = [attend.register_forward_pre_hook(hide, with_kwargs=True) for attend in self.attends]
        if self.model.rotary_pos_emb is not None:
            hooks.append(self.model.rotary_pos_emb.register_forward_hook(turn))
        try:
            xl = [memory.permute(2, 0, 3, 1, 4) for memory in before]
            logits, write, after = self.model(x, read, xl_memories=xl)
        finally:
            for hook in hooks:
                hook.remove()
        return logits, [write, *(memory.permute(1, 3, 0, 2, 4) for memory in after or [])]
