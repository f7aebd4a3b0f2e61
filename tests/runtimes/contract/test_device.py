"""Names of devices."""

from __future__ import annotations

import pytest

from runtimes.base.errors import ConfigError
from runtimes.contract.device import KINDS, Device


def test_every_kind_is_parsed_and_shown_as_it_is_given() -> None:
    for kind in KINDS:
        assert str(Device.parse(kind)) == kind
    assert Device.parse("cuda:1") == Device("cuda", 1)
    assert str(Device.parse("cuda:1")) == "cuda:1"
    assert Device.parse("cuda:0") == Device("cuda")
    assert Device.parse(Device("cpu")) == Device("cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu", "'gpu'; cuda was probably meant; expected one of auto, cpu"),
        ("GPU:1", "cuda was probably meant"),
        ("tensort", "tensorrt was probably meant"),
        ("trt", "tensorrt was probably meant"),
        ("", "device is ''; expected one of"),
        ("cuda:", "expected one of"),
        ("cuda:1:2", "expected one of"),
        ("cpu:0", "cpu has no number"),
        ("cuda:64", "expected a number of 0 to 63"),
    ],
)
def test_any_other_text_is_refused_with_what_was_probably_meant(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Device.parse(text)
