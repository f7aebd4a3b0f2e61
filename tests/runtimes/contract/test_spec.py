"""The contract of an artefact: read back as written, refused with one sentence when anything about it
changed.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import onnx
import pytest

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.memory_identity import MemoryIdentity
from runtimes.contract.model_facts import ModelFacts
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import (
    ANSWERS,
    FUSED,
    GRAPH,
    REFERENCE,
    SCHEMA,
    SPEC,
    VOCAB,
    WEIGHTS,
    Spec,
    Target,
    load_spec,
    read_spec,
    save_spec,
)
from runtimes.contract.tensors import OPTIONAL_WHEN, AnyForm, bytes_saved, head_groups, state_tensors
from tests.sealing import sealed

ROOT = Path(__file__).parents[3]
MODEL = ModelFacts(
    positions="relative",
    sublayers="feed-forward",
    layers=2,
    heads=3,
    head_dim=5,
    d_model=7,
    d_ff=11,
    persistent=0,
    vocab_size=13,
    cutoffs=(),
    reaches=(),
    pre_norm=False,
    parameters=1,
)
RULE = MemoryRule(mem_len=16, segment=8)


def make_spec(form: Any = "ring", **changes: Any) -> Spec:
    facts: dict[str, Any] = {
        "model": MODEL,
        "rule": RULE,
        "form": form,
        "precision": "fp32",
        "opset": 24,
        "memory_identity": MemoryIdentity(layout="0" * 64, weights="1" * 64),
        "producer": {"numpy": "2"},
        "source": {"model.safetensors": "ab"},
    }
    return Spec(**{**facts, **changes}).completed()


def in_place_cases() -> list[dict[str, Any]]:
    """Whether memory is written in place, by form and target, for the readers in other languages too."""
    return [
        {"form": form, "target": target, "expected": make_spec(form, target=target).in_place}
        for form in get_args(AnyForm)
        for target in get_args(Target)
    ]


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes `spec.json` in place, as somebody with an editor would."""
    document = json.loads((folder / SPEC).read_text())
    change(document)
    (folder / SPEC).write_text(json.dumps(document))


Change = Callable[[dict[str, Any]], Any]
SPANS = dataclasses.replace(MODEL, reaches=((10, 200, 300), (7, 9, 12)))
LONG = MemoryRule(mem_len=256, segment=8)


def test_heads_of_similar_reach_share_the_longest_memory() -> None:
    groups = head_groups(SPANS, LONG, "ring")
    assert [[(list(group.heads), group.mem_len) for group in layer] for layer in groups] == [
        [([2, 1], 256), ([0], 10)],  # 300 is cut to the memory; 200 is more than half of that
        [([2, 1, 0], 12)],  # half of it, but less than 64 tokens apart
    ]
    assert [[group.mem_len for group in layer] for layer in head_groups(SPANS, LONG, "hidden")] == [
        [256],
        [12],
    ]
    assert all(len(layer) == 1 and layer[0].mem_len == 256 for layer in head_groups(MODEL, LONG, "ring"))


def test_the_order_of_heads_is_part_of_the_layout() -> None:
    """Memory of equal shape would continue with the keys of other heads."""

    def layout(form: AnyForm, *reaches: tuple[int, ...]) -> str:
        model = dataclasses.replace(MODEL, reaches=reaches)
        return make_spec(form, model=model, rule=LONG).with_layout(None).memory_identity.layout

    spans, others = ((10, 200, 300), (7, 9, 12)), ((300, 200, 10), (7, 9, 12))
    assert layout("ring", *spans) != layout("ring", *others)
    assert layout("hidden", *spans) == layout("hidden", *others)


def test_memory_tensors_of_groups_have_their_own_names_and_lengths() -> None:
    states = state_tensors(SPANS, LONG, "ring")
    assert [(state.name, state.shape) for state in states if state.name.endswith("key")] == [
        ("past_key_values.0.0.key", ("batch", 2, 264, 5)),
        ("past_key_values.0.1.key", ("batch", 1, 18, 5)),
        ("past_key_values.1.key", ("batch", 3, 20, 5)),
    ]
    spec = make_spec(model=SPANS, rule=LONG)
    assert spec.state == states
    assert spec.bytes_per_stream == 8 + 2 * 4 * 5 * (2 * 264 + 18 + 3 * 20)
    assert bytes_saved(SPANS, LONG, "ring") == 2 * 4 * 5 * (6 * 264 - 2 * 264 - 18 - 3 * 20)
    assert bytes_saved(MODEL, LONG, "ring") == 0


def test_heads_with_only_persistent_vectors_have_no_memory() -> None:
    split = dataclasses.replace(MODEL, heads=4, sublayers="head-split", persistent=3, d_ff=0)
    assert {state.shape for state in state_tensors(split, RULE, "shift")} == {("batch", 2, 16, 5)}


@pytest.mark.parametrize(
    "reaches", [((1, 2, 3),), ((1, 2), (1, 2)), ((1, 2, 0), (1, 2, 3)), ((1, 2, 1 << 30), (1, 2, 3))]
)
def test_reaches_that_do_not_fit_the_heads_are_refused(reaches: Any) -> None:
    with pytest.raises(ConfigError, match="reaches"):
        dataclasses.replace(MODEL, reaches=reaches)


def test_a_language_model_with_all_promises_keeps_its_bytes(tmp_path: Path) -> None:
    path = ROOT / "examples" / "stories" / "tales" / SPEC
    save_spec(tmp_path, read_spec(path))
    assert (tmp_path / SPEC).read_bytes() == path.read_bytes()


def test_own_memory_of_a_written_graph_is_refused(tmp_path: Path) -> None:
    shapes = ((3,),)
    save_spec(tmp_path, make_spec("own", memory_shapes=shapes))
    with pytest.raises(ArtefactError, match="its graph was written"):
        load_spec(tmp_path)


def test_a_large_vocabulary_has_inputs_that_say_what_is_wanted() -> None:
    for facts in ({"cutoffs": (5,)}, {"vocab_size": 8193}):
        model = dataclasses.replace(MODEL, **facts)
        spec = make_spec(model=model)
        assert [(tensor.name, tensor.shape) for tensor in spec.inputs[2:4]] == [
            ("targets", ("batch", "tokens")),
            ("logit_rows", ("rows",)),
        ]
        assert [(tensor.name, tensor.shape) for tensor in spec.outputs[:2]] == [
            ("logits", ("rows", model.vocab_size)),
            ("log_probs", ("batch", "tokens")),
        ]


@pytest.mark.parametrize(
    ("form", "names", "shape", "floats"),
    [
        ("ring", ["key", "value"], ("batch", 3, 24, 5), 2 * 2 * 3 * 24 * 5),
        ("shift", ["key", "value"], ("batch", 3, 16, 5), 2 * 2 * 3 * 16 * 5),
        ("hidden", ["hidden"], ("batch", 16, 7), 2 * 16 * 7),
    ],
)
def test_memory_tensors_of_each_form(
    form: Any, names: list[str], shape: tuple[int | str, ...], floats: int
) -> None:
    spec = make_spec(form)
    if form == "hidden":
        expected = [(f"past_hidden.{layer}", f"present_hidden.{layer}") for layer in (0, 1)]
    else:
        expected = [
            (f"past_key_values.{layer}.{name}", f"present.{layer}.{name}")
            for layer in (0, 1)
            for name in names
        ]
    assert [(state.name, state.present) for state in spec.state] == expected
    assert {(state.shape, state.dtype) for state in spec.state} == {(shape, "float32")}
    assert spec.bytes_per_stream == 8 + 4 * floats
    assert [tensor.name for tensor in spec.inputs] == [
        "input_ids",
        "position_ids",
        *(past for past, _ in expected),
    ]
    assert [tensor.name for tensor in spec.outputs] == ["logits", *(present for _, present in expected)]
    assert spec.outputs[0].shape == ("batch", "tokens", 13)
    assert spec.outputs[0].sizes(batch=2, tokens=3) == (2, 3, 13)


def test_a_spec_comes_back_as_it_was_saved(artefacts: dict[str, Path], tmp_path: Path) -> None:
    for folder in artefacts.values():
        spec = load_spec(folder)
        copied = Path(shutil.copytree(folder, tmp_path / spec.form))
        save_spec(copied, spec)
        assert load_spec(copied) == spec
        assert set(spec.files) >= {GRAPH, WEIGHTS, VOCAB, REFERENCE, ANSWERS}


def test_a_newer_schema_is_refused_with_an_update(artefact: Path) -> None:
    edit(artefact, lambda spec: spec.update(schema=SCHEMA + 1, news=1))
    with pytest.raises(
        ArtefactError, match=r"has schema 2, and this version reads up to 1; update xl-export"
    ):
        load_spec(artefact)


ALTERED: list[Change] = [
    lambda spec: spec["rule"].update(mem_len=17),
    lambda spec: spec.update(opset=25),
    lambda spec: spec.update(digest="0" * 64),
    lambda spec: spec.pop("digest"),
    lambda spec: spec["producer"].update(numpy="0"),
    lambda spec: spec["files"][WEIGHTS].update(sha256="0" * 64),
]


def test_an_altered_spec_does_not_match_its_digest(artefact: Path) -> None:
    whole = (artefact / SPEC).read_bytes()
    for change in ALTERED:
        (artefact / SPEC).write_bytes(whole)
        edit(artefact, change)
        with pytest.raises(ArtefactError, match=r"spec\.json was altered: its digest"):
            load_spec(artefact)


OUTSIDE = ["../x", "/etc/hostname", "..", ".", "", "a/b", "a\\b", "a\0b", "C:x", "x" * 5000]
FACTS = {"sha256": "0" * 64, "num_bytes": 1}
OTHER, LISTS = (
    "damaged or of another version of xl-export",
    "inputs, outputs, answers or tolerances do not follow",
)
# What a writer with a bug, or a stranger, may have written with a digest that fits.
SEALED: list[tuple[Change, str]] = [
    (lambda spec: spec.pop("rule"), OTHER),
    (lambda spec: spec.update(more=1), OTHER),
    (lambda spec: spec.update(schema=0), "schema"),
    *((lambda spec, n=n: spec["files"].update({n: FACTS}), "a file in its folder") for n in OUTSIDE),
    *(
        (lambda spec, name=name: spec["files"].pop(name), f"does not list {name}")
        for name in (GRAPH, WEIGHTS, VOCAB, REFERENCE, ANSWERS)
    ),
    (lambda spec: spec["inputs"][2]["shape"].__setitem__(1, 7), LISTS),
    (lambda spec: spec["inputs"][2]["shape"].__setitem__(0, "rows"), LISTS),
    (lambda spec: spec["inputs"][0].update(dtype="float32"), LISTS),
    (lambda spec: spec["inputs"][0].update(name="tokens"), LISTS),
    (lambda spec: spec["outputs"].pop(), LISTS),
    (lambda spec: spec["outputs"].append(spec["outputs"][0]), LISTS),
    (lambda spec: spec["inputs"][2].update(present="logits"), LISTS),
    (lambda spec: spec["inputs"][2].pop("present"), LISTS),
    (lambda spec: spec["inputs"].clear(), LISTS),
]


def test_an_impossible_spec_is_refused_despite_a_valid_digest(artefact: Path) -> None:
    whole = (artefact / SPEC).read_text()
    (artefact.parent / "x").write_text("x")
    for change, words in SEALED:
        document = json.loads(whole)
        change(document)
        (artefact / SPEC).write_bytes(sealed(document))
        with pytest.raises(ArtefactError, match=words):
            load_spec(artefact)


@pytest.mark.parametrize("name", [GRAPH, WEIGHTS, VOCAB, REFERENCE, ANSWERS])
def test_a_missing_cut_or_altered_file_is_named(name: str, artefact: Path) -> None:
    data = (artefact / name).read_bytes()
    (artefact / name).write_bytes(data[:-1])
    with pytest.raises(ArtefactError, match=rf"{name} has {len(data) - 1} bytes, expected {len(data)}"):
        load_spec(artefact)
    (artefact / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArtefactError, match=rf"{name} was altered: its SHA-256"):
        load_spec(artefact)
    (artefact / name).unlink()
    with pytest.raises(ArtefactError, match=rf"{name} is missing; copy the whole folder"):
        load_spec(artefact)
    (artefact / name).mkdir()
    with pytest.raises(ArtefactError, match=rf"{name} is missing"):
        load_spec(artefact)


def test_a_new_artefact_lists_the_tensors_that_its_graphs_have(
    artefacts: dict[str, Path], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """The lists are compared with what the package onnx reads in the file, whatever this project computes."""
    from trainer.model.config import VocabularyConfig
    from xl_export.artefact.export import export

    adaptive = VocabularyConfig(cutoffs=(20, 40))
    selective = export(make_run(vocabulary=adaptive), tmp_path / "selective", memory="shift")
    for folder in (*artefacts.values(), selective):
        document = json.loads((folder / SPEC).read_text())
        for name in (GRAPH, FUSED):
            if name in document["files"]:
                graph = onnx.load(folder / name, load_external_data=False).graph
                for key, nodes in (("inputs", graph.input), ("outputs", graph.output)):
                    assert [(x["name"], x["dtype"], x["shape"]) for x in document[key]] == [
                        as_listed(node) for node in nodes
                    ]
    optional = {x["name"]: x["when"] for x in document["inputs"] + document["outputs"] if "when" in x}
    assert list(optional) == ["targets", "logit_rows", "logits", "log_probs"]
    assert all(sentence.endswith(".") for sentence in optional.values())
    assert not any("when" in x for x in json.loads((artefacts["ring"] / SPEC).read_text())["inputs"])


def as_listed(node: Any) -> tuple[str, str, list[int | str]]:
    tensor = node.type.tensor_type
    sizes = [x.dim_value if x.HasField("dim_value") else x.dim_param for x in tensor.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return node.name, dtype, sizes


def test_another_sentence_on_an_optional_tensor_is_read(
    artefact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentences are for people: an artefact from before one was reworded opens under its identity."""
    selective = dataclasses.replace(MODEL, vocab_size=9000)
    spec = save_spec(artefact, make_spec(model=selective, files=load_spec(artefact).files))
    monkeypatch.setitem(OPTIONAL_WHEN, "logits", "Another sentence.")
    assert read_spec(artefact / SPEC) == spec
