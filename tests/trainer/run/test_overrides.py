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


# Changes of the demo's configuration, one row for each check, at its boundary. The sentence names the key
# that is set last, and what is after the arrow.
MISTAKES = """
# what is no assignment, key or kind of value
steps
=3 -> KEY=VALUE
optimizer.lr=fast -> 'fast'
optimizer=adamw -> 'adamw'
optimiser={} -> 'optimiser' 'optimizer'
d_model=3 -> 'model.d_model'
learning_rate=3 -> 'optimizer.lr'
model.span.max=3 -> 'span' 'max' 'maximum'
model.zzz=1 -> 'model' d_model
steps.x=3 -> steps=VALUE
model.span={"ramp":8} -> 'maximum'
# numbers out of range
batch=0
model.layers=1000000000
model.dropout=1.0
model.norm_epsilon=0
optimizer.lr=1e31
seed=9223372036854775808
training.segment=0
evaluation.mem_len=1000000000000
# values that do not fit each other
accumulate=3 -> batch
steps=10 schedule.warmup_steps=8 schedule.fine_tune_steps=3 -> warmup_steps
schedule.min_lr=1.0 -> optimizer.lr
optimizer.betas=[0.9] -> two
optimizer.betas=[0.9,1.0] -> 1.0
optimizer.kind=adagrad optimizer.betas=[0.8,0.9] -> kind
optimizer.weight_decay=0.1 -> kind
averaging={} -> patience
averaging.start_step=1 averaging.patience=1 -> start_step
steps=10 averaging.start_step=10 -> steps
parallel=fsdp autocast=fp16 -> parallel
parallel=fsdp optimizer.kind=muon -> parallel
text=a.txt data=b -> text
evaluation.include_self=false -> training.include_self
mem_len_schedule=[[0,1,2]] -> step
steps=10 mem_len_schedule=[[10,4]] -> 10.
segment_schedule=[[5,8],[5,9]] -> step
segment_schedule=[[5,0]]
# models
model.positions=sine -> shaw
model.d_model=15 -> even
model.context=3 -> relative
model.positions=shaw -> --set model.context
model.from_segment_end=true -> absolute
model.positions=shaw model.context=3 model.stored_frequencies=true -> shaw
model.positions=learned model.context=5 model.span.maximum=5 -> context
model.span.maximum=9999 -> mem_len
model.span.maximum=5 model.span.initial=2 -> 'span'
model.d_ff=0 -> persistent
model.persistent=3 -> d_ff feed-forward
model.sublayers=all-attention model.persistent=3 -> all-attention d_ff
model.sublayers=head-split model.persistent=3 model.d_ff=0 model.heads=3 -> head-split
model.vocabulary.cutoffs=[7,3] -> order
model.vocabulary.cutoffs=[0,3] -> order
model.vocabulary.cutoffs=[3] model.vocabulary.tie_projections=[true] -> 2
model.vocab_size=11 model.vocabulary.cutoffs=[3,11] -> 11 min_count
model.vocabulary.cutoffs=[3,7] model.vocabulary.div_val=64
""".strip().splitlines()


@pytest.mark.parametrize("mistake", [row for row in MISTAKES if row[0] != "#"])
def test_a_mistake_is_one_sentence(mistake: str) -> None:
    assignments, _, names = mistake.partition(" -> ")
    changes = assignments.split()
    with pytest.raises(ConfigError) as caught:
        make_positions(with_overrides(DEMO, changes).model)
    sentence = str(caught.value)
    for name in (changes[-1].partition("=")[0].rpartition(".")[2], *names.split()):
        assert name in sentence, sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")


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
