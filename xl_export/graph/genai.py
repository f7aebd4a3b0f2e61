"""Writes `genai_config.json`, with which onnxruntime-genai loads a ring artefact without changes."""

from __future__ import annotations

from typing import Any

from runtimes.contract.spec import GRAPH, Spec

FILE = "genai_config.json"
MAX_STREAM = 1 << 20  # tokens; genai keeps their ids, 4 bytes each


def takes(spec: Spec) -> bool:
    """Whether genai can run the artefact.

    It needs a ring of one shape for all layers, in float32, and a graph that gives its logits for all
    positions.
    """
    one_shape = len({state.shape for state in spec.state}) == 1
    return spec.form == "ring" and not spec.model.selective and one_shape and spec.state_dtype == "float32"


def genai_config(spec: Spec) -> dict[str, Any]:
    """Returns the configuration for the folder of a ring artefact.

    Past and present share one buffer, the graph's S slots, so the lengths here only bound how long a stream
    may grow. Prompts must be fed in pieces of at most the artefact's segment. genai feeds the prompts of a
    batch in one piece, and they must have equal lengths, because the graph has no mask for genai's padding.
    Text is generated until `max_length`, because these vocabularies have no end-of-text token.
    """
    model = spec.model
    return {
        "model": {
            "type": "decoder",
            "eos_token_id": [],
            "pad_token_id": 0,
            "vocab_size": model.vocab_size,
            "context_length": MAX_STREAM,
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
        "search": {
            "max_length": MAX_STREAM,
            "past_present_share_buffer": True,
            "num_beams": 1,
            "do_sample": False,
        },
    }
