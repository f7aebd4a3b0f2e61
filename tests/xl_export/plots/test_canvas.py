"""The names that pictures give to curves."""

from __future__ import annotations

import pytest

from xl_export.plots.canvas import short_names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/some/where/run"], ["run"]),
        (["a/run", "a/artefact/"], ["run", "artefact"]),
        (["small/run", "large/run", "artefact"], ["small/run", "large/run", "artefact"]),
        (["x/small/run", "y/small/run"], ["x/small/run", "y/small/run"]),
        (["run", "a/run"], ["run", "a/run"]),
        (["run", "run"], ["run", "run"]),
        (["."], ["."]),
    ],
)
def test_curves_have_the_shortest_distinct_names(paths: list[str], names: list[str]) -> None:
    assert short_names(paths) == names
