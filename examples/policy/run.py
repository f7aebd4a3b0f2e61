"""Balances a pole with the exported policy, one decision every 20 ms as a robot would. It needs no PyTorch.

python run.py ARTEFACT [--episodes N] [--hz HZ]
"""

import argparse
import time

import gymnasium as gym
import numpy as np

import runtimes

parser = argparse.ArgumentParser(description="Runs an exported policy at a fixed rate.")
parser.add_argument("artefact")
parser.add_argument("--episodes", type=int, default=3)
parser.add_argument("--hz", type=float, default=50, help="0 runs as fast as it can")
given = parser.parse_args()

session = runtimes.open_session(given.artefact, threads=1)
memory = session.start(1)
environment = gym.make("CartPole-v1")
returns, times = [], []
due = time.perf_counter()
for seed in range(given.episodes):
    state, _ = environment.reset(seed=seed)
    memory.positions[0] = 0  # a new episode: the policy forgets the last one
    steps, over = 0, False
    while not over:
        began = time.perf_counter()
        outputs, memory = session.step({"observation": state[None, None, [0, 2]]}, memory)
        times.append((time.perf_counter() - began) * 1e3)
        state, _, fallen, out_of_time, _ = environment.step(int(outputs["action"].argmax()))
        steps, over = steps + 1, fallen or out_of_time
        if given.hz:
            due += 1 / given.hz
            time.sleep(max(0.0, due - time.perf_counter()))
    returns.append(steps)
    print(f"seed {seed}: return {steps}", flush=True)
print(f"return over {given.episodes} episodes: {np.mean(returns):.1f}")
median, most = np.percentile(times, (50, 99))
print(f"a decision took {median:.3f} ms (median), {most:.3f} ms (99 % within), {max(times):.3f} ms (slowest)")
