"""What ONNX Runtime and TensorRT share: the session protocol over a step graph whose tensors the spec
names.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np

from runtimes.base.errors import ArtefactError, DivergedError, StreamError
from runtimes.base.logits import log_probability
from runtimes.contract.checks import (
    checked_inputs,
    checked_lengths,
    checked_targets,
    checked_tokens,
    last_fed,
    memory_in_use,
    new_memory,
    refuse_after_fork,
    tokens_by_name,
)
from runtimes.contract.memory import Memory
from runtimes.contract.promises import refuse_apart
from runtimes.contract.restart import clear_restarted_rows, observe
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Paths, Session
from runtimes.contract.spec import VOCAB, Spec, refuse_no_language_model
from runtimes.contract.tensors import POSITIONS, TensorSpec, row_bytes
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions.pieces import cut, run_in_pieces
from runtimes.sessions.segment_end import sees_segment_end

Positions = Literal["all", "last", "none"]  # positions of a segment whose logits are computed


class FromLogits:
    """`predict` and `score` for a session that computes all logits in `step`."""

    @property
    def paths(self) -> Paths | None:
        """None: there is one way to compute a step, unless a session overrides this."""
        return None

    def predict(
        self: Session, tokens: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        logits, memory = self.step(tokens, memory, lengths=lengths)
        last = logits[:, -1] if lengths is None else logits[range(len(logits)), last_fed(lengths, tokens)]
        return last, memory

    def score(
        self: Session,
        tokens: np.ndarray,
        targets: np.ndarray,
        memory: Memory,
        *,
        lengths: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Memory]:
        targets = checked_targets(self, targets, tokens, lengths)
        logits, memory = self.step(tokens, memory, lengths=lengths)
        return log_probability(logits, targets), memory


class GraphSession(FromLogits, ABC):
    """The session protocol (see `runtimes.contract.session.Session`); a runtime adds how the graph runs once.

    A graph with a large vocabulary computes logits only for chosen rows ("selective",
    `ModelFacts.selective`).
    """

    # Positions whose logits a selective graph computes while scoring, which reads none: as few as the
    # runtime allows.
    logits_while_scoring: ClassVar[Positions] = "none"
    before_run: Callable[[], object] | None = None

    def __init__(self, spec: Spec, vocab: Vocab | None, identity: str) -> None:
        self.spec = spec
        self._vocab = vocab  # None unless the step is a language model's
        self.identity = identity
        self._process = os.getpid()
        self._tried = False
        self._counts_from_end = False
        self.rule: MemoryRule = spec.rule
        self.sampler = Sampler()
        self._selective = spec.model.selective  # read several times for each token
        self.state: tuple[TensorSpec, ...] = spec.state
        # The numbers of slots of rings that a step may not write across.
        self._ring_sizes = {state.row[1] for state in spec.state} if spec.linear_ring else set[int]()
        if vocab is not None and vocab.size != spec.model.vocab_size:
            raise ArtefactError(
                f"{VOCAB} has {vocab.size} symbols and the model {spec.model.vocab_size}; export it again."
            )

    @property
    def vocab(self) -> Vocab:
        if self._vocab is None:
            refuse_no_language_model(self.spec)
            raise AssertionError("the vocabulary of a language model was not loaded")
        return self._vocab

    @property
    @abstractmethod
    def computed_by(self) -> str:
        """What computes a step, in words for people."""

    @property
    def kernel(self) -> str | None:
        """The implementation that computes a step, if the runtime has several."""
        return None

    @abstractmethod
    def run(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], memory: Memory) -> None:
        """Runs the graph once: reads `inputs` and the memory's tensors, fills `outputs` and advances the
        tensors. It calls `begins` as late as possible before the computation.
        """

    def begins(self) -> None:
        """Called by `run` when only the computation is left."""
        if self.before_run is not None:
            self.before_run()

    def with_rule(self, rule: MemoryRule) -> GraphSession:
        own = self.rule
        if rule == own:
            return self
        if rule.segment > own.segment:
            raise StreamError(
                f"segment is {rule.segment}; this artefact takes 1 to {own.segment} tokens a step: give a "
                "smaller one, or export with a larger --segment."
            )
        name = "mem_len" if rule.mem_len != own.mem_len else "clamp_len"
        option = f"--{name.replace('_', '-')}"
        wanted = getattr(rule, name)
        fixed = getattr(own, name)
        raise StreamError(
            f"{option} is {'none' if wanted is None else wanted} and this artefact was exported with "
            f"{'none' if fixed is None else fixed}, which is fixed in its graph: export again with {option} "
            f"{wanted or 0}, or give the run that it was made from."
        )

    def step_bytes(self, *, segment: int) -> int:
        state = row_bytes(self.state)
        logits = 4 * segment * self.spec.model.vocab_size
        return 2 * state + 3 * logits  # memory before and after the step; logits, and two arrays made of them

    def start(self, batch: int) -> Memory:
        return new_memory(self, batch)

    def step(self, tokens: Any, memory: Memory, *, lengths: np.ndarray | None = None) -> tuple[Any, Memory]:
        if self._vocab is None or isinstance(tokens, dict):
            return self._step_by_name(tokens, memory, lengths), memory
        logits, _ = self._advance(tokens, memory, lengths, logits_of="all")
        return logits, memory

    def predict(
        self, tokens: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        if self._vocab is None:
            refuse_no_language_model(self.spec)
        if not self._selective:
            return super().predict(tokens, memory, lengths=lengths)
        logits, _ = self._advance(tokens, memory, lengths, logits_of="last")
        return logits, memory

    def score(
        self, tokens: np.ndarray, targets: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        if self._vocab is None:
            refuse_no_language_model(self.spec)
        if not self._selective:
            return super().score(tokens, targets, memory, lengths=lengths)
        targets = checked_targets(self, targets, tokens, lengths)
        _, log_probs = self._advance(
            tokens, memory, lengths, logits_of=self.logits_while_scoring, targets=targets
        )
        return log_probs, memory

    def _step_by_name(self, inputs: Any, memory: Memory, lengths: np.ndarray | None) -> Any:
        """Outputs by name of inputs by name; of an array the array of the only output."""
        spec = self.spec
        fed, returned = spec.signature
        if not isinstance(inputs, dict):
            if len(fed) != 2 or len(returned) != 1:  # one input and the positions
                names = [tensor.name for tensor in fed[:-1]], [tensor.name for tensor in returned]
                raise StreamError(
                    f"the step reads {names[0]} and returns {names[1]}; give a dict with an array for each "
                    "input, and the outputs are a dict too."
                )
            return self._step_by_name({fed[0].name: inputs}, memory, lengths)[returned[0].name]
        if spec.language_model:
            return {"logits": self._advance(tokens_by_name(inputs), memory, lengths, logits_of="all")[0]}
        if lengths is not None:
            raise StreamError(
                "lengths were given, and only the step of a language model takes them; feed rows of equal "
                "length, or give each stream a memory of its own."
            )
        with memory_in_use(memory):
            arrays = checked_inputs(self, spec, inputs, memory)
            refuse_after_fork(self._process)
            segment = next(arrays[x.name].shape[1] for x in fed if "tokens" in x.shape)
            clear_restarted_rows(memory)
            arrays[POSITIONS] = memory.positions[:, None] + np.arange(segment)
            axes = {"batch": memory.batch, "tokens": segment}
            outputs = {x.name: np.empty(x.sizes(**axes), x.dtype) for x in returned}
            self.run(arrays, outputs, memory)
            memory.positions += segment
            with np.errstate(invalid="ignore", over="ignore"):
                sums = [array.sum() for array in outputs.values() if array.dtype.kind == "f"]
            observe(memory, np.array(sums or [np.nan]))  # ids do not show what is not finite
        return outputs

    def _advance(
        self,
        tokens: np.ndarray,
        memory: Memory,
        lengths: np.ndarray | None,
        *,
        logits_of: Positions,
        targets: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits of some positions, and log p(target) [B, T] if there are targets; advances the memory.

        The logits are [B, T, V] of all positions, [B, V] of each row's last one, or [0, V].
        """
        with memory_in_use(memory):
            tokens = checked_tokens(self, tokens, memory)
            refuse_after_fork(self._process)
            if lengths is not None:
                self._refuse_lengths()
            lengths = checked_lengths(lengths, tokens)
            clear_restarted_rows(memory)
            tokens = _padded(tokens, lengths)
            # Padding after a row's tokens needs no input of its own. A token sees nothing that comes after
            # it. The ring has room for a whole segment next to a whole memory, so the padding uses no slot
            # that is still visible; the row's next tokens overwrite its slots, or see them as the future.
            stream = memory.positions[:, None] + np.arange(tokens.shape[1])
            inputs = {"input_ids": tokens, "position_ids": stream}
            where = tokens.shape
            if self._selective:
                inputs["targets"] = np.full_like(tokens, -1) if targets is None else targets
                inputs["logit_rows"] = _chosen(tokens.shape, lengths, logits_of)
                where = inputs["logit_rows"].shape
            outputs = {"logits": np.empty((*where, self.spec.model.vocab_size), np.float32)}
            if self._selective:
                outputs["log_probs"] = np.empty(tokens.shape, np.float32)
            self._run_whole(inputs, outputs, memory, lengths)
            memory.positions += tokens.shape[1] if lengths is None else lengths
            observe(memory, _last_outputs(outputs, inputs, lengths))
        logits = outputs["logits"]
        if self._selective:
            shape = {"all": tokens.shape, "last": tokens.shape[:1], "none": (0,)}[logits_of]
            logits = _spread(logits, shape, lengths)
        elif lengths is not None:
            logits[np.arange(tokens.shape[1]) >= lengths[:, None]] = np.nan
        return logits, outputs.get("log_probs", logits)

    def _run_whole(
        self,
        inputs: dict[str, np.ndarray],
        outputs: dict[str, np.ndarray],
        memory: Memory,
        lengths: np.ndarray | None,
    ) -> None:
        """Runs the graph over a whole segment, in pieces if its ring cannot be written across its end.

        lengths: how many tokens of each row are not padding, int64 [B], or None; for runtimes that pad more.
        """
        length = inputs["input_ids"].shape[1]
        pieces = [slice(0, length)]
        if self._ring_sizes and length > 1:
            pieces = cut(memory.positions, length, self._ring_sizes)
        empty_rows = self.logits_while_scoring == "none"
        # If no row has a token, no logits are wanted.
        if len(pieces) == 1 and (empty_rows or outputs["logits"].size):
            self.run(inputs, outputs, memory)
            return
        run_in_pieces(
            lambda part, answers: self.run(part, answers, memory),
            inputs,
            outputs,
            pieces,
            empty_rows=empty_rows,
        )

    def _refuse_lengths(self) -> None:
        """Raises StreamError if the rows of a step can only advance together."""
        refuse_apart(self.spec.form, self.spec.without, self.spec.fixed_rows)
        if not self.spec.rows_apart:
            raise StreamError(
                f"lengths were given, and in {self.spec.form} memory all rows of a step advance by the same "
                "number of tokens; leave lengths out, or open an artefact with ring memory (`xl-export "
                "export RUN --memory ring`), or the run."
            )
        if not self._tried:
            answer = sees_segment_end(self)
            if answer is None:
                raise DivergedError(
                    f"the model {self.identity:.12} gives log-probabilities that are not finite; its "
                    "training has diverged or its weights are damaged: take an earlier checkpoint, or train, "
                    "import or export it again."
                )
            self._tried = True
            self._counts_from_end = answer
        if self._counts_from_end:
            raise StreamError(
                "lengths were given, and the positions of this model count from the end of the segment, "
                "where padding would change them; leave lengths out, or open the run that it was exported "
                "from."
            )


def _chosen(shape: tuple[int, ...], lengths: np.ndarray | None, which: Positions) -> np.ndarray:
    """The positions b T + t, int64 [N], of some fed tokens of a segment [B, T]."""
    places = np.arange(shape[0] * shape[1]).reshape(shape)
    if which == "none":
        places = places[:, :0]
    elif lengths is None:
        places = places if which == "all" else places[:, -1:]
    else:
        end = lengths[:, None]
        offsets = np.arange(shape[1])
        places = places[offsets < end] if which == "all" else places[offsets == end - 1]
    return places.ravel()


def _padded(tokens: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """The tokens [B, T] with the last real one of each row as its padding, or 0 if a row has none.

    So nothing depends on what the caller has put there, and a row's results depend only on its own tokens.
    """
    if lengths is None:
        return tokens
    last = np.where(lengths > 0, tokens[np.arange(len(tokens)), last_fed(lengths, tokens)], 0)
    return np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, last[:, None])


def _last_outputs(
    outputs: dict[str, np.ndarray], inputs: dict[str, np.ndarray], lengths: np.ndarray | None
) -> np.ndarray:
    """Numbers that are finite where the last output of every row with tokens was computed and is finite."""
    logits = outputs["logits"]
    batch, segment = inputs["input_ids"].shape
    counts = np.full(batch, segment) if lengths is None else lengths
    rows = np.flatnonzero(counts)
    if "targets" not in inputs:
        last = logits[:, -1]
        if lengths is not None:  # what is not finite in padding counts too: it stays in the memory
            last = np.concatenate([last, logits[rows, counts[rows] - 1]])
    elif logits.size:
        last = logits[np.flatnonzero(np.diff(inputs["logit_rows"] // segment, append=-1))]
    else:
        target, answer = (x[rows, counts[rows] - 1] for x in (inputs["targets"], outputs["log_probs"]))
        return np.where(target >= 0, answer, np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        total: np.ndarray = last.sum(axis=-1)
    return total


def _spread(logits: np.ndarray, shape: tuple[int, ...], lengths: np.ndarray | None) -> np.ndarray:
    """Logits [N, V] of chosen positions in the shape [B, T, V] or [B, V], with NaN where none was chosen."""
    if lengths is None or shape == (0,):
        return logits.reshape(*shape, logits.shape[-1])
    whole = np.full((*shape, logits.shape[-1]), np.nan, np.float32)
    whole[lengths > 0 if len(shape) == 1 else np.arange(shape[1]) < lengths[:, None]] = logits
    return whole
