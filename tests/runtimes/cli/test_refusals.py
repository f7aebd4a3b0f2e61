"""The table of refusals of the command line: exit code 2, and one sentence with these words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.commands import refused, xl

# Files in the working folder of each command. RING, SHIFT and RUN are folders of the tests.
FILES: dict[str, bytes] = {
    "some.txt": b"The class of the class",
    "empty.txt": b"",
    "latin.txt": b"caf\xe9 au lait",
    "chinese.txt": "ab一".encode(),
    "abc.txt": b"abc",
    "outside.jsonl": b'"The "\n\n[99999]',
    "symbol.jsonl": '"The "\n\n"\u4e16"'.encode(),
    "comma.jsonl": b'{"text": "a",}\n{"text": "b"}',
    **{
        f"line-{number}.jsonl": b'"The "\n' + line
        for number, line in enumerate(
            [
                b"{",
                b"[1, 2.5]",
                b'{"text": "a", "ids": [1]}',
                b'{"text": "a", "context": "b"}',
                b"[true]",
                b"3",
                b"[" * 9999,
            ]
        )
    },
}
EVAL, GENERATE = ("eval", "RING", "--text"), ("generate", "RING", "--tokens", 3)
PROMPT = (*GENERATE, "--prompt", "a")
COMMANDS = (
    ("check",),
    ("eval", "--text", "some.txt"),
    ("generate", "--prompt", "a"),
    ("info",),
)
Row = tuple[tuple[object, ...], tuple[str, ...]]

TABLE: dict[str, list[Row]] = {
    "usage": [
        (("expotr", "run"), ("no command 'expotr'", "export was probably meant", "`xl-export --help`")),
        (("zzz",), ("no command 'zzz'", "`xl-export --help`")),
        (("eval", "x", "--tetx", "y"), ("xl-export eval has no option --tetx", "--text was probably meant")),
        (("eval", "x", "--tokens", "y"), ("no option --tokens; `xl-export eval --help` lists all of them.",)),
        (("--vresion",), ("no option --vresion", "--version was probably meant")),
        (("eval", "x"), ("--text is missing; add `--text` and the text to score: a text file such as RUN/",)),
        (("check",), ("missing argument 'PATH'", "`xl-export check --help`")),
        (("check", "x", "--threads", 0), ("Error: --threads is 0; expected a whole number from 1 to 1024.",)),
    ],
    "folders": [
        *(((name, "absent", *more), ("absent",)) for name, *more in COMMANDS),
        *(((name, ".", *more), ()) for name, *more in COMMANDS),
        (("check", "RUN"), ("is a run", "xl-export export")),
    ],
    "eval": [
        *(
            (("eval", kind, "--text", file, *options), words)
            for kind in ("RING", "RUN")
            for file, options, words in (
                ("empty.txt", (), ("fewer than 2 tokens",)),
                ("latin.txt", (), ("latin.txt is not UTF-8 (byte 0xe9)", "Latin-1")),
                ("chinese.txt", (), ("'一'", "character 3")),
                ("abc.txt", ("--lanes", 3), ("Error: --lanes is 3", "1 to 2")),
            )
        ),
        ((*EVAL, "absent.txt"), ("absent.txt", "No such file")),
        ((*EVAL, "."), ("directory",)),
        ((*EVAL, "ids.npy"), ("give --ids if they are",)),
        ((*EVAL, "ids.npy", "--ids"), ("outside the vocabulary",)),
        ((*EVAL, "-", "--ids"), ("standard input is read as text", "give a file with --ids")),
        ((*EVAL, "some.txt", "--segment", "4,9"), ("Error: --segment is 9", "1 to 8", "export")),
        ((*EVAL, "some.txt", "--mem-len", "16,64"), ("--mem-len is 64", "with 16", "export again")),
        ((*EVAL, "some.txt", "--clamp-len", 5), ("--clamp-len is 5", "--clamp-len 5", "the run")),
        *(
            (("eval", "RUN", "--text", "some.txt", *options), words)
            for options, words in (
                (("--mem-len", "x"), ("--mem-len is 'x'", "64,128,256")),
                (("--segment", "0"), ("--segment is '0'", "from 1 on")),
                (("--mem-len", "99999999"), ("mem_len is 99999999",)),
                (("--segment", "1:900:1", "--mem-len", "1,2"), ("1,800 settings",)),
                (("--mem-len", "16777216", "--lanes", 9000), ("GiB",)),
            )
        ),
        # Refused before the text is read.
        *(
            (("eval", "RUN", "--text", "absent.txt", "--losses", name), (name, *words))
            for name, words in (
                ("losses.txt", (".npz or .csv",)),
                ("folder.csv", ("is a folder",)),
                ("absent/losses.csv", ("No such file",)),
                ("/dev/null/losses.csv", ("could not be written",)),
            )
        ),
        (
            ("eval", "RUN", "--text", "absent.txt", "--losses", "losses.csv", "--mem-len", "4,8"),
            ("one setting", "make 2"),
        ),
    ],
    "generate": [
        ((*GENERATE, "--prompt", ""), ("encodes to no tokens; give at least one symbol.",)),
        ((*GENERATE, "--prompt", "一"), ("'一'",)),
        (GENERATE, ("no prompt was given", "--prompts FILE")),
        ((*GENERATE, "--prompt-ids", "1,x"), ("--prompt-ids is '1,x'", "such as 12,7,99")),
        ((*GENERATE, "--prompt-ids", "99999"), ("the prompt has the token id 99999", "0 to")),
        ((*GENERATE, "--prompts", "absent.txt"), ("absent.txt", "No such file")),
        ((*GENERATE, "--prompts", "outside.jsonl"), ("line 3 of outside.jsonl", "has the token id 99999")),
        ((*GENERATE, "--prompts", "symbol.jsonl"), ("line 3 of symbol.jsonl", "is not among the")),
        ((*GENERATE, "--prompts", "comma.jsonl"), ("line 1 of", "--format lines")),
        *(((*GENERATE, "--prompts", file), ("line 2 of",)) for file in FILES if file.startswith("line-")),
        ((*PROMPT, "--stop", ""), ("stop string is empty",)),
        ((*PROMPT, "--save-memory", "/dev/null/memory.npz"), ("could not be written",)),
        ((*PROMPT, "--adopt-streams"), ("--adopt-streams is for --load-memory",)),
        ((*PROMPT, "--load-memory", "absent.npz"), ("absent.npz could not be read",)),
        *(
            ((*PROMPT, "--load-memory", file), (f"{file} is not a file that `save_memory` wrote",))
            for file in ("some.txt", "abc.txt", "empty.txt", "chinese.txt")
        ),
        *(
            ((*PROMPT, *options), ("leave",))
            for options in (
                ("--beams", "2", "--stop", "x"),
                ("--beams", "2", "--best-of", "2"),
                ("--beams", "2", "--temperature", "0.2"),
                ("--beams", "2", "--seed", "9"),
                ("--length-penalty", "0.5"),
                ("--best-of", "2", "--save-memory", "new"),
            )
        ),
    ],
    "device": [
        ((*command, "--device", "gpu"), ("device is 'gpu'; cuda was probably meant",))
        for command in (
            ("check", "RING"),
            (*EVAL, "some.txt"),
            PROMPT,
            ("score", "RING", "--input", "some.txt"),
        )
    ],
    "score": [
        (("score", "RING", "--input", "none.txt"), ("none.txt could not be read",)),
        (("score", "RING", "--input", "."), ("could not be read",)),
        (("score", "RING", "--input", "-", "--bos"), ("bos needs a token", "char vocabulary")),
    ],
    "set": [
        (("set", "RING"), ()),
        (("set", "none", "--top-p", "0.5"), ("none",)),
    ],
}


@pytest.mark.parametrize("name", TABLE)
def test_what_a_command_cannot_do_is_one_sentence(
    name: str, run: Path, artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, content in FILES.items():
        Path(file).write_bytes(content)
    Path("folder.csv").mkdir()
    np.save("ids.npy", np.arange(2000))
    before = sorted(tmp_path.iterdir())
    folders = {"RING": artefacts["ring"], "SHIFT": artefacts["shift"], "RUN": run}
    for words, expected in TABLE[name]:
        result = xl(*(folders.get(str(word), word) for word in words))
        refused(result, *expected)
        assert result.stdout == ""
        assert sorted(tmp_path.iterdir()) == before
