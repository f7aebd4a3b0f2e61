"""Artefacts of causal language models in Hugging Face folders: `export_pretrained(folder, out, …)`.

Such a folder is what `save_pretrained` writes: `config.json`, `model.safetensors` or its shards, and perhaps
`tokenizer.json` and `generation_config.json`. The package `transformers` makes the model of it, without the
network, without code that is in the folder, and without pickles.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from runtimes.base.errors import ArtefactError, first_line
from runtimes.base.files import read_json
from runtimes.base.folders import refuse_existing
from runtimes.base.kinds import ARTEFACT
from runtimes.base.progress import working
from runtimes.base.records import from_json
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import Sampler, write_sampling
from runtimes.contract.vocabulary import (
    IdsVocab,
    SpecialTokens,
    SubwordVocab,
    Vocab,
    decode,
    vocab_from_file,
)
from xl_export.adapters.from_transformers import from_transformers
from xl_export.artefact.options import ExportOptions
from xl_export.artefact.traced import trace
from xl_export.importers.huggingface import CONFIG, INDEX, SAFETENSORS, is_config, names_by_shard

GENERATION = "generation_config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
SEGMENT = 16  # tokens of a prompt that a step reads
# How `generation_config.json` names the special tokens, and what they are here.
SPECIAL = {"eos_token_id": "end_of_document", "bos_token_id": "beginning", "pad_token_id": "padding"}
# What it has besides settings of sampling: how long a text may become, and how transformers computes it.
NOT_SAMPLING = """
_from_model_config bos_token_id cache_implementation do_sample eos_token_id max_length max_new_tokens
output_attentions output_hidden_states pad_token_id transformers_version use_cache
"""


def export_pretrained(
    folder: Path,
    out: Path,
    *,
    window: int | None = None,
    segment: int | None = None,
    tokens: Collection[int] | None = None,
    text: Path | None = None,
    force: bool = False,
    **options: Any,
) -> list[str]:
    """Writes the artefact of the model in a folder to the folder `out`, and returns notes for the user.

    - window: the number of tokens that a token sees in layers with full attention (`from_transformers`).
    - segment: the most tokens in one step; None is the largest of `tokens`, or 16.
    - the others: as in `xl_export.trace`.

    Raises UserError if the folder has no such model that can be exported; `out` is not changed then.
    """
    refuse_existing(out, ARTEFACT, force=force, sources=[folder, *([text] if text else [])])
    ExportOptions(exporter="trace", tokens=tokens, text=text, **options)  # refused before the model is read
    with quiet():
        with working(f"reading {folder} with transformers"):
            model, notes = load_model(folder)
            module: Any = from_transformers(model, window)
        vocab, more = vocabulary_of(folder, module.sizes.vocab_size, model.generation_config)
        sampler, lacking = sampling_of(folder)
        rule = MemoryRule(mem_len=module.mem_len, segment=segment or max(tokens or (SEGMENT,)))
        trace(module, out, vocab=vocab, rule=rule, tokens=tokens, text=text, force=force, **options)
    if sampler.changed():
        write_sampling(out, sampler)
    return notes + more + lacking


def load_model(folder: Path) -> tuple[Any, list[str]]:
    """The model in a folder, in float32, and notes; raises ArtefactError if it cannot be read safely."""
    refuse_unreadable(folder)
    import transformers

    try:
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except Exception as error:  # of transformers, of safetensors, or of the model's own code
        raise ArtefactError(
            f"transformers {transformers.__version__} cannot read {folder} ({first_line(error):.300}); copy "
            "the whole folder again, or fix what that names."
        ) from error
    for fault in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, loaded[fault])):
            what = "lacks" if fault == "missing_keys" else "has in another shape"
            raise ArtefactError(
                f"{folder} {what} {names[0]:.80}{_others(names)}, which {type(model).__name__} needs; copy "
                "the whole folder again."
            )
    names = sorted(loaded["unexpected_keys"])
    unused = (
        f"{type(model).__name__} does not use {names[0]:.80}{_others(names)} of its file" if names else ""
    )
    return model.eval(), [unused] * bool(names)


def refuse_unreadable(folder: Path) -> None:
    """Raises ArtefactError for a folder that transformers cannot read by itself, or not safely."""
    config = read_json(folder / CONFIG)
    if is_config(config):
        raise ArtefactError(
            f"{folder} is a Transformer-XL, which becomes a run first; run `xl-export import {folder} --out "
            "RUN`, and export that."
        )
    if not isinstance(config, dict) or not isinstance(kind := config.get("model_type"), str):
        raise ArtefactError(f"{folder / CONFIG} names no model_type; copy the folder again.")
    import transformers

    if kind not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        reason = f"transformers {transformers.__version__} has no causal language model of this type"
        if config.get("auto_map"):
            reason += ", and the code that auto_map names is not run"
        raise ArtefactError(
            f"{folder / CONFIG} has the model_type {kind!r:.40}: {reason}; try `pip install -U "
            "transformers`, or trace a module of your own (docs/guides/own-model.md)."
        )
    if config.get("quantization_config"):
        raise ArtefactError(
            f"{folder / CONFIG} has a quantization_config, and quantised weights are not read; give the "
            "original checkpoint, and --precision int8 or int4."
        )
    index = folder / f"{SAFETENSORS}{INDEX}"
    if index.is_file():
        names_by_shard(index)  # which are files of the folder, and no pickles
    elif not (folder / SAFETENSORS).is_file():
        raise ArtefactError(
            f"{folder} has no {SAFETENSORS}, and other weights are not read, because a pickle can run code; "
            f'write one with `AutoModelForCausalLM.from_pretrained("{folder}").save_pretrained(…)` of a '
            "transformers that you trust with it."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """While it runs, transformers prints neither warnings nor bars: what matters is checked here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def vocabulary_of(folder: Path, size: int, stated: Any) -> tuple[Vocab, list[str]]:
    """The vocabulary of a model of `size` tokens, from the tokenizer in its folder, and notes.

    stated: the GenerationConfig of the model, which has ids of special tokens.
    """
    path = next((path for name in TOKENIZERS if (path := folder / name).is_file()), None)
    if path is None:
        note = (
            f"{folder} has no {TOKENIZERS[0]}, so texts are token ids; "
            f'`AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")` writes one'
        )
        ids = IdsVocab(size, special=special_tokens({}, stated, range(size)))
        return ids, [note, *_other_ends(ids, stated)]
    found = vocab_from_file(path)
    if not isinstance(found, SubwordVocab):
        raise ArtefactError(
            f"{path} is the vocabulary of a run, expected a tokenizer of subwords; delete it."
        )
    named = {name: token for name, token in found.special.to_json().items() if token < size}
    marked = [token for token in _marked(found) if token < size]
    special = special_tokens(named, stated, marked)
    first = _before_texts(found)
    if len(first) == 1 and first[0] < size:
        special = replace(special, first=first[0])
    vocab = SubwordVocab(found.library, found.content, size=size, special=special)
    notes = _other_ends(vocab, stated)
    if found.size < size:
        notes.append(
            f"the last {size - found.size:,} of the model's {size:,} tokens have no text in {path.name}"
        )
    elif found.size > size:
        notes.append(
            f"the last {found.size - size:,} of the {found.size:,} tokens in {path.name} are not in the model"
        )
    if first:
        listed = ",".join(map(str, first))
        how = f"--prompt-ids {listed},…" if vocab.special.first is None else "--bos, and score with it"
        notes.append(
            f"transformers begins each text with the token {listed}, and prompts here do not; generate with "
            f"{how}"
        )
    return vocab, notes


def _before_texts(vocab: SubwordVocab) -> list[int]:
    """The tokens that a tokenizer puts before each text."""
    if vocab.library != "tokenizers":
        return []
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_str(vocab.content.decode()).encode("a")
    marked = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
    return [token for token, _ in itertools.takewhile(lambda pair: pair[1] == 1, marked)]


def _marked(vocab: SubwordVocab) -> set[int]:
    """The tokens that a tokenizer's file marks as special; a `.model` names all of them itself."""
    if vocab.library != "tokenizers":
        return {*vocab.special.to_json().values()}
    return {token["id"] for token in json.loads(vocab.content)["added_tokens"] if token["special"]}


def special_tokens(named: dict[str, int], stated: Any, marked: Collection[int]) -> SpecialTokens:
    """The special tokens of a model.

    named: those that the tokenizer names. stated: the GenerationConfig. marked: the tokens that can be
    special: many configurations have ids that are their defaults, and pieces of text in this tokenizer.
    """
    special = dict(named)
    for key, meaning in SPECIAL.items():
        fitting = [token for token in _stated(stated, key) if token in marked]
        if fitting and special.get(meaning) not in fitting:
            special[meaning] = fitting[0]
    return SpecialTokens(**special)


def _stated(config: Any, key: str) -> list[int]:
    """The ids in a setting of a GenerationConfig, which is a list, one id, or None."""
    value = getattr(config, key, None)
    return value if isinstance(value, list) else [] if value is None else [value]


def _other_ends(vocab: Vocab, stated: Any) -> list[str]:
    """A note for each further token at which transformers ends a text."""
    return [
        f"transformers also ends a text at the token {token}; generate with --stop "
        f"{shlex.quote(decode(vocab, [token]))}"
        for token in _stated(stated, "eos_token_id")
        if token != vocab.special.end_of_document and token < vocab.size
    ]


def sampling_of(folder: Path) -> tuple[Sampler, list[str]]:
    """The settings of sampling in `generation_config.json`, and a note on those that do not exist here."""
    path = folder / GENERATION
    stated = read_json(path) if path.is_file() else {}
    if not isinstance(stated, dict):
        raise ArtefactError(f"{path} has no settings by name; copy the folder again, or delete this file.")
    given = {name: value for name, value in stated.items() if value is not None}
    known = {field.name for field in fields(Sampler)}
    settings = {name: value for name, value in given.items() if name in known}
    if given.get("top_k") == 0:
        settings["top_k"] = None
    if given.get("do_sample") is False:
        settings["temperature"] = 0.0
    # 0, 1 and false are the values with which a setting changes nothing.
    others = [
        name for name in given if name not in known | {*NOT_SAMPLING.split()} and given[name] not in (0, 1)
    ]
    sampler = from_json(Sampler, settings, where=str(path))
    note = f"{GENERATION} also has {', '.join(others)}, which sampling here does not have"
    return sampler, [note] * bool(others)


def _others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
