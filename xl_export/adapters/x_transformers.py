"""The decoders of x-transformers: `TransformerWrapper` and `ContinuousTransformerWrapper`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from xl_export.adapters.known import refuse_unknown
from xl_export.tracing.module import Sizes, features

# Classes and attributes of models that agreed with XLAutoregressiveWrapper's loop.
KNOWN = """
AbsolutePositionalEmbedding AlibiPositionalBias Attend Attention CoPE ConcatCombine Decoder Derf
DynamicPositionBias DynamicTanh FeedForward GLU GRUGating LayerNorm LayerScale LoRALinear
MultiheadRMSNorm RMSNorm RelativePositionBias RelativeProjPositionalBias ReluSquared Residual
RotaryEmbedding Scale ScaleNorm SimpleRMSNorm SoLU TokenEmbedding
act adaptive_mlp add_continuous_pred_head add_zero_kv alpha attend attn_dim_head
attn_dropout attn_fn attn_heads attn_layers attn_on_attn beta can_cache_kv
can_cache_kv_outside_max_seq_len causal cog_signed combine combine_mixture cope create_causal_mask
cross_residual_attn depth depth_scale_residual dim dim_condition disable_abs_pos_emb distance_bank
down emb emb_dim emb_dropout emb_frac_gradient ff ff_deep_embed final_norm flash fn g gamma
gamma_offset gate_values_headwise groups gru has_custom_layer_types head_attn_sink head_learned_sink
head_scale head_scale_params heads input_not_include_cache interpolation_factor inv_freq k_rmsnorm
kv_heads l2_distance l2norm_embed laser laser_softclamp_value layer_dropouts layer_integrators
layer_types layers layers_execute_order len_default_block ln log_distance logit_softclamp_value
max_attend_past max_dist max_distance max_mem_len max_pos max_seq_len maybe_activation
memory_tokens_interspersed_every merge_heads mlp mult_bias norm num_attn_layers num_buckets
num_cls_tokens num_distance_basis num_ff_layers num_residual_streams num_tokens output_gate_headwise
output_is_log_prob pos_emb post_emb_norm post_softmax_talking_heads pre_and_post_norm pre_norm
pre_scale_post_talking_heads pre_softmax_talking_heads pre_tanh_scale pre_tanh_scale_offset
prev_layer_ind proj project_emb project_in project_out q_rmsnorm qk_norm qk_norm_dim_scale
qk_norm_groups qk_norm_k_scale qk_norm_q_scale qk_norm_scale rel_pos rel_proj_pos_bias
relative_attention_bias residual_attn residual_scale rmsnorm rotary_pos_emb rotate_num_heads s
sandwich_norm scale scale_base scale_offset scale_residual_constant sdp_context_manager
shift_mem_down sigsoftmax_logits skip_combines slopes soft_onehot_temp softclamp_logits
softclamp_output softclamp_output_value split_k_heads split_q_heads split_v_heads
squeeze_out_last_dim sublayer_dropout talking_heads tie_embedding_scale to_distance_weights
to_head_space_dimwise to_head_space_headwise to_k to_latent_kv to_latent_q to_logits to_mixture
to_next_embed_pred to_out to_output_gate to_output_gate_head_space to_q to_v to_v_gate
to_v_gate_activation to_v_gate_head_space to_v_head_gate to_value_residual_mix token_emb total_heads
train_max_looped_steps train_max_recycle_steps unet_skips unit_offset up use_latent_kv use_latent_q
value_rmsnorm
"""


def from_x_transformers(net: Any) -> nn.Module:
    """A module for `trace` around a causal wrapper with `max_mem_len`.

    Ids in and logits out, or numbers in and numbers out if the wrapper is a continuous one. The memory moves
    when `max_seq_len` tokens are complete, as in `XLAutoregressiveWrapper`: a token sees its own segment and
    the `max_mem_len` tokens before the segment. Trace it with `MemoryRule(mem_len=net.max_mem_len,
    segment=…)`, with a segment up to `max_seq_len`.

    With `shift_mem_down`, a step must not pass the end of a segment: trace it `without={"cuts"}`, and with a
    `segment` that divides `max_seq_len`.

    Raises ConfigError for options that this function does not know, such as `num_memory_tokens`.
    """
    refuse_unknown(net, KNOWN)
    return XTransformers(net)


class XTransformers(nn.Module):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.moves_every = net.max_seq_len
        layers = net.attn_layers
        # Each time that a layer is executed, it has a memory of its own.
        self.attentions = [layers.layer_types[at] for at in layers.layers_execute_order].count("a")
        if hasattr(net, "token_emb"):
            vocab_size = net.token_emb.emb.num_embeddings
            self.sizes = Sizes(vocab_size=vocab_size, layers=self.attentions, d_model=layers.dim)
        else:
            self.inputs = features(getattr(net.project_in, "in_features", layers.dim))

    def start(self, batch: int) -> list[Tensor]:
        shape = batch, self.net.max_mem_len + self.moves_every - 1, self.net.attn_layers.dim
        return [torch.zeros(shape) for _ in range(self.attentions)]

    def step(self, x: Tensor, positions: Tensor, memory: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        T = x.shape[1]
        W = memory[0].shape[1]
        place = positions.clamp(min=0) % self.moves_every  # in the segment
        distance = torch.arange(T)[:, None] + W - torch.arange(W + T)
        furthest = torch.minimum(positions.clamp(min=0), place + self.net.max_mem_len)
        visible = (distance >= 0) & (distance <= furthest[:, :, None])
        moved = self.net.pos_emb(x, pos=place) - self.net.pos_emb(x)
        mems = list(memory)
        if by := getattr(self.net, "shift_mem_down", 0):  # a layer reads old segments of the layer above
            own = torch.arange(W, 0, -1) <= place[:, :1]
            mems = [
                torch.where(own[:, :, None], mine, above)
                for mine, above in zip(mems, mems[by:] + mems[:by], strict=True)
            ]
            mems = mems[-by:] + mems[:-by]
        with without_einx("x_transformers.x_transformers"), without_cache(self.net.attn_layers.rel_pos):
            out, kept = self.net(
                x, mems=mems, attn_mask=visible[:, None], sum_embeds=moved, return_intermediates=True
            )
        return out, [torch.cat(pair, 1)[:, T:] for pair in zip(memory, kept.hiddens, strict=True)]


def without_cache(bias: Any) -> Any:
    """While a `with` block runs, ALiBi computes its bias anew, and does not keep it as a buffer."""
    if type(bias).__name__ != "AlibiPositionalBias":
        return nullcontext()

    def forward(i: int, j: int) -> Tensor:
        distance = torch.arange(j - i, j)[:, None] - torch.arange(j)
        return nn.functional.pad(
            -distance.abs() * bias.slopes, (0, 0, 0, 0, 0, bias.total_heads - bias.heads)
        )

    return mock.patch.object(bias, "forward", forward)


def without_einx(module: str) -> Any:
    """While a `with` block runs, a module computes with PyTorch what it computes with einx.

    einx turns sizes into numbers, so the graph would fit only the batch and the segment of the trace.
    """
    operations: dict[str, Any] = {
        "add": torch.add,
        "subtract": torch.sub,
        "multiply": torch.mul,
        "where": torch.where,
    }
    plain = {name: _broadcasting(operation) for name, operation in operations.items()}
    return mock.patch.object(sys.modules[module], "einx", SimpleNamespace(**plain))


def _broadcasting(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(pattern: str, *given: Any) -> Tensor:
        """Such as `call("j, i -> i j", keys, queries)`."""
        sides, axes = (side.strip() for side in pattern.split("->"))
        arrays = []
        for side, x in zip(sides.split(","), given, strict=True):
            names = side.split()
            x = torch.as_tensor(x)
            x = x.permute([names.index(axis) for axis in axes.split() if axis in names])
            arrays.append(x[tuple(slice(None) if axis in names else None for axis in axes.split())])
        return operation(*arrays)

    return call
