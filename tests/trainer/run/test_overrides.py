"""`--set KEY=VALUE`: every key of a configuration, the kinds of values, and one sentence for each mistake."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtimes.base.errors import ConfigError
from runtimes.base.records import to_json
from trainer.model.config import SpanConfig
from trainer.model.positions import make_positions
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
        ("optimizer.kind=adamw", "adamw"),
        ('optimizer.kind="adamw"', "adamw"),
        ("model.pre_norm=true", True),
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


# Changes of the demo's configuration, and words of the refusal: one row for each check, at its boundary.
MISTAKES = [
    # what is no assignment, key or kind of value
    ("steps", r"steps: expected KEY=VALUE"),
    ("=3", r"=3: expected KEY=VALUE"),
    ("optimizer.lr=fast", "expected a number, found the text 'fast'"),
    ("optimizer=adamw", "key 'optimizer': expected a JSON object, found the text 'adamw'"),
    ("optimiser.lr=1", "unknown key 'optimiser'; 'optimizer' was probably meant"),
    ("d_model=3", r"'model\.d_model' was probably meant"),
    ("learning_rate=3", r"'optimizer\.lr' was probably meant"),
    ("model.span.max=3", "key 'span': unknown key 'max'; 'maximum' was probably meant"),
    ("model.zzz=1", "key 'model': unknown key 'zzz'; the known keys are .*d_model"),
    ("steps.x=3", "steps has no keys; give steps=VALUE"),
    ("model.span.ramp=8", "the key 'maximum' is missing"),
    # numbers out of range
    ("batch=0", "'batch': expected a whole number from 1 to"),
    ("model.layers=1000000000", "'model', key 'layers': expected a whole number from 1 to"),
    ("model.dropout=1.0", "'dropout': expected a number from 0 to below 1, found"),
    ("model.norm_epsilon=0", "'norm_epsilon': expected a number above 0 and below 1, found"),
    ("optimizer.lr=1e31", r"'optimizer', key 'lr': expected a number above 0 and at most 1e\+30"),
    ("seed=9223372036854775808", "'seed': expected a whole number from 0 to 9223372036854775807"),
    ("training.segment=0", "'segment': expected a whole number from 1"),
    ("evaluation.mem_len=1000000000000", "'mem_len': expected a whole number from 0"),
    # values that do not fit each other
    ("accumulate=3", "accumulate is 3; expected a divisor of batch, which is 16"),
    ("steps=10 schedule.warmup_steps=8 schedule.fine_tune_steps=3", "fit into steps"),
    ("schedule.min_lr=1.0", "schedule.min_lr is 1.0; expected 0 to optimizer.lr"),
    ("optimizer.betas=[0.9]", "expected two numbers"),
    ("optimizer.betas=[0.9,1.0]", "'betas': expected a number from 0 to below 1"),
    ("optimizer.kind=adagrad optimizer.betas=[0.8,0.9]", "adagrad, which has none"),
    ("optimizer.weight_decay=0.1", "give kind adamw"),
    ("averaging={}", "both start_step and patience, or neither"),
    ("averaging.start_step=1 averaging.patience=1", "both start_step and patience, or neither"),
    ("steps=10 averaging.start_step=10", "expected less than steps, which is 10"),
    ("parallel=fsdp autocast=fp16", "loss scale is not shared"),
    ("text=a.txt data=b", "give only one of the two"),
    ("evaluation.include_self=false", "give both the same value"),
    ("mem_len_schedule=[[0,1,2]]", r"mem_len_schedule is .*expected \[step, mem_len\] pairs"),
    ("steps=10 mem_len_schedule=[[10,4]]", "ascend from 0 and stay below 10"),
    ("segment_schedule=[[5,8],[5,9]]", "ascend from 0"),
    ("segment_schedule=[[5,0]]", "segment is 0"),
    # models
    ("model.positions=sine", "expected one of relative, shaw"),
    ("model.d_model=15", r"model\.d_model is 15; relative positions need an even number"),
    ("model.context=3", r"model\.context is 3; relative positions take 0\."),
    ("model.positions=shaw", r"model\.context is 0; shaw positions take 1 to .* --set model\.context=N"),
    ("model.from_segment_end=true", "expected a kind that is added to the input"),
    ("model.positions=shaw model.context=3 model.stored_frequencies=true", "have no sinusoids"),
    ("model.positions=learned model.context=5 model.span.maximum=5", "give 6 rows, for the distances 0 to 5"),
    ("model.span.maximum=9999", "a span cannot be longer than the memory"),
    ("model.span.maximum=5 model.span.initial=2", "'span', key 'initial'"),
    ("model.d_ff=0", "feed-forward layers take a d_ff of at least 1"),
    ("model.persistent=3", "and no persistent vectors"),
    ("model.sublayers=all-attention model.persistent=3", "all-attention layers take .* and no d_ff"),
    ("model.sublayers=head-split model.persistent=3 model.d_ff=0 model.heads=3", "take an even number"),
    ("model.vocabulary.cutoffs=[7,3]", "expected positive token ids in ascending order"),
    ("model.vocabulary.cutoffs=[0,3]", "expected positive token ids in ascending order"),
    ("model.vocabulary.cutoffs=[3] model.vocabulary.tie_projections=[true]", "each of the 2 clusters"),
    ("model.vocabulary.cutoffs=[3,11] model.vocab_size=11", "expected cutoffs below the number of tokens"),
    ("model.vocabulary.cutoffs=[3,7] model.vocabulary.div_val=64", "would have a width of 0"),
]


@pytest.mark.parametrize(("assignments", "words"), MISTAKES)
def test_a_mistake_is_one_sentence(assignments: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_positions(with_overrides(DEMO, assignments.split(" ")).model)
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
