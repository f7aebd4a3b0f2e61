"""Prints the samples of two made-up sensors of a pump, 20 a second: pressure and motor current.

    python stream.py [--samples N] [--seed SEED] [--faults]

A line is a sample of both. With --faults a third column is 1 while something is wrong.
"""

import argparse

import numpy as np

CHANNELS = 2


def make_stream(samples: int, seed: int, *, faults: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Samples float32 [samples, 2], and bool [samples]: where there is a fault.

    The pump's speed and load drift. A fault is a stuck sensor, a spike, a slip of
    the phase or a worn bearing, which adds a fast vibration.
    """
    draw = np.random.default_rng(seed)

    def drifting(low: float, high: float) -> np.ndarray:
        levels = draw.uniform(low, high, samples // 200 + 2)
        return np.interp(np.arange(samples) / 200, np.arange(len(levels)), levels)

    speed, load = drifting(0.3, 0.6), drifting(0.5, 1.5)
    phase = np.cumsum(speed)
    wrong = np.zeros(samples, bool)
    extra = np.zeros((samples, CHANNELS))
    stuck = []
    if faults:
        for at in range(300, samples - 100, 300):
            kind, length = draw.integers(4), 1
            if kind == 0:
                length = 15
                stuck.append((at, draw.integers(CHANNELS)))
            elif kind == 1:
                extra[at, draw.integers(CHANNELS)] = draw.choice([-2.5, 2.5])
            elif kind == 2:
                phase[at:] += 2.0
            else:
                length = 40
                extra[at : at + length, 0] = 0.5 * np.sin(2.4 * np.arange(length))
            wrong[at : at + length] = True
    pressure = load * np.sin(phase) + 0.3 * np.sin(2 * phase + 0.5)
    current = 0.6 * load + 0.5 * np.sin(phase - 0.8) ** 2
    found = np.stack([pressure, current], 1) + draw.normal(0, 0.05, (samples, CHANNELS)) + extra
    for at, channel in stuck:
        found[at : at + 15, channel] = found[at - 1, channel]
    return found.astype(np.float32), wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prints the samples of two made-up sensors.")
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", action="store_true")
    given = parser.parse_args()
    for sample, is_wrong in zip(*make_stream(given.samples, given.seed, faults=given.faults), strict=True):
        print(*(f"{x:.4f}" for x in sample), *([int(is_wrong)] if given.faults else []))
