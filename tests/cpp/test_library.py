"""What only C++ has: storage, threads, callers that stop, hostile files, a machine with little memory."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from runtimes import open_session
from runtimes.contract.saved_streams import save_memory
from runtimes.contract.spec import Storage
from runtimes.contract.tensors import row_bytes
from runtimes.contract.vocabulary import IdsVocab, save_vocab
from runtimes.sessions import fused_cpu
from tests.architectures import ARCHITECTURES
from tests.cpp.program import DRIVER, ROOT, SIGNATURES, compiled, with_vocabulary
from tests.parity.operations import Program
from tests.sealing import sealed
from tests.steps import observed
from xl_export.artefact.export import export

SMALL = 3 << 29  # bytes
TALES = ROOT / "examples" / "stories" / "tales"
CARTPOLE = ROOT / "examples" / "policy" / "cartpole"


def changed(artefact: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of an artefact with another spec, its digest right."""
    shutil.copytree(artefact, folder)
    spec = json.loads((folder / "spec.json").read_text())
    change(spec)
    (folder / "spec.json").write_bytes(sealed(spec, folder))
    return folder


def started(cpp: Program, folder: Path, **more: Any) -> Program:
    """The program with an artefact open, and a new stream `a`."""
    cpp.ask("open", model=str(folder), **more)
    assert "error" not in cpp.ask("start", stream="a")
    return cpp


def stream(path: Path, entries: dict[str, Any], folder: Path, numbers: bytes) -> str:
    """A file of saved streams of an artefact with a header of one's own."""
    digest = hashlib.sha256(numbers).hexdigest()
    identity = json.loads((folder / "spec.json").read_text())["memory_identity"]
    metadata = {"format": "xl-export stream 1", **identity, "sha256": digest}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + numbers)
    return str(path)


@pytest.fixture
def small() -> Iterator[Program]:
    """The same program on a machine of 1.5 GiB."""
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is not installed")
    running = Program("prlimit", f"--as={SMALL}", compiled(DRIVER, "-O0", *SIGNATURES), tolerance=0)
    yield running
    assert running.close() == 0


@pytest.mark.parametrize("storage", ["single-file", "ort"])
def test_an_artefact_of_one_file_passes_its_check(
    storage: Storage, cpp: Program, run: Path, tmp_path: Path
) -> None:
    folder = export(run, tmp_path / "artefact", memory="shift", storage=storage)
    assert not (folder / "weights.bin").exists()
    assert started(cpp, folder).ask("check")["passed"]
    if storage == "ort":
        content = (folder / "step.ort").read_bytes() + b"\x04\0\0\0Loop\0"
        vocabulary = json.loads((folder / "vocab.json").read_text())
        spoiled = with_vocabulary(folder, tmp_path / "b", vocabulary, step_ort=content)
        assert "has an operator Loop" in cpp.refusal("open", model=str(spoiled))


def test_the_fused_operator_must_be_a_library_for_its_model(cpp: Program, artefacts: dict[str, Path]) -> None:
    ring, weights = str(artefacts["ring"]), str(artefacts["ring"] / "weights.bin")
    assert "could not be loaded" in cpp.refusal("open", model=ring, fused=weights)
    hidden = str(artefacts["hidden"])
    assert "has no graph for the fused operator" in cpp.refusal("open", model=hidden, fused="/nowhere.so")


def test_an_artefact_may_have_only_the_fused_graph(
    cpp: Program, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = fused_cpu.build()
    folder = export(run, tmp_path / "artefact", storage="fused-ort")
    assert "needs the fused operator" in cpp.refusal("open", model=str(folder))
    assert cpp.ask("open", model=str(folder), fused=str(library))["kernel"] == "fused"
    assert cpp.ask("check")["passed"]


def test_batches_and_positions_have_bounds(cpp: Program, artefacts: dict[str, Path]) -> None:
    started(cpp, artefacts["ring"])
    assert "batch is 65537" in cpp.refusal("start", stream="b", rows=65537)
    for positions, words in (([(1 << 62) + 1], "2^62"), ([], "positions for 1 streams")):
        started(cpp, artefacts["ring"]).ask("pad", stream="a", positions=positions)
        assert words in cpp.refusal("predict", stream="a", tokens=[[1]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda spec: spec.update(x=[0] * (1 << 20)), "more values than any file of its kind"),
        (lambda spec: spec.update(form="a\x85" + "é" * 60), f"form is a?{'é' * 39}...;"),
    ],
    ids=["values", "control characters"],
)
def test_a_hostile_spec_is_refused(
    change: Callable[[dict[str, Any]], object],
    words: str,
    cpp: Program,
    artefacts: dict[str, Path],
    tmp_path: Path,
) -> None:
    assert words in cpp.refusal("open", model=str(changed(artefacts["ring"], tmp_path / "copy", change)))


def test_check_uses_the_limits_of_the_spec(cpp: Program, artefacts: dict[str, Path], tmp_path: Path) -> None:
    limits = {"tolerance": 1e-4, "mean_tolerance": 1e-4}
    assert started(cpp, artefacts["ring"]).ask("check") == {"passed": True, **limits}
    vocabulary = json.loads((artefacts["ring"] / "vocab.json").read_text())
    answers = bytearray((artefacts["ring"] / "reference.bin").read_bytes())
    answers[:4] = np.array(np.inf, "<f4").tobytes()
    spoiled = with_vocabulary(artefacts["ring"], tmp_path / "inf", vocabulary, reference_bin=bytes(answers))
    assert "one of its answers is not a log-probability" in started(cpp, spoiled).refusal("check")


def test_a_stream_that_claims_too_much_takes_no_memory(small: Program, cpp: Program, tmp_path: Path) -> None:
    inputs = json.loads((TALES / "spec.json").read_text())["inputs"]
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    entries: dict[str, Any] = {entry["name"]: nothing for entry in inputs if "present" in entry}
    entries["positions"] = {"dtype": "I64", "shape": [1 << 16], "data_offsets": [0, 8 << 16]}
    claims = stream(tmp_path / "claims", entries, TALES, bytes(8 << 16))
    assert "another type or shape" in started(small, TALES).refusal("load", stream="a", file=claims)
    many = stream(tmp_path / "many", {f"t{number}": nothing for number in range(40_000)}, TALES, b"")
    assert "more values than any file" in started(cpp, TALES).refusal("load", stream="a", file=many)


@pytest.mark.slow  # it needs a gigabyte
def test_too_little_memory_is_an_error_like_any_other(
    small: Program, artefacts: dict[str, Path], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    def longer(folder: Path, name: str) -> Path:
        return changed(folder, tmp_path / name, lambda spec: spec["rule"].update(segment=1 << 18))

    run = make_run(vocab_size=8000)
    save_vocab(run, IdsVocab(8000))
    started(small, longer(export(run, tmp_path / "large", memory="shift"), "long"))
    sentence = small.refusal("step", stream="a", tokens=[[0] * (1 << 18)])
    assert "the step needs more memory than this machine has" in sentence
    started(small, longer(artefacts["shift"], "wide"))
    sentence = small.refusal("predict", stream="a", tokens=[[0] * (1 << 18)])
    assert "feed fewer tokens at once where memory was short" in sentence
    started(small, TALES)
    many = int(0.48 * SMALL / row_bytes(open_session(TALES).state))  # a fork does not fit with them
    assert "error" not in small.ask("start", stream="many", rows=many)
    assert "the fork needs more memory than this machine has" in small.refusal(
        "fork", stream="many", **{"as": "b"}
    )
    sentence = small.refusal("start", stream="b", rows=1 << 16)
    assert "does not fit into the memory of this machine; use a smaller batch" in sentence
    assert "logits" in small.ask("predict", stream="a", tokens=[[0]])


def test_saving_writes_no_file_of_somebody_else(
    cpp: Program, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "folder" / "saved"
    path.parent.mkdir()
    victim.write_text("kept")
    path.with_name("saved.partial").symlink_to(victim)
    started(cpp, artefacts["ring"]).ask("save", stream="a", file=str(path))
    assert victim.read_text() == "kept"
    whole = path.read_bytes()
    for file in (tmp_path / "nowhere" / "saved", path.parent):  # a folder is not replaced by a file
        assert "could not be written" in cpp.refusal("save", stream="a", file=str(file))
    assert path.read_bytes() == whole
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["saved", "saved.partial"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "victim"]


def test_texts_of_ids_end_by_stop_strings_and_documents(
    cpp: Program, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    size = json.loads((artefacts["ring"] / "spec.json").read_text())["model"]["vocab_size"]
    question = {"stream": "a", "tokens": [1, 2], "max_tokens": 40, "temperature": 2, "seed": 4}
    plain = with_vocabulary(artefacts["ring"], tmp_path / "plain", {"kind": "ids", "size": size})
    tokens = started(cpp, plain).ask("generate", **question)["tokens"]
    assert len(tokens) == 40
    place = next(at for at in range(3, 40) if tokens[at] not in tokens[:at])
    # White space of any kind around a stop string means nothing, as in Python's str.strip().
    stopped = started(cpp, plain).ask("generate", stop=[f"\u3000{tokens[place]}\u00a0\x1f"], **question)
    assert (stopped["tokens"], stopped["ended"]) == (tokens[: place + 1], "stop")
    document = {"kind": "ids", "size": size, "special": {"end_of_document": tokens[place]}}
    ends = with_vocabulary(artefacts["ring"], tmp_path / "ends", document)
    ended = started(cpp, ends).ask("generate", **question)
    assert (ended["tokens"], ended["ended"]) == (tokens[: place + 1], "end")


def test_a_token_at_which_the_caller_stops_is_not_fed(cpp: Program, artefacts: dict[str, Path]) -> None:
    question = {"stream": "a", "temperature": 0}
    ring = artefacts["ring"]
    whole = started(cpp, ring).ask("generate", tokens=[1, 2], max_tokens=8, **question)["tokens"]
    part = started(cpp, ring).ask("generate", tokens=[1, 2], max_tokens=8, until=5, **question)
    assert (part["tokens"], part["positions"]) == (whole[:5], [6])
    assert cpp.ask("generate", tokens=whole[4:5], max_tokens=3, **question)["tokens"] == whole[5:]


def test_a_cancelled_text_leaves_a_whole_memory(cpp: Program, artefacts: dict[str, Path]) -> None:
    question = {"stream": "a", "temperature": 0}
    ring = artefacts["ring"]
    whole = started(cpp, ring).ask("generate", tokens=[1, 2], max_tokens=8, **question)["tokens"]
    nothing = started(cpp, ring).ask("generate", tokens=[1, 2], max_tokens=8, cancel=0, **question)
    assert (nothing["tokens"], nothing["positions"]) == ([], [0])
    part = cpp.ask("generate", tokens=[1, 2], max_tokens=8, cancel=5, **question)
    assert (part["tokens"], part["positions"]) == (whole[:5], [7])
    assert cpp.ask("predict", stream="a", tokens=[[whole[5]]])["positions"] == [8]


def test_a_text_may_begin_with_the_token_before_it(
    cpp: Program, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    size = json.loads((artefacts["ring"] / "spec.json").read_text())["model"]["vocab_size"]
    question = {"stream": "a", "max_tokens": 8, "temperature": 0}
    document = {"kind": "ids", "size": size, "special": {"first": 3}}
    ids = with_vocabulary(artefacts["ring"], tmp_path / "ids", document)
    expected = started(cpp, ids).ask("generate", tokens=[3, 1, 2], **question)
    assert started(cpp, ids).ask("generate", text="1 2", bos=True, **question) == expected
    assert started(cpp, ids).ask("generate", text="1 2", **question) != expected
    started(cpp, artefacts["ring"])
    assert "bos needs a token before a text" in cpp.refusal("generate", text="The", bos=True, **question)


def test_outputs_have_their_shapes(cpp: Program, policy: Path) -> None:
    cpp.ask("open", model=str(policy))
    cpp.ask("start", stream="a", rows=2)
    inputs = {name: array.ravel().tolist() for name, array in observed(2, 3, 0).items()}
    answer = cpp.ask("step by name", stream="a", inputs=inputs)
    expected = {
        entry["name"]: entry["shape"] for entry in json.loads((policy / "spec.json").read_text())["outputs"]
    }
    sizes = {"batch": 2, "tokens": 3}
    for name, shape in answer["shapes"].items():
        assert shape == [sizes.get(size, size) for size in expected[name]]
        assert len(answer["outputs"][name]) == np.prod(shape)


@pytest.mark.parametrize("name", ["ring", "shift", "adaptive-softmax", "tales", "policy"])
def test_later_steps_allocate_nothing(
    name: str, artefacts: dict[str, Path], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """Of their own; ONNX Runtime does within a graph."""
    if name == "adaptive-softmax":
        folder = export(make_run(**ARCHITECTURES[name]), tmp_path / "artefact")
    else:
        folder = {"tales": TALES, "policy": CARTPOLE, **artefacts}[name]
    program = compiled(Path(__file__).with_name("allocations.cpp"), "-O1")
    printed = subprocess.run([program, folder], capture_output=True, text=True, check=True).stdout
    counts = {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in printed.splitlines()}
    anew = {name: count for name, count in counts.items() if name.endswith("anew")}
    assert all(count >= 19 for count in anew.values())  # so that allocations are counted at all
    assert len(anew) == 1
    assert {name: count for name, count in counts.items() if name not in anew and count} == {}


def test_several_threads_use_one_session(cpp: Program, artefacts: dict[str, Path]) -> None:
    question = {"stream": "a", "tokens": [1, 2], "max_tokens": 60, "temperature": 1.5, "seed": 8}
    alone = started(cpp, artefacts["ring"]).ask("generate", **question)
    assert cpp.ask("threads", **question)["answers"] == [alone] * 4


def test_only_json_is_read(cpp: Program) -> None:
    assert cpp.ask("json", text='{"a": [1, -2.5e-3, true, null, "\\u00e9"]}') == {}
    for wrong in (
        '{"a": 1, "a": 2}',
        "[1,]",
        "[01]",
        "[1.]",
        "[+1]",
        "[NaN]",
        '["\\ud800"]',
        "[1] 2",
        '"\t"',
        "[",
    ):
        assert cpp.refusal("json", text=wrong)
    assert "nested" in cpp.refusal("json", text="[" * 100_000)


def test_a_text_that_overflowed_does_not_spoil_the_next_one(
    cpp: Program, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    sound = export(make_run(**ARCHITECTURES["adaptive-softmax-untied"]), tmp_path / "sound")
    graph = onnx.load(sound / "step.onnx", load_external_data=False).graph
    table = next(node.input[0] for node in graph.node if node.op_type == "Gather")
    (place,) = (tensor.external_data for tensor in graph.initializer if tensor.name == table)
    facts = {entry.key: entry.value for entry in place}
    width = int(facts["length"]) // 30  # bytes of a row of the table's 30 tokens
    weights = bytearray((sound / "weights.bin").read_bytes())
    at = int(facts["offset"]) + 7 * width
    weights[at : at + width] = np.full(width // 4, np.nan, "<f4").tobytes()
    vocabulary = json.loads((sound / "vocab.json").read_text())
    spoiled = with_vocabulary(sound, tmp_path / "spoiled", vocabulary, weights_bin=bytes(weights))
    started(cpp, spoiled)
    assert None in cpp.ask("score", stream="a", tokens=[[7, *range(10, 17)]])["log_probs"][1:]
    assert "not finite" in cpp.refusal("save", stream="a", file=str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()
    # The second text writes fewer slots than the first one, so that not-a-numbers stay behind the mask.
    cpp.ask("restart", stream="a", row=0)
    after = cpp.ask("step", stream="a", tokens=[[1, 2, 3, 4]])["logits"]
    assert after == started(cpp, spoiled).ask("step", stream="a", tokens=[[1, 2, 3, 4]])["logits"]
    assert None not in after


def test_a_saved_stream_may_have_notes_of_other_programs(
    cpp: Program, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    memory, file = open_session(artefacts["ring"]).start(1), tmp_path / "saved"
    next(iter(memory.tensors.values()))[:] = np.nan  # as of a text that overflowed
    save_memory(memory, file)
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"]["page"] = json.dumps({"text": "of the web page"})
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + content[end:])
    started(cpp, artefacts["ring"]).ask("load", stream="b", file=str(file))
    assert None not in cpp.ask("predict", stream="b", tokens=[[1]])["logits"]
