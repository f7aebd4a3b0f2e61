"""Training configurations: JSON round trip, the built-in ones, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.records import from_json, to_json
from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig
from trainer.run.catalogue import TITLES, catalogue
from trainer.run.config import BUILT_IN, Averaging, TrainConfig, built_in
from trainer.run.optimizer_config import OptimizerConfig, ScheduleConfig
from trainer.training.state import Training

GOOD: dict[str, Any] = {
    "model": {"layers": 2, "d_model": 16, "heads": 2, "head_dim": 8, "d_ff": 24},
    "training": {"mem_len": 8, "segment": 8, "mask": "full"},
    "evaluation": {"mem_len": 16, "segment": 8, "clamp_len": 5, "initial_memory": "zeros"},
}


def changed(key: str, value: Any) -> dict[str, Any]:
    """GOOD with one dotted key replaced."""
    data = json.loads(json.dumps(GOOD))
    *path, last = key.split(".")
    place = data
    for part in path:
        place = place.setdefault(part, {})
    place[last] = value
    return data


def load(data: Any) -> TrainConfig:
    return TrainConfig.from_json(data, where="config.json")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(*[st.integers(1, 64)] * 5),
    dropout=st.floats(0, 0.99),
    tied=st.booleans(),
    pre_norm=st.booleans(),
    mem_len=st.integers(0, 99),
    mask=st.sampled_from(["full", "same-length"]),
    clamp_len=st.none() | st.integers(1, 99),
    vocab=st.sampled_from(["byte", "char", "word"]),
    text=st.none() | st.text(),
    seed=st.integers(0, 2**63 - 1),
    lr=st.floats(1e-9, 1),
)
def test_json_round_trip_is_the_identity(
    sizes: tuple[int, ...],
    dropout: float,
    tied: bool,
    pre_norm: bool,
    mem_len: int,
    mask: Any,
    clamp_len: int | None,
    vocab: Any,
    text: str | None,
    seed: int,
    lr: float,
) -> None:
    layers, half, heads, head_dim, d_ff = sizes
    config = TrainConfig(
        model=ModelConfig(
            layers=layers,
            d_model=2 * half,
            heads=heads,
            head_dim=head_dim,
            d_ff=d_ff,
            dropout=dropout,
            tie_biases=tied,
            pre_norm=pre_norm,
        ),
        training=MemoryRule(mem_len=mem_len, segment=7, mask=mask, clamp_len=clamp_len),
        evaluation=MemoryRule(mem_len=3, segment=2),
        vocab=vocab,
        text=text,
        seed=seed,
        optimizer=OptimizerConfig(
            kind="adamw" if tied else "adagrad",
            lr=lr,
            betas=(dropout, lr / 2) if tied else (0.9, 0.999),
            epsilon=lr if pre_norm else None,
        ),
        schedule=ScheduleConfig(kind="plateau", min_lr=lr / 2, warmup_steps=seed % 100),
        averaging=Averaging(start_step=seed % 100) if tied else None,
        mem_len_schedule=((1, mem_len), (5, 2)) if pre_norm else (),
    )
    assert load(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("name", sorted(built_in()))
def test_every_built_in_configuration_loads_by_name(name: str) -> None:
    config = TrainConfig.load(name)
    assert config.text is None, "a built-in configuration must work on any machine"
    assert load(json.loads(json.dumps(to_json(config)))) == config


def test_every_configuration_is_listed_once_under_a_title() -> None:
    paths = list(BUILT_IN.rglob("*.json"))
    assert {path.parent for path in paths} == {BUILT_IN / folder for folder in TITLES}
    assert sorted(path.stem for path in paths) == sorted(built_in())
    listed = [line.split()[0] for line in catalogue() if line.startswith("  ")]
    assert sorted(listed) == sorted(built_in())
    assert built_in()["demo"] == BUILT_IN / "small" / "demo.json"


def test_a_file_loads_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(GOOD))
    assert (
        TrainConfig.load(tmp_path / "mine.json")
        == TrainConfig.load(str(tmp_path / "mine.json"))
        == load(GOOD)
    )


def test_an_integer_is_good_enough_for_a_float() -> None:
    rate = load(changed("optimizer.lr", 1)).optimizer.lr
    assert (rate, type(rate)) == (1.0, float)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        # unknown keys, at each depth
        ("stepz", 3),
        ("model.layerz", 3),
        ("training.mem", 3),
        # wrong types
        ("model.layers", "2"),
        ("model.layers", 2.0),
        ("model.layers", True),
        ("model.layers", None),
        ("model.pre_norm", 1),
        ("model.dropout", "0.1"),
        ("optimizer.lr", float("nan")),
        ("optimizer.lr", float("inf")),
        ("optimizer.lr", False),
        ("model", 3),
        ("training", []),
        ("text", 3),
        ("vocab", "chars"),
        ("vocab", None),
        ("training.mask", "causal"),
        ("evaluation.initial_memory", "ones"),
        ("steps", [1]),
        ("seed", 0.5),
        # impossible sizes
        ("model.d_model", 0),
        ("model.heads", 0),
        ("model.heads", -1),
        ("model.layers", 0),
        ("model.head_dim", 0),
        ("model.d_ff", 0),
        ("model.layers", 10**12),
        ("model.vocab_size", -1),
        ("model.dropout", 1.0),
        ("model.dropout", -0.1),
        ("model.attention_dropout", 1.0),
        ("steps", -5),
        ("steps", 0),
        ("batch", 0),
        ("batch", -1),
        ("min_count", 0),
        ("log_every", 0),
        ("validate_every", 0),
        ("checkpoint_every", 0),
        ("schedule.warmup_steps", 1001),
        ("schedule.warmup_steps", -1),
        ("optimizer.lr", 0.0),
        ("optimizer.lr", -1.0),
        ("optimizer.clip", 0.0),
        ("seed", -1),
        ("seed", 2**63),
        ("threads", -1),
        ("threads", 10**6),
        ("accumulate", 0),
        ("accumulate", 3),
        ("optimizer.betas", [0.9]),
        ("optimizer.betas", [0.9, 1.0]),
        ("optimizer.betas", 0.9),
        ("optimizer.epsilon", 0.0),
        ("optimizer.weight_decay", -0.1),
        ("optimizer.weight_decay", 0.1),  # of Adam
        ("schedule.min_lr", -0.1),
        ("schedule.min_lr", 1.0),
        ("schedule.plateau_decay", 1.0),
        ("schedule.plateau_decay", 0.0),
        ("schedule.plateau_patience", -1),
        ("patience", -1),
        ("averaging", {}),
        ("averaging.start_step", 1000),
        ("averaging.patience", -1),
        ("mem_len_schedule", [[0, 1, 2]]),
        ("segment_schedule", [[5, 8], [5, 9]]),
        ("segment_schedule", [[5]]),
        ("mem_len_schedule", [[]]),
        ("optimizer.lr", 1e39),
        ("averaging.start_step", -1),
        # choices that there are not
        ("optimizer.kind", "sgd"),
        ("schedule.kind", "linear"),
        ("autocast", "fp8"),
        ("device", "tpu"),
        ("tensorboard", 1),
        ("mem_len_schedule", 3),
        ("mem_len_schedule", [3]),
        ("mem_len_schedule", [["1", 2]]),
        ("averaging", 3),
        # lengths
        ("training.segment", 0),
        ("training.mem_len", -1),
        ("evaluation.mem_len", 10**12),
        ("evaluation.clamp_len", 0),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"\b{key.split('.')[-1]}\b") as caught:
        load(changed(key, value))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("key", ["model", "training", "evaluation", "model.layers", "training.segment"])
def test_a_missing_key_is_named(key: str) -> None:
    data = changed(key, None)
    *path, last = key.split(".")
    del (data[path[0]] if path else data)[last]
    with pytest.raises(ConfigError, match=f"key '{last}' is missing"):
        load(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {**GOOD["model"], "d_ff": 1 << 24, "d_model": 1 << 16}},
        {"training": {"mem_len": 1 << 24, "segment": 512}},
    ],
)
def test_a_model_too_large_for_the_machine_is_refused(changes: dict[str, Any]) -> None:
    config = load(GOOD | changes)  # loading is no offence: a run may be exported on a smaller machine
    with pytest.raises(
        ConfigError, match=r"takes about [\d,]+ GiB and this machine has \d+ GiB; reduce layers"
    ):
        Training.start(config)


def test_betas_that_an_optimizer_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"betas is .* and optimizer\.kind is adagrad, which has none"):
        OptimizerConfig(kind="adagrad", betas=(0.8, 0.9))
    assert OptimizerConfig(kind="adagrad").betas == (0.9, 0.999)


@pytest.mark.parametrize("data", [[], 3, None, "model"])
def test_json_that_is_not_an_object_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="expected a JSON object"):
        load(data)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{model: 3}")
    with pytest.raises(ArtefactError, match=r"mine\.json is not valid JSON"):
        TrainConfig.load(tmp_path / "mine.json")


def test_the_folder_of_a_run_is_told_from_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="or continue its run with `xl-export train --resume"):
        TrainConfig.load(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("dmeo", "; demo was probably meant, and `xl-export"),
        ("tinny", "; tiny was probably meant, and `xl-export"),
        ("enwik8-bas", "; enwik8-base or "),
        ("zzz", "; `xl-export"),
    ],
)
def test_an_unknown_name_gives_those_that_are_near(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(name)
    assert str(caught.value).startswith(f"{name} is neither a file nor a built-in configuration{meant}")
    assert str(caught.value).endswith("`xl-export train --list` shows all of them.")


def test_the_list_names_the_data_of_examples() -> None:
    data = {line.split()[0]: line[36:54].strip() for line in catalogue() if line.startswith("  ")}
    assert data["stories"] == "examples/stories"
    assert data["chorales"] == "examples/music"
    assert data["tiny"] == "any text"


@pytest.mark.parametrize(
    ("half", "segment", "enough"), [(False, 1, False), (False, 2, True), (True, 2, False), (True, 3, True)]
)
def test_a_second_target_needs_a_second_token_in_every_segment(
    half: bool, segment: int, enough: bool
) -> None:
    data = changed("segment_schedule", [[5, segment]])
    data["model"] = {**data["model"], "objective": {"second_target": True, "half": half}}
    if enough:
        load(data)
        return
    with pytest.raises(
        ConfigError, match=rf"the shortest training segment is {segment} and objective\.second_target needs 2"
    ):
        load(data)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "optimizer.lr"),  # its initials
        ("lr", "optimizer.lr"),
        ("warmup", "schedule.warmup_steps"),
        ("stepz", "steps"),  # a slip
        ("layers", "model.layers"),  # a key of the record inside
        ("mem_len", "training.mem_len"),
        ("batch_size", "batch"),
    ],
)
def test_an_unknown_key_suggests_the_probable_one(key: str, meant: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"unknown key '{key}'; '{meant}' was probably meant, and the known"
    ):
        from_json(TrainConfig, {key: 1}, where="here")


def test_an_unknown_key_that_resembles_none_is_only_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'zzz'; the known keys are"):
        from_json(TrainConfig, {"zzz": 1}, where="here")
