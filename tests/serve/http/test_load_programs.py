"""Two programs that measure servers, guidellm and aiperf, run against ours to their end.

`make test-clients` installs them in an environment of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.http.conftest import Running, running, sources

pytestmark = pytest.mark.slow
TALES = Path(__file__).parents[3] / "examples" / "stories" / "tales"
REQUESTS = 12


@pytest.fixture
def tales() -> Iterator[Running]:
    with running(sources(("tales", TALES), rows=4)) as server:
        yield server


def ends_well(server: Running, folder: Path, name: str, *options: str) -> None:
    """Runs a program; each of its completions has status 200, and the model drew all of their tokens."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; make test-clients installs it.")
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [found, *options], cwd=folder, env=environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in server.log.getvalue().splitlines()]
    statuses = Counter(line["status"] for line in lines if line.get("path") == "/v1/completions")
    assert set(statuses) == {200}
    assert statuses[200] >= REQUESTS
    assert server.server.models["tales"].engine.scheduler.drawn >= REQUESTS * 30


def test_guidellm_runs_to_its_end(tales: Running, tmp_path: Path) -> None:
    backend = f"kind=openai_http,target={tales.at},model=tales,request_format=/v1/completions"
    ends_well(
        tales,
        tmp_path,
        "guidellm",
        "run",
        *("--backend", backend),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TALES}"),
        *("--data", "kind=synthetic_text,prompt_tokens=50,output_tokens=30"),
    )


def test_aiperf_runs_to_its_end(tales: Running, tmp_path: Path) -> None:
    ends_well(
        tales,
        tmp_path,
        "aiperf",
        *("profile", "--model", "tales", "--url", tales.at, "--endpoint-type", "completions", "--streaming"),
        *("--tokenizer", str(TALES), "--isl", "50", "--osl", "30", "--concurrency", "2"),
        *("--request-count", str(REQUESTS), "--extra-inputs", "ignore_eos:true"),
    )
