"""The importer for the truncated-BPTT Transformer-XL of fairseq (`examples/truncated_bptt`).

The files `checkpoint_*.pt` are dictionaries with the model's tensors, and with the configuration under `cfg`
or, as a Namespace, under `args`. The model is Hugging Face's TransfoXLLMHeadModel, so it computes as
described in `huggingface.py`. The rest was read from the code of fairseq at commit 3d262bb: u and v are
per layer (`untie_r`), d_embed is d_model, all projections but the first are tied, and cutoffs beyond the
vocabulary are dropped.

The vocabulary is fairseq's `dict.txt`, a word and its count on each line. The four symbols `<s>`, `<pad>`,
`</s>` and `<unk>` come before them. A line of a text ends with `</s>`, and nothing comes before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError
from xl_export.importers.huggingface import HuggingFace, checked_config
from xl_export.importers.pickle.values import Foreign, clean
from xl_export.importers.shared.checkpoint import Source, companion_file
from xl_export.importers.shared.settings import Setting, of_last_run
from xl_export.importers.shared.state_dict import project_of, state_in
from xl_export.importers.shared.validated import Table, checked, fixed, ignored, optional, taken, whole
from xl_export.importers.shared.vocabularies import ReadVocabulary, read_lines, read_vocabulary, vocabulary
from xl_export.importers.transformer_xl import Reading, Settings

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
OVERWRITE = "#fairseq:overwrite"
DEFAULTS: dict[str, Any] = {  # of TransformerXLConfig, for the options that a checkpoint lacks
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
TOKENS_PER_SAMPLE = 1024  # of TruncatedBPTTLMConfig
BY_DEFAULT = "default of the project"


class Fairseq(HuggingFace):
    title = "fairseq truncated-BPTT Transformer-XL"
    vocabularies = ("dict.txt",)

    def recognises(self, opened: Source) -> bool:
        content = opened.content
        return (
            isinstance(content, dict)
            and (content.get("cfg") is not None or content.get("args") is not None)
            and project_of(content) == "huggingface"
            and any(isinstance(name, str) and "decoder." in name for name in state_in(content) or ())
        )

    def settings(self, opened: Source) -> Settings:
        model, task = configuration(opened.content, opened.path)
        size = _vocabulary_size(state_in(opened.content) or {}, opened.path)
        described = DEFAULTS | model | {"vocab_size": size}
        described["d_embed"] = described["d_model"]
        if isinstance(described["cutoffs"], list | tuple):
            described["cutoffs"] = [n for n in described["cutoffs"] if type(n) is not int or n < size]
        given = {*model, *(["tgt_len"] if task["tokens_per_sample"] else [])}
        segment = task["tokens_per_sample"] or TOKENS_PER_SAMPLE
        return checked_config(described, opened.path) | {"tgt_len": segment, "given": given}

    def vocabulary(self, r: Reading) -> tuple[Path, ReadVocabulary]:
        path = companion_file(r.opened.path, self.vocabularies, r.options.vocab)
        return path, read_dictionary(path, size=r.facts.vocab_size)

    def defaults(self, r: Reading) -> dict[str, Setting]:
        assert r.stored is not None
        known = of_last_run(r.stored, origin="the file")
        for name in {"mem_len", "tgt_len", "same_length", "clamp_len"} - r.stored["given"]:
            ours = {"tgt_len": "segment", "same_length": "mask"}.get(name, name)
            known[ours] = Setting(known[ours].value, BY_DEFAULT)
        return known


PROJECT = Fairseq()
NAME = "transformer_xl"
TASK_NAME = "truncated_bptt_lm"
MODEL: Table = {  # the fields of TransformerXLConfig; `huggingface.config_table` has their rules
    **ignored("checked as in Hugging Face's model", *DEFAULTS, "d_inner"),
    **fixed(NAME, "_name"),
    **ignored("how a training saves memory", "checkpoint_activations", "offload_activations"),
    **ignored("the longest sample that may be given", "max_target_positions"),
}
TASK: Table = {  # the fields of TruncatedBPTTLMConfig
    **taken(optional(whole(1)), "tokens_per_sample"),
    **fixed(TASK_NAME, "_name"),
    **ignored("the data and the batches", "data", "batch_size", "max_target_positions"),
    **ignored("the data and the batches", "data_parallel_rank", "data_parallel_size"),
}


def configuration(content: dict[Any, Any], where: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options of the model and of the task, as plain data.

    Raises ArtefactError if the checkpoint has another model than this one, or an unknown option of it.
    """
    config = content.get("cfg") if content.get("cfg") is not None else content.get("args")
    config = config.state if isinstance(config, Foreign) else config  # of a Namespace
    if not isinstance(config, dict):
        raise ArtefactError(f"{where}: cfg is not the configuration of fairseq; copy the checkpoint again.")
    model = config.get("model")
    task = config.get("task", {})
    if not isinstance(model, dict):
        # `args` is one Namespace of all options; a model and a task get only those that they declare.
        model = {key: config[key] for key in MODEL if key in config} | {"_name": config.get("arch", NAME)}
        task = {key: config[key] for key in TASK if key in config} | {"_name": task or TASK_NAME}
    if (name := model.get("_name", NAME)) != NAME:
        raise ArtefactError(
            f"{where} is a fairseq model {clean(str(name))}; only its {NAME}, of examples/truncated_bptt, "
            "can be imported."
        )
    checked(model, MODEL, where=where, inside="cfg.model.")
    task = checked(task, TASK, where=where, inside="cfg.task.")
    known = (*DEFAULTS, "d_inner")
    return {key: model[key] for key in known if model.get(key) is not None}, task


def _vocabulary_size(state: dict[Any, Any], where: Path) -> int:
    """Returns the number of tokens, which the configuration does not hold: all rows of all tables."""
    tables = [
        tensor
        for name, tensor in state.items()
        if str(name).endswith(".weight") and ".word_emb.emb_layers." in str(name)
    ]
    rows = [tensor.shape[0] for tensor in tables if getattr(tensor, "ndim", 0) == 2]
    if not rows or len(rows) != len(tables):
        raise ArtefactError(
            f"{where} lacks the embedding of a {PROJECT.title} model; copy the checkpoint again."
        )
    return int(sum(rows))


def read_dictionary(path: Path, *, size: int) -> ReadVocabulary:
    """Returns the vocabulary in a `dict.txt`; a file of another kind is read as of the other projects.

    Raises ArtefactError if it is damaged or has another size.
    """
    if path.suffix != ".txt":
        return read_vocabulary(path, size=size)
    symbols = list(SPECIALS)
    for number, line in enumerate(read_lines(path), 1):
        word, _, count = line.rstrip().removesuffix(" " + OVERWRITE).rpartition(" ")
        if not word or not (count.isascii() and count.lstrip("-").isdecimal()):
            raise ArtefactError(
                f"{path}, line {number}, is {clean(line)!r:.60}; expected a word, a blank and its count, as "
                "fairseq writes its dictionary."
            )
        symbols.append(word)
    return vocabulary(symbols, where=path, size=size, end_of_line="</s>")
