"""The importer for kimiyoung/transformer-xl, PyTorch: the pickled module `model.pt`, or a bare state dict.

The vocabulary comes from the project's corpus `cache.pt`. How these models compute was measured with the
project's code at commit 44781ed:

- The memory begins empty, and nothing before the text is visible.
- With `same_length`, a query attends to mem_len keys, of which its own token is one.
- Distances are clamped to clamp_len; attn_type 1 keeps its nearest clamp_len vectors.
- The head's columns for the tail clusters are stored in reverse order.
- Memory, segment, clamp and mask are options of `eval.py`. They are not in the file.

attn_types 2 and 3 count positions back from the end of each segment. With memory, the code for type 2 stops
at the first segment, and the code for type 3 adds positions to the same memory again at every segment. No
memory in this project does that, so both types are imported with mem_len 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.rule import MemoryRule
from xl_export.importers.pickle import values
from xl_export.importers.pickle.values import Foreign
from xl_export.importers.shared.checkpoint import Source
from xl_export.importers.shared.settings import Setting, published
from xl_export.importers.shared.state_dict import project_of
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
    shown,
    taken,
    whole,
)
from xl_export.importers.transformer_xl import Project, Reading, Settings

MAX_PARTS = 1_000_000


class Kimiyoung(Project):
    title = "kimiyoung/transformer-xl"
    vocabularies = ("cache.pt",)

    def recognises(self, opened: Source) -> bool:
        if isinstance(opened.content, Foreign):
            return opened.content.name.endswith(".MemTransformerLM")
        return project_of(opened.content) == "kimiyoung"

    def settings(self, opened: Source) -> Settings | None:
        return module_settings(opened.content, opened.path) if isinstance(opened.content, Foreign) else None

    def weights(self, opened: Source) -> tuple[dict[str, Path], Iterable[tuple[Any, Any, Any]]]:
        if not isinstance(opened.content, Foreign):
            return super().weights(opened)
        tensors = module_tensors(opened.content, opened.path)
        return {"model": opened.path}, ((name, name, tensor) for name, tensor in tensors)

    def defaults(self, r: Reading) -> dict[str, Setting]:
        """The evaluation that the project published; if it published none, the module's last run."""
        if r.facts.attention_type in (2, 3):
            only = "the only value that can be expressed"
            known = {"mem_len": Setting(0, only), "mask": Setting("full", only)}
            if r.facts.attention_type == 2:
                known["clamp_len"] = Setting(0, "none")
            if r.stored is not None:
                known["segment"] = Setting(r.stored["tgt_len"] + r.stored["ext_len"], "the file")
            return known
        if r.dataset in ("enwik8", "text8", "wt103", "lm1b"):
            return published(r.dataset, r.facts.d_model)
        return {} if r.stored is None else of_last_run(r.stored, origin="the file")

    def rule(self, r: Reading) -> MemoryRule:
        kind = r.facts.attention_type
        if kind in (2, 3):
            return _without_memory(r)
        rule = super().rule(r)
        # The clamp keeps the nearest clamp_len vectors, of which the first is for distance 0.
        if kind == 1 and rule.clamp_len is not None:
            if rule.clamp_len == 1:
                raise ConfigError(
                    "clamp_len 1 leaves one vector for all distances of an attn_type 1 model; give "
                    "--clamp-len 2 or more."
                )
            rule = replace(rule, clamp_len=rule.clamp_len - 1)
        return rule

    def notes(self, r: Reading) -> tuple[str, ...]:
        if r.stored is None:
            return super().notes(r)
        return (f"attn_type {r.facts.attention_type}, last run with {lengths(r.stored)}",)


def _without_memory(r: Reading) -> MemoryRule:
    """The rule of attn_types 2 and 3, which depends on the positions that they know."""
    kind = r.facts.attention_type
    segment = r.chosen["segment"].value
    if r.chosen["mem_len"].value or r.chosen["mask"].value != "full":
        raise ConfigError(
            f"attn_type {kind} with memory adds positions to the remembered states, and this project "
            "cannot do that; give --mem-len 0 --mask full, as the project evaluates such models."
        )
    if kind == 2:
        trained = sum(r.stored[name] for name in ("tgt_len", "ext_len", "mem_len")) if r.stored else 0
        clamp_len = r.chosen["clamp_len"].value
        r.add(context=clamp_len + 1 if clamp_len else max(segment, trained))
    elif segment > (rows := r.t.peek("r_emb", dimensions=4).shape[1]):  # the positions that it learned
        raise ConfigError(
            f"segment is {segment} and this model has {rows} positions; give --segment {rows} or less."
        )
    return MemoryRule(mem_len=0, segment=segment, mask="full")


PROJECT = Kimiyoung()
LENGTHS = ("tgt_len", "ext_len", "mem_len", "clamp_len", "same_length")
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
    """Returns what each class of module may hold.

    m: the settings of the model. ends: the token after each cluster.
    """
    clusters = len(ends)
    attention = ATTENTION[m["attn_type"]]
    vocabulary: Table = MODULE | {
        **fixed(m["n_token"], "n_token"),
        **fixed(m["d_embed"], "d_embed"),
        **fixed(m["d_model"], "d_proj"),
        **fixed(ends, "cutoffs"),
        **fixed([0, *ends], "cutoff_ends"),
        **fixed(div_val, "div_val"),
    }
    return {
        "ModuleList": MODULE,
        "Sequential": MODULE,
        "ParameterList": MODULE
        | ignored("the number of its tensors", "_size")
        | fixed(None, *map(str, range(clusters))),  # projections that a model of one width lacks
        "AdaptiveEmbedding": {**vocabulary, **fixed(m["d_model"] ** 0.5, "emb_scale")},
        "ProjectedAdaptiveLogSoftmax": {
            **vocabulary,
            **fixed(ends[0], "shortlist_size"),
            **fixed(clusters - 1, "n_clusters"),
            **fixed(ends[0] + clusters - 1, "head_size"),
            **ignored("the order in which losses are returned", "keep_order"),
        },
        "PositionalEmbedding": MODULE | ignored("not used by its code", "demb"),
        f"{attention}DecoderLayer": MODULE,
        f"{attention}MultiHeadAttn": MODULE
        | {
            **fixed(m["n_head"], "n_head"),
            **fixed(m["d_head"], "d_head"),
            **fixed(1 / m["d_head"] ** 0.5, "scale"),
            **taken(TRUTH, "pre_lnorm"),
            **ignored("not used by its code", "d_model", "dropout"),
        },
        "PositionwiseFF": MODULE
        | {**taken(TRUTH, "pre_lnorm"), **ignored("not used by its code", "d_model", "d_inner", "dropout")},
        "ReLU": MODULE
        | {
            **fixed(0.0, "threshold", "value"),  # until PyTorch 1.1, of x if x > threshold else value
            **ignored("where the result is stored", "inplace"),
        },
        "Dropout": MODULE | {**taken(FRACTION, "p"), **ignored("where the result is stored", "inplace")},
        "Linear": MODULE | ignored("its tensor has them", "in_features", "out_features"),
        "Embedding": MODULE
        | {
            **fixed(None, "max_norm"),  # a limit for rows, which are then scaled when they are read
            **ignored("used with max_norm only", "norm_type"),
            **ignored("its tensor has them", "num_embeddings", "embedding_dim"),
            **ignored("of gradients", "padding_idx", "scale_grad_by_freq", "sparse"),
        },
        "LayerNorm": MODULE
        | {
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
    """The settings of the pickled module, with those of its parts that the architecture depends on.

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
            raise ArtefactError(f"{where} lacks the module {path} of a {PROJECT.title} model.")
        if part.name.rpartition(".")[2] != kind:
            raise ArtefactError(
                f"{where}: the module {path} is a {values.clean(part.name)}, expected {kind}, the only one "
                f"that can be imported; {OWN_MODEL}"
            )
        settings[path] = checked(part.state, known[kind], where=where, inside=f"{path}.")
    if parts:
        path, part = next(iter(parts.items()))
        raise ArtefactError(
            f"{where} has the unexpected module {values.clean(path)}, a {values.clean(part.name)}, expected "
            f"only the modules of a {PROJECT.title} model; {OWN_MODEL}"
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


def of_last_run(stored: Settings, *, origin: str) -> dict[str, Setting]:
    """The evaluation in the settings of a model."""
    return {
        "mem_len": Setting(stored["mem_len"], origin),
        "segment": Setting(stored.get("tgt_len"), origin),
        "mask": Setting("same-length" if stored["same_length"] else "full", origin),
        "clamp_len": Setting(max(stored["clamp_len"], 0), origin),
    }


def lengths(stored: Settings) -> str:
    """The lengths of a training, for notes."""
    return ", ".join(f"{name} {shown(stored.get(name))}" for name in LENGTHS)


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
