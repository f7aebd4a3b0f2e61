"""`genai_config.json`: what onnxruntime-genai needs to load a ring artefact as it is."""

from __future__ import annotations

from typing import Any

from runtimes.spec import GRAPH, Spec

FILE = "genai_config.json"


def genai_config(spec: Spec) -> dict[str, Any]:
    """The configuration for a ring artefact's folder.

    genai allocates the buffers that past and present share with `max_length` slots, so that is S here. Its
    prompts must be fed in pieces of at most the artefact's segment; generation may run on without bound.
    No vocabulary of ours has an end-of-text token, so the ids name one past the last symbol.
    """
    model, none = spec.model, spec.model.vocab_size
    return {
        "model": {
            "type": "decoder",
            "bos_token_id": none,
            "eos_token_id": none,
            "pad_token_id": 0,
            "vocab_size": model.vocab_size,
            "context_length": spec.rule.slots,
            "decoder": {
                "filename": GRAPH,
                "head_size": model.head_dim,
                "hidden_size": model.d_model,
                "num_attention_heads": model.heads,
                "num_key_value_heads": model.heads,
                "num_hidden_layers": model.layers,
                "session_options": {"provider_options": []},
                "inputs": {
                    "input_ids": "input_ids",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"max_length": spec.rule.slots, "past_present_share_buffer": True, "num_beams": 1, "do_sample": False},
    }
