"""Scores text that arrives on standard input, line by line, in constant memory.

    tail -f events.log | python score_stream.py ARTEFACT

For each line the program prints how many bits it took to predict a symbol of it, given everything that came
before. A line with a high figure is one that the model did not expect. Each symbol but the first of the
stream is scored exactly once.
"""

import math
import sys

import numpy as np

import runtimes

session = runtimes.open_session(sys.argv[1], threads=1)
memory = session.start(batch=1)
waiting = np.empty(
    0, np.int64
)  # the last token: it is fed with the next line, whose first symbol it predicts

for line in sys.stdin:
    tokens = np.concatenate([waiting, session.vocab.encode(line)])
    nats = 0.0
    for start in range(0, len(tokens) - 1, session.rule.segment):
        inputs = tokens[start : start + session.rule.segment][: len(tokens) - 1 - start]
        targets = tokens[start + 1 : start + 1 + len(inputs)]
        log_probs, memory = session.score(inputs[None], targets[None], memory)
        nats -= float(log_probs.sum())
    scored, waiting = len(tokens) - 1, tokens[-1:]
    if scored:
        print(f"{nats / scored / math.log(2):.3f} bits per token  {line.rstrip()}", flush=True)
