"""Folders of Hugging Face become artefacts."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import runtimes
from runtimes import check
from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import Sampler, read_sampling
from runtimes.contract.vocabulary import IdsVocab, SpecialTokens
from runtimes.tasks.context_losses import refuse_beyond_context
from tests.commands import json_of, refused, xl
from xl_export import trace

pytest.importorskip("transformers", reason="needs transformers; `make setup` installs it")
pytestmark = [pytest.mark.usefixtures("fast_traces"), pytest.mark.filterwarnings("ignore")]

END, SIZE = "<|endoftext|>", 300
GENERATION = {
    "eos_token_id": 0,
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 0,
    "typical_p": 0.5,
    "num_beams": 1,
}


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mamba in bfloat16 with a tokenizer of fewer tokens, and with code that must not be run."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import MambaConfig, MambaForCausalLM

    folder = tmp_path_factory.mktemp("pretrained") / "mamba"
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=SIZE, hidden_size=16, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat and the other cat " * 9 + __doc__ * 9] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    change(folder / "config.json", auto_map={"AutoModelForCausalLM": "own.Own"})
    (folder / "own.py").write_text("raise AssertionError('code of the folder was run')\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_a_folder_becomes_an_artefact_without_network_and_code(
    mamba: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def connect(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", connect)
    artefact = tmp_path / "artefact"
    document = json_of(xl("export", mamba, "--out", artefact, "--json"))
    assert document["notes"] == [
        "the last 10 of the model's 300 tokens have no text in tokenizer.json",
        "generation_config.json also has typical_p, which sampling here does not have",
    ]
    assert document["original_difference"] < 1e-5
    assert read_sampling(artefact) == Sampler(temperature=0.7)
    session = runtimes.open_session(artefact)
    info = xl("info", artefact).stdout
    assert "kB per stream, however long the text grows; exported with mem_len=64" in info
    refuse_beyond_context([session], 1000)  # a state has no number of tokens
    assert session.vocab.special.end_of_document == 0
    tokens = session.vocab.encode("the cat and the cat")[None]
    model = AutoModelForCausalLM.from_pretrained(mamba, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.log_softmax(-1)
    memory = session.start(1)
    for at, token in enumerate(tokens[0]):
        logits, memory = session.step([[token]], memory)
        log_probs = torch.tensor(np.array(logits)).log_softmax(-1)
        torch.testing.assert_close(log_probs[0], expected[0, at : at + 1], atol=1e-5, rtol=0)


SHARDS = {"model.safetensors.index.json": b'{"weight_map": {"x": "pytorch_model.bin"}}'}
PICKLE = {"model.safetensors": None, "pytorch_model.bin": b"\x80\x02."}


@pytest.mark.parametrize(
    ("config", "files", "options", "words"),
    [
        ({"model_type": "own"}, {}, "", "'own': .* and the code that auto_map names is not run"),
        ({"model_type": "bert-own", "auto_map": None}, {}, "", "no causal language model of this type; try"),
        ({"model_type": "transfo-xl"}, {}, "", "run `xl-export import"),
        ({"quantization_config": {"bits": 4}}, {}, "", "quantised weights are not read"),
        ({}, PICKLE, "", "has no model.safetensors, .* a pickle can run code"),
        ({}, SHARDS, "", "places the tensor x in pytorch_model.bin, expected the name of a .safetensors"),
        ({"num_hidden_layers": 3}, {}, "", r"lacks backbone.layers.2.* and \d+ more, which Mamba"),
        ({"hidden_size": "wide"}, {}, "", "transformers .* cannot read"),
        ({}, {"tokenizer.json": b'{"kind": "byte"}'}, "", "is the vocabulary of a run"),
        ({}, {"generation_config.json": b'{"temperature": -1}'}, "", "temperature"),
        ({}, {}, "--target web", "target is web, whose graph"),
        ({}, {}, "--mem-len 4", "--mem-len is for a run, and"),
        ({}, {}, "--exporter trace", "--exporter is for a run, and"),
        ({}, {}, "--single-file", "--single-file is for a run, and"),
    ],
)
def test_a_folder_that_cannot_be_exported_is_refused(
    config: dict[str, Any],
    files: dict[str, bytes | None],
    options: str,
    words: str,
    mamba: Path,
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(mamba, tmp_path / "model")
    change(folder / "config.json", **config)
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
    result = xl("export", folder, "--out", tmp_path / "out", "--segment", 1, *options.split())
    refused(result)
    assert re.search(words, result.stderr), result.stderr
    assert not (tmp_path / "out").exists()


SMALL = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TABLE = r"no position [0-9,]+ \(.*\): its positions end at n_positions=1024"


@pytest.mark.parametrize(
    ("family", "window", "options", "words"),
    [
        ("GPT2", 8, {}, TABLE),
        ("Bloom", 8, {}, "does not run with masks and positions per token"),
        ("OPT", 8, {"ffn_dim": 8, "word_embed_proj_dim": 8}, "other logits step by step than for two tokens"),
        ("Mamba", 8, {}, "No token of MambaForCausalLM sees more than 8 tokens"),
        ("Mistral", 8, {"sliding_window": 8, "num_key_value_heads": 2}, "so window would change nothing"),
    ],
)
def test_a_model_that_cannot_be_stepped_is_refused_at_once(
    family: str, window: int, options: dict[str, Any], words: str
) -> None:
    import transformers

    from xl_export.adapters import from_transformers

    config = getattr(transformers, f"{family}Config")(**SMALL | options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match=words):
        from_transformers(model, window)


def test_one_head_of_keys_for_all_queries_is_exported(tmp_path: Path) -> None:
    import transformers

    from xl_export.adapters import from_transformers

    torch.manual_seed(0)
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**SMALL)).eval()  # calls PyTorch itself
    module: Any = from_transformers(model, 8)
    rule = MemoryRule(mem_len=module.mem_len, segment=4)
    artefact = trace(module, tmp_path / "a", vocab=IdsVocab(30), rule=rule)
    assert check(artefact).passed


STOP = "transformers also ends a text at the token 6; generate with --stop '&'"


@pytest.mark.parametrize(
    ("size", "stated", "special", "notes"),
    [
        (290, {"eos_token_id": 0}, {"end_of_document": 0}, []),
        (290, {"eos_token_id": 6}, {"end_of_document": 0}, [STOP]),  # a piece of text
        (290, {"eos_token_id": [6, 0]}, {"end_of_document": 0}, [STOP]),
        (290, {"bos_token_id": 0}, {"end_of_document": 0, "beginning": 0}, []),
        (280, {}, {"end_of_document": 0}, ["the last 10 of the 290 tokens in tokenizer.json"]),
    ],
)
def test_special_tokens_are_those_of_tokenizer_and_model(
    size: int, stated: dict[str, Any], special: dict[str, int], notes: list[str], mamba: Path
) -> None:
    from xl_export.artefact.pretrained import vocabulary_of

    vocab, found = vocabulary_of(mamba, size, SimpleNamespace(**stated))
    assert vocab.size == size
    assert vocab.special == SpecialTokens(**special)
    assert len(found) == len(notes)
    assert all(map(str.startswith, found, notes))


def test_a_token_before_each_text_is_noted(mamba: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    from xl_export.artefact.pretrained import vocabulary_of

    tokenizer = Tokenizer.from_file(str(mamba / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A {END}", special_tokens=[(END, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocab, (note,) = vocabulary_of(tmp_path, 290, SimpleNamespace(eos_token_id=0))
    assert "generate with --bos" in note
    assert vocab.special == SpecialTokens(end_of_document=0, first=0)


def test_a_folder_without_a_tokenizer_has_ids(tmp_path: Path) -> None:
    from xl_export.artefact.pretrained import vocabulary_of

    vocab, (note,) = vocabulary_of(tmp_path, 9, SimpleNamespace(eos_token_id=3, bos_token_id=20))
    assert isinstance(vocab, IdsVocab)
    assert vocab.to_json() == {"kind": "ids", "size": 9, "special": {"end_of_document": 3}}
    assert "save_pretrained" in note


def test_a_window_may_be_shorter_than_the_sliding_window_of_the_model(tmp_path: Path) -> None:
    """transformers cuts keys and values to its own window, which fitted steps of one length only."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MistralConfig(vocab_size=40, hidden_size=16, intermediate_size=32, sliding_window=8, **sizes)
    MistralForCausalLM(config).save_pretrained(tmp_path / "mistral")
    options = ("--window", 4, "--segment", 4)
    found = json_of(xl("export", tmp_path / "mistral", "--out", tmp_path / "a", *options, "--json"))
    assert found["check"]["passed"]


def test_a_folder_of_hugging_face_is_no_run(mamba: Path) -> None:
    for command in (("info", mamba), ("generate", mamba, "--prompt", "a")):
        refused(xl(*command), "model_type 'mamba'", f"xl-export export {mamba}")


def test_a_config_without_a_model_type_is_refused(mamba: Path, tmp_path: Path) -> None:
    from xl_export.artefact.pretrained import export_pretrained

    folder = shutil.copytree(mamba, tmp_path / "model")
    change(folder / "config.json", model_type=None)
    with pytest.raises(ArtefactError, match="names no model_type"):
        export_pretrained(folder, tmp_path / "out")
