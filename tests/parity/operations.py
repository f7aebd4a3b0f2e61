"""Operations on streams, one line of JSON each, and who answers them.

`tests/data/operations.jsonl` is the recording. An operation has a name, `op`, and arguments; its answer is an
object, or `{"error": sentence}` for what is refused:

    start     stream, rows                       → positions of the rows
    score     stream, tokens [rows][n]           → log_probs of all tokens; null where nothing predicts one
    step      stream, tokens [rows][n]           → logits after each token
    predict   stream, tokens [rows][n]           → logits after the last token of each row
    generate  stream, tokens or text, max_tokens, seed, stop, settings of sampling
                                                 → tokens, pieces and whole of their text, and why it ended
    fork      stream, as                         restart  stream, row
    rewind    stream, count                      pad      stream, positions
    save      stream, file                       load     stream, file
    encode    text → tokens                      decode   tokens → pieces of text, the rest at the end
    check     → passed, tolerance, mean_tolerance
    step by name  stream, inputs {name: numbers} → outputs by name, in flat lists

An implementation that has no such operation answers `{"lacks": true}`, and loses the stream.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np

import runtimes
from runtimes.base.errors import UserError
from runtimes.base.logits import log_sum_exp
from runtimes.contract.spec import Spec
from runtimes.sessions.onnx_runtime import KernelChoice, OrtSession
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.replica import Replica

RECORDING = Path(__file__).parents[1] / "data" / "operations.jsonl"
LACKS: dict[str, Any] = {"lacks": True}
SETTINGS = [field.name for field in fields(runtimes.Sampler)]


class Implementation(Protocol):
    """What answers operations. tolerance: in nats. goes_on: whether half a character at the end of a text
    that was generated waits for the next text.
    """

    tolerance: float
    goes_on: bool

    def ask(self, op: str, **given: Any) -> dict[str, Any]: ...


def one_sentence(message: str) -> str:
    assert message
    assert "\n" not in message
    assert len(message) < 1000
    return message


def generated(session: runtimes.Session, prompt: Any, **given: Any) -> dict[str, Any]:
    """The answer to `generate`. given: its other arguments, and perhaps the memory to continue."""
    settings = {name: given.pop(name) for name in SETTINGS if name in given}
    pieces = list(runtimes.generate(session, prompt, sampler=runtimes.Sampler(**settings), **given))
    texts = [piece.text for piece in pieces]
    tokens = [piece.token for piece in pieces]
    return {"tokens": tokens, "pieces": texts, "text": "".join(texts), "ended": pieces[-1].ended}


@dataclass
class Row:
    """All tokens that a row was fed. padding: how many of the first ones do not count. starts: where the
    steps began in which they were fed.
    """

    tokens: list[int]
    padding: int = 0
    starts: list[int] = field(default_factory=list)

    def feed(self, tokens: list[int], step: int) -> None:
        """Appends tokens, which are fed in steps of so many."""
        self.starts += range(len(self.tokens), len(self.tokens) + len(tokens), step)
        self.tokens += tokens


class Naive:
    """The truth: it remembers all tokens of a stream, and computes every answer from the first of them.

    It cuts a text into whole segments, however it was fed, because answers do not depend on that. Under the
    mask `full` they do, by definition: then it cuts where the text was cut.
    """

    tolerance, goes_on = 0.0, False

    def __init__(self, session: runtimes.Session) -> None:
        self.session = session
        self.streams: dict[str, list[Row]] = {}
        self.files: dict[str, list[Row]] = {}

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        answer = getattr(self, op)(**given) or {}
        rows = self.streams.get(given.get("stream", ""), [])
        return answer | {"positions": [len(row.tokens) - row.padding for row in rows]}

    def logits(self, row: Row) -> tuple[np.ndarray, runtimes.Memory]:
        """After each token of a row, [n, V]; those at padding mean nothing. And the memory of the row."""
        memory, rule, end = self.session.start(1), self.session.rule, len(row.tokens)
        starts = list(range(row.padding, end, rule.segment))
        if rule.mask == "full":
            starts = sorted({max(start, row.padding) for start in row.starts} - {end})
        found = [np.full((row.padding, self.session.vocab.size), np.nan, np.float32)]
        for start, stop in itertools.pairwise([*starts, end]):
            found.append(self.session.step(np.array([row.tokens[start:stop]]), memory)[0][0])
        return np.concatenate(found), memory

    def start(self, stream: str, rows: int = 1) -> None:
        self.streams[stream] = [Row([]) for _ in range(rows)]

    def fed(self, stream: str, tokens: list[list[int]]) -> list[np.ndarray]:
        """The logits after each token of each row, which the new tokens end."""
        for row, new in zip(self.streams[stream], tokens, strict=True):
            row.feed(new, self.session.rule.segment)
        return [self.logits(row)[0] for row in self.streams[stream]]

    def step(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        return {"logits": np.stack([each[-len(tokens[0]) :] for each in self.fed(stream, tokens)]).ravel()}

    def predict(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        return {"logits": np.stack([each[-1] for each in self.fed(stream, tokens)]).ravel()}

    def score(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        found = []
        fed = self.fed(stream, tokens)
        for row, new, logits in zip(self.streams[stream], tokens, fed, strict=True):
            log_probs = (logits - log_sum_exp(logits)[:, None])[np.arange(len(logits) - 1), row.tokens[1:]]
            found.append(np.concatenate([[np.nan], log_probs])[-len(new) :])
        return {"log_probs": np.concatenate(found)}

    def generate(self, stream: str, tokens: list[int], **given: Any) -> dict[str, Any]:
        (row,) = self.streams[stream]
        answer = generated(self.session, tokens, memory=self.logits(row)[1], **given)
        row.feed(tokens, self.session.rule.segment)
        row.feed(answer["tokens"], 1)
        return answer

    def fork(self, stream: str, **given: str) -> None:
        self.streams[given["as"]] = copy.deepcopy(self.streams[stream])

    def restart(self, stream: str, row: int) -> None:
        self.streams[stream][row] = Row([])

    def rewind(self, stream: str, count: int) -> None:
        (row,) = self.streams[stream]
        del row.tokens[-count:]
        row.starts = [start for start in row.starts if start < len(row.tokens)]

    def pad(self, stream: str, positions: list[int]) -> None:
        self.streams[stream] = [Row([], padding=-position) for position in positions]

    def save(self, stream: str, file: str) -> None:
        self.files[Path(file).name] = copy.deepcopy(self.streams[stream])

    def load(self, stream: str, file: str) -> None:
        self.streams[stream] = copy.deepcopy(self.files[Path(file).name])

    def check(self) -> dict[str, Any]:
        spec = self.session.spec
        assert spec is not None
        return {"passed": True, "tolerance": spec.tolerance, "mean_tolerance": spec.mean_tolerance}


class PythonSession:
    """Sessions of `runtimes`, with memory that is carried from one operation to the next.

    kernel: the fused operator only if the other side has it too. Presets of few bits round activations to
    8 bits with standard operators, and to 16 with the fused one.
    """

    tolerance, goes_on = 1e-4, False

    def __init__(self, folder: Path, kernel: KernelChoice = "standard") -> None:
        self.folder = folder
        self.session = OrtSession.open(folder, threads=1, kernel=kernel)
        self.streams: dict[str, runtimes.Memory] = {}

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        try:
            answer = getattr(self, op.replace(" ", "_"), lambda **_: LACKS)(**given) or {}
        except UserError as error:
            return {"error": one_sentence(str(error))}
        memory = self.streams.get(given.get("stream", ""))
        return answer | ({"positions": memory.positions.tolist()} if memory else {})

    def open(self, model: str, **trusted: str) -> None:
        """Whether an artefact opens; the session stays what it was."""
        runtimes.open_session(Path(model), threads=1, device="cpu", **trusted)

    def start(self, stream: str, rows: int = 1) -> None:
        self.streams[stream] = self.session.start(rows)

    def step(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        logits, _ = self.session.step(np.array(tokens, np.int64), self.streams[stream])
        return {"logits": logits.ravel()}

    def step_by_name(self, stream: str, inputs: dict[str, list[float]]) -> dict[str, Any]:
        memory = self.streams[stream]
        assert self.session.spec is not None
        fed = {
            fact.name: np.reshape(inputs[fact.name], fact.sizes(batch=memory.batch, tokens=-1)).astype(
                fact.dtype
            )
            for fact in self.session.spec.signature[0][:-1]
        }
        outputs, _ = self.session.step(fed, memory)
        return {"outputs": {name: x.ravel() for name, x in outputs.items()}}

    def predict(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        logits, _ = self.session.predict(np.array(tokens, np.int64), self.streams[stream])
        return {"logits": logits.ravel()}

    def score(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        ids, memory = np.array(tokens, np.int64), self.streams[stream]
        targets = np.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        found = [np.full((len(ids), 1), np.nan)]  # no logits are kept for the first tokens
        for at in range(0, ids.shape[1], self.session.rule.segment):
            piece = slice(at, at + self.session.rule.segment)
            found.append(self.session.score(ids[:, piece], targets[:, piece], memory)[0])
        return {"log_probs": np.concatenate(found, axis=1)[:, :-1].ravel()}

    def generate(self, stream: str, tokens: Any = None, text: str = "", **given: Any) -> dict[str, Any]:
        prompt = text if tokens is None else tokens
        return generated(self.session, prompt, memory=self.streams[stream], **given)

    def fork(self, stream: str, **given: str) -> None:
        self.streams[given["as"]] = self.streams[stream].copy()

    def restart(self, stream: str, row: int) -> None:
        self.streams[stream].positions[row] = 0

    def pad(self, stream: str, positions: list[int]) -> None:
        self.streams[stream].positions[:] = positions

    def save(self, stream: str, file: str) -> None:
        runtimes.save_memory(self.streams[stream], Path(file))

    def load(self, stream: str, file: str) -> None:
        self.streams[stream] = runtimes.load_memory(Path(file), self.session)

    def encode(self, text: str, **_: str) -> dict[str, Any]:
        return {"tokens": self.session.vocab.encode(text).tolist()}

    def check(self) -> dict[str, Any]:
        report = runtimes.check(self.folder, threads=1)
        limits = {"tolerance": report.tolerance, "mean_tolerance": report.mean_tolerance}
        return {"passed": report.passed, **limits}


class Program:
    """A program that reads operations from standard input: `driver.cpp` or `web/test/driver.js`.

    It stays open for all tests; `open` names the artefact.
    """

    def __init__(
        self, *command: str | Path, tolerance: float = 0, goes_on: bool = False, cwd: Path | None = None
    ) -> None:
        self.tolerance, self.goes_on = tolerance, goes_on
        words = [str(word) for word in command]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", cwd=cwd
        )

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"op": op, **given}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the program ended with {self._process.wait()} at {op} {given!s:.200}"
        answer: dict[str, Any] = json.loads(line)
        assert "escaped" not in answer, answer
        if "error" in answer:
            one_sentence(answer["error"])
        return answer

    def refusal(self, op: str, **given: Any) -> str:
        """The sentence with which an operation is refused."""
        sentence: str = self.ask(op, **given)["error"]
        return sentence

    def close(self) -> int:
        """Ends the program; returns its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait()
        self._process.stdout.close()
        return code


def nested(inputs: dict[str, list[float]], spec: Spec) -> dict[str, Any]:
    """The inputs of one row as nested lists in their shapes."""
    shapes = {each.name: each.sizes(batch=1, tokens=-1) for each in spec.signature[0][:-1]}
    return {name: np.reshape(numbers, shapes[name]).tolist() for name, numbers in inputs.items()}


def flat_outputs(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer with flat outputs, as C++ and JavaScript give them."""
    if "outputs" not in answer:
        return answer
    return answer | {"outputs": {name: np.ravel(x).tolist() for name, x in answer["outputs"].items()}}


class HttpServer:
    """The streams of a server of one model."""

    tolerance, goes_on = 1e-3, True

    def __init__(self, at: str, spec: Spec) -> None:
        self.spec = spec
        self.client = httpx.Client(base_url=at, timeout=60, verify=False, trust_env=False)
        self.ids: dict[str, str] = {}
        self.signed: set[str] = set()  # files

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        return getattr(self, op.replace(" ", "_"), lambda **_: LACKS)(**given)

    def close(self) -> None:
        self.client.close()

    def post(self, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
        content: Any = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = self.client.post(path, **content)
        if answer.is_success:
            return answer.json()
        return {"error": one_sentence(answer.json()["error"]["message"]), "status": answer.status_code}

    def operation(self, stream: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.post(f"/v1/streams/{self.ids[stream]}/{name}", body)
        if "error" not in answer:
            answer["positions"] = [answer.get("stream", answer)["position"]]
        return answer

    def start(self, stream: str, rows: int = 1) -> dict[str, Any]:
        if rows != 1:
            return LACKS
        self.ids[stream] = self.post("/v1/streams", {})["stream"]["id"]
        return {"positions": [0]}

    def score(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        (row,) = tokens
        answer = self.operation(stream, "append", {"tokens": row})
        if "error" in answer:
            return answer
        bits = np.array([np.nan if value is None else value for value in answer["bits"]])
        return {"log_probs": -bits * np.log(2), "positions": answer["positions"], "server": True}

    def generate(self, stream: str, **given: Any) -> dict[str, Any]:
        answer = self.operation(stream, "continue", given)
        if "error" in answer:
            return answer
        tokens, texts = (answer[name][answer["appended"] :] for name in ("tokens", "texts"))
        facts = {"ended": answer["finish_reason"], "positions": answer["positions"]}
        return {"tokens": tokens, "text": "".join(texts), **facts}

    def step_by_name(self, stream: str, inputs: dict[str, list[float]]) -> dict[str, Any]:
        return flat_outputs(self.operation(stream, "step", {"inputs": nested(inputs, self.spec)}))

    def restart(self, stream: str, row: int) -> dict[str, Any]:
        position = self.client.get(f"/v1/streams/{self.ids[stream]}").json()["position"]
        return self.rewind(stream, position)

    def fork(self, stream: str, **given: str) -> dict[str, Any]:
        self.ids[given["as"]] = self.operation(stream, "fork", {})["id"]
        return {}

    def rewind(self, stream: str, count: int) -> dict[str, Any]:
        return self.operation(stream, "rewind", {"tokens": count})

    def save(self, stream: str, file: str) -> dict[str, Any]:
        answer = self.client.get(f"/v1/streams/{self.ids[stream]}/snapshot")
        answer.raise_for_status()
        Path(file).write_bytes(answer.content)
        self.signed.add(file)
        return {}

    def load(self, stream: str, file: str) -> dict[str, Any]:
        if file not in self.signed:  # nothing else is restored
            return LACKS
        answer = self.post("/v1/streams/restore", Path(file).read_bytes())
        if "error" in answer:
            return answer
        self.ids[stream] = answer["id"]
        return {"positions": [answer["position"]]}

    def encode(self, text: str, **_: str) -> dict[str, Any]:
        return self.post("/tokenize", {"prompt": text})


class ReplicaClient:
    """A replica of Ray Serve, in this process and without Ray. A request feeds tokens, then draws."""

    tolerance, goes_on = 1e-3, True

    def __init__(self, replica: Replica, spec: Spec) -> None:
        self.replica = replica
        self.spec = spec
        self.at: dict[str, int] = {}
        self.names: dict[str, str] = {}
        self.count = 0
        self.loop = asyncio.new_event_loop()
        self.thread = ThreadPoolExecutor(1)  # a browser under test keeps an event loop in the main thread

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        return getattr(self, op.replace(" ", "_"), lambda **_: LACKS)(**given)

    def request(self, stream: str, body: dict[str, Any]) -> dict[str, Any]:
        work = self.replica.answer(self.names[stream], {"position": self.at[stream], **body})
        try:
            answer = self.thread.submit(self.loop.run_until_complete, work).result()
        except (UserError, RefusedError) as error:
            return {"error": one_sentence(str(error))}
        self.at[stream] = answer["position"]
        return {**answer, "positions": [answer["position"]]}

    def start(self, stream: str, rows: int = 1) -> dict[str, Any]:
        self.count += 1
        self.names[stream], self.at[stream] = f"{stream}-{self.count}", 0
        return {} if rows == 1 else LACKS

    def score(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        answer = self.request(stream, {"tokens": tokens[0], "score": True})
        if "error" in answer:
            return answer
        known = np.array([np.nan if value is None else value for value in answer["log_probs"]])
        return {"log_probs": known, "positions": answer["positions"], "server": True}

    def step_by_name(self, stream: str, inputs: dict[str, list[float]]) -> dict[str, Any]:
        return flat_outputs(self.request(stream, {"inputs": nested(inputs, self.spec)}))

    def restart(self, stream: str, row: int) -> dict[str, Any]:
        return self.start(stream)

    def generate(self, stream: str, **given: Any) -> dict[str, Any]:
        if given["max_tokens"] == 0:
            return LACKS  # a request may feed tokens only
        answer = self.request(stream, given)
        keys = {"tokens": "tokens", "text": "text", "reason": "ended", "positions": "positions"}
        return answer if "error" in answer else {name: answer[key] for key, name in keys.items()}

    def close(self) -> None:
        self.thread.submit(self.loop.close).result()
        self.thread.shutdown()


def read_recording(size: int) -> list[dict[str, Any]]:
    """The operations, with tokens of a vocabulary of so many."""

    def modulo(tokens: Any) -> Any:
        return [modulo(each) for each in tokens] if isinstance(tokens, list) else tokens % size

    lines = [json.loads(line) for line in RECORDING.read_text(encoding="utf-8").splitlines()]
    return [line | ({"tokens": modulo(line["tokens"])} if "tokens" in line else {}) for line in lines]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The recording with its answers, and what reads the files of others afterwards. folder: of its files."""

    answers: list[tuple[dict[str, Any], dict[str, Any]]]
    afterwards: list[tuple[dict[str, Any], dict[str, Any]]]
    reader: PythonSession
    folder: Path

    @classmethod
    def of(
        cls, artefact: Path, folder: Path, *, rounds: bool = False, kernel: KernelChoice = "standard"
    ) -> Reference:
        """The answers for an artefact. Python's own sessions must give them, too.

        rounds: for numbers of few bits, whose rounding depends on where a text is cut. Then a session that
        cuts texts as all implementations do is the reference.
        """
        reader = PythonSession(artefact, kernel)
        session = reader.session
        recording = read_recording(session.vocab.size)
        if session.spec.form != "ring":  # type: ignore[union-attr]
            recording = [line for line in recording if "f" not in (line.get("as"), line.get("stream"))]
        truth: Implementation = PythonSession(artefact, kernel) if rounds else Naive(session)

        def answered(lines: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
            return [(line, truth.ask(**with_folder(line, folder, folder))) for line in lines]

        answers = answered(recording)
        files = {"b": 1, "s": 2}
        afterwards = answered(
            [
                line
                for file, rows in files.items()
                for line in (
                    {"op": "load", "stream": file, "file": file},
                    {"op": "step", "stream": file, "tokens": [[1, 2, 3]] * rows},
                )
            ]
        )
        found = cls(answers=answers, afterwards=afterwards, reader=reader, folder=folder)
        found.check(reader, folder)
        return found

    @classmethod
    def of_steps(
        cls, artefact: Path, folder: Path, truth: Implementation | None = None, *, rows: int = 2
    ) -> Reference:
        """The answers of `truth`, or of Python's own session, to `random_steps` of any artefact. Python's own
        sessions must give them, too.
        """
        reader = PythonSession(artefact)
        truth = truth or PythonSession(artefact)
        assert reader.session.spec is not None
        lines, afterwards = random_steps(reader.session.spec, rows)
        answered = [(line, truth.ask(**with_folder(line, folder, folder))) for line in (*lines, *afterwards)]
        at = len(lines)
        found = cls(answers=answered[:at], afterwards=answered[at:], reader=reader, folder=folder)
        found.check(reader, folder)
        return found

    def check(self, implementation: Implementation, scratch: Path) -> dict[str, float]:
        """Compares every answer; then Python continues what the implementation has saved in `scratch`.

        Returns the operations that were compared, and the largest difference of each.
        """
        compared = self._compare(self.answers, implementation, scratch)
        saved = {path.name for path in scratch.iterdir()}
        self._compare([each for each in self.afterwards if each[0]["stream"] in saved], self.reader, scratch)
        return compared

    def _compare(
        self,
        answers: list[tuple[dict[str, Any], dict[str, Any]]],
        implementation: Implementation,
        scratch: Path,
    ) -> dict[str, float]:
        lost: set[str] = set()
        compared: dict[str, float] = {}
        for line, expected in answers:
            streams = {line.get("stream"), line.get("as")} - {None}
            lacks = "lacks" in expected or lost & streams
            answer = LACKS if lacks else implementation.ask(**with_folder(line, scratch, self.folder))
            if "lacks" in answer:
                lost.add(line.get("as", line.get("stream", "")))
                continue
            assert "error" not in answer, (line, answer)
            difference = compare(answer, expected, implementation, line)
            compared[line["op"]] = max(difference, compared.get(line["op"], 0.0))
        return compared


def random_steps(spec: Spec, rows: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """62 steps of any artefact, with what its promises allow, and how a saved stream goes on.

    The first stream has 50, with restarts and, if its rows may begin with padding, at different positions; a
    fork and the files of the stream have the others.
    """
    draw = np.random.default_rng(0)
    rows = spec.fixed_rows or (1 if "rows" in spec.without else rows)
    segment = spec.rule.segment
    whole = (spec.fixed_rows and not spec.fixed_tokens) or "cuts" in spec.without
    lines: list[dict[str, Any]] = [{"op": "check"}, {"op": "start", "stream": "a", "rows": rows}]
    if "padding" not in spec.without and rows > 1:
        lines.append({"op": "pad", "stream": "a", "positions": [0] * (rows - 1) + [-segment]})

    def step(stream: str) -> dict[str, Any]:
        tokens = segment if whole else int(draw.integers(1, segment + 1))
        if spec.language_model:
            ids = draw.integers(spec.model.vocab_size, size=(rows, tokens))
            return {"op": "step", "stream": stream, "tokens": ids.tolist()}
        inputs = {}
        for fact in spec.signature[0][:-1]:
            shape = fact.sizes(batch=rows, tokens=tokens)
            x = draw.integers(fact.ids, size=shape) if fact.ids else draw.standard_normal(shape, np.float32)
            inputs[fact.name] = x.ravel().tolist()
        return {"op": "step by name", "stream": stream, "inputs": inputs}

    for number in range(50):
        if number in (10, 27, 40):
            lines.append({"op": "restart", "stream": "a", "row": number % rows})
        if number == 33:
            lines += [{"op": "fork", "stream": "a", "as": "b"}, *(step("b") for _ in range(4))]
        lines.append(step("a"))
    lines.append({"op": "save", "stream": "a", "file": "a"})
    for stream, file in (("c", "a"), ("d", "python-a")):
        lines += [{"op": "load", "stream": stream, "file": file}, *(step(stream) for _ in range(4))]
    return lines, [{"op": "load", "stream": "a", "file": "a"}, step("a")]


def with_folder(line: dict[str, Any], scratch: Path, python: Path) -> dict[str, Any]:
    """An operation with the path of its file. Python's files are called `python-NAME`."""
    if "file" not in line:
        return line
    name = line["file"].removeprefix("python-")
    return line | {"file": str((scratch if name == line["file"] else python) / name)}


def compare(
    answer: dict[str, Any], expected: dict[str, Any], implementation: Implementation, line: dict[str, Any]
) -> float:
    """Every value of an answer is that of the reference. Returns the largest difference of numbers.

    Where the reference has no number, any will do. Only servers must know log p of the first tokens.
    """
    worst = 0.0
    for name in answer.keys() & expected.keys():
        mine, right = answer[name], expected[name]
        if name == "outputs":
            assert mine.keys() == right.keys(), (line, name)
            mine, right = (np.concatenate([np.ravel(x[key]) for key in sorted(right)]) for x in (mine, right))
        if name in ("logits", "log_probs", "outputs"):
            found = np.array([np.nan if value is None else value for value in mine], np.float64)
            assert found.shape == np.shape(right), (line, name)
            needed = ~np.isnan(right)
            if name == "log_probs" and "server" not in answer:
                first = np.arange(len(right)) % len(line["tokens"][0]) == 0
                needed &= ~(first & np.isnan(found))
            worst = max(worst, float(np.abs(found - right)[needed].max(initial=0)))
            assert worst <= implementation.tolerance, (line, name)
            continue
        if implementation.goes_on and name == "text":
            mine, right = mine.rstrip("\ufffd"), right.rstrip("\ufffd")
        if implementation.goes_on and name == "pieces":
            mine, right = mine[:-1], right[:-1]
        assert mine == right, (line, name)
    return worst
