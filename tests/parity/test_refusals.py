"""One table of refusals, and each entry point that can receive them: sessions, commands, libraries, servers.

A refusal is one sentence with the expected words, and changes nothing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtimes
from runtimes.base.errors import UserError
from tests.commands import xl
from tests.parity.operations import (
    LACKS,
    HttpServer,
    Implementation,
    Program,
    PythonSession,
    ReplicaClient,
    one_sentence,
)
from tests.sampling import range_cases
from tests.sealing import sealed
from xl_export.artefact.export import export


class Commands:
    """`xl-export generate` and `xl-export check`."""

    tolerance, goes_on = 0.0, False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        return getattr(self, op, lambda **_: LACKS)(**given)

    def start(self, stream: str, rows: int = 1) -> dict[str, Any]:
        return {} if rows == 1 else LACKS

    def open(self, model: str, **trusted: str) -> dict[str, Any]:
        options = {"expected_identity": "--identity", "public_key": "--public-key"}
        return self._run(
            "check", model, *(word for name in trusted for word in (options[name], trusted[name]))
        )

    def generate(self, stream: str, max_tokens: int, **given: Any) -> dict[str, Any]:
        stop, tokens = given.pop("stop", []), given.pop("tokens", None)
        words = (
            ["--prompt", given.pop("text")]
            if tokens is None
            else ["--prompt-ids", ",".join(map(str, tokens))]
        )
        words += [word for each in stop for word in ("--stop", each)]
        words += [
            word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        return self._run("generate", self.folder, "--tokens", str(max_tokens), *words)

    def _run(self, *words: object) -> dict[str, Any]:
        done = xl(*words)
        if done.exit_code == 0:
            return {}
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        (line,) = done.stderr.splitlines()
        return {"error": one_sentence(line)}


ENTRY_POINTS = ("python", "command", "cpp", "javascript", "worker", "server", "replica")


@pytest.fixture(scope="module")
def entry_points(
    artefacts: dict[str, Path],
    cpp: Program,
    javascript: Program,
    serve: Callable[[str, Path], Implementation],
) -> dict[str, Implementation]:
    ring = artefacts["ring"]
    programs = {"cpp": cpp, "javascript": javascript, "worker": javascript}
    served = {kind: serve(kind, ring) for kind in ("server", "replica")}
    return {"python": PythonSession(ring), "command": Commands(ring), **programs, **served}


@pytest.fixture(params=ENTRY_POINTS)
def entry_point(
    request: pytest.FixtureRequest, entry_points: dict[str, Implementation], artefacts: dict[str, Path]
) -> Implementation:
    """One that has the artefact `ring` open, and nothing else."""
    found = entry_points[request.param]
    if isinstance(found, Program):
        more = {"worker": True} if request.param == "worker" else {}
        found.ask("open", model=str(artefacts["ring"]), **more)
    return found


# An operation on a new stream of the artefact `ring`, and the words that refuse it.
OPERATIONS: list[tuple[dict[str, Any], str]] = [
    ({"op": "start", "rows": 0}, "batch is 0"),
    ({"op": "predict", "tokens": [[100_000]]}, "outside|no token of this model"),
    ({"op": "step", "tokens": [[-1]]}, "outside|no token of this model"),
    ({"op": "step", "tokens": [[]]}, "the segment has 0 tokens|expected"),
    ({"op": "predict", "tokens": [[1] * 9]}, "the segment has 9 tokens|expected"),
    ({"op": "score", "tokens": [[1, 100_000]]}, "outside|no token of this model"),
    ({"op": "encode", "text": "a\u2603"}, "\u2603"),
    ({"op": "generate", "text": "a\u2603", "max_tokens": 1}, "\u2603"),
    ({"op": "generate", "text": "", "max_tokens": 1}, "no tokens|nothing to append|at least one"),
    ({"op": "generate", "tokens": [100_000], "max_tokens": 1}, "100000|100,000"),
    ({"op": "generate", "tokens": [1], "max_tokens": 0}, "is 0|0 is not in the range"),
    ({"op": "generate", "tokens": [1], "max_tokens": 2, "stop": [""]}, "stop string is empty"),
    ({"op": "rewind", "count": 8}, "expected 0 to 0|the stream has 0"),
    ({"op": "load", "file": "nowhere"}, "nowhere"),
]


def test_an_impossible_operation_is_refused_in_one_sentence(entry_point: Implementation) -> None:
    wrong, refused = [], 0
    for operation, words in OPERATIONS:
        entry_point.ask("start", stream="a")
        answer = entry_point.ask(**{"stream": "a", **operation})
        if "lacks" in answer:
            continue
        refused += 1
        unchanged = entry_point.ask("score", stream="a", tokens=[[1]])
        if not re.search(rf"({words}).*\.$", answer.get("error", "")) or unchanged.get("positions", [1]) != [
            1
        ]:
            wrong.append((operation, answer, unchanged))
    assert wrong == []
    assert refused >= 5


def names(sentence: str, setting: str) -> bool:
    """Whether a sentence names a setting, as a field or as an option of a command or of JavaScript."""
    return setting.replace("_", "") in re.sub("[-_]", "", sentence.lower())


def test_settings_of_sampling_have_the_same_ranges(entry_point: Implementation) -> None:
    wrong, server = [], isinstance(entry_point, HttpServer | ReplicaClient)
    for case in range_cases():
        name, value, expected = case["name"], case["value"], case["expected"]
        if server and (name, value) in (("top_k", -1), ("top_p", 0)):
            continue  # what clients of other servers send for "off"
        entry_point.ask("start", stream="a")
        answer = entry_point.ask("generate", stream="a", tokens=[1], max_tokens=1, **{name: value})
        if ("error" in answer) != (expected is not None) or (expected and not names(answer["error"], name)):
            wrong.append((case, answer))
    assert wrong == []


def with_digest(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """A changed spec whose digest fits."""

    def changed(content: bytes) -> bytes:
        spec = json.loads(content)
        change(spec)
        return sealed(spec)

    return changed


# A file of an artefact, what is done to it, and the words that refuse the folder.
FILES: list[tuple[str, Callable[[bytes], bytes] | None, str]] = [
    ("weights.bin", lambda data: data[:-1] + bytes([data[-1] ^ 1]), "weights.bin"),
    ("weights.bin", None, "weights.bin"),
    ("step.onnx", lambda data: data[:-1], "step.onnx"),
    ("step.onnx", lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:], "step.onnx"),
    ("vocab.json", None, "vocab.json"),
    ("vocab.json", lambda data: data + b" ", "vocab.json"),
    ("spec.json", lambda data: data.replace(b'"segment": 8', b'"segment": 9'), "digest"),
    ("spec.json", lambda data: data[:-2], "JSON"),
    ("spec.json", None, "spec.json|is no|not an artefact"),
    ("spec.json", with_digest(lambda spec: spec.update(schema=2)), "newer|schema"),
    ("spec.json", with_digest(lambda spec: spec.update(form="rang")), "rang"),
    ("spec.json", with_digest(lambda spec: spec.update(target="moon")), "moon"),
    ("spec.json", with_digest(lambda spec: spec.update(tolerance="1")), "tolerance|number"),
]
# JavaScript does not read these.
SPECS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda spec: spec["model"].update(layers=4097), "layers|4096"),
    (lambda spec: spec["inputs"][2].update(name="positions"), "contradicts|follow"),
]


@pytest.mark.parametrize("entry_point", ["python", "command", "cpp", "javascript"], indirect=True)
def test_a_damaged_artefact_is_refused_in_one_sentence(
    entry_point: Implementation, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    wrong = []
    specs = [("spec.json", with_digest(change), words) for change, words in SPECS]
    files = FILES if isinstance(entry_point, Program) and entry_point.goes_on else FILES + specs
    for number, (name, change, words) in enumerate(files):
        folder = shutil.copytree(artefacts["ring"], tmp_path / str(number))
        if change is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(change((folder / name).read_bytes()))
        answer = entry_point.ask("open", model=str(folder))
        if not re.search(rf"({words}).*\.$", answer.get("error", "")):
            wrong.append((name, number, answer))
    assert wrong == []


def with_scale(memory: runtimes.Memory, scale: float) -> runtimes.Memory:
    memory.tensors["past_key_values.1.value_scale"][0, 0, 3] = scale
    return memory


@pytest.mark.parametrize("entry_point", ["python", "cpp", "javascript", "server"], indirect=True)
def test_a_damaged_stream_is_refused_in_one_sentence(entry_point: Implementation, tmp_path: Path) -> None:
    path = tmp_path / "stream"
    entry_point.ask("start", stream="a")
    entry_point.ask("score", stream="a", tokens=[[1, 2, 3]])
    entry_point.ask("save", stream="a", file=str(path))
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    artefact = whole.index(b'"artefact"')
    for at in [*range(8), *range(8, header, 53), *range(header, len(whole), 997)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        answer = entry_point.ask("load", stream="b", file=str(path))
        # A blank of the header may become anything, and the artefact's identity is only for information.
        free = whole[at] == 32 or artefact < at < artefact + 80
        assert "error" in answer or free, at
        path.write_bytes(whole[:at])
        assert "error" in entry_point.ask("load", stream="b", file=str(path)), at
    path.write_bytes(whole)
    assert entry_point.ask("load", stream="b", file=str(path))["positions"] == [3]


@pytest.mark.parametrize("entry_point", ["cpp", "javascript"], indirect=True)
def test_a_stream_of_another_artefact_is_refused(
    entry_point: Implementation, artefacts: dict[str, Path], run: Path, tmp_path: Path
) -> None:
    shift = PythonSession(artefacts["shift"])
    shift.ask("start", stream="a")
    shift.ask("save", stream="a", file=str(tmp_path / "other"))
    answer = entry_point.ask("load", stream="b", file=str(tmp_path / "other"))
    assert "another memory" in answer["error"]
    folder = export(run, tmp_path / "bytes", memory_precision="int8")
    session = runtimes.open_session(folder)
    _, memory = session.step(np.arange(8)[None], session.start(1))
    entry_point.ask("open", model=str(folder))
    for scale in (-0.5, 3e36):
        runtimes.save_memory(with_scale(memory, scale), tmp_path / "scale")
        answer = entry_point.ask("load", stream="b", file=str(tmp_path / "scale"))
        assert "scales that no key or value has" in answer["error"]
    with pytest.raises(UserError):
        runtimes.load_memory(tmp_path / "scale", session)
