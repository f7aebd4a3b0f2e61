"""Pickles that would run something are refused by name, and nothing runs, in no container."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtimes.base.errors import UserError
from tests.xl_export.importers.forge import (
    call,
    in_every_container,
    name,
    number,
    program,
    text,
    zip_container,
)
from xl_export.importers.pickle.read import read_pickle

# By the name that is called: a shell command and a Python statement → a pickle that runs one of them.
LIVE: dict[str, Callable[[str, str], bytes]] = {
    "os.system": lambda shell, _: call("os.system", text(shell)),
    "posix.system": lambda shell, _: call("posix.system", text(shell)),
    "subprocess.call": lambda shell, _: call(
        "subprocess.call", text(shell), number(-1), *[b"N"] * 6 + [b"\x88", b"\x88"]
    ),
    "builtins.exec": lambda _, statement: call("builtins.exec", text(statement)),
    "builtins.eval": lambda shell, _: call("builtins.eval", text(f"__import__('os').system({shell!r})")),
    "__builtin__.eval": lambda shell, _: call(
        "__builtin__.eval", text(f"__import__('os').system({shell!r})")
    ),
    "builtins.getattr": lambda shell, _: (
        call("builtins.getattr", call("builtins.__import__", text("os")), text("system"))
        + text(shell)
        + b"\x85R"
    ),
    "timeit.timeit": lambda _, statement: call(
        "timeit.timeit", text(statement), text("pass"), name("time.time"), number(1)
    ),
    "runpy._run_code": lambda _, statement: call("runpy._run_code", text(statement), b"}"),
    "code.InteractiveInterpreter": lambda _, statement: call("code.InteractiveInterpreter"),
    "INST": lambda shell, _: b"(" + text(shell) + b"ios\nsystem\n",
    "OBJ": lambda shell, _: b"(" + name("os.system") + text(shell) + b"o",
    "NEWOBJ": lambda shell, _: name("subprocess.Popen") + text(shell) + b"\x85\x81",
    "STACK_GLOBAL": lambda shell, _: text("os") + text("system") + b"\x93" + text(shell) + b"\x85R",
    "dotted": lambda shell, _: (
        b"\x80\x04" + text("subprocess") + text("os.system") + b"\x93" + text(shell) + b"\x85R"
    ),
    "nested": lambda shell, _: b"}" + text("model") + call("os.system", text(shell)) + b"s",
    "dropped": lambda shell, _: call("os.system", text(shell)) + b"0N",
}
NAMED_OTHERWISE = {
    "INST": "os.system",
    "OBJ": "os.system",
    "NEWOBJ": "subprocess.Popen",
    "STACK_GLOBAL": "os.system",
}
NAMED_OTHERWISE |= {"dotted": "subprocess.os.system", "nested": "os.system", "dropped": "os.system"}
RUNS_NOTHING = {"runpy._run_code", "code.InteractiveInterpreter", "NEWOBJ", "subprocess.call"}


def refused(path: Path, data: bytes, *words: str) -> None:
    """One sentence that names the file and holds the words."""
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_pickle(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.endswith(".")
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("kind", LIVE)
def test_what_would_run_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    data = program(LIVE[kind](f"touch {canary}", f"open({str(canary)!r}, 'w').close()"))
    for container, content in in_every_container(data).items():
        refused(
            tmp_path / container,
            content,
            f"calls {NAMED_OTHERWISE.get(kind, kind)},",
            "nothing in it was run",
        )
    assert not canary.exists()
    if kind not in RUNS_NOTHING:  # that it would have run otherwise
        pickle.loads(data)
        assert canary.exists()


UNKNOWN = [
    "nt.system", "os.popen", "os.execv", "pty.spawn", "commands.getoutput", "shutil.rmtree",
    "pathlib.Path.write_text", "builtins.open", "builtins.compile", "builtins.__import__",
    "builtins.getattr", "builtins.setattr", "builtins.globals", "builtins.map", "builtins.type",
    "builtins.super", "builtins.bytearray", "io.open", "io.FileIO", "importlib.import_module",
    "importlib.machinery.SourceFileLoader", "runpy.run_path", "ctypes.CDLL", "ctypes.cdll.LoadLibrary",
    "codecs.decode", "codecs.open", "_codecs.decode", "pip.main", "pip._internal.main",
    "operator.attrgetter", "operator.methodcaller", "functools.partial", "functools.reduce",
    "types.FunctionType", "types.CodeType", "marshal.loads", "pickle.loads", "_pickle.loads", "torch.load",
    "torch.hub.load", "torch.jit.load", "torch.serialization.load", "torch.storage._load_from_bytes",
    "torch._utils._rebuild_sparse_tensor", "torch.ops.load_library", "torch.utils.cpp_extension.load",
    "torch.nn.functional.relu", "torch.nn.modules.module.os.system", "numpy.load", "numpy.f2py.compile",
    "numpy.testing._private.utils.runstring", "copyreg._reconstructor", "copyreg.add_extension",
    "socket.create_connection", "webbrowser.open", "threading.Thread", "multiprocessing.Process",
    "asyncio.run", "sys.exit", "collections.namedtuple", "collections.abc.os", "re.compile",
    "transformers.AutoModel.from_pretrained", "transformers.utils.hub.cached_file",
    "transformers.dynamic_module_utils.exec", "utils.exec", "utils.os.system", "utils.subprocess.Popen",
    "utils.Vocab.__class__", "data.open", "data_utils.get_lm_corpus", "data_utils2.Corpus", "mydata.Corpus",
    "mem_transformer.sub.Model", "argparse.open", "argparse._sys.exit", "x.Y", ".Y",
]  # fmt: skip


@pytest.mark.parametrize("full", UNKNOWN)
def test_no_other_name_is_known(full: str, tmp_path: Path) -> None:
    # To mention it is enough: an unpickler would import it.
    for opcodes in (call(full, text("x")), name(full)):
        refused(tmp_path / "file", program(opcodes), f"calls {full},")
    module, _, attribute = full.partition(".")
    refused(tmp_path / "file", program(text(module) + text(attribute) + b"\x93N\x85R"), f"calls {full},")


def test_a_module_that_is_named_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mem_transformer", "harmless"):
        (tmp_path / f"{module}.py").write_text(
            f"open({str(tmp_path / 'canary')!r}, 'w').close()\nclass Model: pass\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "file").write_bytes(program(call("mem_transformer.Model", b"N")))
    assert read_pickle(tmp_path / "file").name == "mem_transformer.Model"
    refused(tmp_path / "file", program(call("harmless.Model")), "calls harmless.Model,")
    assert "mem_transformer" not in sys.modules
    assert not (tmp_path / "canary").exists()


class Reduced:
    """Pickles as whatever tuple it is given, with iterators for lists."""

    def __init__(self, *reduction: Any) -> None:
        self.reduction = reduction

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple(iter(part) if type(part) is list else part for part in self.reduction)


def test_every_slot_of_a_reduction_is_looked_at(tmp_path: Path) -> None:
    inner = Reduced(os.system, ("true",))
    for trick in (
        Reduced(dict, ((("a", inner),),)),
        Reduced(list, (), None, [inner]),
        Reduced(dict, (), None, None, [("a", inner)]),
        Reduced(dict, (), {"state": inner}),
        Reduced(list, (), {"state": 1}, None, None, os.system),  # a function that sets the state
    ):
        for protocol in (2, 4, 5):
            refused(tmp_path / "file", pickle.dumps(trick, protocol), "calls posix.system,")


@pytest.mark.parametrize(
    ("opcodes", "reason"),
    [
        (b"\x82\x01", "EXT1"),
        (b"\x83\x01\x00", "EXT2"),
        (b"\x84\x01\x00\x00\x00", "EXT4"),
        (b"\x97", "NEXT_BUFFER"),
        (b"]\x98", "READONLY_BUFFER"),
        (b"Pstorage\n", "PERSID"),
        (b"\xff", "is damaged (opcode b'\\xff' unknown)"),
        (b"\x80\x06N", "protocol 6"),
        (text("storage") + b"Q", "persistent id"),
        (
            b"(" + text("storage") + text("torch.FloatStorage") + text("0") + text("cpu") + b"K\x01tQ",
            "persistent id",
        ),
        (b"(" + text("module") + text("os") + text("os.py") + text("import os") + b"tQ", "persistent id"),
        (
            b"(" + text("storage") + name("mem_transformer.Storage") + text("0") + text("cpu") + b"K\x01tQ",
            "mem_transformer.Storage",
        ),
        (
            b"(" + text("storage") + name("torch.FloatStorage") + text("0") + text("cpu") + b"K\x01(K\x01ttQ",
            "view of another",
        ),
        (text("a") + b")R", "calls a str"),
        (b"N)\x81", "calls a NoneType"),
        (call("mem_transformer.Model") + b")R", "calls a mem_transformer.Model"),
        (name("mem_transformer.Model") + b"]R", "not a plain tuple"),
        (name("mem_transformer.Model") + b")}" + text("a") + b"K\x01s\x92", "not a plain tuple"),
        (name("torch.FloatStorage") + b")R", "torch.FloatStorage"),
        (call("builtins.int", text("1")), "builtins.int"),
        (call("_codecs.encode", text("x"), text("rot13")), "rot13"),
        (call("builtins.set", b"K\x01"), "builtins.set"),
        (call("collections.OrderedDict", b"K\x01"), "collections.OrderedDict"),
        (call("collections.OrderedDict", b"}", b"}"), "collections.OrderedDict"),
        (call("torch._utils._rebuild_parameter", b"K\x01"), "torch._utils._rebuild_parameter"),
        (call("torch._utils._rebuild_tensor_v2", b"N"), "torch._utils._rebuild_tensor_v2"),
        (call("numpy.core.multiarray.scalar", b"N", b"N"), "numpy.core.multiarray.scalar"),
        (
            call("numpy.core.multiarray.scalar", call("numpy.dtype", text("f8")) + b")b", b"C\x01\0"),
            "a NumPy number of a type",
        ),
        (text("a") + text("b") + b"a", "appends to a str"),
        (b"]K\x01K\x02s", "sets items of a list"),
        (b"]K\x01b", "attributes to a list"),
        (b"}(K\x01u", "without a value"),
        (b"](K\x01\x90", "members to a list"),
        (b"}]K\x01s", "list as a key"),
        (b"}" + call("mem_transformer.Model") + b"Ns", "mem_transformer.Model as a key"),
        (b"N\x85\x91", "group that it did not begin"),
        (b"t", "group that it did not begin"),
        (b"00", "group that it did not begin"),
        # Every operation that takes a value off the stack, or looks at the top, without one.
        *(
            (opcodes, "more from its stack")
            for opcodes in (
                *(b"", b"a", b"b", b"s", b"Ns", b"R", b"NR", b"\x85", b"N\x86", b"NN\x87", b"Q", b"\x81"),
                *(b"2", b"p0\n", b"q\x00", b"\x94", b"Na", b"(e", b"NNs", b"(u", b"(\x90", b"Nb"),
            )
        ),
        (b"h\x00", "did not remember"),
        (b"Ix\n", "is damaged (invalid literal for int()"),
        (b"Nc\xff\n\xff\n", "is damaged ("),
        (b"U\x01\xff", "not UTF-8"),
        (b"X\x01\x00\x00\x00\xff", "is damaged ("),
        (b"Va\\u12\n", "is damaged ("),
        (b"S'x\n", "is damaged ("),
        (b"]]\x93", "not text"),
    ],
)
def test_other_misuse_is_refused(opcodes: bytes, reason: str, tmp_path: Path) -> None:
    for container, content in in_every_container(program(opcodes)).items():
        refused(tmp_path / container, content, reason)


def test_a_strangers_name_cannot_spoil_the_message(tmp_path: Path) -> None:
    refused(
        tmp_path / "file",
        program(text("a\nb\x1b[31m" + "c" * 10_000) + text("d") + b"\x93"),
        "calls a?b?[31mccc",
    )
    refused(
        tmp_path / "file",
        zip_container(
            program(b"(" + text("storage") + name("torch.FloatStorage") + text("\n") + b"NK\x00tQ")
        ),
    )
