"""Names of devices; `tests/runtimes/test_refusals.py` has those that are refused."""

from __future__ import annotations

from runtimes.contract.device import KINDS, Device


def test_every_kind_is_parsed_and_shown_as_it_is_given() -> None:
    for kind in KINDS:
        assert str(Device.parse(kind)) == kind
    assert Device.parse("cuda:1") == Device("cuda", 1)
    assert str(Device.parse("cuda:1")) == "cuda:1"
    assert Device.parse("cuda:1+tf32") == Device("cuda", 1, tf32=True)
    assert str(Device.parse("cuda+tf32")) == "cuda+tf32"
    assert Device.parse("cuda:0") == Device("cuda")
    assert Device.parse(Device("cpu")) == Device("cpu")
