"""Scores text that arrives on standard input, line by line, in constant memory.

    tail -f events.log | python score_stream.py ARTEFACT

For each line the program prints how many bits it took to predict a symbol of it, given everything that came
before. A line with a high score is one that the model did not expect. Each symbol but the first of the
stream is scored exactly once. A model of token ids reads lines of whole numbers, such as `12 7 30`, or of
JSON lists, such as `[12, 7, 30]`; where its tokens have names, it reads lines of these too.
"""

import json
import math
import sys

import numpy as np

import runtimes
from runtimes.base.text import TextDecoder
from runtimes.contract.id_files import is_id_list, refuse_outside


def encode(session: runtimes.Session, line: str) -> np.ndarray:
    """The tokens of a line: of its text, or the ids that it lists."""
    vocab, listed = session.vocab, line.lstrip().startswith("[")
    if vocab.kind != "ids" or ("names" in vocab.to_json() and not listed):
        return vocab.encode(line)
    try:
        ids = json.loads(line if listed else f"[{','.join(line.split())}]")
    except (ValueError, RecursionError):
        ids = None
    if not is_id_list(ids):
        raise runtimes.UserError(
            f"the line {line.strip()!r:.60} is no list of token ids; give whole numbers with blanks between."
        )
    tokens = np.array(ids, np.int64)
    refuse_outside(tokens, f"the line {line.strip()!r:.60}", vocab.size, fix="give ids of this model")
    return tokens


def score_lines(artefact: str) -> None:
    session = runtimes.open_session(artefact, threads=1)
    memory = session.start(batch=1)
    # The last token: it is fed with the next line, whose first symbol it predicts.
    waiting = np.empty(0, np.int64)
    decoder = TextDecoder("standard input")
    for raw in sys.stdin.buffer:
        if session.vocab.kind == "byte":  # a model of bytes reads them whatever they are
            line, new = raw.decode(errors="replace"), session.vocab.encode(raw)
        else:
            line = decoder.decode(raw)
            new = encode(session, line)
        tokens = np.concatenate([waiting, new])
        nats = 0.0
        for start in range(0, len(tokens) - 1, session.rule.segment):
            inputs = tokens[start : start + session.rule.segment][: len(tokens) - 1 - start]
            targets = tokens[start + 1 : start + 1 + len(inputs)]
            log_probs, memory = session.score(inputs[None], targets[None], memory)
            nats -= float(log_probs.sum())
        scored, waiting = len(tokens) - 1, tokens[-1:]
        if scored > 0:
            print(f"{nats / scored / math.log(2):.3f} bits per token  {line.rstrip()}", flush=True)


try:
    if len(sys.argv) != 2:
        raise runtimes.UserError("give the folder of an artefact: python score_stream.py ARTEFACT")
    score_lines(sys.argv[1])
except runtimes.UserError as error:
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(2)
