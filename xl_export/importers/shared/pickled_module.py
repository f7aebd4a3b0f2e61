"""The pickled module `model.pt` of kimiyoung/transformer-xl: the classes and settings that it may hold.

A pickle holds names of classes and no code, so every module must be of the class that the project has in its
place, and every attribute must be known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError
from xl_export.importers.pickle import values
from xl_export.importers.pickle.values import Foreign
from xl_export.importers.shared.validated import (
    ASCENDING,
    FRACTION,
    NOT_SAMPLED,
    NOTHING,
    OWN_MODEL,
    TRUTH,
    Table,
    checked,
    checked_setting,
    fixed,
    ignored,
    one_of,
    taken,
    whole,
)

TITLE = "kimiyoung/transformer-xl"
MAX_PARTS = 1_000_000
MODULES = {  # the class of each module by its path; * counts layers, and the tables of the vocabulary
    "drop": "Dropout",
    "word_emb": "AdaptiveEmbedding",
    "word_emb.emb_layers": "ModuleList",
    "word_emb.emb_layers.*": "Embedding",
    "word_emb.emb_projs": "ParameterList",
    "crit": "ProjectedAdaptiveLogSoftmax",
    "crit.out_layers": "ModuleList",
    "crit.out_layers.*": "Linear",
    "crit.out_projs": "ParameterList",
    "layers": "ModuleList",
    "layers.*": "{}DecoderLayer",
    "layers.*.dec_attn": "{}MultiHeadAttn",
    "layers.*.dec_attn.o_net": "Linear",
    "layers.*.dec_attn.drop": "Dropout",
    "layers.*.dec_attn.dropatt": "Dropout",
    "layers.*.dec_attn.layer_norm": "LayerNorm",
    "layers.*.pos_ff": "PositionwiseFF",
    "layers.*.pos_ff.layer_norm": "LayerNorm",
    "layers.*.pos_ff.CoreNet": "Sequential",
    "layers.*.pos_ff.CoreNet.0": "Linear",
    "layers.*.pos_ff.CoreNet.1": "ReLU",
    "layers.*.pos_ff.CoreNet.2": "Dropout",
    "layers.*.pos_ff.CoreNet.3": "Linear",
    "layers.*.pos_ff.CoreNet.4": "Dropout",
}
# The names of the classes of each attn_type begin with this.
ATTENTION = {0: "RelPartialLearnable", 1: "RelLearnable", 2: "", 3: ""}
MORE_MODULES = {  # of each attn_type
    0: ("pos_emb", "layers.*.dec_attn.qkv_net", "layers.*.dec_attn.r_net"),
    1: ("layers.*.dec_attn.qkv_net",),
    2: ("pos_emb", "layers.*.dec_attn.q_net", "layers.*.dec_attn.kv_net"),
    3: ("layers.*.dec_attn.q_net", "layers.*.dec_attn.kv_net"),
}
MODULE: Table = {  # what PyTorch itself keeps in every module
    **ignored("tensors and modules, which are read one by one", "_parameters", "_buffers", "_modules"),
    **taken(NOTHING, "_forward_hooks", "_forward_pre_hooks"),  # they may change what is computed
    **ignored("of these hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    **ignored("of these hooks", "_forward_hooks_always_called"),
    **ignored("of the training", "training", "_backward_hooks", "_backward_pre_hooks"),
    **ignored("of the training", "_is_full_backward_hook", "_backend"),
    **ignored("of saving and loading", "_non_persistent_buffers_set", "_state_dict_hooks"),
    **ignored("of saving and loading", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
    **ignored("of saving and loading", "_load_state_dict_post_hooks"),
}
MODEL: Table = MODULE | {
    **taken(whole(1), "n_token", "d_model", "n_head", "d_head", "d_embed", "n_layer", "tgt_len"),
    **taken(whole(), "ext_len", "mem_len"),
    **taken(whole(-1), "clamp_len"),
    **taken(TRUTH, "same_length"),
    **taken(one_of(*ATTENTION), "attn_type"),
    **taken(NOT_SAMPLED, "sample_softmax"),
    **ignored("the sum of the lengths of the training", "max_klen"),
}


def tables(m: dict[str, Any], ends: list[int], div_val: int) -> dict[str, Table]:
    """What each class of module may hold, besides what PyTorch keeps in it.

    m: the settings of the model. ends: the token after each cluster.
    """
    clusters = len(ends)
    attention = ATTENTION[m["attn_type"]]
    vocabulary: Table = {
        **fixed(m["n_token"], "n_token"),
        **fixed(m["d_embed"], "d_embed"),
        **fixed(m["d_model"], "d_proj"),
        **fixed(ends, "cutoffs"),
        **fixed([0, *ends], "cutoff_ends"),
        **fixed(div_val, "div_val"),
    }
    return {
        "ParameterList": {
            **ignored("the number of its tensors", "_size"),
            **fixed(None, *map(str, range(clusters))),  # projections that a model of one width lacks
        },
        "AdaptiveEmbedding": {**vocabulary, **fixed(m["d_model"] ** 0.5, "emb_scale")},
        "ProjectedAdaptiveLogSoftmax": {
            **vocabulary,
            **fixed(ends[0], "shortlist_size"),
            **fixed(clusters - 1, "n_clusters"),
            **fixed(ends[0] + clusters - 1, "head_size"),
            **ignored("the order in which losses are returned", "keep_order"),
        },
        "PositionalEmbedding": ignored("not used by its code", "demb"),
        f"{attention}MultiHeadAttn": {
            **fixed(m["n_head"], "n_head"),
            **fixed(m["d_head"], "d_head"),
            **fixed(1 / m["d_head"] ** 0.5, "scale"),
            **taken(TRUTH, "pre_lnorm"),
            **ignored("not used by its code", "d_model", "dropout"),
        },
        "PositionwiseFF": {
            **taken(TRUTH, "pre_lnorm"),
            **ignored("not used by its code", "d_model", "d_inner", "dropout"),
        },
        "ReLU": {
            **fixed(0.0, "threshold", "value"),  # until PyTorch 1.1, of x if x > threshold else value
            **ignored("where the result is stored", "inplace"),
        },
        "Dropout": {**taken(FRACTION, "p"), **ignored("where the result is stored", "inplace")},
        "Linear": ignored("its tensor has them", "in_features", "out_features"),
        "Embedding": {
            **fixed(None, "max_norm"),  # a limit for rows, which are then scaled when they are read
            **ignored("used with max_norm only", "norm_type"),
            **ignored("its tensor has them", "num_embeddings", "embedding_dim"),
            **ignored("of gradients", "padding_idx", "scale_grad_by_freq", "sparse"),
        },
        "LayerNorm": {
            **taken(FRACTION, "eps"),
            **fixed([m["d_model"]], "normalized_shape"),
            **fixed(True, "elementwise_affine"),
        },
    }


def module_classes(m: dict[str, Any], clusters: int) -> Iterator[tuple[str, str]]:
    """Returns the path and the class of each module of a model, without the model itself.

    m: the settings of the model. clusters: those that have a table of their own.
    """
    kind = m["attn_type"]
    more = {path: "PositionalEmbedding" if path == "pos_emb" else "Linear" for path in MORE_MODULES[kind]}
    for path, name in (MODULES | more).items():
        count = 1 if "*" not in path else m["n_layer"] if path.startswith("layers.") else clusters
        for i in range(count):
            yield path.replace("*", str(i)), name.format(ATTENTION[kind])


def module_settings(module: Foreign, where: Path) -> dict[str, Any]:
    """The settings of the pickled module, and of its parts that the architecture depends on.

    Raises ArtefactError for a module or a setting that is unknown, or that computes something else than this
    project.
    """
    parts = modules_of(module, where)
    m = checked(parts.pop("").state, MODEL, where=where)
    embedding = parts["word_emb"].state if "word_emb" in parts else {}
    ends = list(checked_setting(embedding, "cutoffs", ASCENDING, where=where, inside="word_emb."))
    div_val = checked_setting(embedding, "div_val", whole(1), where=where, inside="word_emb.")
    if ends[-1:] != [m["n_token"]]:
        raise ArtefactError(
            f"{where}: word_emb.cutoffs end at {ends[-1:]}, expected n_token, {m['n_token']}."
        )
    settings = {}
    known = tables(m, ends, div_val)
    for path, kind in module_classes(m, 1 if div_val == 1 else len(ends)):
        part = parts.pop(path, None)
        if part is None:
            raise ArtefactError(f"{where} lacks the module {path} of a {TITLE} model.")
        if part.name.rpartition(".")[2] != kind:
            raise ArtefactError(
                f"{where}: the module {path} is a {values.clean(part.name)}, expected {kind}, the only one "
                f"that can be imported; {OWN_MODEL}"
            )
        settings[path] = checked(part.state, MODULE | known.get(kind, {}), where=where, inside=f"{path}.")
    if parts:
        path, part = next(iter(parts.items()))
        raise ArtefactError(
            f"{where} has the unexpected module {values.clean(path)}, a {values.clean(part.name)}, expected "
            f"only the modules of a {TITLE} model; {OWN_MODEL}"
        )
    norms, orders = (
        {part[name] for part in settings.values() if name in part} for name in ("eps", "pre_lnorm")
    )
    if len(norms) != 1 or len(orders) != 1:
        raise ArtefactError(
            f"{where}: its layers have different LayerNorms; expected one epsilon and one order for all."
        )
    return m | {
        "div_val": div_val,
        "cutoffs": ends[:-1],
        "pre_lnorm": orders.pop(),
        "layer_norm_epsilon": norms.pop(),
        "dropout": settings["drop"]["p"],
        "dropatt": settings["layers.0.dec_attn.dropatt"]["p"],
    }


def modules_of(model: Foreign, where: Path) -> dict[str, Foreign]:
    """Returns the modules of a pickled model by path, the model itself with the path ""."""
    found = {}
    todo = [("", model)]
    seen = 0
    while todo:
        path, module = todo.pop()
        found[path] = module
        for kind in ("_parameters", "_buffers", "_modules"):
            parts = module.state.get(kind, {}) if isinstance(module.state, dict) else None
            seen += len(parts) if isinstance(parts, dict) else MAX_PARTS
            if seen >= MAX_PARTS:
                raise ArtefactError(
                    f"{where}: {values.clean(path) or 'the model'} is not a module that PyTorch pickled; "
                    "copy the file again."
                )
        parts = module.state.get("_modules", {})
        todo += [
            (f"{path}.{name}" if path else str(name), part)
            for name, part in parts.items()
            if isinstance(part, Foreign)
        ]
    return found


def module_tensors(model: Foreign, where: Path) -> Iterator[tuple[str, Any]]:
    """Returns the names and tensors of the state dict of a pickled module."""
    for path, module in modules_of(model, where).items():
        for kind in ("_parameters", "_buffers", "_modules"):
            for name, part in module.state.get(kind, {}).items():
                if part is not None and not (kind == "_modules" and isinstance(part, Foreign)):
                    yield (f"{path}.{name}" if path else str(name)), part
