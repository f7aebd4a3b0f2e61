"""The engine of a model with named inputs: named arrays in, named arrays out.

Each step runs one stream, so its outputs never depend on other streams or on the load.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from runtimes.base.errors import StreamError
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from runtimes.contract.tensors import MAX_AXES, row_bytes
from xl_export.serve.core.admission import EngineSettings, Places
from xl_export.serve.core.state import StreamState
from xl_export.serve.streams.files import StepInputs

Arrays = dict[str, np.ndarray]


def as_numbers(name: str, given: Any) -> np.ndarray:
    """Nested lists of numbers as an array; raises StreamError for anything else. NumPy would make arrays of
    texts, too, in which each takes the memory of the longest.
    """
    if isinstance(given, np.ndarray):
        return given
    values = [given]
    for _ in range(MAX_AXES + 1):
        kinds = set(map(type, values))
        if kinds <= {int, float}:
            try:
                return np.asarray(given)
            except ValueError:  # lists of unequal length
                break
        if kinds != {list}:
            break
        values = list(itertools.chain.from_iterable(values))
    raise StreamError(f"{name:.60} is no array of numbers; give numbers in nested lists of equal length.")


class StepEngine:
    """Computes the steps of streams. Its methods run in one event loop, and the steps on threads.

    Raises StreamError for an artefact that needs several streams in a step.
    """

    def __init__(self, session: Session, settings: EngineSettings) -> None:
        spec = session.spec
        assert spec is not None, "only artefacts name their inputs"
        if spec.fixed_rows not in (None, 1):
            raise StreamError(
                f"this artefact was traced for exactly {spec.fixed_rows} rows, and a server steps one stream "
                "at a time; trace it with rows=1, or without `rows`."
            )
        #: Names the inputs and outputs.
        self.spec = spec
        self._session = session
        #: Memories that no step uses now. What a session keeps with a memory makes the next step in it cheap.
        self._idle: list[Memory] = []
        #: What requests hold of it.
        self.places = Places(settings, state_bytes=row_bytes(session.state))
        self._running = 0
        self._steps = 0
        self._tokens = 0
        self._seconds = 0.0

    @property
    def alive(self) -> bool:
        """Whether it computes steps; False once it is stopped."""
        return not self.places.closed

    def start(self) -> None:
        """Does nothing: it has no thread of its own."""

    def stop(self, *, within: float) -> None:
        """Refuses further steps; those that run come to their end."""
        self.places.closed = True

    async def step(
        self, inputs: Mapping[str, Any], state: StreamState
    ) -> tuple[Arrays, StreamState, StepInputs]:
        """Outputs by name, the stream after the step, and what was fed; `state` stays as it was.

        inputs: arrays or nested lists, with a batch of one. Raises StreamError for inputs that do not fit or
        whose numbers overflow. The caller holds a place (`places`).
        """
        self._running += 1
        began = time.monotonic()
        try:
            outputs, after, fed = await asyncio.to_thread(self._stepped, inputs, state)
        finally:
            self._running -= 1
            self._seconds += time.monotonic() - began
        self._steps += 1
        self._tokens += len(fed)
        return outputs, after, fed

    def metrics(self) -> Iterator[tuple[str, str, float]]:
        """Name, meaning and value of each figure, for `/metrics`."""
        yield "num_requests_running", "Tasks that have a row.", self._running
        yield "engine_steps_total", "Steps of the model.", self._steps
        yield "engine_tokens_fed_total", "Tokens that were fed.", self._tokens
        yield "step_seconds_total", "Seconds in steps, with the wait for a thread.", self._seconds

    def _stepped(
        self, given: Mapping[str, Any], state: StreamState
    ) -> tuple[Arrays, StreamState, StepInputs]:
        inputs = {name: as_numbers(name, each) for name, each in given.items()}
        before = state.memory  # forks share it, so it is read without its lock
        try:
            memory = self._idle.pop()
        except IndexError:  # as many steps run as never before
            memory = self._session.start(1)
        try:
            for name, array in memory.tensors.items():
                if isinstance(array, np.ndarray):
                    array[...] = before.tensors[name]
                else:  # on a device: the step uploads the new array
                    memory.tensors[name] = before.tensors[name].copy()
            memory.positions[:] = before.positions
            memory.unsure = before.unsure
            outputs, _ = self._session.step(inputs, memory)
            after = memory.copy()
        finally:
            self._idle.append(memory)
        if not all(np.isfinite(array).all() for array in after.tensors.values()):
            raise StreamError(
                "the step has made numbers that are not finite, and the stream stays as it was; give smaller "
                "inputs, or train the model again."
            )
        after.unsure = False
        kinds = {tensor.name: tensor.dtype for tensor in self.spec.signature[0]}
        fed = {name: array.astype(kinds[name]) for name, array in inputs.items()}
        position = int(after.positions[0])
        reached = StreamState(memory=after, logits=None, tail=state.tail, written=position)
        return outputs, reached, StepInputs(fed, position - state.position)
