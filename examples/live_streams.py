"""Serves requests that arrive at different times from one batch with a fixed number of rows.

    python live_streams.py ARTEFACT

A row whose request is answered is given to the next request: its position is set to 0, and nothing has to
be cleared. Rows without a request are fed padding at a negative position, which nothing ever sees. At the
end the program answers each request by itself, in a batch of one, and compares the answers.
"""

import sys

import numpy as np

import runtimes
from runtimes.contract.vocabulary import decode

ROWS, LENGTH = 2, 12  # streams that run at once; symbols to generate for each request
REQUESTS = ("The ", "A class is a", "If", "Return the ", "x")


def serve(session: runtimes.Session, prompts: tuple[str, ...], rows: int) -> list[str]:
    """The likeliest continuation of each prompt, from a batch of `rows` streams."""
    memory = session.start(batch=rows)
    waiting = list(enumerate(prompts))
    request: list[int | None] = [None] * rows  # which request each row serves
    to_feed: list[list[int]] = [[] for _ in range(rows)]  # tokens of each row that the model has not read yet
    answers: list[list[int]] = [[] for _ in prompts]
    while waiting or any(number is not None for number in request):
        tokens = np.zeros((rows, 1), np.int64)
        for row in range(rows):
            if request[row] is None and waiting:  # a free row begins a new text
                request[row], prompt = waiting.pop(0)
                to_feed[row] = session.vocab.encode(prompt).tolist()
                memory.positions[row] = 0
            if request[row] is None:
                memory.positions[row] = -1  # padding: nothing sees the one token that follows
            else:
                tokens[row, 0] = to_feed[row].pop(0)
        logits, memory = session.predict(tokens, memory)
        for row, number in enumerate(request):
            if number is not None and not to_feed[row]:  # the prompt has been read: choose the next symbol
                answers[number].append(int(logits[row].argmax()))
                to_feed[row] = answers[number][-1:]
                if len(answers[number]) == LENGTH:
                    request[row] = None
    return [decode(session.vocab, answer) for answer in answers]


try:
    if len(sys.argv) != 2:
        raise runtimes.UserError("give the folder of an artefact: python live_streams.py ARTEFACT")
    session = runtimes.open_session(sys.argv[1], threads=1)
    together = serve(session, REQUESTS, ROWS)
except runtimes.UserError as error:
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(2)
for prompt, answer in zip(REQUESTS, together, strict=True):
    print(f"{prompt!r} -> {answer!r}")
alone = [serve(session, (prompt,), 1)[0] for prompt in REQUESTS]
if together != alone:
    sys.exit(f"the answers differ from a batch of one: {alone}")
print("every request got the same answer as in a batch of one")
