"""The importer for the truncated-BPTT Transformer-XL of fairseq (`examples/truncated_bptt`).

The files `checkpoint_*.pt` are dictionaries with the model's tensors, and with the configuration under `cfg`
or, as a Namespace, under `args`. The model is Hugging Face's TransfoXLLMHeadModel, so it computes as the
docstring of `huggingface.py` says. The rest was read from the code of fairseq at commit 3d262bb: u and v are
per layer (`untie_r`), d_embed is d_model, all projections but the first are tied, and cutoffs beyond the
vocabulary are dropped.

The vocabulary is fairseq's `dict.txt`, a word and its count on each line. The four symbols `<s>`, `<pad>`,
`</s>` and `<unk>` come before them. A line of a text ends with `</s>`, and nothing stands before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError
from runtimes.contract.vocabulary import WordVocab
from xl_export.importers import huggingface
from xl_export.importers.pickle.compressed import inner_suffix
from xl_export.importers.pickle.values import Foreign, shown
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source, companion_file
from xl_export.importers.shared.settings import Setting
from xl_export.importers.shared.state_dict import bare_name, project_of, state_in
from xl_export.importers.shared.transformer_xl import convert
from xl_export.importers.shared.validated import integer
from xl_export.importers.shared.vocabularies import ReadVocabulary, read_lines, read_vocabulary

PROJECT = "fairseq truncated-BPTT Transformer-XL"
VOCABULARIES = ("dict.txt",)
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
OVERWRITE = "#fairseq:overwrite"
DEFAULTS: dict[str, Any] = {  # those of TransformerXLConfig, for the options that a checkpoint lacks
    "n_layer": 12,
    "n_head": 10,
    "d_model": 500,
    "d_head": 50,
    "div_val": 1,
    "cutoffs": [20000, 40000, 200000],
    "mem_len": 0,
    "clamp_len": -1,
    "same_length": False,
    "dropout": 0.0,
    "dropatt": 0.0,
}
TOKENS_PER_SAMPLE = 1024  # that of TruncatedBPTTLMConfig
IN_FILE, BY_DEFAULT = "the file", "default of the project"


def recognises(opened: Source) -> bool:
    content = opened.content
    return (
        isinstance(content, dict)
        and (content.get("cfg") is not None or content.get("args") is not None)
        and project_of(content) == "huggingface"
        and any(isinstance(name, str) and "decoder." in name for name in state_in(content) or ())
    )


def read(opened: Source, options: ImportOptions) -> Checkpoint:
    """Returns the model in an opened checkpoint.

    Raises ArtefactError or ConfigError where something is missing, is wrong or cannot be expressed here.
    """
    where, state = opened.path, state_in(opened.content) or {}
    model, task = configuration(opened.content, where)
    vocab_path = companion_file(where, VOCABULARIES, options.vocab, what="vocabulary")
    size = _vocabulary_size(state, where)
    found = read_dictionary(vocab_path, size=size)
    described = huggingface.DEFAULTS | DEFAULTS | model | {"vocab_size": size}
    described["d_embed"] = described["d_model"]
    if isinstance(described["cutoffs"], list | tuple):
        described["cutoffs"] = [n for n in described["cutoffs"] if type(n) is not int or n < size]
    facts = huggingface.config_facts(described, where)
    settings = huggingface.defaults(described, where, origin=IN_FILE)
    for name, key in (("mem_len", "mem_len"), ("mask", "same_length"), ("clamp_len", "clamp_len")):
        if key not in model:
            settings[name] = Setting(settings[name].value, BY_DEFAULT)
    settings["segment"] = Setting(TOKENS_PER_SAMPLE, BY_DEFAULT)
    if type(task.get("tokens_per_sample")) is int:
        settings["segment"] = Setting(integer(task, "tokens_per_sample", where=str(where), least=1), IN_FILE)
    settings = options.overrides.applied_to(PROJECT, settings)
    original = {huggingface.renamed(bare_name(name)): name for name in state}
    tensors = options.tensors(
        ((huggingface.renamed(bare_name(name)), tensor) for name, tensor in state.items()),
        where=where,
        project=PROJECT,
        spell=lambda name: str(original.get(name, f"decoder.model.{huggingface.spelled(name)}")),
    )
    config, converted = convert(tensors, facts)
    return Checkpoint(
        config=config,
        tensors=converted,
        rule=huggingface.memory_rule_of(settings, project=PROJECT),
        vocab=found.vocab,
        settings=settings,
        files={"model": where, "vocabulary": vocab_path},
        notes=(*found.notes, *options.notes_on(tensors, config, settings)),
    )


def configuration(content: dict[Any, Any], where: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options of the model and of the task, as plain data.

    Raises ArtefactError where the checkpoint has another model than this one.
    """
    config = plain(content.get("cfg") if content.get("cfg") is not None else content.get("args"))
    if not isinstance(config, dict):
        raise ArtefactError(f"{where}: cfg is not the configuration of fairseq; copy the checkpoint again.")
    model, task = (plain(config.get(part, config)) for part in ("model", "task"))
    if not isinstance(model, dict) or not isinstance(task, dict):  # `args` is one Namespace for both
        model = task = config
    name = model.get("_name", model.get("arch", "transformer_xl"))
    if name != "transformer_xl":
        raise ArtefactError(
            f"{where} is a fairseq model {shown(str(name))}; only its transformer_xl, of "
            "examples/truncated_bptt, can be imported."
        )
    return {key: model[key] for key in DEFAULTS if model.get(key) is not None}, task


def plain(value: Any) -> Any:
    """Returns a Namespace, or a node of OmegaConf, as plain data; any other value as it is."""
    if isinstance(value, Foreign) and isinstance(value.state, dict):
        inner = value.state.get("_content", value.state.get("_val", value.state))
        return plain(inner) if isinstance(inner, Foreign) else plain_parts(inner)
    return plain_parts(value)


def plain_parts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(part) if isinstance(part, Foreign) else part for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) if isinstance(part, Foreign) else part for part in value]
    return value


def _vocabulary_size(state: dict[Any, Any], where: Path) -> int:
    """Returns the number of tokens, which the configuration does not hold: all rows of all tables."""
    tables = [
        tensor
        for name, tensor in state.items()
        if str(name).endswith(".weight") and ".word_emb.emb_layers." in str(name)
    ]
    rows = [tensor.shape[0] for tensor in tables if getattr(tensor, "ndim", 0) == 2]
    if not rows or len(rows) != len(tables):
        raise ArtefactError(f"{where} lacks the embedding of a {PROJECT} model; copy the checkpoint again.")
    return int(sum(rows))


def read_dictionary(path: Path, *, size: int) -> ReadVocabulary:
    """Returns the vocabulary in a `dict.txt`; a file of another kind is read as of the other projects.

    Raises ArtefactError where it is damaged or has another size.
    """
    if inner_suffix(path) != ".txt":
        return read_vocabulary(path, size=size)
    symbols = list(SPECIALS)
    for number, line in enumerate(read_lines(path, expected="a word and its count on each line"), 1):
        word, _, count = line.rstrip().removesuffix(" " + OVERWRITE).rpartition(" ")
        if not word or not (count.isascii() and count.lstrip("-").isdecimal()):
            raise ArtefactError(
                f"{path}, line {number}, is {shown(line)!r:.60}; expected a word, a blank and its count, as "
                "fairseq writes its dictionary."
            )
        symbols.append(word)
    if len(set(symbols)) != len(symbols):
        raise ArtefactError(
            f"{path} has a word twice; expected the dictionary that the model was trained with."
        )
    if len(symbols) != size:
        raise ArtefactError(
            f"{path} has {len(symbols)} symbols, with the {len(SPECIALS)} that fairseq adds, and the model "
            f"{size}; name the dict.txt that the model was trained with, with --vocab FILE."
        )
    return ReadVocabulary(
        WordVocab(symbols, unknown="<unk>", end_of_line="</s>"),
        notes=("texts are split at white space: tokenise them in the same way as the training text",),
    )
