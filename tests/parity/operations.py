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

An implementation that has no such operation answers `{"lacks": true}`, and loses the stream.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np

import runtimes
from runtimes.base.errors import UserError
from runtimes.base.logits import log_sum_exp
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


def sampler_in(given: dict[str, Any]) -> runtimes.Sampler:
    return runtimes.Sampler(**{name: given[name] for name in SETTINGS if name in given})


def one_sentence(message: str) -> str:
    assert message
    assert "\n" not in message
    assert len(message) < 1000
    return message


class Naive:
    """The truth: it remembers all tokens of a stream, and computes every answer from the first of them."""

    tolerance, goes_on = 0.0, False

    def __init__(self, session: runtimes.Session) -> None:
        self.session = session
        self.rows: dict[str, list[list[int]]] = {}
        self.padding: dict[str, list[int]] = {}
        self.files: dict[str, tuple[list[list[int]], list[int]]] = {}

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        return getattr(self, op)(**given)

    def start(self, stream: str, rows: int = 1) -> dict[str, Any]:
        self.rows[stream], self.padding[stream] = [[] for _ in range(rows)], [0] * rows
        return self.positions(stream)

    def positions(self, stream: str) -> dict[str, Any]:
        lengths = map(len, self.rows[stream])
        return {"positions": [n - pad for n, pad in zip(lengths, self.padding[stream], strict=True)]}

    def logits(self, row: list[int]) -> np.ndarray:
        """After each token of a row, [n, V]."""
        memory, segment = self.session.start(1), self.session.rule.segment
        found = [
            self.session.step(np.array([row[at : at + segment]]), memory)[0][0]
            for at in range(0, len(row), segment)
        ]
        return np.concatenate(found) if found else np.zeros((0, self.session.vocab.size), np.float32)

    def fed(self, stream: str, tokens: list[list[int]]) -> list[np.ndarray]:
        """The logits after each token of each row; those at padding mean nothing."""
        before, rows = [len(row) for row in self.rows[stream]], self.rows[stream]
        for row, new in zip(rows, tokens, strict=True):
            row.extend(new)
        found = []
        for row, at, pad in zip(rows, before, self.padding[stream], strict=True):
            hidden = np.full((pad, self.session.vocab.size), np.nan, np.float32)
            found.append(np.concatenate([hidden, self.logits(row[pad:])])[at:])
        return found

    def step(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        return {"logits": np.stack(self.fed(stream, tokens)).ravel(), **self.positions(stream)}

    def predict(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        last = [logits[-1] for logits in self.fed(stream, tokens)]
        return {"logits": np.stack(last).ravel(), **self.positions(stream)}

    def score(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        before = [len(row) for row in self.rows[stream]]
        self.fed(stream, tokens)
        found = []
        for row, at, pad in zip(self.rows[stream], before, self.padding[stream], strict=True):
            assert not pad
            logits = self.logits(row)
            log_probs = (logits - log_sum_exp(logits)[:, None])[np.arange(len(row) - 1), row[1:]]
            found.append(np.concatenate([[np.nan], log_probs])[at:])
        return {"log_probs": np.concatenate(found), **self.positions(stream)}

    def generate(
        self,
        stream: str,
        max_tokens: int,
        tokens: list[int] | None = None,
        text: str | None = None,
        seed: int = 0,
        stop: list[str] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        (row,) = self.rows[stream]
        row.extend(self.session.vocab.encode(text).tolist() if tokens is None else tokens)
        found = list(
            runtimes.generate(
                self.session,
                row,
                max_tokens=max_tokens,
                sampler=sampler_in(settings),
                seed=seed,
                stop=stop or (),
            )
        )
        row.extend(piece.token for piece in found)
        return {**generated(found), **self.positions(stream)}

    def fork(self, stream: str, **given: str) -> dict[str, Any]:
        self.rows[given["as"]] = [row.copy() for row in self.rows[stream]]
        self.padding[given["as"]] = self.padding[stream].copy()
        return {}

    def restart(self, stream: str, row: int) -> dict[str, Any]:
        self.rows[stream][row], self.padding[stream][row] = [], 0
        return self.positions(stream)

    def rewind(self, stream: str, count: int) -> dict[str, Any]:
        (row,) = self.rows[stream]
        del row[-count:]
        return self.positions(stream)

    def pad(self, stream: str, positions: list[int]) -> dict[str, Any]:
        self.padding[stream] = [-position for position in positions]
        return self.positions(stream)

    def save(self, stream: str, file: str) -> dict[str, Any]:
        rows = [row.copy() for row in self.rows[stream]]
        self.files[Path(file).name] = rows, self.padding[stream].copy()
        return self.positions(stream)

    def load(self, stream: str, file: str) -> dict[str, Any]:
        rows, padding = self.files[Path(file).name]
        self.rows[stream], self.padding[stream] = [row.copy() for row in rows], padding.copy()
        return self.positions(stream)

    def check(self) -> dict[str, Any]:
        spec = self.session.spec
        assert spec is not None
        return {"passed": True, "tolerance": spec.tolerance, "mean_tolerance": spec.mean_tolerance}


def generated(pieces: list[runtimes.Piece]) -> dict[str, Any]:
    texts = [piece.text for piece in pieces]
    return {
        "tokens": [piece.token for piece in pieces],
        "pieces": texts,
        "text": "".join(texts),
        "ended": pieces[-1].ended,
    }


class PythonSession:
    """Sessions of `runtimes`, with memory that is carried from one operation to the next."""

    tolerance, goes_on = 1e-4, False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.session = runtimes.open_session(folder, threads=1, device="cpu")
        self.streams: dict[str, runtimes.Memory] = {}

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        try:
            return getattr(self, op, lambda **_: LACKS)(**given)
        except UserError as error:
            return {"error": one_sentence(str(error))}

    def open(self, model: str) -> dict[str, Any]:
        """Whether an artefact opens; the session stays what it was."""
        runtimes.open_session(Path(model), threads=1, device="cpu")
        return {}

    def positions(self, stream: str) -> dict[str, Any]:
        return {"positions": self.streams[stream].positions.tolist()}

    def start(self, stream: str, rows: int = 1) -> dict[str, Any]:
        self.streams[stream] = self.session.start(rows)
        return self.positions(stream)

    def step(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        logits, _ = self.session.step(np.array(tokens, np.int64), self.streams[stream])
        return {"logits": logits.ravel(), **self.positions(stream)}

    def predict(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        logits, _ = self.session.predict(np.array(tokens, np.int64), self.streams[stream])
        return {"logits": logits.ravel(), **self.positions(stream)}

    def score(self, stream: str, tokens: list[list[int]]) -> dict[str, Any]:
        ids, segment = np.array(tokens, np.int64), self.session.rule.segment
        targets = np.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        found = [
            self.session.score(
                ids[:, at : at + segment], targets[:, at : at + segment], self.streams[stream]
            )[0]
            for at in range(0, ids.shape[1], segment)
        ]
        log_probs = np.concatenate(found, axis=1)[:, :-1]
        unknown = np.pad(log_probs, ((0, 0), (1, 0)), constant_values=np.nan)  # no logits are kept here
        return {"log_probs": unknown.ravel(), **self.positions(stream)}

    def generate(
        self,
        stream: str,
        max_tokens: int,
        tokens: list[int] | None = None,
        text: str | None = None,
        seed: int = 0,
        stop: list[str] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        prompt: Any = text if tokens is None else tokens
        pieces = runtimes.generate(
            self.session,
            prompt,
            max_tokens=max_tokens,
            sampler=sampler_in(settings),
            seed=seed,
            stop=stop or (),
            memory=self.streams[stream],
        )
        return {**generated(list(pieces)), **self.positions(stream)}

    def fork(self, stream: str, **given: str) -> dict[str, Any]:
        self.streams[given["as"]] = self.streams[stream].copy()
        return {}

    def restart(self, stream: str, row: int) -> dict[str, Any]:
        self.streams[stream].positions[row] = 0
        return self.positions(stream)

    def pad(self, stream: str, positions: list[int]) -> dict[str, Any]:
        self.streams[stream].positions[:] = positions
        return self.positions(stream)

    def save(self, stream: str, file: str) -> dict[str, Any]:
        runtimes.save_memory(self.streams[stream], Path(file))
        return self.positions(stream)

    def load(self, stream: str, file: str) -> dict[str, Any]:
        self.streams[stream] = runtimes.load_memory(Path(file), self.session)
        return self.positions(stream)

    def encode(self, text: str, **_: str) -> dict[str, Any]:
        return {"tokens": self.session.vocab.encode(text).tolist(), "size": self.session.vocab.size}

    def check(self) -> dict[str, Any]:
        report = runtimes.check(self.folder, threads=1)
        return {
            "passed": report.passed,
            "tolerance": report.tolerance,
            "mean_tolerance": report.mean_tolerance,
        }


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


class HttpServer:
    """The streams of a server of one model."""

    tolerance, goes_on = 1e-3, True

    def __init__(self, at: str) -> None:
        self.client = httpx.Client(base_url=at, timeout=60, verify=False, trust_env=False)
        self.ids: dict[str, str] = {}
        self.signed: set[str] = set()  # files

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        return getattr(self, op, lambda **_: LACKS)(**given)

    def close(self) -> None:
        self.client.close()

    def post(self, path: str, body: dict[str, Any] | bytes, method: str = "POST") -> dict[str, Any]:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = self.client.request(method, path, **content)  # type: ignore[arg-type]
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
        drawn = answer["tokens"][answer["appended"] :]
        texts = answer["texts"][answer["appended"] :]
        return {
            "tokens": drawn,
            "text": answer["text"] if not answer["appended"] else "".join(texts),
            "ended": answer["finish_reason"],
            "positions": answer["positions"],
        }

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

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.at: dict[str, int] = {}
        self.names: dict[str, str] = {}
        self.count = 0
        self.loop = asyncio.new_event_loop()
        self.thread = ThreadPoolExecutor(1)  # a browser under test keeps an event loop in the main thread

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        return getattr(self, op, lambda **_: LACKS)(**given)

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
    def of(cls, artefact: Path, folder: Path, *, rounds: bool = False) -> Reference:
        """The answers for an artefact. Python's own sessions must give them, too.

        rounds: for numbers of few bits, whose rounding depends on where a text is cut. Then a session that
        cuts texts as all implementations do is the reference.
        """
        reader = PythonSession(artefact)
        session = reader.session
        recording = read_recording(session.vocab.size)
        if session.spec.form != "ring":  # type: ignore[union-attr]
            recording = [line for line in recording if "f" not in (line.get("as"), line.get("stream"))]
        truth: Implementation = PythonSession(artefact) if rounds else Naive(session)

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

    def check(self, implementation: Implementation, scratch: Path) -> set[str]:
        """Compares every answer; then Python continues what the implementation has saved in `scratch`.

        Returns the operations that were compared.
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
    ) -> set[str]:
        lost: set[str] = set()
        compared: set[str] = set()
        for line, expected in answers:
            streams = {line.get("stream"), line.get("as")} - {None}
            lacks = "lacks" in expected or lost & streams
            answer = LACKS if lacks else implementation.ask(**with_folder(line, scratch, self.folder))
            if "lacks" in answer:
                lost |= streams
                continue
            assert "error" not in answer, (line, answer)
            compare(answer, expected, implementation, line)
            compared.add(line["op"])
        return compared


def with_folder(line: dict[str, Any], scratch: Path, python: Path) -> dict[str, Any]:
    """An operation with the path of its file. Python's files are called `python-NAME`."""
    if "file" not in line:
        return line
    name = line["file"].removeprefix("python-")
    return line | {"file": str((scratch if name == line["file"] else python) / name)}


def compare(
    answer: dict[str, Any], expected: dict[str, Any], implementation: Implementation, line: dict[str, Any]
) -> None:
    """Every value of an answer is that of the reference.

    Where the reference has no number, any will do. Only servers must know log p of the first tokens.
    """
    for name in answer.keys() & expected.keys():
        mine, right = answer[name], expected[name]
        if name in ("logits", "log_probs"):
            found = np.array([np.nan if value is None else value for value in mine], np.float64)
            assert found.shape == np.shape(right), (line, name)
            needed = ~np.isnan(right)
            if name == "log_probs" and "server" not in answer:
                first = np.arange(len(right)) % len(line["tokens"][0]) == 0
                needed &= ~(first & np.isnan(found))
            assert np.abs(found - right)[needed].max(initial=0) <= implementation.tolerance, (line, name)
            continue
        if implementation.goes_on and name == "text":
            mine, right = mine.rstrip("\ufffd"), right.rstrip("\ufffd")
        if implementation.goes_on and name == "pieces":
            mine, right = mine[:-1], right[:-1]
        assert mine == right, (line, name)
