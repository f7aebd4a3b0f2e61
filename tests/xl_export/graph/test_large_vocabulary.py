"""WikiText-103's 267,735 words at their published size: what scoring takes in memory.

Random weights; several minutes.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from runtimes.contract.spec import WEIGHTS

WORDS, SEGMENT, GIB = 267_735, 128, 1 << 30

SCORE = """
import json, sys
import numpy as np
from runtimes import open_session
session = open_session(sys.argv[1])
draw = np.random.default_rng(0)
tokens, targets = (draw.integers(0, session.vocab.size, (1, 128)) for _ in range(2))
memory = session.start(1)
for _ in range(3):
    log_probs, memory = session.score(tokens, targets, memory)
logits, memory = session.predict(tokens, memory)
held = sum(array.nbytes for array in memory.tensors.values())
peak = next(int(line.split()[1]) * 1024 for line in open('/proc/self/status') if line.startswith('VmHWM'))
mean = float(log_probs.mean())
print(json.dumps({"peak": peak, "memory": held, "mean": mean, "vocabulary": logits.shape[1]}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc, which Linux has")
@pytest.mark.timeout(1800)
def test_scoring_wikitext_103_takes_at_most_1_5_gib(tmp_path: Path) -> None:
    from benchmarks.models import random_weights, write_run
    from runtimes.base.files import write_json
    from runtimes.contract.rule import MemoryRule
    from trainer.run.config import TrainConfig
    from xl_export import export

    config = TrainConfig.load("wt103-base")
    model = dataclasses.replace(config.model, vocab_size=WORDS)
    rule = MemoryRule(mem_len=640, segment=SEGMENT, clamp_len=400)
    run = write_run(tmp_path / "run", model, rule, random_weights(model))
    write_json(
        run / "vocab.json",
        {"kind": "word", "symbols": ["<unk>", "<eos>", *(f"w{i}" for i in range(WORDS - 2))]},
    )
    artefact = export(run, tmp_path / "artefact")
    done = subprocess.run(
        [sys.executable, "-c", SCORE, str(artefact)], capture_output=True, text=True, check=True
    )
    facts = json.loads(done.stdout)
    above = facts["peak"] - (artefact / WEIGHTS).stat().st_size
    print(f"peak {facts['peak'] / GIB:.2f} GiB, {above / GIB:.2f} above the weights")
    assert facts["vocabulary"] == WORDS
    assert -50 < facts["mean"] < -5
    assert above <= 1.5 * GIB
