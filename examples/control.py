"""Steps a policy, or another artefact that is no language model, at a fixed rate, as a controller does.

    python control.py ARTEFACT [--hz 1000] [--ticks 10000] [--priority 1-99] [--cpu N] [--lock] [--log FILE]

It replays the reference first, and ends if the answers differ. Then it steps one stream with random inputs.
A step is late if its answer comes after the next tick. A tick that has passed when its turn comes is skipped.
cpp/examples/control.cpp is the same program in C++. It needs Linux.
"""

import argparse
import ctypes
import gc
import os
import sys
import time

import numpy as np

import runtimes

WARMUP_STEPS = 100  # the first steps allocate, and fill the caches
MCL_CURRENT, MCL_FUTURE = 1, 2  # of Linux's mlockall
LIMITS = "run it as root, or raise the limits rtprio and memlock in /etc/security/limits.conf"

parser = argparse.ArgumentParser(description="Steps an exported policy at a fixed rate.")
parser.add_argument("artefact")
parser.add_argument("--hz", type=float, default=1000)
parser.add_argument("--ticks", type=int, default=10_000)
parser.add_argument("--priority", type=int, help="1 to 99, of SCHED_FIFO")
parser.add_argument("--cpu", type=int, help="the only CPU to use")
parser.add_argument("--lock", action="store_true", help="keep all memory of the process in RAM")
parser.add_argument("--log", help="write a line for each step: its tick, the milliseconds that it computed, "
                    "and those from its tick to its answer")  # fmt: skip
given = parser.parse_args()

session = runtimes.open_session(given.artefact, threads=1)  # no other thread has to be woken during a step
report = runtimes.check(given.artefact)
print(f"{'passed' if report.passed else 'FAILED'}: {report.sentence}")
if not report.passed:
    sys.exit(1)
memory = session.start(1)
draw = np.random.default_rng(0)


def observed() -> dict[str, np.ndarray]:
    """One token of every input; a robot reads its sensors here."""
    inputs = {}
    for tensor in session.spec.signature[0][:-1]:  # the session adds the positions, which are the last
        shape = tensor.sizes(batch=1, tokens=1)
        numbers = draw.uniform(-1, 1, shape).astype(np.float32)
        inputs[tensor.name] = numbers if tensor.ids is None else draw.integers(tensor.ids, size=shape)
    return inputs


gc.collect()
gc.disable()  # the loop makes no cycles, and a collection takes milliseconds
if given.lock and ctypes.CDLL(None, use_errno=True).mlockall(MCL_CURRENT | MCL_FUTURE):
    sys.exit(f"--lock was refused ({os.strerror(ctypes.get_errno())}); {LIMITS}.")
try:  # after the slow part, so that other processes can run during it
    option, fix = "--cpu", "give a CPU that `nproc --all` counts, from 0"
    if given.cpu is not None:
        os.sched_setaffinity(0, {given.cpu})
    option, fix = "--priority", f"give 1 to 99; {LIMITS}"
    if given.priority is not None:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(given.priority))
except (OSError, OverflowError, ValueError) as error:  # ValueError for a negative CPU
    sys.exit(f"{option} was refused ({getattr(error, 'strerror', error)}); {fix}.")
for _ in range(WARMUP_STEPS):
    session.step(observed(), memory)
memory.positions[0] = 0  # a new episode: the policy forgets the warm-up

steps = []  # of each: its tick, the milliseconds that it computed, and those from its tick to its answer
start = time.monotonic() + 1 / given.hz
for tick in range(given.ticks):
    due = start + tick / given.hz  # absolute, so that lateness does not add up
    wait = due - time.monotonic()
    if tick > 0 and wait <= -1 / given.hz:
        continue  # the robot holds its last action
    time.sleep(max(0.0, wait))
    inputs = observed()
    began = time.monotonic()
    session.step(inputs, memory)
    ended = time.monotonic()
    steps.append((tick, 1e3 * (ended - began), 1e3 * (ended - due)))

_, compute_ms, answer_ms = np.array(steps).T
late, skipped = int((answer_ms > 1e3 / given.hz).sum()), given.ticks - len(steps)
print(f"{given.ticks} ticks at {given.hz:g} Hz: {late} steps late, {skipped} ticks skipped")
for what, times in (("step", compute_ms), ("answer after its tick", answer_ms)):
    p50, p99, p999 = np.percentile(times, (50, 99, 99.9), method="inverted_cdf")
    print(f"{what}: p50 {p50:.3f} ms, p99 {p99:.3f} ms, p99.9 {p999:.3f} ms, longest {times.max():.3f} ms")
if given.log:
    np.savetxt(given.log, steps, "%g", ",", header="tick,compute_ms,answer_ms", comments="")
