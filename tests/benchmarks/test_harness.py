"""Timing in turns, the history, comparisons and the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine, measure
from benchmarks.cases import load, load_case
from benchmarks.history import append, newest, read_results
from benchmarks.machine import checkout, commit, history_file, machine_facts, versions
from benchmarks.measure import measure_limits, take_turns, timing
from benchmarks.serving.load import LoadError, Stream
from runtimes.base.errors import ArtefactError, UserError
from tests.benchmarks.conftest import a_result, call
from tests.clock import set_clock

ROOT = Path(__file__).parents[2]


def test_sides_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    set_clock(monkeypatch, measure, sleep=lambda seconds: order.append("-"))
    sides = {name: lambda name=name: order.append(name) for name in "ab"}
    times = take_turns(sides, repeats=5, warmup=1, turns=2)
    assert "".join(order) == "-aaa-bbb-aaaa-bbbb"  # a rest, one warm-up call, then 2 and 3 timed ones
    assert [len(times[name]) for name in "ab"] == [5, 5]


def test_a_timing_has_median_and_extremes() -> None:
    assert timing([4.0, 1.0, 10.0], per=2) == {"median": 2, "fastest": 0.5, "slowest": 5, "repeats": 3}


def test_limits_are_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def ticking() -> float:
        now[0] += 0.25
        return now[0]

    set_clock(monkeypatch, measure, perf_counter=ticking)  # every call takes a quarter of a second
    limits = measure_limits(1)
    assert limits["read_bytes"] == pytest.approx(4 * measure.READ_BYTES)
    assert limits["multiply_adds"] == pytest.approx(4 * measure.MATRIX_SIDE**3)


def test_machine_facts_are_plain_and_name_no_host_or_path() -> None:
    text = json.dumps([machine_facts(), versions()], allow_nan=False)
    assert json.loads(text)[0]["cpu"]
    assert json.loads(text)[1]["onnxruntime"]
    assert "/home" not in text
    assert __import__("platform").node() not in text


def test_a_result_is_appended_as_it_is_printed(tiny: Any, tmp_path: Path) -> None:
    history = tmp_path / "new" / "history.jsonl"
    options = ("load", "--config", "tiny", "--repeats", 1, "--threads", 1, "--history", history)
    result = call("run", *options, "--json")
    assert result.exit_code == 0, result.output
    (document,) = read_results(history)
    assert document == json.loads(result.stdout)
    assert document["command"] == "python -m benchmarks run load --config tiny --repeats 1 --threads 1"
    assert (document["config"], document["threads"]) == ("tiny", 1)


def test_what_fails_while_it_is_measured_leaves_no_history(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "artefact_of", lambda *_: sys.exit(143))
    call("run", "load", "--config", "tiny", "--history", tmp_path / "history.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_history_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append(path, {"case": "one"})
    before = path.read_text()
    resource = pytest.importorskip("resource")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(UserError, match="could not be written"):
            append(path, {"case": "two"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == before


def test_the_history_is_that_of_a_checkout_or_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment often lies in the checkout of another project, whose commit says nothing here."""
    monkeypatch.chdir(ROOT / "docs")
    assert history_file() == ROOT / "benchmarks" / "history.jsonl"
    monkeypatch.chdir(tmp_path)
    assert history_file() == Path("benchmark-history.jsonl")
    monkeypatch.chdir(ROOT)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n', encoding="utf-8")
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "benchmarks" / "machine.py"))
    assert (checkout(), commit(), history_file()) == (None, None, Path("benchmark-history.jsonl"))


def test_measurements_are_no_change_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement adds to the history, and the next one is of the same code."""
    (tmp_path / "benchmarks").mkdir()
    for name in ("code.py", "benchmarks/history.jsonl"):
        (tmp_path / name).write_text("1\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "a")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr("benchmarks.machine.checkout", lambda: tmp_path)
    clean = commit()
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "benchmarks/history.jsonl").write_text("1\n2\n")
    assert commit() == clean
    (tmp_path / "code.py").write_text("2\n")
    assert commit() == f"{clean}+"


NEW = "2026-11-02T10:00:00+00:00"


def with_token(milliseconds: float, **changes: Any) -> dict[str, Any]:
    row = {"side": "artefact", "open_ms": timing([milliseconds])}
    return a_result("load", [row, {**row, "side": "run in PyTorch"}], **changes)


def test_the_newest_result_of_an_idle_machine_is_published() -> None:
    busy = {"cpu": "A", "cpus": 2, "busy_cpus": 0.5}
    history = [
        with_token(1),
        with_token(2, time=NEW),
        with_token(3, time=NEW, config="small"),
        with_token(4, time=NEW, threads=1),
        with_token(5, time=NEW, machine=busy),
    ]

    def found(**filters: str) -> list[float]:
        split = {name: text.split(",") for name, text in filters.items()}
        return [row["open_ms"]["median"] for row, _ in newest(history, "load", split)]

    assert found(config="tiny", side="artefact") == [2]
    assert found(config="tiny") == [2, 2]
    assert found(config="small,tiny", side="artefact") == [3, 2]
    assert found(config="tiny", threads="1", side="artefact") == [4]
    assert found(config="tiny", side="artefact", busy="yes") == [5]
    assert found(config="tiny", side="artefact", commit="0123456789abcdef+") == [2]
    with pytest.raises(
        ArtefactError, match=r"no result of load config=large; run `python -m benchmarks run load`"
    ):
        found(config="large")


def write(path: Path, *documents: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_two_commits_are_compared(tmp_path: Path) -> None:
    before, after = with_token(2, commit="aaaa1111"), with_token(1, commit="bbbb2222+", time=NEW)
    after["rows"][1]["side"] = "another"
    history = write(tmp_path / "history.jsonl", before, after)
    report = json.loads(call("compare", "aaaa", "2026-11-02", "--history", history, "--json").stdout)
    (change,) = report["changes"]
    assert (change["row"], change["timing"], change["ratio"]) == ("side artefact", "open_ms", 0.5)
    assert [(row["row"], row["only_in"]) for row in report["unmatched"]] == [
        ("side run in PyTorch", "BEFORE"),
        ("side another", "AFTER"),
    ]
    assert report["warnings"] == []
    other = write(tmp_path / "other.jsonl", with_token(1, versions={"onnxruntime": "1.32"}))
    text = call("compare", history, other).stdout
    assert text.startswith("warning: the machines differ")
    assert "0.500" in call("compare", "aaaa", "bbbb", "--history", history).stdout


BAD = [
    (("run", "sliding-window", "--config", "huge"), "--config is 'huge'; give one of demo, tales, small"),
    (("run", "sliding-window", "--lengths", "64,0"), "--lengths is '64,0'; give numbers from 1 to 16384"),
    (("run", "load", "--threads", "4096"), "--threads is 4096; expected "),
    (("run", "latency", "--plot", "result.pdf"), "ends in .png"),
    (("run", "latency", "--plot", "no/such/folder/result.png"), "No such file or directory"),
    (("run", "gpu", "--only", "engine"), "'engine' is not a name of a part; give one of tensorrt-native"),
    (("run", "load", "--history", "."), "which is a folder; give a file name"),
    (("compare", "20", "2026-11-01"), "is neither a file with results nor a commit or date"),
    (("compare", "wrong.jsonl", "wrong.jsonl"), "line 1 of wrong.jsonl is not a result"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=range(len(BAD)))
def test_bad_input_is_one_sentence(
    words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.jsonl").write_text("[1]\n")
    if "gpu" not in words:
        monkeypatch.setattr(load_case(words[1]) if words[0] == "run" else measure, "run", None, raising=False)
    result = call(*words)
    assert result.exit_code == 2
    assert not result.stdout
    assert result.stderr.startswith("Error: ")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_plot_is_replaced_only_with_force(measured: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    plot.write_text("mine")
    options = ("sliding-window", "--config", "tiny", "--lengths", "8", "--plot", plot)
    assert call("run", *options, "--history", tmp_path / "history.jsonl").exit_code == 2
    assert plot.read_text() == "mine"
    measured(*options, "--force")
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_help_is_cheap() -> None:
    code = (
        "import sys, benchmarks.__main__; "
        "sys.exit(sorted({'torch', 'onnx_ir', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKENS = [b'data: {"choices":[{"text":" %d","finish_reason":null}]}\n\n' % token for token in (7, 12)]
LAST = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def sent(*events: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + end


def read(data: bytes, size: int) -> Stream:
    """A stream of the load process after it has read these bytes, `size` at a time."""
    pieces = [data[at : at + size] for at in range(0, len(data), size)] + [b""]
    stream = Stream.__new__(Stream)
    stream.events, stream._bytes = 0, bytearray()
    for piece in pieces:
        stream.socket = type("Received", (), {"recv": lambda self, count, piece=piece: piece})()
        assert stream.read() == (not piece)
    return stream


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_counted_however_they_arrive(size: int) -> None:
    stream = read(sent(TOKENS[0], TOKENS[1] + LAST, DONE), size)  # two events in one chunk
    assert (stream.events, stream.texts()) == (4, [" 7", " 12"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (sent(*TOKENS, LAST, DONE, end=b""), "before its answer was whole"),
        (sent(*TOKENS, LAST), "a stream has no end"),
        (sent(TOKENS[0], b'data: {"error":{"message":"no"}}\n\n', DONE), "a stream has failed"),
        (b"HTTP/1.1 429 No\r\nContent-Length: 2\r\n\r\nno", "429: no"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read(data, 1000).texts()
