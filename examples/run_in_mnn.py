"""Runs an artefact in MNN; neither ONNX Runtime nor xl-export is imported.

    xl-export export RUN --rows 1 --segment 1 --out fixed
    python -c "import sys, _tools; _tools.mnnconvert(sys.argv)" -f ONNX --modelFile fixed/step.onnx \
        --MNNModel fixed.mnn --bizCode xl-export
    python run_in_mnn.py fixed fixed.mnn          # compares MNN with the reference of the artefact
    python run_in_mnn.py fixed fixed.mnn "The "   # continues a text, for a vocabulary of characters

`Stream` is all that a program of your own needs.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from MNN import expr, nn

LAST = 2**31 - 1  # MNN has no integers of 64 bits


class Stream:
    """One stream of an artefact: its memory and its position."""

    def __init__(self, spec: dict[str, Any], model: Path, *, threads: int = 1) -> None:
        """spec: the content of `spec.json`. model: the file that MNN's converter made of `step.onnx`."""
        names = [[tensor["name"] for tensor in spec[side]] for side in ("inputs", "outputs")]
        runtime = nn.create_runtime_manager(({"backend": "CPU", "numThread": threads},))
        self.net = nn.load_module_from_file(str(model), *names, runtime_manager=runtime)
        shapes = [[1, *tensor["shape"][1:]] for tensor in spec["inputs"] if "present" in tensor]
        self.memory = [expr.const(np.zeros(shape, np.float32), shape, expr.NCHW) for shape in shapes]
        self.position = 0  # set it to 0 to begin a new text: the graph hides what the memory holds

    def step(self, token: int) -> np.ndarray:
        """The logits [V] of the token after this one."""
        token_and_position = [
            expr.const(np.array([number], np.int32), [1, 1], expr.NCHW, expr.int)
            for number in (token, min(self.position, LAST))
        ]
        logits, *self.memory = self.net.forward([*token_and_position, *self.memory])
        self.position += 1
        return np.array(logits.read()).ravel()


def difference(stream: Stream, folder: Path) -> float:
    """The largest difference from the log-probabilities of the reference, in nats."""
    reference = json.loads((folder / "reference.json").read_text())
    place = reference["log_probs"]
    expected = np.fromfile(folder / place["file"], "<f4", place["shape"][1], offset=place["offset"])
    tokens, worst = reference["tokens"][0], 0.0
    for n, (token, target) in enumerate(itertools.pairwise(tokens)):
        if reference["restarts"][n][0]:
            stream.position = 0
        logits = stream.step(token).astype(np.float64)
        log_prob = logits[target] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        worst = max(worst, abs(log_prob - expected[n]))
    return float(worst)


def refuse(sentence: str) -> NoReturn:
    print(f"Error: {sentence}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    if len(sys.argv) not in (3, 4):
        refuse(
            "give an artefact and the file of the converter: python run_in_mnn.py ARTEFACT MODEL.mnn [TEXT]"
        )
    folder, model = Path(sys.argv[1]), Path(sys.argv[2])
    if not (folder / "spec.json").is_file() or not model.is_file():
        refuse(
            f"{folder} is no artefact (it has no spec.json), or {model} is no file; convert step.onnx first."
        )
    spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    if spec.get("fixed_rows") != 1 or spec["rule"]["segment"] != 1 or spec["precision"] != "fp32":
        refuse(f"{folder} has other steps than of one token in fp32; export it with `--rows 1 --segment 1`.")
    if "logits" not in [tensor["name"] for tensor in spec["outputs"]]:
        refuse(f"{folder} is no language model; feed its inputs by name, as `Stream.step` does with tokens.")
    stream = Stream(spec, model)
    if len(sys.argv) == 3:
        print(f"MNN differs from the reference by at most {difference(stream, folder):.1e} nats")
        return
    symbols, prompt = json.loads((folder / "vocab.json").read_text()).get("symbols", ""), sys.argv[3]
    if not prompt or set(prompt) - set(symbols):
        refuse(f"the prompt {prompt!r:.60} is empty or has other characters than the model; give others.")
    for symbol in prompt:
        logits = stream.step(symbols.index(symbol))
    print(prompt, end="")
    for _ in range(40):
        token = int(logits.argmax())
        print(symbols[token], end="", flush=True)
        logits = stream.step(token)
    print()


if __name__ == "__main__":
    main()
