"""Runs an artefact with NumPy and ONNX Runtime alone; nothing of xl-export is imported.

    python plain_onnxruntime.py ARTEFACT "The "

The program feeds the prompt in segments, and then continues it with the likeliest symbol, one token at a
time. It takes artefacts with `ring` memory whose vocabulary is characters: the default of `xl-export
export` for a text.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

folder, prompt = Path(sys.argv[1]), sys.argv[2]
spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
symbols = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))["symbols"]
assert spec["form"] == "ring", (
    "other forms need two sets of buffers that change places; see docs/reference/step.md"
)

session = onnxruntime.InferenceSession(folder / "step.onnx", providers=["CPUExecutionProvider"])
binding = session.io_binding()
batch, position = 1, 0
for state in spec["state"]:  # one buffer is both input and output, so a step copies none of the memory
    shape = [batch if size == "batch" else int(size) for size in state["shape"]]
    buffer = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, state["dtype"]))
    binding.bind_ortvalue_input(state["past"], buffer)
    binding.bind_ortvalue_output(state["present"], buffer)


def step(tokens: list[int]) -> np.ndarray:
    """Logits [T, V] of the symbol after each of these tokens, at most one segment of them."""
    global position
    binding.bind_cpu_input("input_ids", np.array([tokens], np.int64))
    binding.bind_cpu_input("position_ids", position + np.arange(len(tokens), dtype=np.int64)[None])
    binding.bind_output("logits", "cpu")
    session.run_with_iobinding(binding)
    position += len(tokens)
    logits: np.ndarray = binding.get_outputs()[-1].numpy()
    return logits[0]


ids, segment = [symbols.index(symbol) for symbol in prompt], spec["rule"]["segment"]
for start in range(0, len(ids), segment):  # never more than a segment: the ring has room for no more
    logits = step(ids[start : start + segment])
print(prompt, end="")
for _ in range(40):
    token = int(logits[-1].argmax())
    print(symbols[token], end="", flush=True)
    logits = step([token])
print()
