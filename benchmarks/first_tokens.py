"""Generates greedily in a process of its own, and prints what the start and each token cost.

`python benchmarks/first_tokens.py SIDE MODEL THREADS UNTIMED TIMED VOCABULARY` imports only what the side
needs. The next token is the likeliest one plus the position, modulo the vocabulary: without that, random
weights soon repeat one token for ever.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MODEL, (THREADS, UNTIMED, TIMED, VOCABULARY) = Path(sys.argv[2]), map(int, sys.argv[3:])


def artefact() -> Iterator[int]:
    """This project's session over an artefact."""
    import numpy as np

    import runtimes

    session = runtimes.open_session(MODEL, threads=THREADS, device="cpu")
    memory = session.start(1)
    token = np.zeros((1, 1), np.int64)
    while True:
        logits, memory = session.predict(token, memory)
        yield (likeliest := int(logits.argmax()))
        token[0, 0] = (likeliest + memory.positions[0]) % VOCABULARY


def onnxruntime() -> Iterator[int]:
    """The loop of examples/plain_onnxruntime.py: a ring that is bound in place."""
    import numpy as np
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = ort.InferenceSession(MODEL / "step.onnx", options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for tensor in session.get_inputs():
        if tensor.name.startswith("past"):
            zeros = np.zeros([1, *tensor.shape[1:]], np.float32)
            buffer = ort.OrtValue.ortvalue_from_numpy(zeros)
            binding.bind_ortvalue_input(tensor.name, buffer)
            binding.bind_ortvalue_output(tensor.name.replace("past_key_values", "present"), buffer)
    token, position = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
    logits = np.zeros((1, 1, VOCABULARY), np.float32)
    binding.bind_cpu_input("input_ids", token)
    binding.bind_cpu_input("position_ids", position)
    binding.bind_output("logits", "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
    while True:
        session.run_with_iobinding(binding)
        yield (likeliest := int(logits.argmax()))
        position += 1
        token[0, 0] = (likeliest + position[0, 0]) % VOCABULARY


def openvino() -> Iterator[int]:
    """A model whose memory is a state of the request."""
    import numpy as np
    import openvino as ov

    settings = {"INFERENCE_NUM_THREADS": THREADS, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    request = ov.Core().compile_model(MODEL / "step.xml", "CPU", settings).create_infer_request()
    token, position = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
    request.set_tensor("input_ids", ov.Tensor(token, shared_memory=True))
    request.set_tensor("position_ids", ov.Tensor(position, shared_memory=True))
    logits = request.get_tensor("logits").data
    while True:
        request.infer()
        yield (likeliest := int(logits.argmax()))
        position += 1
        token[0, 0] = (likeliest + position[0, 0]) % VOCABULARY


def mnn() -> Iterator[int]:
    """The loop of examples/run_in_mnn.py."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from run_in_mnn import Stream  # type: ignore[import-not-found]

    spec = json.loads((MODEL / "spec.json").read_text(encoding="utf-8"))
    stream = Stream(spec, MODEL / "step.mnn", threads=THREADS)
    token = 0
    while True:
        yield (likeliest := int(stream.step(token).argmax()))
        token = (likeliest + stream.position) % VOCABULARY


def llama() -> Iterator[int]:
    """llama.cpp's server without HTTP, which chooses the likeliest token itself."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(MODEL)
    params.n_ctx = 2 * (UNTIMED + TIMED)
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.n_gpu_layers = 0
    params.warmup = False
    params.verbosity = 0
    server = xllamacpp.Server(params)
    settings = {"ignore_eos": True, "cache_prompt": True, "samplers": ["top_k"], "top_k": 1}
    tokens = [1]
    for count in (1, UNTIMED, TIMED):
        answer = server.handle_completions({"prompt": tokens, "n_predict": count, **settings})
        # Each token is a number, and stands three places further: see benchmarks.serving.llama.
        added = [int(number) + 3 for number in answer["choices"][0]["text"].split()]
        assert len(added) == count, answer
        tokens += added
        yield from added


def resident(field: str) -> int:
    """Bytes in use now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    side = {each.__name__: each for each in (artefact, onnxruntime, openvino, mnn, llama)}[sys.argv[1]]
    stream = side()
    tokens = [next(stream)]
    report = {
        "answered_s": time.monotonic(),
        "first_cpu_s": time.process_time(),
        "resident_bytes": resident("VmRSS"),
    }
    tokens += [next(stream) for _ in range(UNTIMED)]
    began = time.process_time()
    tokens += [next(stream) for _ in range(TIMED)]
    token_cpu_s = (time.process_time() - began) / TIMED
    report |= {"token_cpu_s": token_cpu_s, "peak_bytes": resident("VmHWM")}
    print(json.dumps(report | {"tokens": tokens}))


main()
