"""Finds a bare state dict in what torch.save wrote, and reads the sizes of its model from its tensors.

Such a file holds `model.state_dict()`, by itself or under a key such as `state_dict`. The names of the
tensors show whose model it is. They may begin with the prefixes of DataParallel, FSDP, torch.compile and
Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError
from xl_export.importers.pickle.values import Foreign, clean
from xl_export.importers.shared.checkpoint import ImportOptions, Source
from xl_export.importers.shared.settings import Setting
from xl_export.importers.shared.transformer_xl import Architecture, table_sizes
from xl_export.importers.shared.validated import Tensors

# Of DataParallel, of kimiyoung's copy of it and of its `--fp16`: their `module` computes what they compute.
WRAPPER_CLASSES = frozenset(
    {"DataParallel", "BalancedDataParallel", "DistributedDataParallel", "FP16_Module"}
)
KEYS = ("model_state", "model_state_dict", "state_dict", "model", "module", "net", "network", "weights")
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
OWNERS = ("model", "decoder")  # names of attributes that hold the model
MAX_DEPTH = 8
# From the settings that a bare state dict lacks to the project's words for them.
WORDS = {"mem_len": "mem_len", "segment": "tgt_len", "mask": "same_length", "clamp_len": "clamp_len"}


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


def architecture(t: Tensors, options: ImportOptions, *, reversed_clusters: bool) -> Architecture:
    """Returns sizes and options that follow from the tensors; `n_head`, `cutoffs` and `pre_lnorm` may not.

    t: tensors under kimiyoung's names. Raises ConfigError if the user must give a size.
    """
    kind = _attention_type(t)
    d_model = t.peek("layers.0.dec_attn.o_net.weight", dimensions=2).shape[0]
    untied = kind == 0 and "r_w_bias" not in t
    heads, head_dim = _heads(t, options, kind=kind, untied=untied)
    vocab_size, cutoffs, d_embed, div_val = table_sizes(t)
    if not cutoffs:
        cutoffs = _cutoffs(t, options)
        # Only a div_val above 1 has a projection between equal widths.
        div_val = 2 if not cutoffs and d_embed == d_model and "word_emb.emb_projs.0" in t else 1
    return Architecture(
        layers=t.count("layers"),
        d_model=d_model,
        heads=heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        d_embed=d_embed,
        div_val=div_val,
        cutoffs=cutoffs,
        reversed_clusters=reversed_clusters,
        attention_type=kind,
        pre_norm=bool(options.chosen("pre_lnorm")),
        biases_in_layers=untied,
    )


def _attention_type(t: Tensors) -> int:
    if "layers.0.dec_attn.r_net.weight" in t:
        return 0
    if "r_emb" in t:
        return 1 if "layers.0.dec_attn.qkv_net.weight" in t else 3
    return 2 if "layers.0.dec_attn.q_net.weight" in t else 0


def _heads(t: Tensors, options: ImportOptions, *, kind: int, untied: bool) -> tuple[int, int]:
    """Returns the number of heads and their width."""
    if kind == 0:
        pair = t.peek("layers.0.dec_attn.r_w_bias" if untied else "r_w_bias", dimensions=2).shape
        return pair[0], pair[1]
    if kind in (1, 3):
        table = t.peek("r_emb", dimensions=4).shape
        return table[2], table[3]
    width = t.peek("layers.0.dec_attn.q_net.weight", dimensions=2).shape[0]
    heads = options.chosen("n_head")
    if heads is None or width % heads:
        raise ConfigError(
            f"{t.where} is a bare state dict with queries of {width} numbers, and n_head is "
            f'{"not given" if heads is None else heads}; give "n_head", a divisor of {width}, in a file with '
            "--settings."
        )
    return heads, width // heads


def _cutoffs(t: Tensors, options: ImportOptions) -> tuple[int, ...]:
    """Returns the first token of each tail cluster if all clusters share one table."""
    if "crit.cluster_weight" not in t:
        return ()
    tails = t.peek("crit.cluster_weight", dimensions=2).shape[0]
    chosen = options.chosen("cutoffs")
    if chosen is None or len(chosen) != tails:
        raise ConfigError(
            f"{t.where} is a bare state dict with {tails} tail clusters, and cutoffs "
            f"{'are not given' if chosen is None else f'has {len(chosen)} numbers'}; give "
            f'"cutoffs": [{tails} ascending token ids] in a file with --settings.'
        )
    return tuple(chosen)


def state_tensors(
    opened: Source,
    options: ImportOptions,
    *,
    project: str,
    renamed: Callable[[Any], Any] = lambda name: name,
) -> Tensors:
    """Returns the tensors of a bare state dict under kimiyoung's names.

    renamed: from a name in the project's code to kimiyoung's.
    """
    state = state_in(opened.content) or {}
    return Tensors(
        ((renamed(bare_name(name)), name, tensor) for name, tensor in state.items()),
        where=opened.path,
        project=project,
        allow_nonfinite=options.allow_nonfinite,
    )


def state_notes(opened: Source, facts: Architecture) -> tuple[str, ...]:
    """Returns sentences on what a bare state dict lacks, and on what else its file holds."""
    return (
        f"a bare state dict of attn_type {facts.attention_type}: its sizes are those of its tensors",
        *assumed(SCALES),
        *unread(opened.content),
    )


SCALES = "the activation ReLU, embeddings times sqrt(d_model) and attention scores over sqrt(d_head)"


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


def state_settings(
    opened: Source, options: ImportOptions, project: str, known: dict[str, Setting], facts: Architecture
) -> dict[str, Setting]:
    """Returns the settings of the evaluation, and of the model if its tensors do not show them.

    known: the settings that are known for these sizes and this data set. Raises ConfigError, which names the
    missing keys, if another setting is needed.
    """
    assumed = {"pre_lnorm": Setting(False, "assumed: not in a state dict")}
    if options.chosen("n_head") is not None:
        assumed["n_head"] = Setting(facts.heads, "the tensors")
    if options.chosen("cutoffs") is not None:
        assumed["cutoffs"] = Setting(facts.cutoffs, "the tensors")
    needed = [name for name in WORDS if name != "clamp_len" or facts.attention_type != 3]
    settings = options.applied_to(project, dict.fromkeys(needed, Setting(None, "")) | known | assumed)
    if missing := [name for name in needed if settings[name].value is None]:
        keys = ", ".join(f'"{WORDS[name]}"' for name in missing)
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ConfigError(
            f"{opened.path} is a bare state dict, which does not say how its model is evaluated; give "
            f"{flags}, or {keys} in a file with --settings."
        )
    for name, found in (("n_head", facts.heads), ("cutoffs", facts.cutoffs)):
        if name in settings and settings[name].value != found:
            raise ArtefactError(
                f"{opened.path}: {name} is {found} by the shapes of the tensors, and {settings[name].value} "
                f"is given ({settings[name].origin}); leave {name} out."
            )
    return settings
