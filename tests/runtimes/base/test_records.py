"""Dataclasses from JSON: what fits comes back the same, everything else is refused with its place."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from runtimes.base.errors import ConfigError
from runtimes.base.records import from_json, json_text, to_json


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int


@dataclass(frozen=True, kw_only=True)
class Outer:
    number: int
    share: float
    flag: bool
    name: str
    kind: Literal["a", "b"]
    inner: Inner
    inners: tuple[Inner, ...]
    table: dict[str, float]
    maybe: int | None = None
    listed: tuple[str, ...] = field(default=("x",))
    ratio: float | None = None


GOOD: dict[str, Any] = {
    "number": 3,
    "share": 0.5,
    "flag": True,
    "name": "é",
    "kind": "b",
    "inner": {"size": 1},
    "inners": [{"size": 2}, {"size": 3}],
    "table": {"k": 1.5},
    "maybe": 4,
    "listed": ["y", "z"],
    "ratio": 0.25,
}


def test_a_record_goes_to_json_text_and_back() -> None:
    record = from_json(Outer, GOOD, where="here")
    assert record == Outer(
        number=3,
        share=0.5,
        flag=True,
        name="é",
        kind="b",
        inner=Inner(size=1),
        inners=(Inner(size=2), Inner(size=3)),
        table={"k": 1.5},
        maybe=4,
        listed=("y", "z"),
        ratio=0.25,
    )
    assert json.loads(json.dumps(to_json(record))) == GOOD
    assert from_json(Outer, json.loads(json.dumps(to_json(record))), where="here") == record


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_json_has_no_number_that_is_not_finite(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"rows": [{"score": value}]})


def test_absent_keys_have_defaults() -> None:
    short = {key: value for key, value in GOOD.items() if key not in ("maybe", "listed")}
    assert from_json(Outer, short, where="here").maybe is None
    assert from_json(Outer, short, where="here").listed == ("x",)
    assert from_json(Outer, {**GOOD, "maybe": None}, where="here").maybe is None


def test_an_integer_is_taken_for_a_float_and_becomes_one() -> None:
    share = from_json(Outer, {**GOOD, "share": 2}, where="here").share
    assert type(share) is float


@pytest.mark.parametrize("key", ["number", "share", "flag", "name", "kind", "inner", "inners", "table"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"here: the key '{key}' is missing"):
        from_json(Outer, {k: v for k, v in GOOD.items() if k != key}, where="here")


def test_an_unknown_key_is_named_at_any_depth() -> None:
    with pytest.raises(
        ConfigError,
        match=r"here: unknown key 'nmae'; 'name' was probably meant, and the known keys are flag, inner",
    ):
        from_json(Outer, {**GOOD, "nmae": 1}, where="here")
    with pytest.raises(ConfigError, match=r"here, key 'inner': unknown key 'b'; the known keys are size"):
        from_json(Outer, {**GOOD, "inner": {"size": 1, "b": 2}}, where="here")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("number", True, "expected a whole number, found true"),
        ("number", 1.0, "expected a whole number, found the number"),
        ("number", "1", "expected a whole number, found the text '1'"),
        ("number", None, "expected a whole number, found null"),
        ("share", float("nan"), "expected a finite number, found nan"),
        ("ratio", float("nan"), "expected a finite number, found nan"),
        ("ratio", float("-inf"), "expected a finite number, found -inf"),
        ("share", float("inf"), "expected a finite number, found inf"),
        ("share", False, "expected a number, found false"),
        ("share", "0.5", "expected a number, found the text"),
        ("flag", 1, "expected true or false, found the number 1"),
        ("name", 1, "expected a text, found the number"),
        ("kind", "c", "expected one of a, b, found 'c'"),
        ("kind", ["a"], "expected one of a, b"),
        ("kind", None, "expected one of a, b"),
        ("inner", [1], "expected a JSON object, found the list"),
        ("inner", {"size": "1"}, "key 'inner', key 'size': expected a whole number"),
        ("inners", {"size": 1}, "expected a list, found the object"),
        ("inners", [{"size": 1}, {"size": None}], "key 'inners', key 'size': expected a whole number"),
        ("table", [["k", 1.5]], "expected an object, found the list"),
        ("table", {"k": "1"}, "key 'table', 'k': expected a number"),
        ("maybe", "4", "expected a whole number, found the text"),
        ("maybe", True, "expected a whole number, found true"),
        ("listed", "xyz", "expected a list, found the text"),
        ("listed", [1], "key 'listed': expected a text"),
        pytest.param(
            "share",
            10**400,
            "expected a finite number, found one beyond 1.8e308",
            id="an integer beyond all floats",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"^here, key '{key}'.*") as caught:
        from_json(Outer, {**GOOD, key: value}, where="here")
    assert expected in str(caught.value)


@pytest.mark.parametrize("data", [None, [], "x", 1])
def test_a_document_that_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="here: expected a JSON object, found"):
        from_json(Outer, data, where="here")
