"""Scores each line of standard input as a sequence of its own, on Triton Inference Server.

    python examples/triton_client.py localhost:8001 models/my-model < run/test.txt

The model is one that `xl-export export … --triton models --triton-backend python` wrote; its folder here is
needed only for the vocabulary. Install `tritonclient[grpc]`.
"""

from __future__ import annotations

import math
import secrets
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

from runtimes.base.text import text_lines
from runtimes.contract.spec import load_spec
from runtimes.contract.vocabulary import load_vocab


def score(server: triton.InferenceServerClient, model: str, ids: np.ndarray, *, segment: int) -> float:
    """The log-probability in nats of all tokens but the first, which are sent segment by segment."""
    sequence = secrets.randbits(63) + 1  # never one that somebody has used: the server knows a text by it
    total, last = 0.0, len(ids) - 1
    for at in range(0, last, segment):
        end = min(at + segment, last)
        # With its position a request that was lost, or that came twice, is an error and not a wrong answer.
        inputs = {"input_ids": ids[at:end], "targets": ids[at + 1 : end + 1], "position": np.array([at])}
        tensors = []
        for name, array in inputs.items():
            tensors.append(triton.InferInput(name, [1, len(array)], "INT64"))
            tensors[-1].set_data_from_numpy(array[None].astype(np.int64))
        answer = server.infer(
            model,
            tensors,
            outputs=[triton.InferRequestedOutput("log_probs")],
            sequence_id=sequence,
            sequence_start=at == 0,
            sequence_end=end == last,
        )
        total += float(answer.as_numpy("log_probs").sum())
    return total


def main(address: str, folder: Path) -> None:
    artefact = folder / "artefact"
    vocab, segment = load_vocab(artefact / "vocab.json"), load_spec(artefact).rule.segment
    with triton.InferenceServerClient(address) as server:
        for line in text_lines(sys.stdin.buffer, "standard input"):
            ids = vocab.encode(line)
            if len(ids) > 1:
                log_prob = score(server, folder.name, ids, segment=segment)
                bits = -log_prob / math.log(2) / (len(ids) - 1)
                print(f"{log_prob:.4f} nats, {bits:.4f} bits per token  {line.rstrip()!r:.60}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("Error: give both: python triton_client.py ADDRESS MODEL_FOLDER", file=sys.stderr)
        sys.exit(2)
    main(sys.argv[1], Path(sys.argv[2]))
