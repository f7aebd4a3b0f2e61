"""Nothing private is in a report: not in its page, not in what steps printed, not in the archive."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.first_hour import private
from benchmarks.first_hour.catalogue import Step
from benchmarks.first_hour.private import Scrubber
from benchmarks.first_hour.run import first_hour

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


def test_a_step_that_says_everything_leaves_nothing(
    toy: Callable[..., Step], machine: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home-of-annabel"
    home.mkdir()
    for name, value in {**SECRETS, "HOME": str(home), "USER": "annabel", "LOGNAME": "annabel"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(private.socket, "gethostname", lambda: "annabels-box")
    monkeypatch.chdir(home)
    first_hour(home / "report", [machine, toy("leaks")], limit_minutes=10)
    files = {path.name: path.read_bytes() for path in (home / "report").rglob("*") if path.is_file()}
    with tarfile.open(home / "report" / "report.tar.gz") as archive:
        for member in archive.getmembers():
            stream = archive.extractfile(member)
            assert stream is not None
            files[f"packed {member.name}"] = member.name.encode() + stream.read()
    assert len(files) == 11  # the report, two pages, two printed texts; these again packed; the archive
    for name, content in files.items():
        text = content.decode("utf-8", "replace").lower()
        found = [word for word in (*WORDS, str(tmp_path)) if word in text]
        assert found == [], name
    assert "model.bin" in files["leaks.txt"].decode()  # what a file is called may stay


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
        (r"C:\Users\eve\model.onnx", "<folder>/model.onnx"),
    ],
)
def test_what_is_taken_out_and_what_stays(text: str, expected: str) -> None:
    scrub = Scrubber(words={"eve": "<user>", "eve-box": "<host>"}, parts={})
    assert scrub(text) == expected


def test_the_number_of_a_login_is_not_taken_out_of_figures() -> None:
    environment = {"XDG_SESSION_ID": "1234", "XDG_SESSION_CLASS": "user", "WEB_SESSION": "c00k1e"}
    scrub = private.scrubber({}, environment=environment)
    assert scrub("3.1234e-05 nats for each user, c00k1e") == "3.1234e-05 nats for each user, <environment>"
