"""Which sessions an engine serves, and a trial that tells whether their rows are independent."""

from __future__ import annotations

import numpy as np

from runtimes.base.errors import StreamError
from runtimes.contract.memory import DeviceTensor
from runtimes.contract.session import Session
from xl_export.serve.core.pieces import piece_after


def refuse_unserved(session: Session) -> None:
    """Raises StreamError for a session whose rows cannot advance apart and in place on the CPU."""
    if session.spec is not None and session.spec.form != "ring":
        raise StreamError(
            f"the artefact has {session.spec.form} memory, in which streams cannot be served apart from each "
            "other; export it with `--memory ring`."
        )
    memory = session.start(2)
    token = np.zeros((2, 1), np.int64)
    session.predict(token, memory)
    if any(isinstance(array, DeviceTensor) for array in memory.tensors.values()):
        raise StreamError(
            "the session keeps its memory on a device, where rows cannot be served apart; open the artefact "
            "with --device cpu."
        )
    # Refused by the session in a sentence where the model's positions count from the end of a segment.
    if session.rule.segment > 1:
        session.predict(np.zeros((2, 2), np.int64), memory, lengths=np.array([2, 1]))


def dependence_of_rows(session: Session, rows: int) -> str | None:
    """None where a row gets bitwise the same numbers in every batch; otherwise what the trial found."""
    chance, segment = np.random.default_rng(0), session.rule.segment
    batches = sorted({1, 2, 3, 5, 8, 16, rows} & set(range(1, rows + 1)))
    widths = sorted({1, piece_after(0, max(1, segment // 3), segment)[1], segment})
    memory = session.start(rows)
    wrong = []
    for width in [*widths, *widths]:  # at the start of the streams, and once more behind it
        tokens = chance.integers(session.vocab.size, size=(rows, width))
        before = memory.copy()
        whole, _ = session.predict(tokens, memory)
        for batch in batches[:-1]:
            own = before.select(range(batch))
            part, _ = session.predict(tokens[:batch], own)
            same = np.array_equal(part, whole[:batch]) and all(
                np.array_equal(array, memory.tensors[name][:batch]) for name, array in own.tensors.items()
            )
            if not same:
                wrong.append((batch, width))
    if not wrong:
        return None
    batch, width = wrong[0]
    return (
        f"rows are not bitwise independent of each other with {session.computed_by}: {batch} of {rows} rows "
        f"fed {width} tokens got other numbers than among all; a seed may give other tokens under load."
    )
