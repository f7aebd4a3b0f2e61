"""Operations whose state is not on the disk yet: how many there may be, and how many of one tenant."""

from __future__ import annotations

import contextlib

import pytest

from xl_export.serve.core.admission import Quota
from xl_export.serve.streams.facts import FullStoreError, full_store


def test_a_tenant_has_half_of_the_places_and_nobody_more_than_all() -> None:
    unwritten = Quota(4, refusal=full_store)
    with contextlib.ExitStack() as running:
        anna = [running.enter_context(unwritten.one("anna")) for _ in range(2)]
        with pytest.raises(FullStoreError, match="2 operations of this tenant on streams run or wait"):
            unwritten.one("anna").__enter__()
        running.enter_context(unwritten.one("bert"))
        running.enter_context(unwritten.one("bert"))
        assert len(anna) == 2
        with pytest.raises(FullStoreError, match=r"^4 operations on streams run or wait for the disk"):
            unwritten.one("carl").__enter__()
    with contextlib.ExitStack() as running:  # all places are free again
        for _ in range(4):
            running.enter_context(unwritten.one())  # without keys there is one tenant, who may have all
        with pytest.raises(FullStoreError):
            unwritten.one().__enter__()


def test_a_single_place_is_anybodys() -> None:
    unwritten = Quota(1, refusal=full_store)
    with unwritten.one("anna"), pytest.raises(FullStoreError):
        unwritten.one("bert").__enter__()
    with unwritten.one("bert"):
        pass
