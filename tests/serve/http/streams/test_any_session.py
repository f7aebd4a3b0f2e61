"""Streams over sessions whose rows are joined for each step: they answer as a server of a ring does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtimes import generate, open_session
from tests.serve.http.conftest import running, sources
from tests.serve.http.streams.conftest import Stream, created, restored, straight


@pytest.mark.parametrize("form", ["shift", "hidden"])
def test_streams_of_other_forms_continue_after_a_restart(
    form: str, artefacts: dict[str, Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    session = open_session(artefacts[form], threads=1)
    served = sources(("tiny", artefacts[form]))
    with running(served, state=tmp_path) as server:
        (model,) = server.get("/v1/models").json()["data"]
        assert isinstance(model["xl_export"]["rows_independent"], bool)
        body = {"prompt": [tokens[:n].tolist() for n in (5, 9, 30)], "max_tokens": 12, "seed": 3, "top_k": 4}
        choices = server.post("/v1/completions", body).json()["choices"]
        texts = ["", "", ""]
        sampler = session.sampler.replaced(top_k=4)
        for piece in generate(session, body["prompt"], max_tokens=12, seed=3, sampler=sampler):
            texts[piece.row] += piece.text
        assert [choice["text"] for choice in choices] == texts
        stream = created(server, tokens[:20])
        bits = stream.append(tokens[20:45])["bits"]
        assert np.abs(np.array(bits) - straight(session, tokens[:45])[19:]).max() < 1e-3
        fork = stream.fork()
        assert stream.append(tokens[45:46])["stream"]["rewindable"] == 0
        assert server.post(f"{stream.path}/rewind", {"tokens": 1}).json()["error"]["code"] == "too_far_back"
        snapshot = stream.snapshot()
        expected = fork.append(tokens[45:60])["bits"][1:]
    with running(served, state=tmp_path) as server:
        assert np.abs(np.array(stream.on(server).append(tokens[46:60])["bits"]) - expected).max() < 1e-3
        copy = Stream(server, restored(server, snapshot).json()["id"])
        assert np.abs(np.array(copy.append(tokens[46:60])["bits"]) - expected).max() < 1e-3
