"""What the commands of a runtime refuse: exit code 2, one sentence, and nothing written.

A row is what the sentence must name (options, fields, files, values), and the commands. How the sentence puts
it is free.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.commands import refused, xl

# Files in the working folder of each command.
LINES = [
    "{",
    "[1, 2.5]",
    '{"text": "a", "ids": [1]}',
    '{"text": "a", "context": "b"}',
    "[true]",
    "3",
    "[" * 9999,
]
FILES: dict[str, bytes] = {
    "some.txt": b"The class of the class",
    "empty.txt": b"",
    "latin.txt": b"caf\xe9 au lait",
    "chinese.txt": "ab一".encode(),
    "abc.txt": b"abc",
    "outside.jsonl": b'"The "\n\n[99999]',
    "symbol.jsonl": '"The "\n\n"\u4e16"'.encode(),
    "comma.jsonl": b'{"text": "a",}\n{"text": "b"}',
    **{f"line-{number}.jsonl": f'"The "\n{line}'.encode() for number, line in enumerate(LINES)},
}
EVAL, GENERATE = "eval {ring} --text", "generate {ring} --tokens 3"
PROMPT = f"{GENERATE} --prompt a"
NO_TEXT = "eval {run} --text absent.txt --losses"  # refused before the text is read
TABLE: list[tuple[str, ...]] = [
    # usage
    ("'expotr' export", "expotr run"),
    ("'zzz'", "zzz"),
    ("--tetx --text", "eval x --tetx y"),
    ("--tokens", "eval x --tokens y"),
    ("--vresion --version", "--vresion"),
    ("--text RUN/", "eval x"),
    ("'PATH'", "check"),
    ("--threads", "check x --threads 0"),
    # folders
    ("absent", "check absent", "info absent", "eval absent --text some.txt", "generate absent --prompt a"),
    ("spec.json config.json", "check .", "info .", "eval . --text some.txt", "generate . --prompt a"),
    ("absent", "set absent --top-p 0.5"),
    ("--", "set {ring}"),
    ("run artefact export", "check {run}"),
    # texts
    *((names, f"eval {{ring}} --text {rest}", f"eval {{run}} --text {rest}") for names, rest in (
        ("2 tokens", "empty.txt"),
        ("latin.txt 0xe9", "latin.txt"),
        ("'一'", "chinese.txt"),
        ("--lanes 3", "abc.txt --lanes 3"),
    )),
    ("none.txt", f"{EVAL} none.txt", f"{GENERATE} --prompts none.txt", "score {ring} --input none.txt"),
    ("directory read", f"{EVAL} .", "score {ring} --input ."),
    ("ids.npy --ids", f"{EVAL} ids.npy"),
    ("standard input --ids", f"{EVAL} - --ids"),
    ("ids.npy 103", f"{EVAL} ids.npy --ids"),
    ("bos", "score {ring} --input - --bos"),
    # settings of eval
    ("--segment 9", f"{EVAL} some.txt --segment 4,9"),
    ("--segment '0'", "eval {run} --text some.txt --segment 0"),
    ("--mem-len 64 16", f"{EVAL} some.txt --mem-len 16,64"),
    ("--mem-len 'x'", "eval {run} --text some.txt --mem-len x"),
    ("--clamp-len", f"{EVAL} some.txt --clamp-len 5"),
    ("mem_len", "eval {run} --text some.txt --mem-len 99999999"),
    ("1,800", "eval {run} --text some.txt --segment 1:900:1 --mem-len 1,2"),
    ("GiB", "eval {run} --text some.txt --mem-len 16777216 --lanes 9000"),
    ("losses.txt .npz .csv", f"{NO_TEXT} losses.txt"),
    ("folder.csv", f"{NO_TEXT} folder.csv"),
    ("absent/losses.csv", f"{NO_TEXT} absent/losses.csv"),
    ("/dev/null/losses.csv", f"{NO_TEXT} /dev/null/losses.csv"),
    ("--losses 2", f"{NO_TEXT} losses.csv --mem-len 4,8"),
    # prompts
    ("tokens", f"{GENERATE} --prompt ''"),
    ("'一'", f"{GENERATE} --prompt 一"),
    ("--prompts", GENERATE),
    ("--prompt-ids '1,x'", f"{GENERATE} --prompt-ids 1,x"),
    ("prompt 99999", f"{GENERATE} --prompt-ids 99999"),
    ("line 3 outside.jsonl 99999", f"{GENERATE} --prompts outside.jsonl"),
    ("line 3 symbol.jsonl", f"{GENERATE} --prompts symbol.jsonl"),
    ("line 1 --format", f"{GENERATE} --prompts comma.jsonl"),
    ("line 2", *(f"{GENERATE} --prompts {file}" for file in FILES if file.startswith("line-"))),
    # options of generate
    ("stop string", f"{PROMPT} --stop ''"),
    ("/dev/null/memory.npz", f"{PROMPT} --save-memory /dev/null/memory.npz"),
    ("--adopt-streams --load-memory", f"{PROMPT} --adopt-streams"),
    *((file, f"{PROMPT} --load-memory {file}")
      for file in ("absent.npz", "some.txt", "abc.txt", "empty.txt", "chinese.txt")),
    *((f"--beams {o.split()[0]}", f"{PROMPT} --beams 2 {o}")
      for o in ("--stop x", "--best-of 2", "--temperature 0.2", "--seed 9")),
    ("--length-penalty", f"{PROMPT} --length-penalty 0.5"),
    ("--save-memory", f"{PROMPT} --best-of 2 --save-memory new"),
    ("device cuda", *(f"{command} --device gpu" for command in (
        "check {ring}", f"{EVAL} some.txt", PROMPT, "score {ring} --input some.txt"
    ))),
]  # fmt: skip
ROWS = [(command, names.split()) for names, *given in TABLE for command in given]


@pytest.mark.parametrize(("command", "names"), ROWS, ids=[command for command, _ in ROWS])
def test_what_a_command_cannot_do_is_one_sentence(
    command: str,
    names: list[str],
    run: Path,
    artefacts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, content in FILES.items():
        Path(file).write_bytes(content)
    Path("folder.csv").mkdir()
    np.save("ids.npy", np.arange(2000))
    before = sorted(tmp_path.iterdir())
    result = xl(*(word.format(ring=artefacts["ring"], run=run) for word in shlex.split(command)))
    refused(result, *names)
    assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before
