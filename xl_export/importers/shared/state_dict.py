"""Finds a bare state dict in what torch.save wrote.

Such a file holds `model.state_dict()`, by itself or under a key such as `state_dict`. The names of the
tensors show whose model it is. They may begin with the prefixes of DataParallel, FSDP, torch.compile and
Lightning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from xl_export.importers.pickle.values import Foreign, clean

# Of DataParallel, of kimiyoung's copy of it and of its `--fp16`: their `module` computes what they compute.
WRAPPER_CLASSES = frozenset(
    {"DataParallel", "BalancedDataParallel", "DistributedDataParallel", "FP16_Module"}
)
KEYS = ("model_state", "model_state_dict", "state_dict", "model", "module", "net", "network", "weights")
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
OWNERS = ("model", "decoder")  # names of attributes that hold the model
MAX_DEPTH = 8


def unwrapped(content: Any) -> Any:
    """Returns a pickled module without the modules and dictionaries around it; other content as it is.

    DataParallel, DistributedDataParallel and FP16_Module hold their module under the name `module`.
    """
    for _ in range(MAX_DEPTH):
        if isinstance(content, Foreign):
            if content.name.rpartition(".")[2] not in WRAPPER_CLASSES:
                return content
            modules = content.state.get("_modules") if isinstance(content.state, dict) else None
            inner = modules.get("module") if isinstance(modules, dict) and len(modules) == 1 else None
        elif isinstance(content, dict):
            inner = next((content[key] for key in KEYS if isinstance(content.get(key), Foreign)), None)
        else:
            return content
        if not isinstance(inner, Foreign):
            return content
        content = inner
    return content


def state_in(content: Any) -> dict[Any, Any] | None:
    """Returns the tensors by name that a file holds, by itself or under a key; None if it holds none."""
    if not isinstance(content, dict):
        return None
    inner = (content.get(key) for key in KEYS)
    return next(
        (state for state in (*inner, content) if isinstance(state, dict) and _has_tensors(state)), None
    )


def _has_tensors(state: Mapping[Any, Any]) -> bool:
    return any(isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items())


def bare_name(name: Any) -> Any:
    """Returns the name of a tensor without the names of wrappers, and of attributes that hold the model."""
    if not isinstance(name, str):
        return name
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] in OWNERS:
        parts = parts[1:]
    return ".".join(parts)


def project_of(content: Any) -> str | None:
    """Returns the name of the format whose tensors have these names; None for unknown names."""
    if isinstance(content, dict) and {"model_config", "model_state"} <= set(content):
        return None  # a whole checkpoint of NVIDIA
    names = {name for name in map(bare_name, state_in(content) or ()) if isinstance(name, str)}
    if "key_pe" in names:
        return "adaptive-span"
    if any(name.startswith(("crit.out_layers_biases.", "crit.shared_out_projs.")) for name in names):
        return "nvidia"
    if any(name.startswith(("transformer.word_emb.", "transformer.layers.0.dec_attn.")) for name in names):
        return "huggingface"
    if "layers.0.dec_attn.r_w_bias" in names:  # kimiyoung's code has one r_w_bias, outside of the layers
        return "huggingface"
    if any(name.startswith(("word_emb.emb_layers.", "layers.0.dec_attn.")) for name in names):
        return "kimiyoung"
    return None


SCALES = "the activation ReLU, embeddings times sqrt(d_model) and attention scores over sqrt(d_head)"


def state_notes(content: Any, attention_type: int) -> tuple[str, ...]:
    """Returns sentences on what a bare state dict lacks, and on what else its file holds."""
    return (
        f"a bare state dict of attn_type {attention_type}: its sizes follow from its tensors",
        *assumed(SCALES),
        *unread(content),
    )


def assumed(what: str) -> tuple[str]:
    """Returns the sentence on what no tensor shows. what: the properties of the project's code."""
    return (f"assumed, because tensors do not tell it: {what}, as in the project's code",)


def unread(content: Any, known: Collection[str] = ()) -> tuple[str, ...]:
    """Returns a sentence that names what a file holds next to its weights and is not read.

    known: what the project writes there itself: the state of its training.
    """
    state = state_in(content)
    names = [name for name in content if content[name] is not state and name not in known]
    if content is state or not names:
        return ()
    listed = ", ".join(clean(str(name)) for name in names[:8]) + (", …" if len(names) > 8 else "")
    return (f"only the weights were read; next to them the file has: {listed}",)
