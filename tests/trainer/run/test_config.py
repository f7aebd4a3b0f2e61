"""Training configurations: JSON round trip, the built-in ones, and one sentence for each mistake."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from runtimes.base.errors import ConfigError
from runtimes.base.records import UNIONS, limits, to_json, type_hints
from trainer.run.catalogue import TITLES, catalogue
from trainer.run.config import BUILT_IN, TrainConfig, built_in
from trainer.run.optimizer_config import OptimizerConfig
from trainer.training.state import Training

GOOD: dict[str, Any] = {
    "model": {"layers": 2, "d_model": 16, "heads": 2, "head_dim": 8, "d_ff": 24},
    "training": {"mem_len": 8, "segment": 8, "mask": "full"},
    "evaluation": {"mem_len": 16, "segment": 8, "clamp_len": 5, "initial_memory": "zeros"},
}


def load(data: Any) -> TrainConfig:
    return TrainConfig.from_json(data, where="config.json")


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


def numbers(kind: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The numbers of a configuration by their keys, and their ranges."""
    for name, hint in type_hints(kind).items():
        plain, ranges = limits(hint)
        for each in get_args(plain) if get_origin(plain) in UNIONS else (plain,):
            inner, more = limits(each)
            if dataclasses.is_dataclass(inner):
                yield from numbers(inner, f"{path}{name}.")
            elif inner in (int, float):
                yield f"{path}{name}", [*ranges, *more]


def test_every_number_of_a_configuration_has_a_range() -> None:
    found = dict(numbers(TrainConfig))
    assert {"steps", "peak_tflops", "model.layers", "model.span.ramp", "averaging.patience"} <= set(found)
    assert [key for key, ranges in found.items() if not ranges] == []


def test_an_unknown_name_gives_those_that_are_near() -> None:
    with pytest.raises(ConfigError, match=r"^enwik8-bas is neither .*; enwik8-base or .* was probably meant"):
        TrainConfig.load("enwik8-bas")


@pytest.mark.parametrize(
    ("name", "values"), [("steps", (1.5, math.inf, "9")), ("peak_tflops", (math.nan, math.inf, "9"))]
)
def test_a_number_made_in_python_has_its_kind_and_is_finite(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"^{name} is "):
            dataclasses.replace(load(GOOD), **{name: value})
    with pytest.raises(ConfigError, match=r"^optimizer\.lr is nan"):
        OptimizerConfig(lr=math.nan)
