"""Watches a stream of samples for anomalies, and continues where it stopped. It needs no PyTorch.

    python stream.py --faults | python watch.py ARTEFACT STREAM [--threshold NATS]

It reads a sample per line and prints the surprising ones. At the end, or at Ctrl-C, it saves the stream to
the file STREAM, and the next call continues from there, bit by bit as if it had never stopped.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import runtimes

parser = argparse.ArgumentParser(description="Prints the surprising samples of a stream.")
parser.add_argument("artefact", type=Path)
parser.add_argument("stream", type=Path, help="the file of the stream; a new one starts a new stream")
parser.add_argument("--threshold", type=float, default=10.0, help="nats of surprise from which on it prints")
parser.add_argument("--all", action="store_true", help="print every sample")
given = parser.parse_args()

session = runtimes.open_session(given.artefact, threads=1)
(channels,) = session.spec.inputs[0].shape[2:]
memory = runtimes.load_memory(given.stream, session) if given.stream.exists() else session.start(1)
try:
    for line in filter(str.strip, sys.stdin):
        sample = np.array(line.split()[:channels], np.float32)
        at = memory.positions[0]
        outputs, memory = session.step({"sample": sample[None, None]}, memory)
        surprise = outputs["surprise"].item()
        if given.all or surprise > given.threshold:
            print(f"sample {at}: {surprise:.6g} nats", flush=True)
except KeyboardInterrupt:
    pass
finally:
    runtimes.save_memory(memory, given.stream)
