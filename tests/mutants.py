"""Measures the tests: puts one small random fault into a product file, and runs the nearest tests.

`make mutants SEEDS=150` uses the seeds 0 to 149. A seed always makes the same fault in the same tree. Faults
are only made in a temporary copy of the tree. A survivor is printed as a diff: a test is missing, or nobody
can see the difference. Most of what nobody can see is never changed: texts (docstrings, messages, help),
annotations, imports, `__all__`, assertions and log lines.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("runtimes/", "trainer/", "xl_export/")
NEAREST = 12  # files of tests for one fault; the first failure ends the run, so more cost little
NO_TESTS = 5  # pytest's exit code if all tests of the files are slow
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # a fault may ask for any amount

PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {**dict(PAIRS), **{b: a for a, b in PAIRS}}
# Deleting another kind of statement leaves a name undefined, which any test would notice.
DELETABLE = (ast.Expr, ast.AugAssign, ast.Return, ast.Continue, ast.Break, ast.Delete, ast.If)
UNSEEN_FIELDS = ("annotation", "returns", "type_params")
UNSEEN_KEYWORDS = ("help", "metavar", "show_default", "strict", "stacklevel")
UNSEEN_CALLS = re.compile(r"(log|logger|logging|warnings)\.\w+|\w*(cast|TypeVar|Error|Refusal)")
Edit = tuple[str, ast.expr | ast.stmt, str]  # its kind, the node, and the text that takes its place


def edits(node: ast.AST) -> Iterator[Edit]:
    """Every edit of a node and of what it contains."""
    match node:
        case (
            ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant())
        ):
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Call(func=func) | ast.Expr(value=ast.Call(func=func)):
            if UNSEEN_CALLS.fullmatch(ast.unparse(func)):
                return
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right):
            yield "comparison", node, ast.unparse(ast.Compare(left, [FLIPPED[type(op)]()], right))
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and/or", node, ast.unparse(ast.BoolOp(other, values))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            sign = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
            yield "+/-", node, ast.unparse(ast.BinOp(left, sign, right))
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", node, str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", node, str(2 * value or 1.0)
        case ast.Call():
            yield from (("argument", node, text) for text in calls_with_other_arguments(node))
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", node, "pass"
    if isinstance(node, ast.Raise):
        yield "raise", node, "pass"  # a kind of its own: tests forget refusals most often
        return  # what is raised is mostly wording
    if isinstance(node, DELETABLE):
        yield "statement", node, "pass"
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            unseen = field in UNSEEN_FIELDS or getattr(child, "arg", None) in UNSEEN_KEYWORDS
            foreign = field == "decorator_list" and not ast.unparse(child).startswith("click.")
            if isinstance(child, ast.AST) and not unseen and not foreign:
                yield from edits(child)


def calls_with_other_arguments(node: ast.Call) -> Iterator[str]:
    """The call without one of its arguments, and with its first two exchanged."""
    args, keywords = node.args, node.keywords
    for keyword in keywords:
        if keyword.arg not in UNSEEN_KEYWORDS:
            yield ast.unparse(ast.Call(node.func, args, [each for each in keywords if each is not keyword]))
    if args:
        yield ast.unparse(ast.Call(node.func, args[:-1], keywords))
    if len(args) > 1 and not any(isinstance(each, ast.Starred) for each in args[:2]):
        yield ast.unparse(ast.Call(node.func, [args[1], args[0], *args[2:]], keywords))


def edited(source: str, edit: Edit) -> str:
    """The source after an edit; everything else is as it was, character for character."""
    _, node, text = edit
    lines = source.encode().splitlines(keepends=True)  # columns of nodes count bytes
    assert node.end_lineno is not None
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + (node.end_col_offset or 0)
    whole = b"".join(lines)
    return (whole[:begin] + text.encode() + whole[end:]).decode()


def choose(seed: int, sources: dict[str, str]) -> tuple[str, str, str]:
    """A random file, the kind of an edit, and the file's source after it."""
    draw = random.Random(seed)
    while True:
        name = draw.choice(sorted(sources))
        found = list(edits(ast.parse(sources[name])))
        if not found:
            continue
        kind = draw.choice(sorted({kind for kind, *_ in found}))
        after = edited(sources[name], draw.choice([edit for edit in found if edit[0] == kind]))
        with contextlib.suppress(SyntaxError):  # for example, an `elif` cannot be deleted
            if ast.dump(ast.parse(after)) != ast.dump(ast.parse(sources[name])):
                return name, kind, after


def nearest_tests(name: str, tests: dict[str, str]) -> list[str]:
    """Files of tests for a module: those with its name, those that import it or run its command, also in
    programs in strings, then the tests of its folder.
    """
    path = Path(name)
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    package, _, last = module.rpartition(".")
    uses = rf"\b(from|import) {module} *(import|as|;|$)|\bfrom {package} import .*\b{last}\b"
    if package.endswith(".cli"):
        uses += rf'|"{last.replace("_", "-")}[" ]'
    ranked = []
    for test, text in tests.items():
        place, folder = Path(test).parent.parts[1:], path.parent.parts
        near = sum(part in folder for part in place) - sum(part not in folder for part in place)
        mirrors = near > 0 and re.match(rf"test_(\w+_)?{path.stem.strip('_')}(_|$)", Path(test).stem)
        rank = 0 if mirrors else 1 if re.search(uses, text, re.M) else 2
        if rank < 2 or near > 0:
            ranked.append((rank, -near, -len(text), test))
    return [test for *_, test in sorted(ranked)[:NEAREST]]


def first_failure(tree: Path, tests: Sequence[str], limit: float) -> str | None:
    """The first test that fails, empty if all pass; None if they take more than `limit` seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "TMPDIR": str(tree.parent)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with everything that the tests have started
            process.wait()
        output.seek(0)
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/[\w/.]+(?:::\w+)*)", output.read(), re.M)
    return "" if code in (0, NO_TESTS) else next(iter(failed), tests[0])


def write(path: Path, source: str) -> None:
    """Writes a module, and removes its compiled form, which knows versions only by size and second."""
    path.write_text(source, encoding="utf-8")
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)


def judge(path: Path, after: str, tree: Path, tests: list[str], limit: float) -> str:
    """The fate of a fault. It is unknown if the test that caught it also fails without it."""
    before = path.read_text("utf-8")
    write(path, after)
    failed = first_failure(tree, tests, limit) if tests else ""
    write(path, before)
    if failed:
        return "caught" if first_failure(tree, [failed], limit) == "" else f"unknown ({failed})"
    return "timed out" if failed is None else "survived"


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes random faults and reports which the tests catch.")
    parser.add_argument("--seeds", type=int, default=150, metavar="N", help="how many (default 150)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (default 0)")
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="seconds of tests for each")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in output.split("\0") if (ROOT / name).is_file()]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "tree"
        for name in names:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
        python = {name: (tree / name).read_text("utf-8") for name in names if name.endswith(".py")}
        sources = {name: text for name, text in python.items() if name.startswith(PRODUCT)}
        tests = {name: text for name, text in python.items() if re.match(r"tests/(.*/)?test_\w+\.py", name)}
        for seed in range(given.first, given.first + given.seeds):
            name, kind, after = choose(seed, sources)
            began = time.monotonic()
            fate = judge(tree / name, after, tree, nearest_tests(name, tests), given.limit)
            counts[fate.partition(" (")[0]] += 1
            print(f"seed {seed}: {fate}, {kind} in {name}, {time.monotonic() - began:.0f} s", flush=True)
            if fate != "caught":
                lines = sources[name].splitlines(), after.splitlines()
                diff = difflib.unified_diff(lines[0], lines[1], name, name, n=2, lineterm="")
                print("\n".join(diff), flush=True)
    share = f"{counts['caught'] / max(1, counts['caught'] + counts['survived']):.0%}"
    print(f"{dict(counts)}; of the faults that were caught or survived, {share} were caught")


if __name__ == "__main__":
    main()
