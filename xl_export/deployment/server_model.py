"""The model of Triton Inference Server's Python backend: a session, and one memory with a row for each
sequence.

`xl-export export --triton REPOSITORY --triton-backend python` copies this file into a model repository as
`NAME/1/model.py`, next to the artefact in `NAME/artefact`. It imports `runtimes` and nothing above it, so the
server's Python only needs NumPy, ONNX Runtime and click.

The server reports which sequence a request belongs to, and whether the sequence begins or ends with it. It
reports nothing when it drops a sequence that was idle too long or whose client cancelled a request. So no row
is ever reused as it is: a sequence that begins sets its row to position 0, which hides its old content, and a
request of a sequence without a row is an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import runtimes
from runtimes.base.errors import StreamError, UserError
from runtimes.base.logits import log_probability
from runtimes.base.ranges import counted
from runtimes.contract.checks import checked_ids

ARTEFACT = "artefact"  # the folder of the model's artefact, in the model's folder


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client sends: the next tokens of a sequence."""

    sequence: int | str
    tokens: np.ndarray  # [T]
    start: bool = False  # whether it is the first request of the sequence
    end: bool = False  # whether it is the last request of the sequence
    cancelled: bool = False  # whether its client no longer waits for it
    targets: np.ndarray | None = None  # [T]: tokens to score; -1 for none
    position: int | None = None  # number of tokens that the client expects in the sequence; None if unknown
    logits: bool = True  # whether the logits of the token after the last one are wanted


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client gets."""

    logits: np.ndarray | None  # float32 [V], if they were requested
    log_probs: np.ndarray | None  # float32 [T], if they were requested
    position: int  # position of the sequence after the request


class Sequences:
    """All sequences of a server, each in a row of one memory, which is written in place."""

    def __init__(self, session: runtimes.Session, rows: int) -> None:
        self.session = session
        self.memory = session.start(rows)
        self._free = list(range(rows))
        self._rows: dict[int | str, int] = {}  # of each sequence; the one that rested longest is first

    def answer(self, requests: Sequence[Request]) -> list[Answer | UserError]:
        """The answer to each request, or the error that is sent instead. The server hands over one request of
        a sequence at a time.

        Requests of equal length and with equal outputs share steps, and get the same bits as by themselves.
        """
        answers: dict[int, Answer | UserError] = {}
        busy = {request.sequence for request in requests}
        groups: dict[tuple[int, bool, bool], list[int]] = {}
        for index, request in enumerate(requests):
            try:
                self._admit(request, busy)
            except UserError as error:
                answers[index] = error
            else:
                wanted = len(request.tokens), request.logits, request.targets is not None
                groups.setdefault(wanted, []).append(index)
        for group in groups.values():
            for part in self._adjacent(group, requests):
                answers |= self._step(part, requests)
        for request in requests:
            if request.end:
                self._leave(request.sequence)
        return [answers[index] for index in range(len(requests))]

    def _admit(self, request: Request, busy: Collection[int | str]) -> None:
        """Finds or makes the row of a request; raises UserError if the request cannot be computed.

        A request that starts a sequence, or was cancelled, ends the earlier sequence of that id.
        """
        if request.start or request.cancelled:
            self._leave(request.sequence)
        if request.cancelled:
            raise StreamError(
                f"a request of sequence {request.sequence} was cancelled, which ends the sequence; begin it "
                "again."
            )
        _refuse_unfit(request, self.session)
        row = None if request.start else self._rows.get(request.sequence)
        if row is None and not request.start:
            raise StreamError(
                f"sequence {request.sequence} has no memory here: it never began, it ended, or its memory "
                "went to another one; mark the next request as its start, and send its tokens again."
            )
        position = 0 if row is None else int(self.memory.positions[row])
        if request.position not in (None, position):
            raise StreamError(
                f"sequence {request.sequence} has had {position} tokens and the request says "
                f"{request.position}: a request was lost or came twice; send the tokens from there, or begin "
                "again."
            )
        if row is None:
            row = self._free_row(busy)
            self.memory.positions[row] = 0
        self._rows.pop(request.sequence, None)
        self._rows[request.sequence] = row  # at the end: it has rested least

    def _free_row(self, busy: Collection[int | str]) -> int:
        """The lowest free row, so that rows in use are adjacent; or else the row that was idle longest."""
        if not self._free:
            resting = next((name for name in self._rows if name not in busy), None)
            if resting is None:
                raise StreamError(f"all {self.memory.batch} rows of the memory are in use; try again.")
            self._leave(resting)
        row = min(self._free)
        self._free.remove(row)
        return row

    def _leave(self, sequence: int | str) -> None:
        if sequence in self._rows:
            self._free.append(self._rows.pop(sequence))

    def _adjacent(self, group: Iterable[int], requests: Sequence[Request]) -> Iterator[list[int]]:
        """The requests with adjacent rows, in the order of their rows: each group is a part of the memory."""
        part: list[int] = []
        for index in sorted(group, key=lambda index: self._rows[requests[index].sequence]):
            row = self._rows[requests[index].sequence]
            if part and row != self._rows[requests[part[-1]].sequence] + 1:
                yield part
                part = []
            part.append(index)
        yield part

    def _step(self, part: Sequence[int], requests: Sequence[Request]) -> dict[int, Answer | UserError]:
        chosen = [requests[index] for index in part]
        first = self._rows[chosen[0].sequence]
        memory = self.memory.part(first, first + len(part))  # a view, which is written in place
        tokens = np.stack([request.tokens for request in chosen])
        targets = None
        if chosen[0].targets is not None:
            targets = np.stack([request.targets for request in chosen if request.targets is not None])
        try:
            logits, log_probs = self._computed(tokens, targets, memory, logits=chosen[0].logits)
        except UserError as error:
            for request in chosen:  # the content of its row is unknown now
                self._leave(request.sequence)
            return dict.fromkeys(part, error)
        return {
            index: Answer(
                logits=None if logits is None else logits[at],
                log_probs=None if log_probs is None else log_probs[at],
                position=int(memory.positions[at]),
            )
            for at, index in enumerate(part)
        }

    def _computed(
        self, tokens: np.ndarray, targets: np.ndarray | None, memory: runtimes.Memory, *, logits: bool
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Logits [B, V] of the last token and log-probabilities [B, T], each if it is wanted."""
        if targets is None:
            last, _ = self.session.predict(tokens, memory)
            return (last if logits else None), None
        if not logits:
            return None, self.session.score(tokens, targets, memory)[0]
        every, _ = self.session.step(tokens, memory)
        return every[:, -1], log_probability(every, targets)


def rows_of(config: Mapping[str, Any]) -> int:
    """How many rows the memory has: one for each sequence that the server keeps, and spare ones.

    The server silently drops a cancelled sequence and lets another one begin, while the row of the former is
    still in use here. Without spare rows the new one would get the row that was idle longest, which the
    server may still keep.
    """
    candidates = int(config["sequence_batching"]["oldest"]["max_candidate_sequences"])
    return candidates + 2 * max(1, int(config["max_batch_size"]))


def _refuse_unfit(request: Request, session: runtimes.Session) -> None:
    """Raises UserError for tokens or targets that the session does not accept."""
    longest = session.rule.segment
    checked_ids(request.tokens, session.vocab.size, what="input_ids")
    if not 1 <= len(request.tokens) <= longest:
        raise StreamError(
            f"input_ids has {counted(len(request.tokens), 'token')}; expected 1 to {longest} a request."
        )
    if request.targets is not None:
        checked_ids(np.maximum(request.targets, 0), session.vocab.size, what="targets")
        if len(request.targets) != len(request.tokens):
            raise StreamError(
                f"targets has {len(request.targets)} tokens and input_ids {len(request.tokens)}; give one "
                "target for each token, or -1."
            )


class TritonPythonModel:
    """What the server's Python backend looks for in `model.py`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the artefact for the number of sequences in `config.pbtxt`."""
        config = json.loads(args["model_config"])
        threads = config.get("parameters", {}).get("threads", {}).get("string_value")
        folder = Path(args["model_repository"]) / ARTEFACT
        session = runtimes.open_session(folder, threads=int(threads) if threads else None, device="cpu")
        self.sequences = Sequences(session, rows_of(config))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """The response to each request."""
        import triton_python_backend_utils as server

        answers = self.sequences.answer([_read(request, server) for request in requests])
        return [_response(answer, server) for answer in answers]


def _read(request: Any, server: Any) -> Request:
    def row(name: str) -> np.ndarray | None:
        """The input of this name without its batch of one; None if it was not sent."""
        tensor = server.get_input_tensor_by_name(request, name)
        return None if tensor is None else tensor.as_numpy().reshape(-1)

    tokens = row("input_ids")
    position = row("position")
    flags = request.flags()
    assert tokens is not None, "config.pbtxt has input_ids as an input that must be there"
    return Request(
        sequence=request.correlation_id(),
        tokens=tokens,
        start=bool(flags & server.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
        end=bool(flags & server.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        cancelled=request.is_cancelled(),
        targets=row("targets"),
        position=None if position is None or not len(position) else int(position[0]),
        logits="logits" in request.requested_output_names(),
    )


def _response(answer: Answer | UserError, server: Any) -> Any:
    if isinstance(answer, UserError):
        return server.InferenceResponse(output_tensors=[], error=server.TritonError(str(answer)))
    arrays = {"logits": answer.logits, "log_probs": answer.log_probs, "position": np.array([answer.position])}
    return server.InferenceResponse(
        output_tensors=[
            server.Tensor(name, array[None]) for name, array in arrays.items() if array is not None
        ]
    )
