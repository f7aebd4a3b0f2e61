"""The GPU report: every end of a part is a result, nothing private is kept, and the tests are collected."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks.cases import gpu
from benchmarks.gpu import private
from benchmarks.gpu import report as module
from benchmarks.gpu.private import Scrubber
from benchmarks.gpu.report import PARTS, Part, gpu_report
from benchmarks.harness import matching
from runtimes.base.errors import UserError
from tests.benchmarks.conftest import call

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "gpu-report.md"


def python(name: str, code: str, minutes: float = 1, silent: float | None = None) -> Part:
    return Part(name=name, command=(sys.executable, "-c", code), minutes=minutes, silent=silent)


def test_every_end_of_a_part_is_a_result(tmp_path: Path) -> None:
    parts = [
        python("right", "print('all is well')"),
        python("wrong", "raise SystemExit(3)"),
        python("broken", "import os; os.kill(os.getpid(), 11)"),
        python("silent", "import time; time.sleep(600)", silent=0.3),
        python("long", "import time\nwhile True: print(time.time()); time.sleep(0.01)", minutes=0.02),
        Part(name="missing", command=("a-program-that-nobody-has",), minutes=1),
        python("last", "print('still here')"),
    ]
    ended = {part.name: part.how for part in gpu_report(tmp_path / "report", parts)}
    assert ended == {
        "right": "exit code 0",
        "wrong": "exit code 3",
        "broken": "ended by SIGSEGV",
        "silent": "stopped after 0.3 seconds without output",
        "long": "stopped at its limit",
        "missing": "a-program-that-nobody-has is not installed",
        "last": "exit code 0",
    }
    page = (tmp_path / "report" / "report.md").read_text()
    assert "| broken | ended by SIGSEGV |" in page
    assert re.search(r"\| right \| exit code 0 \| \d+ \| all is well \|", page)
    with tarfile.open(tmp_path / "report" / "report.tar.gz") as archive:
        members = archive.getmembers()
    assert members[0].name == "gpu-report/report.md"
    assert "gpu-report/logs/last.txt" in [member.name for member in members]
    assert {(member.uname, member.gname, member.uid) for member in members} == {("", "", 0)}


@pytest.mark.slow  # it waits for a hang
def test_tests_go_on_after_a_crash_and_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, time\n"
        "def test_a(): pass\n"
        "def test_b(): os.kill(os.getpid(), 11)\n"
        "def test_c(): time.sleep(600)\n"
        "def test_d(): assert 0\n"
    )
    monkeypatch.setattr(module, "ROOT", tmp_path)
    words = (sys.executable, "-m", "pytest", "test_it.py", "-v", "-c", os.devnull, "--rootdir", str(tmp_path))
    words = (*words, "-p", "no:cacheprovider", "-p", "no:schemathesis")
    (ended,) = gpu_report(tmp_path / "out", [Part(name="tests", command=words, minutes=5, silent=4)])
    crashed, hung, last = ended.how.split("; ")
    assert crashed == "ended by SIGSEGV in test_it.py::test_b"
    assert hung == "stopped after 4 seconds without output in test_it.py::test_c"
    assert last == "exit code 1"
    log = (tmp_path / "out" / "logs" / "tests.txt").read_text()
    assert "test_it.py::test_a PASSED" in log
    assert "test_it.py::test_d FAILED" in log


def test_ctrl_c_keeps_what_is_there(tmp_path: Path) -> None:
    out, begun = tmp_path / "report", tmp_path / "begun"
    code = (
        "from pathlib import Path; from benchmarks.gpu.report import Part, gpu_report; import sys\n"
        "parts = [Part(name='one', command=('echo', 'found'), minutes=1),"
        " Part(name='two', command=('sh', '-c', 'touch $0 && sleep 600', sys.argv[2]), minutes=5)]\n"
        "gpu_report(Path(sys.argv[1]), parts)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(out), str(begun)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    while not begun.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert "| two | interrupted |" in (out / "report.md").read_text()
    with tarfile.open(out / "report.tar.gz") as archive:
        assert "gpu-report/logs/one.txt" in archive.getnames()


def test_only_a_report_is_replaced(tmp_path: Path) -> None:
    parts = [python("one", "print(1)")]
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"no report\.md"):
        gpu_report(tmp_path, parts)
    with pytest.raises(UserError, match=r"no report\.md"):
        gpu_report(tmp_path, parts, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    gpu_report(tmp_path / "report", [python("old", "print(1)")])
    gpu_report(tmp_path / "report", parts, force=True)
    assert [path.name for path in (tmp_path / "report" / "logs").iterdir()] == ["one.txt"]
    result = call("gpu-report", "--out", tmp_path / "new", "--minutes", 0)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_every_side_that_a_part_names_exists() -> None:
    for part in PARTS:
        names = [part.command[at + 1] for at, word in enumerate(part.command) if word == "--only"]
        assert not names or matching(names, gpu.NAMES)
        assert f"`{part.name.removesuffix('-details')}`" in GUIDE.read_text("utf-8")


SECRETS = {
    "PRIVATE_API_TOKEN": "s3cr3t",
    "PRIVATE_DATABASE": "postgres://annabel:pw@10.1.2.3/customers",
    "PRIVATE_FOLDER": "/srv/customers/acme/weights/model.bin",
    "PRIVATE_HOST": "annabels-box",
    "PRIVATE_NAME": "annabel",
    "PRIVATE_GPU": "GPU-01234567-89ab-cdef-0123-456789abcdef",
    "PRIVATE_MAIL": "annabel@example.com",
}
WORDS = ("s3cr3t", "postgres", "customers", "acme", "annabel", "89ab-cdef", "clients")
LEAK = """
import json, os
values = [value for name, value in os.environ.items() if name.startswith("PRIVATE_")]
text = " and ".join([*values, os.getcwd(), os.environ["HOME"] + "/clients/acme/model.bin"])
print(text)
open("results.jsonl", "w").write(json.dumps({"rows": [{text: text, "ms": 1.5}]}) + "\\n")
"""


def test_nothing_private_is_in_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home-of-annabel"
    home.mkdir()
    for name, value in {**SECRETS, "HOME": str(home), "USER": "annabel", "LOGNAME": "annabel"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(private.socket, "gethostname", lambda: "annabels-box")
    monkeypatch.chdir(home)
    gpu_report(home / "report", [python("leaks", LEAK)])
    files = {path.name: path.read_bytes() for path in (home / "report").rglob("*") if path.is_file()}
    with tarfile.open(home / "report" / "report.tar.gz") as archive:
        for member in archive.getmembers():
            stream = archive.extractfile(member)
            assert stream is not None
            files[f"packed {member.name}"] = member.name.encode() + stream.read()
    assert {"report.md", "results.jsonl", "leaks.txt", "packed gpu-report/results.jsonl"} <= set(files)
    for name, content in files.items():
        text = content.decode("utf-8", "replace").lower()
        assert [word for word in (*WORDS, str(tmp_path)) if word in text] == [], name
    assert "model.bin" in files["leaks.txt"].decode()  # file names may stay
    assert json.loads(files["results.jsonl"])["rows"][0]["ms"] == 1.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see /home/eve/x.py, line 3", "see <folder>/x.py, line 3"),
        ("/usr/lib/libcuda.so.1 and /data/run/x", "/usr/lib/libcuda.so.1 and <folder>/x"),
        ("PATH=/usr/bin/:/srv/secret/bin/", "PATH=/usr/bin/:<folder>/"),
        ("https://example.org/a/b stays", "https://example.org/a/b stays"),
        ("Read file:///data/acme/x.py", "Read file://<folder>/x.py"),
        ("2 and/or 3 GB/s", "2 and/or 3 GB/s"),
        ("TensorRT 10.3.0.26 on eve-box", "TensorRT 10.3.0.26 on <host>"),
        ("the max of Max", "the max of Max"),
        ("Eve said evening", "<user> said evening"),
        ("GPU-01234567-89ab-cdef-0123-456789abcdef is busy", "<unique> is busy"),
        (r"C:\Users\eve\model.onnx", "<folder>/model.onnx"),
    ],
)
def test_what_is_taken_out_and_what_stays(text: str, expected: str) -> None:
    scrub = Scrubber(words={"eve": "<user>", "eve-box": "<host>"}, parts={})
    assert scrub(text) == expected


def test_a_login_number_is_not_scrubbed_from_figures() -> None:
    environment = {"XDG_SESSION_ID": "1234", "XDG_SESSION_CLASS": "user", "WEB_SESSION": "c00k1e"}
    scrub = private.scrubber({}, environment=environment)
    assert scrub("3.1234e-05 nats for each user, c00k1e") == "3.1234e-05 nats for each user, <environment>"


def test_the_report_runs_every_gpu_test() -> None:
    marked = "mark" + ".gpu"
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if marked in path.read_text("utf-8")]
    assert {path.parent for path in files} == {ROOT / "tests" / "gpu"}
