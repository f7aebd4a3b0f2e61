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

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_json
from xl_export.importers.pickle import values
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.tensors import read_safetensors
from xl_export.importers.shared.checkpoint import Source
from xl_export.importers.shared.settings import Setting, of_last_run, published
from xl_export.importers.shared.state_dict import bare_name, project_of
from xl_export.importers.shared.validated import (
    FRACTION,
    NOTHING,
    TRUTH,
    Table,
    checked,
    fixed,
    ignored,
    model_settings,
    taken,
    whole,
)
from xl_export.importers.transformer_xl import Project, Reading, Settings

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
PYTORCH = "pytorch_model.bin"
INDEX = ".index.json"
WEIGHTS = (SAFETENSORS, SAFETENSORS + INDEX, PYTORCH, PYTORCH + INDEX)  # in the order of transformers
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


class HuggingFace(Project):
    title = "Hugging Face TransfoXL"
    vocabularies: ClassVar[tuple[str, ...]] = ("vocab.pkl", "vocab.bin", "vocab.txt")
    names: ClassVar[Mapping[str, str]] = {"transformer.*": "*"}
    reversed_clusters = False
    initial_memory = "zeros"

    def recognises(self, opened: Source) -> bool:
        if not opened.path.is_dir():
            return project_of(opened.content) == "huggingface"
        return is_config(opened.content)

    def settings(self, opened: Source) -> Settings | None:
        return checked_config(opened.content, opened.path / CONFIG) if opened.path.is_dir() else None

    def weights(self, opened: Source) -> tuple[dict[str, Path], Iterable[tuple[Any, Any, Any]]]:
        if not opened.path.is_dir():
            return super().weights(opened)
        weights = find_weights(opened.path)
        if weights is None:
            raise ArtefactError(
                f"{opened.path} has no {SAFETENSORS} or {PYTORCH}; copy the whole folder that "
                "save_pretrained wrote."
            )
        state, shards = read_weights(weights)
        files = {"config": opened.path / CONFIG, "model": weights}
        files |= {f"shard {number}": path for number, path in enumerate(shards, 1)}
        return files, ((bare_name(name), name, tensor) for name, tensor in state.items())

    def defaults(self, r: Reading) -> dict[str, Setting]:
        """config.json does not hold the segment; 128 is what was published with the model of WikiText-103."""
        if r.stored is None:
            return {"segment": SEGMENT}
        return of_last_run(r.stored, origin=CONFIG) | {"segment": SEGMENT}


PROJECT = HuggingFace()


def is_config(content: Any) -> bool:
    """Whether `config.json` belongs to a TransfoXL model; its first releases wrote no model_type."""
    return isinstance(content, dict) and (
        content.get("model_type") == "transfo-xl"
        or ("model_type" not in content and set(content) >= {"cutoffs", "div_val", "d_head", "mem_len"})
    )


def config_table(config: dict[str, Any]) -> Table:
    """Returns what `config.json` may hold. config: its settings with the defaults for those that it lacks."""
    return {
        **model_settings(config),
        **taken(whole(1), "vocab_size", "d_embed"),
        **taken(TRUTH, "untie_r", "tie_word_embeddings", "same_length"),
        **taken(FRACTION, "layer_norm_epsilon"),
        **taken(whole(), "mem_len"),
        **taken(whole(-1), "clamp_len"),
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
    names = names_by_shard(index)
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


def names_by_shard(index: Path) -> dict[str, set[str]]:
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
