"""Runs an artefact with only NumPy and ONNX Runtime; nothing of xl-export is imported.

    python plain_onnxruntime.py ARTEFACT "The "

The program feeds the prompt in segments, and then continues it with the likeliest symbol, one token at a
time. It takes artefacts with `ring` memory whose vocabulary is characters: the default of `xl-export
export` for a text. Words and subwords need their own rules to cut a text, which `runtimes` has.
"""

import json
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import onnxruntime


def refuse(sentence: str) -> NoReturn:
    print(f"Error: {sentence}", file=sys.stderr)
    sys.exit(2)


if len(sys.argv) != 3:
    refuse('give an artefact and a prompt: python plain_onnxruntime.py ARTEFACT "The "')
folder, prompt = Path(sys.argv[1]), sys.argv[2]
if not (folder / "spec.json").is_file():
    refuse(f"{folder} is no artefact (it has no spec.json); give the folder that xl-export export wrote.")
spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
symbols = json.loads((folder / "vocab.json").read_text(encoding="utf-8")).get("symbols")
if symbols is None:
    refuse(f"{folder} has a vocabulary of other tokens than characters; use runtimes.generate for it.")
if spec["form"] != "ring":  # it needs two sets of buffers that change places; see docs/reference/step.md
    refuse(f"{folder} has {spec['form']} memory; export it with `--memory ring`.")
if not prompt or set(prompt) - set(symbols):
    refuse(f"the prompt {prompt!r:.60} is empty or has characters that the model lacks; give others.")

session = onnxruntime.InferenceSession(folder / "step.onnx", providers=["CPUExecutionProvider"])
binding = session.io_binding()
batch, position = 1, 0
for tensor in spec["inputs"]:
    if "present" in tensor:  # memory: one buffer is both input and output, so a step copies none of it
        shape = [batch if size == "batch" else size for size in tensor["shape"]]
        buffer = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, tensor["dtype"]))
        binding.bind_ortvalue_input(tensor["name"], buffer)
        binding.bind_ortvalue_output(tensor["present"], buffer)


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
