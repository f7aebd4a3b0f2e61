"""Answers are as the server's own description, which schemathesis reads, and the guide say."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.serve.http.conftest import Running
from tests.serve.http.streams.conftest import Keeping, created
from tests.serve.http.test_clients import comes_true
from xl_export.serve.http.streams.documents import ContinueChunk, ContinueResult

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_every_answer_is_as_described_and_no_row_is_held(keeping: Keeping, tmp_path: Path) -> None:
    """Each operation alone, and operations on streams that earlier ones have made."""
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    options = ["--phases", "coverage,fuzzing,stateful", "--checks", ",".join(CHECKS), "--no-shrink"]
    options += ["--max-examples", "10", "--seed", "1", "--request-timeout", "60", "--continue-on-failure"]
    with keeping(tmp_path / "state") as server:
        command = [sys.executable, "-c", program, "run", f"{server.at}/openapi.json", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=550)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        model = server.server.models["tiny"]

        def is_idle() -> bool:
            tasks = len(model.engine.scheduler.rows.runs) + model.engine.waiting
            return tasks == 0 and server.server.requests.total == 0

        assert comes_true(is_idle)
        assert '"event":"fault"' not in server.log.getvalue()
        assert server.server.models["tiny"].requests.generated_tokens > 0
        assert '"path":"/v1/streams/stream-' in server.log.getvalue()


def test_events_are_as_described(kept: Running) -> None:
    described = kept.get("/openapi.json").json()["paths"]
    stream = created(kept)
    # Tokens that wait are sent as one event; on a busy machine these may be a few events.
    body = {"text": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
    events = kept.post(f"{stream.path}/continue", body).text.split("\n\n")
    *first, last, done = [each.removeprefix("data: ") for each in events if each]
    for one in first:
        msgspec.json.decode(one, type=ContinueChunk)
    msgspec.json.decode(last, type=ContinueResult)
    assert first, "tokens come while others are drawn"
    assert done == "[DONE]"
    success = described["/v1/streams/{id}/continue"]["post"]["responses"]["200"]["description"]
    assert "each a `data:` line with a ContinueChunk, the last one with a ContinueResult" in success


GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "streams.md"
SHOWN = {
    name: json.loads(block)
    for name, block in re.findall(
        r"<!-- answer: (\w+) -->\n```json\n(.*?)\n```", GUIDE.read_text("utf-8"), re.DOTALL
    )
}


def shape(value: Any) -> Any:
    """The names of all fields and the kinds of their values; for a list, the kind of its first element."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])]
    return type(value).__name__


def test_the_guide_shows_the_fields_of_the_answers(kept: Running, tokens: np.ndarray) -> None:
    stream = created(kept, tokens[:3])
    given = {
        "append": stream.post("append", {"tokens": tokens[3:6].tolist(), "alternatives": 2}),
        "continue": stream.post("continue", {"max_tokens": 6, "seed": 1, "ignore_eos": True}),
        "error": kept.post(f"{stream.path}/rewind", {"tokens": 600}).json(),
    }
    assert set(SHOWN) == set(given)
    for name, answer in given.items():
        assert shape(SHOWN[name]) == shape(answer), name
