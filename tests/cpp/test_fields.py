"""Readers in other languages read no field of an artefact that the pages on the format do not name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cpp.program import CPP, ROOT
from tests.docs.pages import FORMAT

NAMED = set(re.findall(r"`([A-Za-z_][\w.]*)`", FORMAT))
# A file of the library `tokenizers`, whose fields are not this project's to specify.
OF_OTHERS = {"bpe.hpp"}
OF_TABLES = {"absent", "axes", "circular", "holds", "tensors"}  # of format_tables.hpp
# A string that a reader of JSON is asked for: a key of a call, or the second argument of a helper.
CPP_FIELD = re.compile(r'(?:\.at|\.find|\bread|\bword)\((?:document, )?"([A-Za-z_][^"]*)"')
WEB_FIELD = re.compile(r"\b(?:spec\.model|spec\.rule|spec|facts)\.(?!js)([a-z][a-z0-9_]*)\b")


def fields(path: Path, expression: re.Pattern[str]) -> set[str]:
    return set(expression.findall(path.read_text(encoding="utf-8")))


def test_cpp_reads_only_what_the_page_names() -> None:
    files = [path for path in (CPP / "src").glob("*.?pp") if path.name not in OF_OTHERS]
    read = {name: path.name for path in files for name in fields(path, CPP_FIELD)}
    assert {"digest", "sha256", "vocab_size", "segments", "lower_case", "layout"} <= set(read)
    assert {name: file for name, file in read.items() if name not in NAMED | OF_TABLES} == {}


def test_the_web_module_reads_only_what_the_page_names() -> None:
    files = [path for path in (ROOT / "web" / "src").rglob("*.js") if "node_modules" not in path.parts]
    if not files:
        pytest.skip("there is no module in web/src")
    read = {name: path.name for path in files for name in fields(path, WEB_FIELD)}
    assert {"vocab_size", "segment", "digest"} <= set(read)
    own = {"state", *OF_TABLES}  # the inputs that are memory, which `readSpec` takes out of the list
    assert {name: file for name, file in read.items() if name not in NAMED | own} == {}
