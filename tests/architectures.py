"""One small model of every kind, for tests that hold for all of them."""

from __future__ import annotations

from typing import Any

from runtimes.contract.rule import MemoryRule
from trainer.model.config import SpanConfig, VocabularyConfig

RULE = MemoryRule(mem_len=16, segment=8)
UNSEEN = MemoryRule(mem_len=16, segment=8, include_self=False, initial_memory="zeros")
LEARNED: dict[str, Any] = {"positions": "learned", "context": 17}
SPAN: dict[str, Any] = LEARNED | {"span": SpanConfig(maximum=16, ramp=4, initial=0.4, penalty=1e-3)}
ALL_ATTENTION: dict[str, Any] = SPAN | {"d_ff": 0, "persistent": 5, "rule": UNSEEN}

# sizes of trainer.model.config.ModelConfig that differ from the tests' usual ones, and the rule
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer-xl": {},
    "transformer-xl-untied-pre-norm": {"tie_biases": False, "pre_norm": True},
    "adaptive-softmax": {
        "vocabulary": VocabularyConfig(cutoffs=(20, 50), div_val=2, tie_projections=(False, True, True)),
    },
    "adaptive-softmax-untied": {
        "vocabulary": VocabularyConfig(cutoffs=(30,), d_embed=10, tie_weights=False, scale=False),
    },
    "adaptive-softmax-wide-first": {  # as the TensorFlow code writes it
        "vocabulary": VocabularyConfig(cutoffs=(30,), div_val=2, project_same_width=False),
        "tie_biases": False,
        "norm_epsilon": 1e-2,
        "rule": MemoryRule(mem_len=16, segment=8, initial_memory="zeros"),
    },
    "shaw": {"positions": "shaw", "context": 9},
    "absolute": {"positions": "absolute", "context": 8},
    "per-layer": {
        "positions": "per-layer",
        "context": 8,
        "rule": MemoryRule(mem_len=0, segment=8, mask="full"),
    },
    "absolute-from-segment-end": {
        "positions": "absolute",
        "context": 6,
        "from_segment_end": True,
        "pre_norm": True,
        "query_norm": False,
        "rule": MemoryRule(mem_len=0, segment=8, mask="full"),
    },
    "per-layer-from-segment-end": {
        "positions": "per-layer",
        "context": 8,
        "from_segment_end": True,
        "rule": MemoryRule(mem_len=0, segment=8, mask="full"),
    },
    "adaptive-span": SPAN | {"rule": UNSEEN},
    "adaptive-span-masked": SPAN | {"rule": MemoryRule(mem_len=16, segment=8, include_self=False)},
    "adaptive-span-full": SPAN | {"rule": MemoryRule(mem_len=16, segment=8, mask="full")},
    "all-attention": ALL_ATTENTION | {"sublayers": "all-attention"},
    "all-attention-pre-norm": ALL_ATTENTION | {"sublayers": "all-attention", "pre_norm": True, "span": None},
    "all-attention-groups": {
        **LEARNED,
        "context": 81,
        "d_ff": 0,
        "sublayers": "all-attention",
        "persistent": 5,
        "heads": 4,
        "span": SpanConfig(maximum=80, ramp=4, penalty=1e-3),
        "rule": MemoryRule(mem_len=80, segment=8, include_self=False),
        "shares": (0.02, 1.0, 0.05, 0.8),
    },
    "attn-split": ALL_ATTENTION | {"sublayers": "attn-split"},
    "head-split": ALL_ATTENTION | {"sublayers": "head-split"},
    "single-head": ALL_ATTENTION | {"sublayers": "single-head"},
    "ff-attn": ALL_ATTENTION | {"sublayers": "ff-attn"},
    "adaptive-span-gated-full": {  # as the public code: the span's factors come after the softmax
        **LEARNED,
        "span": SpanConfig(maximum=16, ramp=4, initial=0.4, epsilon=1e-2),
        "rule": MemoryRule(mem_len=16, segment=8, mask="full"),
    },
}

# A model whose graph holds every weight itself: `weights.bin` is empty. The vocabulary has 7 ids.
SMALLEST: dict[str, Any] = {
    "layers": 1,
    "d_model": 6,
    "heads": 1,
    "head_dim": 4,
    "d_ff": 8,
    "vocab_size": 7,
    "rule": MemoryRule(mem_len=8, segment=4),
}
