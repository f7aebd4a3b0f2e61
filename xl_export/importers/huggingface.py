"""The importer for Hugging Face TransfoXL folders.

A folder holds `config.json`, the weights (`model.safetensors`, `pytorch_model.bin`, or shards of one of them
with their index) and the vocabulary (`vocab.pkl`, `.bin` or `.txt`). A file that holds a bare state dict is
read, too. How these models compute was measured with transformers 4.37.2, the last release that runs them:

- The memory begins as mem_len vectors of zeros, and queries attend to them.
- With `same_length`, a query attends to mem_len keys, of which its own token is one.
- The head's columns are in the order of the clusters.
- With `untie_r`, every layer has its own u and v.
- Tied tensors are not in the file; `config.json` says which they are.

An index of shards is a JSON object whose `weight_map` maps each tensor to its file. A shard must hold exactly
the tensors that the index expects in it, because shards of another model would otherwise be mixed in
silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_json
from runtimes.contract.rule import MemoryRule
from xl_export.importers.pickle import values
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.tensors import read_safetensors
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source, companion_file
from xl_export.importers.shared.settings import Setting, memory_rule, published
from xl_export.importers.shared.state_dict import (
    architecture,
    bare_name,
    project_of,
    state_notes,
    state_settings,
    state_tensors,
)
from xl_export.importers.shared.transformer_xl import Architecture, checkpoint
from xl_export.importers.shared.validated import (
    ASCENDING,
    FRACTION,
    NOT_SAMPLED,
    NOTHING,
    TRUTH,
    Table,
    Tensors,
    checked,
    fixed,
    ignored,
    optional,
    taken,
    truths,
    whole,
)
from xl_export.importers.shared.vocabularies import read_vocabulary

PROJECT = "Hugging Face TransfoXL"
CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
PYTORCH = "pytorch_model.bin"
INDEX = ".index.json"
WEIGHTS = (SAFETENSORS, SAFETENSORS + INDEX, PYTORCH, PYTORCH + INDEX)  # in the order of transformers
VOCABULARIES = ("vocab.pkl", "vocab.bin", "vocab.txt")
DEFAULTS: dict[str, Any] = {  # of TransfoXLConfig; an older config.json may lack some keys
    "vocab_size": 267735,
    "cutoffs": [20000, 40000, 200000],
    "d_model": 1024,
    "d_embed": 1024,
    "n_head": 16,
    "d_head": 64,
    "div_val": 4,
    "pre_lnorm": False,
    "n_layer": 18,
    "mem_len": 1600,
    "clamp_len": 1000,
    "same_length": True,
    "attn_type": 0,
    "untie_r": True,
    "dropout": 0.1,
    "dropatt": 0.0,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


SEGMENT = published("wt103", d_model=1024)["segment"]


def recognises(opened: Source) -> bool:
    if not opened.path.is_dir():
        return project_of(opened.content) == "huggingface"
    return is_config(opened.content)


def is_config(content: Any) -> bool:
    """Whether `config.json` belongs to a TransfoXL model; its first releases wrote no model_type."""
    return isinstance(content, dict) and (
        content.get("model_type") == "transfo-xl"
        or ("model_type" not in content and set(content) >= {"cutoffs", "div_val", "d_head", "mem_len"})
    )


def read(opened: Source, options: ImportOptions) -> Checkpoint:
    """Returns the model in an opened folder or file.

    Raises ArtefactError or ConfigError if something is missing, is wrong or cannot be expressed here.
    """
    whole = opened.path.is_dir()
    if whole:
        described = checked_config(opened.content, opened.path / CONFIG)
        weights = find_weights(opened.path)
        if weights is None:
            raise ArtefactError(
                f"{opened.path} has no {SAFETENSORS} or {PYTORCH}; copy the whole folder that "
                "save_pretrained wrote."
            )
        state, shards = read_weights(weights)
        named = ((renamed(bare_name(name)), name, tensor) for name, tensor in state.items())
        t = Tensors(named, where=weights, project=PROJECT, allow_nonfinite=options.allow_nonfinite)
        facts = config_facts(described)
        files = {"config": opened.path / CONFIG, "model": weights}
        files |= {f"shard {number}": path for number, path in enumerate(shards, 1)}
    else:
        t = state_tensors(opened, options, project=PROJECT, renamed=renamed)
        facts = architecture(t, options, reversed_clusters=False)
        files = {"model": opened.path}
    files["vocabulary"] = companion_file(opened.path, VOCABULARIES, options.vocab)
    found = read_vocabulary(files["vocabulary"], size=facts.vocab_size)
    settings = (
        options.applied_to(PROJECT, defaults(described))
        if whole
        else state_settings(opened, options, PROJECT, {"segment": SEGMENT}, facts)
    )
    return checkpoint(
        t,
        facts,
        options=options,
        rule=memory_rule_of(settings),
        vocabulary=found,
        settings=settings,
        files=files,
        notes=() if whole else state_notes(opened, facts),
    )


def memory_rule_of(settings: dict[str, Setting], *, project: str = PROJECT) -> MemoryRule:
    """Returns the rule of the memory under which a TransfoXL model of Hugging Face computes."""
    return memory_rule(settings, project=project, beyond_self=-1, initial_memory="zeros")


def config_table(config: dict[str, Any]) -> Table:
    """Returns what `config.json` may hold. config: its settings with the defaults for those that it lacks."""
    cutoffs = config.get("cutoffs")
    clusters = 1 + (len(cutoffs) if isinstance(cutoffs, list | tuple) else 0)
    return {
        **taken(whole(1), "vocab_size", "n_layer", "n_head", "d_model", "d_head", "d_embed", "div_val"),
        **taken(optional(whole(1)), "d_inner"),
        **taken(ASCENDING, "cutoffs"),
        **taken(TRUTH, "pre_lnorm", "untie_r", "tie_word_embeddings", "same_length"),
        **taken(truths(clusters), "tie_projs"),
        **taken(FRACTION, "dropout", "dropatt", "layer_norm_epsilon"),
        **taken(whole(), "mem_len"),
        **taken(whole(-1), "clamp_len"),
        **taken(NOT_SAMPLED, "sample_softmax"),
        **fixed(0, "attn_type"),  # the only one that transformers runs
        **fixed(0, "ext_len"),  # the tokens that the memory of the first releases leaves out
        **fixed(True, "adaptive"),
        **taken(NOTHING, "pruned_heads"),
        # Other names of settings that are read.
        **fixed(config.get("vocab_size"), "n_token"),
        **fixed(config.get("d_model"), "hidden_size"),
        **fixed(config.get("n_head"), "num_attention_heads"),
        **fixed(config.get("n_layer"), "num_hidden_layers"),
        **fixed(config.get("tie_word_embeddings"), "tie_weight"),
        **ignored("tie_projs follows from it, unless the file has tie_projs", "proj_share_all_but_first"),
        **ignored("of the training: a step may have any length", "tgt_len"),
        **ignored("of the start of a training", "init", "init_range", "init_std", "proj_init_std"),
        **ignored("the type of the file's weights, which become float32", "torch_dtype", "dtype"),
        **ignored("the name and the release", "model_type", "architectures", "transformers_version"),
        **ignored("the place that it was loaded from", "_name_or_path", "_commit_hash"),
        **ignored("what transformers returns, and how it runs", *RETURNED),
        **ignored("tokens that the vocabulary marks or generation uses", *TOKENS),
        **ignored("of classifiers and of other tasks", *TASKS),
        **ignored("of text generation", *GENERATION),
    }


RETURNED = (
    "output_attentions", "output_hidden_states", "output_past", "use_cache", "return_dict", "torchscript",
    "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward",
)  # fmt: skip
TOKENS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "tokenizer_class", "prefix",
)  # fmt: skip
TASKS = (
    "task_specific_params", "finetuning_task", "problem_type", "num_labels", "_num_labels", "id2label",
    "label2id", "is_decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size",
    "tie_encoder_decoder",
)  # fmt: skip
GENERATION = (
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature",
    "diversity_penalty", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip


def checked_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the settings in `config.json`, with the defaults of transformers for those that it lacks.

    Raises ArtefactError if one is unknown or has a value that cannot be expressed here.
    """
    first_releases = {"n_token": "vocab_size", "tie_weight": "tie_word_embeddings"}
    older = {name: config[old] for old, name in first_releases.items() if old in config}
    described = DEFAULTS | older | config
    if isinstance(described["cutoffs"], list | tuple):
        share = described.get("proj_share_all_but_first", True)
        described = {"tie_projs": [False] + [share] * len(described["cutoffs"])} | described
    return checked(described, config_table(described), where=path)


def config_facts(config: dict[str, Any]) -> Architecture:
    """Returns the sizes and options in what `checked_config` returned."""
    return Architecture(
        layers=config["n_layer"],
        d_model=config["d_model"],
        heads=config["n_head"],
        head_dim=config["d_head"],
        vocab_size=config["vocab_size"],
        d_embed=config["d_embed"],
        div_val=config["div_val"],
        cutoffs=tuple(config["cutoffs"]),
        reversed_clusters=False,
        d_ff=config["d_inner"],
        biases_in_layers=config["untie_r"],
        pre_norm=config["pre_lnorm"],
        tie_weights=config["tie_word_embeddings"],
        tie_projections=tuple(config["tie_projs"]),
        norm_epsilon=float(config["layer_norm_epsilon"]),
        dropout=float(config["dropout"]),
        attention_dropout=float(config["dropatt"]),
    )


def defaults(config: dict[str, Any], *, origin: str = CONFIG) -> dict[str, Setting]:
    """Returns the settings of the evaluation in what `checked_config` returned.

    origin: the name of that description. It does not hold the segment; 128 is what was published with the
    model of WikiText-103.
    """
    return {
        "mem_len": Setting(config["mem_len"], origin),
        "segment": SEGMENT,
        "mask": Setting("same-length" if config["same_length"] else "full", origin),
        "clamp_len": Setting(max(config["clamp_len"], 0), origin),
    }


def renamed(name: Any) -> Any:
    """Returns the name of a tensor in kimiyoung's code."""
    return name.removeprefix("transformer.") if isinstance(name, str) else name


def find_weights(folder: Path) -> Path | None:
    """Returns the file of the weights in a folder, or their index; None if there is neither."""
    return next((path for name in WEIGHTS if (path := folder / name).is_file()), None)


def read_weights(path: Path) -> tuple[dict[Any, Any], list[Path]]:
    """Returns the tensors by name, and the shards, which are empty if `path` is not an index.

    Raises UserError if a file is damaged, is missing or does not belong to the index.
    """
    if path.name.endswith(INDEX):
        return _read_shards(path)
    return _read_file(path), []


def _read_file(path: Path) -> dict[Any, Any]:
    state = read_safetensors(path) if path.suffix == ".safetensors" else read_pickle(path)
    if not isinstance(state, dict):
        raise ArtefactError(f"{path} is a {type(state).__name__}, expected tensors by name.")
    return state


def _read_shards(index: Path) -> tuple[dict[Any, Any], list[Path]]:
    names = _names_by_shard(index)
    for name in names:
        if not (index.parent / name).is_file():
            raise ArtefactError(
                f"{index.parent} lacks {name}, one of the {len(names)} shards that {index.name} lists; "
                "copy the whole folder."
            )
    paths = [index.parent / name for name in names]
    tensors: dict[str, Tensor] = {}
    for path, expected in zip(paths, names.values(), strict=True):
        shard = _read_file(path)
        strange = sorted({str(name) for name in shard} ^ expected)
        if strange:
            held = "lacks" if strange[0] in expected else "holds"
            raise ArtefactError(
                f"{path} {held} the tensor {values.clean(strange[0])}, and {index.name} says otherwise: it "
                "is a shard of another model; copy the whole folder again."
            )
        tensors |= shard
    return tensors, paths


def _names_by_shard(index: Path) -> dict[str, set[str]]:
    """Returns the names of the tensors that an index expects in each shard.

    Raises ArtefactError if the index is not one, or names a file outside of its folder.
    """
    content = read_json(index)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise ArtefactError(
            f'{index} has no "weight_map" that gives the file of each tensor; copy the whole folder again.'
        )
    suffix = Path(index.name.removesuffix(INDEX)).suffix
    names = dict[str, set[str]]()
    for tensor, shard in found.items():
        if (
            not isinstance(shard, str)
            or not shard.isprintable()
            or Path(shard).name != shard
            or "\\" in shard
            or Path(shard).suffix != suffix
        ):
            raise ArtefactError(
                f"{index} places the tensor {values.clean(tensor)} in {values.clean(str(shard))}, expected "
                f"the name of a {suffix} file in the same folder; copy the whole folder again."
            )
        names.setdefault(shard, set()).add(tensor)
    return dict(sorted(names.items()))
