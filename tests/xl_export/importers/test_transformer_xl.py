"""Formats that share kimiyoung's names: the same model told in each of them, and pickled modules that are
not whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtimes import open_session
from runtimes.base.errors import UserError
from tests.commands import refused, xl
from tests.nightly import every
from tests.xl_export.importers.oracles import DATA, nll
from trainer.run.checkpoint import load_run
from xl_export.importers import kimiyoung, tensorflow
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.values import Foreign
from xl_export.importers.shared.checkpoint import ImportOptions, Source

FOLDER, WORDS = DATA / "hf-wt103" / "pretrained", DATA / "kimiyoung-wt103-large"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder to alter."""
    return Path(shutil.copytree(FOLDER, tmp_path / "pretrained", copy_function=shutil.copyfile))


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )


def state_of(run: Path) -> dict[str, Tensor]:
    return load_run(run).model.state_dict()


# Hugging Face


def test_the_mask_and_lengths_are_those_of_config_json(folder: Path, tmp_path: Path) -> None:
    configure(folder, same_length=False, mem_len=21, clamp_len=-1)
    result = xl("import", folder, "--out", tmp_path / "run", "--segment", 17)
    assert "memory 21, segment 17, full mask, no clamp, initial memory zeros" in result.output
    with np.load(FOLDER.parent / "expected_fullmask.npz") as arrays:
        expected = dict(arrays)
    assert np.abs(nll(open_session(tmp_path / "run"), expected) - expected["nll"]).max() < 2e-5


def test_one_pair_of_biases_may_be_listed_in_every_layer(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    pairs = {kind: tensors[f"transformer.layers.0.dec_attn.{kind}"] for kind in ("r_w_bias", "r_r_bias")}
    for layer in range(3):
        for kind, pair in pairs.items():
            tensors[f"transformer.layers.{layer}.dec_attn.{kind}"] = pair.clone()
    configure(folder, untie_r=False)
    save_file(tensors, folder / "model.safetensors")
    assert xl("import", folder, "--out", tmp_path / "run").exit_code == 0
    assert load_run(tmp_path / "run").config.model.tie_biases
    assert torch.equal(state_of(tmp_path / "run")["positions.v"][0], pairs["r_r_bias"])
    tensors["transformer.layers.1.dec_attn.r_w_bias"] += 1
    save_file(tensors, folder / "model.safetensors")
    refused(
        xl("import", folder, "--describe"),
        "r_w_bias is shared by all layers in the configuration, and the layers",
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_type": 1}, ["attn_type is 1, expected 0"]),
        ({"tie_projs": None, "proj_share_all_but_first": False}, ["lacks the tensor crit.out_projs.1"]),
        ({"tie_word_embeddings": False}, ["lacks the tensor crit.out_layers.0.weight"]),
        ({"untie_r": False}, ["r_w_bias is shared by all layers"]),
        ({"cutoffs": [61, 151, 340]}, ["word_emb.emb_layers.2.weight is [190, 4], expected [189, 4]"]),
        ({"vocab_size": 501}, ["has 500 symbols and the model 501"]),
        ({"layer_norm_epsilon": "x"}, ["layer_norm_epsilon is 'x'"]),
        ({"model_type": "gpt2"}, ["has no checkpoint by the names", "config.json has the model_type 'gpt2'"]),
        (
            {"activation_function": "gelu"},
            ["config.json has the unknown setting activation_function, 'gelu'"],
        ),
        ({"n_token": 501}, ["n_token is 501, expected 500"]),
        ({"ext_len": 8}, ["ext_len is 8, expected 0"]),
        ({"sample_softmax": 5}, ["sample_softmax is 5, expected 0 or less"]),
        ({"adaptive": False}, ["adaptive is False, expected True"]),
        ({"pruned_heads": {"0": [1]}}, ["pruned_heads is of the type dict, expected an empty one"]),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(
    changes: dict[str, Any], words: list[str], folder: Path
) -> None:
    configure(folder, **changes)
    refused(xl("import", folder, "--describe"), *words)


def test_only_the_file_that_is_named_is_read(folder: Path) -> None:
    """Files that the folder's reader would pass over for another are refused."""
    for name in ("other.safetensors", "pytorch_model.bin", "generation_config.json"):
        shutil.copyfile(folder / "model.safetensors", folder / name)
        refused(
            xl("import", folder / name, "--describe"),
            name,
            "config.json and model.safetensors are read; name the folder",
        )
    assert xl("import", folder / "model.safetensors", "--describe").exit_code == 0


# TensorFlow: the variables that its code would have for the same model. Kernels are [in, out], head columns
# in order.


def variables_of(run: Path) -> dict[str, np.ndarray]:
    """A run of ours as the variables of the original release's `tf/model.py`."""
    model, state = load_run(run).config.model, {name: x.numpy() for name, x in state_of(run).items()}
    found = {}

    def put(name: str, array: np.ndarray) -> None:
        found[f"transformer/{name}"] = np.ascontiguousarray(array)

    for kind, name in (("r_w_bias", "u"), ("r_r_bias", "v")):
        put(kind, state[f"positions.{name}"][0] if model.tie_biases else state[f"positions.{name}"])
    for layer in range(model.layers):
        block, scope = f"blocks.{layer}.", f"layer_{layer}/"
        qkv = np.concatenate([state[f"{block}{kind}.weight"] for kind in ("query", "key", "value")])
        put(f"{scope}rel_attn/qkv/kernel", qkv.T)
        put(f"{scope}rel_attn/r/kernel", state[f"positions.project.{layer}.weight"].T)
        put(f"{scope}rel_attn/o/kernel", state[f"{block}out.weight"].T)
        for number, name in ((1, "expand"), (2, "contract")):
            put(f"{scope}ff/layer_{number}/kernel", state[f"{block}{name}.weight"].T)
            put(f"{scope}ff/layer_{number}/bias", state[f"{block}{name}.bias"])
        for place, name in (("rel_attn", "attention_norm"), ("ff", "feed_forward_norm")):
            put(f"{scope}{place}/LayerNorm/gamma", state[f"{block}{name}.weight"])
            put(f"{scope}{place}/LayerNorm/beta", state[f"{block}{name}.bias"])
    many, clusters = model.vocabulary.div_val > 1, model.clusters
    for i, cluster in enumerate(clusters):
        tables = [state[f"vocabulary.table.{j}"] for j in range(len(clusters))]
        if many or i == 0:
            scope = f"adaptive_embed/cutoff_{i}/" if many else "adaptive_embed/"
            put(f"{scope}lookup_table", tables[i] if many else np.concatenate(tables))
            if cluster.projected:
                put(f"{scope}proj_W", state[f"vocabulary.projection.{i}"].T)
        bias = f"adaptive_softmax/cutoff_{i}/b" if len(clusters) > 1 else "adaptive_softmax/bias"
        put(bias, state[f"vocabulary.output_bias.{i}"])
        if not cluster.tied_projection:
            put(f"adaptive_softmax/cutoff_{i}/proj", state[f"vocabulary.output_projection.{i}"].T)
    if len(clusters) > 1:
        put("adaptive_softmax/cutoff_0/cluster_W", state["vocabulary.cluster_table"])
        put("adaptive_softmax/cutoff_0/cluster_b", state["vocabulary.cluster_bias"])
    found["global_step"], found["beta1_power"] = np.array(3, np.int64), np.array(0.9, np.float32)
    found["transformer/r_w_bias/Adam_1"] = np.zeros(3, np.float32)
    return found


def test_tensorflow_variables_give_the_likelihoods_of_their_kin(tmp_path: Path) -> None:
    """Hugging Face's code keeps what TensorFlow's does but for one token of the mask and the epsilon of
    LayerNorm."""
    assert xl("import", FOLDER, "--out", tmp_path / "run").exit_code == 0
    np.savez(tmp_path / "model.npz", **variables_of(tmp_path / "run"))
    options = ("--mem-len", 47, "--segment", 16, "--clamp-len", 32, "--vocab", FOLDER / "vocab.pkl")
    result = xl("import", tmp_path / "model.npz", "--out", tmp_path / "copy", *options)
    assert "memory 47, segment 16, same-length mask, clamp 32, initial memory zeros" in result.output
    assert load_run(tmp_path / "copy").config.model.norm_epsilon == tensorflow.NORM_EPSILON
    with np.load(FOLDER.parent / "expected.npz") as arrays:
        expected = dict(arrays)
    assert np.abs(nll(open_session(tmp_path / "copy"), expected) - expected["nll"]).max() < 1e-4


SOURCES = {
    "four-tables": DATA / "kimiyoung-wt103-large",
    "one-table-with-clusters": DATA / "nvidia-wt103-base",
    "plain": DATA / "kimiyoung-enwik8",
    "one-projection-and-clusters": DATA / "variants" / "kimiyoung-one-table",
}


@pytest.mark.parametrize("kind", every(2, SOURCES))
def test_tensorflow_variables_of_each_vocabulary_become_the_same_model(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind]
    vocab = source / ("vocab.txt" if kind.startswith("one-projection") else "cache.pt")
    assert xl("import", source, "--out", tmp_path / "run", "--vocab", vocab, "--segment", 8).exit_code == 0
    np.savez(tmp_path / "model.npz", **variables_of(tmp_path / "run"))
    result = xl("import", tmp_path, "--out", tmp_path / "copy", "--vocab", vocab)
    assert result.exit_code == 0, result.output
    first, second = load_run(tmp_path / "run"), load_run(tmp_path / "copy")
    assert first.config.model.vocabulary == second.config.model.vocabulary
    assert first.config.model.clusters == second.config.model.clusters
    mine, theirs = first.model.state_dict(), second.model.state_dict()
    assert mine.keys() - theirs.keys() == {"positions.frequencies"}  # which TensorFlow computes
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def words_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of an oracle with four tables."""
    options, out = ("--mem-len", 48, "--segment", 16, "--clamp-len", 32), tmp_path_factory.mktemp("words")
    assert xl("import", WORDS, "--out", out / "run", *options).exit_code == 0
    return out / "run"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda v: v.pop("transformer/layer_1/ff/LayerNorm/beta"),
            ["lacks the tensor transformer/layer_1/ff/LayerNorm/beta"],
        ),
        (lambda v: v.update({"transformer/more": np.zeros(2)}), ["unexpected tensor transformer/more [2]"]),
        (
            lambda v: v.update({"transformer/adaptive_softmax/bias": np.zeros(500)}),
            ["cutoff_0/b under two names"],
        ),
        (
            lambda v: v.update({"transformer/r_w_bias": np.zeros((1 << 40, 0, 0))}),
            ["transformer/r_w_bias is [1099511627776, 0, 0]"],
        ),
        (
            lambda v: v.update({"transformer/layer_0/rel_attn/o/kernel": np.zeros((3, 64))}),
            ["rel_attn/o/kernel is [64, 3]"],
        ),
    ],
)
def test_other_variables_are_refused_by_their_names(
    change: Callable[[dict[str, np.ndarray]], Any], words: list[str], words_run: Path, tmp_path: Path
) -> None:
    variables = variables_of(words_run)
    change(variables)
    np.savez(tmp_path / "model.npz", **variables)
    refused(xl("import", tmp_path / "model.npz", "--describe", "--vocab", WORDS / "cache.pt"), *words)


# kimiyoung's pickled module


def module() -> Foreign:
    found: Foreign = read_pickle(WORDS / "model.pt")
    return found


def part(found: Foreign, *path: str) -> dict[str, Any]:
    for name in path:
        found = found.state["_modules"][name]
    state: dict[str, Any] = found.state
    return state


def core_net(found: Foreign) -> dict[str, Any]:
    modules: dict[str, Any] = part(found, "layers", "1", "pos_ff", "CoreNet")["_modules"]
    return modules


def other(name: str) -> Foreign:
    return Foreign(f"torch.nn.modules.activation.{name}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda m: core_net(m).update({"1": other("SiLU")}),
            "CoreNet.1 is a torch.nn.modules.activation.SiLU,",
        ),
        (lambda m: core_net(m).pop("1"), "lacks the module layers.1.pos_ff.CoreNet.1"),
        (lambda m: core_net(m).update({"5": other("ReLU")}), "unexpected module layers.1.pos_ff.CoreNet.5"),
        (lambda m: core_net(m)["1"].state.update(threshold=0.1), "CoreNet.1.threshold is 0.1, expected 0.0"),
        (
            lambda m: core_net(m)["1"].state.update(slope=0.1),
            "unknown setting layers.1.pos_ff.CoreNet.1.slope",
        ),
        (lambda m: part(m, "word_emb").update(emb_scale=1.0), "word_emb.emb_scale is 1.0, expected 8.0"),
        (lambda m: part(m, "word_emb").update(emb_scale=10**400), "expected 8.0"),
        (
            lambda m: part(m, "word_emb", "emb_layers", "2").update(max_norm=1.0),
            "emb_layers.2.max_norm is 1.0, expected None",
        ),
        (
            lambda m: part(m, "layers", "2", "dec_attn").update(scale=1.0),
            "layers.2.dec_attn.scale is 1.0, expected 0.25",
        ),
        (
            lambda m: part(m, "layers", "2", "dec_attn").update(_forward_hooks={3: Foreign("data.Hook")}),
            "layers.2.dec_attn._forward_hooks is of the type dict, expected an empty one",
        ),
        (
            lambda m: part(m, "crit").update(cutoffs=[60, 150, 351, 500]),
            "crit.cutoffs is [60, 150, 351, 500]",
        ),
        (lambda m: m.state.update(final_norm=True), "unknown setting final_norm, True"),
        (lambda m: m.state.update(sample_softmax=9), "sample_softmax is 9, expected 0 or less"),
        (lambda m: m.state.update(n_layer=2), "has the unexpected module layers.2"),
        (lambda m: m.state.update(attn_type=7), "attn_type is 7, expected 0, 1, 2 or 3"),
        (lambda m: m.state.update(_parameters=3), "is not a module that PyTorch pickled"),
        (lambda m: setattr(m, "state", 3), "the model is not a module"),
        (lambda m: part(m, "word_emb").update(cutoffs=[60, 150, 350]), "word_emb.cutoffs end at"),
        (
            lambda m: part(m, "layers", "1", "pos_ff").update(pre_lnorm=True),
            "its layers have different LayerNorms",
        ),
        (
            lambda m: part(m, "layers", "1", "pos_ff", "layer_norm").update(eps=1e-3),
            "its layers have different LayerNorms",
        ),
        (lambda m: part(m, "crit")["_parameters"].update(cluster_bias=3), "'crit.cluster_bias' is a int"),
    ],
)
def test_a_pickled_module_that_is_not_whole_is_refused(change: Callable[[Foreign], Any], words: str) -> None:
    found = module()
    change(found)
    with pytest.raises(UserError) as caught:
        kimiyoung.read(Source(path=WORDS / "model.pt", content=found), ImportOptions())
    assert words in str(caught.value)


def test_the_relu_of_old_pytorch_is_read() -> None:
    """Until PyTorch 1.1 it was a Threshold."""
    found = module()
    for layer in part(found, "layers")["_modules"]:
        part(found, "layers", layer, "pos_ff", "CoreNet", "1").update(threshold=0.0, value=0.0)
    assert kimiyoung.read(Source(path=WORDS / "model.pt", content=found), ImportOptions()).config.layers == 3


def test_frequencies_are_those_of_the_file(words_run: Path, tmp_path: Path) -> None:
    """Another model's frequencies change what is computed, in PyTorch and in the graph alike."""
    from xl_export.artefact.export import export

    with np.load(WORDS / "expected.npz") as arrays:
        expected = dict(arrays)
    shutil.copytree(words_run, tmp_path / "run")
    before = nll(open_session(tmp_path / "run"), expected)
    tensors = load_file(tmp_path / "run" / "model.safetensors")
    save_file(
        tensors | {"positions.frequencies": tensors["positions.frequencies"] * 1.5},
        tmp_path / "run" / "model.safetensors",
    )
    changed = nll(open_session(tmp_path / "run"), expected)
    assert np.abs(changed - before).max() > 1e-3
    artefact = export(tmp_path / "run", tmp_path / "artefact")
    assert np.abs(nll(open_session(artefact), expected) - changed).max() < 2e-5
