"""Loops as the authors of a module write them: the truth that its artefact is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtimes.contract.spec import load_spec
from tests.parity.operations import Implementation, Reference


class Stream:
    """One stream of a model whose memory moves when `every` tokens are complete, as its authors run it.

    call: forward over the tokens since then, and the memory; it returns answers [1, n, …] and the new memory.
    """

    def __init__(self, call: Callable[[Tensor, Any], tuple[Any, Any]], every: int, start: Any = None) -> None:
        self.call = call
        self.every = every
        self.memory = start
        self.tokens: Tensor | None = None
        self.position = 0

    def step(self, x: Tensor) -> dict[str, np.ndarray]:
        """The answers to x [1, T, …], fed one by one; an output without a name has the name "". Those to
        tokens at negative positions, which are padding, are not numbers.
        """
        answers = []
        for token in x.split(1, dim=1):
            tokens = token if self.tokens is None else torch.cat([self.tokens, token], 1)
            with torch.no_grad():
                y, after = self.call(tokens, self.memory)
            named = y if isinstance(y, dict) else {"": y}
            padding = self.position < 0
            answers.append(
                {name: each[:, -1:] * (torch.nan if padding else 1) for name, each in named.items()}
            )
            self.position += 1
            if padding:
                continue
            full = tokens.shape[1] == self.every
            self.memory = after if full else self.memory
            self.tokens = None if full else tokens
        return {name: torch.cat([each[name] for each in answers], 1).numpy() for name in answers[0]}


def episodes(
    call: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[dict[str, Tensor], Tensor]],
    window: int,
    longest: int,
    row: tuple[int, int],
) -> Stream:
    """A stream as CleanRL's `ppo_trxl/enjoy.py` runs it, with a memory [1, longest, *row] of the episode.

    call: answers [1, …] to an observation, by the last `window` places, their mask and their indices; and
    what goes into the next place.
    """
    masks = torch.tril(torch.ones(window, window), diagonal=-1)
    first = [torch.arange(window)] * (window - 1)
    indices = torch.stack([*first, *(torch.arange(i, i + window) for i in range(longest - window + 1))])

    def step(x: Tensor, state: tuple[Tensor, int]) -> Any:
        memory, at = state
        places = indices[at][None]
        y, new = call(x[:, 0], memory[0, places], masks[min(at, window - 1)][None], places)
        memory = memory.clone()
        memory[:, at] = new
        return {name: each[:, None] for name, each in y.items()}, (memory, at + 1)

    return Stream(step, 1, (torch.zeros(1, longest, *row), 0))


class Authors:
    """Answers operations on an artefact with loops over the module that it was traced from."""

    tolerance, goes_on = 0.0, False

    def __init__(self, artefact: Path, stream: Stream) -> None:
        self.spec = load_spec(artefact)
        self.new = stream
        self.streams: dict[str, list[Stream]] = {}
        self.files: dict[str, list[Stream]] = {}

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        answer = getattr(self, op.replace(" ", "_"))(**given) or {}
        return answer | {
            "positions": [each.position for each in self.streams.get(given.get("stream", ""), [])]
        }

    def check(self) -> dict[str, Any]:
        return {"passed": True}

    def start(self, stream: str, rows: int) -> None:
        self.streams[stream] = [copy.copy(self.new) for _ in range(rows)]

    def pad(self, stream: str, positions: list[int]) -> None:
        for row, position in zip(self.streams[stream], positions, strict=True):
            row.position = position

    def restart(self, stream: str, row: int) -> None:
        self.streams[stream][row] = copy.copy(self.new)

    def fork(self, stream: str, **given: str) -> None:
        self.streams[given["as"]] = [copy.copy(row) for row in self.streams[stream]]

    def save(self, stream: str, file: str) -> None:
        self.files[Path(file).name] = [copy.copy(row) for row in self.streams[stream]]

    def load(self, stream: str, file: str) -> None:
        self.streams[stream] = [copy.copy(row) for row in self.files[Path(file).name]]

    def step(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        (logits,) = self._outputs(stream, torch.tensor(tokens)).values()
        return {"logits": logits}

    def step_by_name(self, stream: str, inputs: dict[str, list[float]]) -> dict[str, Any]:
        fact = self.spec.signature[0][0]
        shape = fact.sizes(batch=len(self.streams[stream]), tokens=-1)
        return {"outputs": self._outputs(stream, torch.tensor(inputs[fact.name]).reshape(shape))}

    def _outputs(self, stream: str, x: Tensor) -> dict[str, np.ndarray]:
        rows = [row.step(x[at : at + 1]) for at, row in enumerate(self.streams[stream])]
        names = [fact.name for fact in self.spec.signature[1]]
        return {name or names[0]: np.concatenate([row[name] for row in rows]).ravel() for name in rows[0]}


def largest_differences(
    artefact: Path, stream: Stream, programs: dict[str, Implementation], folder: Path
) -> dict[str, float]:
    """Of Python and other programs from the authors' loop: steps, restarts, rows at other positions, forks,
    and files in both directions.
    """
    (folder / "python").mkdir()
    reference = Reference.of_steps(artefact, folder / "python", Authors(artefact, stream))
    worst = {}
    for name, program in {"Python": reference.reader, **programs}.items():
        program.ask("open", model=str(artefact))
        scratch = folder / f"by {name}"
        scratch.mkdir()
        compared = reference.check(program, scratch)
        assert compared.keys() >= {"check", "start", "fork", "restart", "save", "load"}
        worst[name] = max(compared.values())
    return worst
