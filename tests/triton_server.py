"""A stand-in for Triton Inference Server: sequence batching with implicit state, over ONNX Runtime.

It does what the server's documentation and sources say, their faults included (release 25.12 of its core):

- The first request of a sequence has memory as the configuration's `initial_state` says. `leaks` leaves the
  memory of an earlier sequence there, as the server once did (triton-inference-server/server#7117).
- A state output becomes a state input by its place in alphabetical order (`SequenceStates::OutputState`).
- Requests of equal shapes are put together into batches of at most `max_batch_size` rows, one request of
  each sequence.
- The control input is 1 for the first request of a sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

NUMPY = {"TYPE_INT64": "int64", "TYPE_INT32": "int32", "TYPE_FP32": "float32", "TYPE_FP16": "float16"}
TOKEN = re.compile(r'[{}]|\w+:?|"(?:[^"\\]|\\.)*"|-?\d+|\[|\]|,')


def read_config(text: str) -> dict[str, list[Any]]:
    """The message in protobuf's text form: each field with the list of its values."""
    words = iter(re.findall(r'[{}]|"(?:[^"\\]|\\.)*"|[\w-]+:?', text))

    def message(*, inner: bool) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for word in words:
            if word == "}":
                assert inner
                return found
            value: Any = next(words)
            if value == "{":
                value = message(inner=True)
            elif value.lstrip("-").isdecimal():
                value = int(value)
            else:
                value = {"true": True, "false": False}.get(value, value.strip('"'))
            found.setdefault(word.rstrip(":"), []).append(value)
        assert not inner
        return found

    return message(inner=False)


@dataclass
class Sequence:
    """The memory of one sequence in the server, by the name of the state input."""

    states: dict[str, np.ndarray] = field(default_factory=dict)


class Server:
    """One model of a repository. leaks: see above."""

    def __init__(self, folder: Path, *, leaks: bool = False) -> None:
        self.config = read_config((folder / "config.pbtxt").read_text())
        assert self.config["name"] == [folder.name]
        self.batching = self.config["sequence_batching"][0]
        self.session = ort.InferenceSession(
            str(folder / "1" / "model.onnx"), providers=["CPUExecutionProvider"]
        )
        self.sequences: dict[int, Sequence] = {}
        self.left: dict[str, np.ndarray] | None = None
        self.leaks = leaks
        self.executions = 0
        self._verify()

    def _verify(self) -> None:
        """The graph has the tensors of the configuration and no others, as the server's backend demands."""
        states = self.batching["state"]
        control = {self.batching["control_input"][0]["name"][0]: ("int32", [1])}
        inputs = {t["name"][0]: (NUMPY[t["data_type"][0]], t["dims"]) for t in self.config["input"]} | control
        outputs = {t["name"][0]: (NUMPY[t["data_type"][0]], t["dims"]) for t in self.config["output"]}
        for state in states:
            fact = NUMPY[state["data_type"][0]], state["dims"]
            inputs[state["input_name"][0]] = outputs[state["output_name"][0]] = fact
        kinds = {"tensor(int64)": "int64", "tensor(int32)": "int32"}
        kinds |= {"tensor(float)": "float32", "tensor(float16)": "float16"}
        for promised, found in ((inputs, self.session.get_inputs()), (outputs, self.session.get_outputs())):
            made = {}
            for tensor in found:
                assert not isinstance(tensor.shape[0], int), f"{tensor.name} has no batch"
                sizes = [size if isinstance(size, int) else -1 for size in tensor.shape[1:]]
                made[tensor.name] = (kinds[tensor.type], sizes)
            assert made == promised

    def infer(
        self, requests: Iterable[tuple[int, bool, dict[str, np.ndarray]]]
    ) -> list[dict[str, np.ndarray]]:
        """The answers to requests that wait at once: (sequence, whether it starts, inputs [1, …])."""
        waiting = list(enumerate(requests))
        answers: dict[int, dict[str, np.ndarray]] = {}
        while waiting:
            shapes = {name: array.shape for name, array in waiting[0][1][2].items()}
            batch, seen = [], set[int]()
            for number, (sequence, start, inputs) in waiting:
                fits = {name: array.shape for name, array in inputs.items()} == shapes
                if fits and sequence not in seen and len(batch) < self.config["max_batch_size"][0]:
                    batch.append((number, sequence, start, inputs))
                seen.add(sequence)  # later requests of a sequence wait for their turn
            answers |= self._execute(batch)
            waiting = [item for item in waiting if item[0] not in answers]
        return [answers[number] for number in range(len(answers))]

    def end(self, sequence: int) -> None:
        self.left = self.sequences.pop(sequence).states

    def _execute(self, batch: list[tuple[int, int, bool, dict[str, np.ndarray]]]) -> dict[int, Any]:
        self.executions += 1
        for _, sequence, start, _ in batch:
            if start:
                self.sequences[sequence] = Sequence(self._beginning())
        feeds = {name: np.concatenate([inputs[name] for *_, inputs in batch]) for name in batch[0][3]}
        control = self.batching["control_input"][0]
        no, yes = control["control"][0]["int32_false_true"]
        feeds[control["name"][0]] = np.array([[yes if start else no] for _, _, start, _ in batch], np.int32)
        read = sorted(state["input_name"][0] for state in self.batching["state"])
        written = sorted(state["output_name"][0] for state in self.batching["state"])
        for name in read:
            feeds[name] = np.concatenate([self.sequences[sequence].states[name] for _, sequence, *_ in batch])
        names = [tensor["name"][0] for tensor in self.config["output"]]
        values = dict(zip([*names, *written], self.session.run([*names, *written], feeds), strict=True))
        answers = {}
        for row, (number, sequence, *_) in enumerate(batch):
            for into, out in zip(read, written, strict=True):
                self.sequences[sequence].states[into] = values[out][row : row + 1]
            answers[number] = {name: values[name][row : row + 1] for name in names}
        return answers

    def _beginning(self) -> dict[str, np.ndarray]:
        if self.leaks and self.left is not None:
            return dict(self.left)
        states = {}
        for state in self.batching["state"]:
            beginning = state["initial_state"][0]
            assert beginning["zero_data"] == [True]
            kind = NUMPY[beginning["data_type"][0]]
            states[state["input_name"][0]] = np.zeros((1, *beginning["dims"]), kind)
        return states
