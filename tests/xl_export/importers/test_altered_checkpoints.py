"""Checkpoints altered in one place: each is refused by the name of what is wrong, or read as it is."""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtimes.base.errors import UserError
from tests.commands import xl
from tests.xl_export.importers.oracles import DATA, assert_same_tensors, read
from tests.xl_export.importers.tensorflow_variables import variables_of
from trainer.run.checkpoint import load_run
from xl_export.importers.formats import open_source
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.values import Foreign
from xl_export.importers.shared.checkpoint import Source
from xl_export.importers.shared.pickled_module import module_tensors

WORDS = DATA / "kimiyoung-wt103-large"
FOLDERS = {
    "kimiyoung": WORDS,
    "nvidia": DATA / "nvidia-wt103-base",
    "huggingface": DATA / "hf-wt103" / "pretrained",
    "adaptive-span": DATA / "adaptive-span-persistent",
}


@functools.cache
def whole(kind: str) -> Source:
    """A checkpoint as its project wrote it. TensorFlow's has the variables of kimiyoung's model."""
    if kind == "tensorflow":
        variables = variables_of(read(WORDS, mem_len=48, segment=16, clamp_len=32))
        content = {name: torch.as_tensor(array) for name, array in variables.items()}
        return Source(path=WORDS / "model.npz", content=content)
    return open_source(FOLDERS[kind])


GONE = object()


def put(holder: Any, place: str, value: Any) -> None:
    """Replaces, adds or removes the entry at a path, which goes from a module to a module or `_modules`."""
    *path, last = place.split(" ")
    for name in path:
        if isinstance(holder, Foreign):
            holder = holder.state if name.startswith("_") else holder.state["_modules"]
        holder = holder[name]
    entries = holder.state if isinstance(holder, Foreign) else holder
    if value is GONE:
        del entries[last]
    else:
        entries[last] = value


NAN = torch.full((4, 10), float("nan"))
CORE = "layers 1 pos_ff CoreNet"
MASK = "model module.layers.{}.attn.attn.{}adaptive_span._mask.{}"
CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("nvidia", {"model_state layers.1.dec_attn.r_net.weight": GONE}, "lacks the tensor layers.1.dec_attn"),
    ("nvidia", {"model_state crit.out_layers_biases.0": GONE}, "lacks the tensor crit.out_layers_biases.0"),
    ("nvidia", {"model_state a\n\x1b[31m": torch.zeros(3)}, "unexpected tensor a??[31m [3]"),
    ("nvidia", {"model_state crit.out_layers.0.bias": torch.zeros(3)}, "under two names; expected one"),
    ("nvidia", {"model_state extra": "x"}, "'extra' is a str"),
    ("nvidia", {"model_state r_w_bias": torch.zeros(10, 4)}, "r_w_bias is [10, 4], expected [4, 10]"),
    ("nvidia", {"model_state r_w_bias": torch.zeros(4, 10).long()}, "r_w_bias is torch.int64"),
    ("nvidia", {"model_state r_r_bias": NAN}, "r_r_bias holds NaN or infinite values … --allow-nonfinite"),
    ("nvidia", {"model_config n_layer": 10**6}, "does not describe a model … model.layers is 1000000"),
    ("nvidia", {"model_config cutoffs": [5, 600], "model_config tie_projs": [True] * 3}, "cutoffs is [5, 6"),
    ("nvidia", {"model_config tie_projs": [True]}, "tie_projs is [True] … 4 clusters"),
    ("nvidia", {"model_config tie_weight": False}, "lacks the tensor crit.out_layers_weights.0"),
    ("nvidia", {"model_config activation": "gelu"}, "setting model_config.activation, 'gelu' … own-model.md"),
    ("nvidia", {"model_config adapt_inp": True}, "model_config.adapt_inp is True, expected False"),
    ("nvidia", {"model_config d_inner": 81}, "CoreNet.0.weight is [80, 40], expected [81, 40]"),
    ("nvidia", {"model_config div_val": 1 << 24}, "div_val is 16777216, and the last cluster would have"),
    ("adaptive-span", {"model module.out_emb.bias": GONE}, "lacks the tensor out_emb.bias"),
    ("adaptive-span", {"model key_pe": torch.zeros(1, 10, 128)}, "module.key_pe under two names"),
    ("adaptive-span", {"model module.key_pe": torch.zeros(1, 7, 128)}, "key_pe is [1, 7, 128]"),
    ("adaptive-span", {MASK.format(0, "", "current_val"): torch.full((4, 1, 1), 1.5)}, "values outside 0"),
    ("adaptive-span", {MASK.format(0, "", "mask_template"): torch.ones(128)}, "not hold the numbers -127"),
    ("adaptive-span", {MASK.format(1, "persistent_memory.", "current_val"): torch.zeros(4, 1, 1)},
     "second copy of the layer's spans"),
    ("huggingface", {"attn_type": 1}, "attn_type is 1, expected 0"),
    ("huggingface", {"tie_projs": GONE, "proj_share_all_but_first": False}, "lacks the tensor crit.out_pro"),
    ("huggingface", {"tie_word_embeddings": False}, "lacks the tensor crit.out_layers.0.weight"),
    ("huggingface", {"untie_r": False}, "r_w_bias is shared by all layers"),
    ("huggingface", {"cutoffs": [61, 151, 340]}, "emb_layers.2.weight is [190, 4], expected [189, 4]"),
    ("huggingface", {"vocab_size": 501}, "has 500 symbols and the model 501"),
    ("huggingface", {"layer_norm_epsilon": "x"}, "layer_norm_epsilon is 'x'"),
    ("huggingface", {"activation_function": "gelu"}, "has the unknown setting activation_function, 'gelu'"),
    ("huggingface", {"n_token": 501}, "n_token is 501, expected 500"),
    ("huggingface", {"ext_len": 8}, "ext_len is 8, expected 0"),
    ("huggingface", {"sample_softmax": 5}, "sample_softmax is 5, expected 0 or less"),
    ("huggingface", {"pruned_heads": {"0": [1]}}, "pruned_heads is of the type dict, expected an empty one"),
    ("tensorflow", {"transformer/layer_1/ff/LayerNorm/beta": GONE}, "the tensor transformer/layer_1/ff"),
    ("tensorflow", {"transformer/more": torch.zeros(2)}, "unexpected tensor transformer/more [2]"),
    ("tensorflow", {"transformer/adaptive_softmax/bias": torch.zeros(500)}, "cutoff_0/b under two names"),
    ("tensorflow", {"transformer/r_w_bias": torch.zeros(1 << 40, 0, 0)}, "r_w_bias is [1099511627776, 0, 0]"),
    ("tensorflow", {"transformer/layer_0/rel_attn/o/kernel": torch.zeros(3, 64)}, "o/kernel is [64, 3]"),
    ("kimiyoung", {f"{CORE} _modules 1": Foreign("nn.SiLU")}, "CoreNet.1 is a nn.SiLU, expected ReLU"),
    ("kimiyoung", {f"{CORE} _modules 1": GONE}, "lacks the module layers.1.pos_ff.CoreNet.1"),
    ("kimiyoung", {f"{CORE} _modules 5": Foreign("nn.ReLU")}, "unexpected module layers.1.pos_ff.CoreNet.5"),
    ("kimiyoung", {f"{CORE} 1 threshold": 0.1}, "CoreNet.1.threshold is 0.1, expected 0.0"),
    ("kimiyoung", {f"{CORE} 1 slope": 0.1}, "unknown setting layers.1.pos_ff.CoreNet.1.slope"),
    ("kimiyoung", {"word_emb emb_scale": 1.0}, "word_emb.emb_scale is 1.0, expected 8.0"),
    ("kimiyoung", {"word_emb emb_scale": 10**400}, "expected 8.0"),
    ("kimiyoung", {"word_emb emb_layers 2 max_norm": 1.0}, "emb_layers.2.max_norm is 1.0, expected None"),
    ("kimiyoung", {"layers 2 dec_attn scale": 1.0}, "layers.2.dec_attn.scale is 1.0, expected 0.25"),
    ("kimiyoung", {"layers 2 dec_attn _forward_hooks": {3: Foreign("data.Hook")}},
     "layers.2.dec_attn._forward_hooks is of the type dict, expected an empty one"),
    ("kimiyoung", {"crit cutoffs": [60, 150, 351, 500]}, "crit.cutoffs is [60, 150, 351, 500]"),
    ("kimiyoung", {"final_norm": True}, "unknown setting final_norm, True"),
    ("kimiyoung", {"n_layer": 2}, "has the unexpected module layers.2"),
    ("kimiyoung", {"attn_type": 7}, "attn_type is 7, expected 0, 1, 2 or 3"),
    ("kimiyoung", {"_parameters": 3}, "is not a module that PyTorch pickled"),
    ("kimiyoung", {"word_emb cutoffs": [60, 150, 350]}, "word_emb.cutoffs end at"),
    ("kimiyoung", {"layers 1 pos_ff pre_lnorm": True}, "its layers have different LayerNorms"),
    ("kimiyoung", {"layers 1 pos_ff layer_norm eps": 1e-3}, "its layers have different LayerNorms"),
    ("kimiyoung", {"crit _parameters cluster_bias": 3}, "'crit.cluster_bias' is a int"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "words"), CHANGES)
def test_an_altered_checkpoint_is_refused_by_name(kind: str, changes: dict[str, Any], words: str) -> None:
    source = whole(kind)
    altered = Source(path=source.path, content=copy.deepcopy(source.content))
    for place, value in changes.items():
        put(altered.content, place, value)
    with pytest.raises(UserError) as caught:
        read(altered, WORDS / "cache.pt" if kind == "tensorflow" else None)
    for word in words.split(" … "):
        assert word in str(caught.value)


def test_the_relu_of_old_pytorch_is_read() -> None:
    """Until PyTorch 1.1 it was a Threshold."""
    content = copy.deepcopy(whole("kimiyoung").content)
    for layer in range(3):
        for name in ("threshold", "value"):
            put(content, f"layers {layer} pos_ff CoreNet 1 {name}", 0.0)
    assert read(Source(path=WORDS / "model.pt", content=content)).config.layers == 3


def test_weights_that_are_not_finite_are_imported_on_request(tmp_path: Path) -> None:
    content = read_pickle(FOLDERS["nvidia"] / "checkpoint_last.pt")
    content["model_state"]["r_r_bias"].view(-1)[1] = float("nan")
    torch.save({name: content[name] for name in ("model_config", "model_state")}, tmp_path / "checkpoint.pt")
    options = ("--vocab", FOLDERS["nvidia"] / "cache.pt", "--allow-nonfinite")
    result = xl("import", tmp_path / "checkpoint.pt", "--out", tmp_path / "run", *options)
    assert result.exit_code == 0, result.output
    assert "r_r_bias holds NaN or infinite values: `xl-export export` refuses this run" in result.output
    assert "next:" not in result.output
    assert torch.isnan(load_run(tmp_path / "run").model.state_dict()["positions.v"]).sum() == 1


def shared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of kimiyoung's model with four tables, under the names that NVIDIA's code has for them."""
    kept = {
        re.sub(r"crit\.out_layers\.(\d)\.bias", r"crit.out_layers_biases.\1", name): tensor
        for name, tensor in state.items()
        if not re.fullmatch(r"crit\.out_layers\.\d\.weight|crit\.out_projs\.[123]", name)
    }
    return kept | {f"crit.shared_out_projs.{i}": kept[f"word_emb.emb_projs.{i}"].clone() for i in range(4)}


@pytest.mark.parametrize("damage", [False, True])
def test_shared_output_projections_are_those_of_the_input(damage: bool) -> None:
    """NVIDIA's large model lists its input projections a second time, as `crit.shared_out_projs`."""
    state = shared(dict(module_tensors(whole("kimiyoung").content, WORDS)))
    if damage:
        state["crit.shared_out_projs.2"] += 1
    model = json.loads((WORDS / "config.json").read_text())["model"]
    lengths = ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_embed", "div_val")
    config = {name: model[name] for name in (*lengths, "attn_type", "cutoffs", "tie_projs")}
    config |= {"tie_weight": True, "pre_lnorm": False, "dropout": 0.1, "dropatt": 0.0}
    source = Source(path=WORDS / "model.pt", content={"model_config": config, "model_state": state})
    if damage:
        with pytest.raises(UserError, match=r"shared_out_projs.2 and word_emb.emb_projs.2 .* differ here"):
            read(source)
        return
    assert_same_tensors(read(source), read(WORDS))
