"""`--set KEY=VALUE`: every key of a configuration, the kinds of values, and one sentence for each mistake."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtimes.base.errors import ConfigError
from runtimes.base.records import to_json
from trainer.model.config import SpanConfig
from trainer.run.config import Averaging, TrainConfig
from trainer.run.overrides import with_overrides

DEMO = TrainConfig.load("demo")


def leaves(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested JSON by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def test_every_key_can_be_set() -> None:
    """All values of a configuration, set one by one, turn any other configuration into it."""
    wanted = TrainConfig.load("adaptive-span-enwik8")
    values = leaves(to_json(wanted))
    assert {"model.span.maximum", "optimizer.betas", "training.clamp_len", "averaging", "steps"} <= set(
        values
    )
    changes = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    assert with_overrides(DEMO, changes) == wanted
    assert with_overrides(DEMO, []) == DEMO


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("optimizer.lr=3e-4", 3e-4),
        ("optimizer.lr=1", 1.0),
        ("optimizer.kind=adamw", "adamw"),
        ('optimizer.kind="adamw"', "adamw"),
        ("optimizer.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("model.pre_norm=true", True),
        ("vocab=byte", "byte"),
        ("text=2024", "2024"),  # a path
        ("text=a=b.txt", "a=b.txt"),
        ("text=null", None),
        ("model.span.maximum=12", SpanConfig(maximum=12)),
        ('model.span={"maximum": 12, "ramp": 3}', SpanConfig(maximum=12, ramp=3)),
        ("averaging.start_step=9", Averaging(start_step=9)),
        ("segment_schedule=[[5, 8]]", ((5, 8),)),
    ],
)
def test_a_value_is_json_or_bare_text(assignment: str, expected: Any) -> None:
    value: Any = with_overrides(DEMO, [assignment])
    for name in assignment.partition("=")[0].split("."):
        value = getattr(value, name)
        if value == expected:
            break
    assert (value, type(value)) == (expected, type(expected))


def test_an_object_can_be_made_changed_and_removed() -> None:
    changes = ["model.span.maximum=12", "model.span.ramp=3", "averaging.patience=2"]
    config = with_overrides(DEMO, changes)
    assert config.model.span == SpanConfig(maximum=12, ramp=3)
    assert with_overrides(config, ["model.span=null", "averaging=null"]) == DEMO
    other = with_overrides(config, ["averaging.patience=null", "averaging.start_step=7"])
    assert other.averaging == Averaging(start_step=7)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("steps", r"steps: expected KEY=VALUE"),
        ("=3", r"=3: expected KEY=VALUE"),
        ("schedule.fine_tune_steps=99999", "fit into steps"),
        ("optimizer.lr=fast", "expected a number, found the text 'fast'"),
        ("optimizer.lr=NaN", "expected a finite number, found nan"),
        ("model.d_model=1.5", "expected a whole number, found the number 1.5"),
        ("model.d_model=null", "expected a whole number"),
        ("tensorboard=yes", "expected true or false, found the text 'yes'"),
        ("optimizer.kind=sgd", "expected one of adam, adamw, adagrad, found 'sgd'"),
        ("optimizer=adamw", r"expected an object with the keys kind, .* such as optimizer\.kind"),
        ("optimiser.lr=1", r"there is no key optimiser\.lr; optimizer\.lr was probably meant"),
        ("d_model=3", r"model\.d_model was probably meant"),
        ("model.dmodel=3", r"model\.d_model was probably meant"),
        ("learning_rate=3", r"optimizer\.lr was probably meant"),
        ("model.span.max=3", r"model\.span\.maximum was probably meant"),
        ("model.zzz=1", r"the known keys of model are .*d_model"),
        ("steps.x=3", r"steps is one value and has no key 'x'; give steps=VALUE"),
        ("model.span.ramp=8", "the key 'maximum' is missing"),
        ("batch=0", "batch is 0; expected 1 to 1,099,511,627,776."),
        ("schedule.warmup_steps=99999", r"schedule\.warmup_steps is 99999; expected 0 to steps"),
    ],
)
def test_a_mistake_is_one_sentence(assignment: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        with_overrides(DEMO, [assignment])
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_steps_shorten_the_whole_recipe_as_the_option_does() -> None:
    recipe = TrainConfig.load("all-attention-wt103")
    for steps in (40_000, 8100, 1):
        short = with_overrides(recipe, [f"steps={steps}"])
        assert short == recipe.with_steps(steps)
        assert short.schedule.warmup_steps + short.schedule.fine_tune_steps <= steps
    changed = with_overrides(recipe, ["schedule.fine_tune_steps=7", "steps=20000"])
    assert (changed.steps, changed.schedule.fine_tune_steps) == (20_000, 7)


def test_schedules_shrink_with_the_steps() -> None:
    recipe = with_overrides(
        DEMO, ["steps=1000", "mem_len_schedule=[[500,9],[900,12]]", "averaging.start_step=800"]
    )
    short = recipe.with_steps(100)
    assert short.mem_len_schedule == ((50, 9), (90, 12))
    assert short.averaging == Averaging(start_step=80)
    assert recipe.with_steps(1).mem_len_schedule == ((0, 12),)
    with pytest.raises(ConfigError, match="steps is 0"):
        recipe.with_steps(0)
