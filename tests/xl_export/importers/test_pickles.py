"""What read_pickle makes of good files: the same as PyTorch and pickle, as plain data."""

from __future__ import annotations

import collections
import pickle
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.xl_export.importers.forge import call, program, text
from tests.xl_export.importers.test_refusals import refused
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.values import Foreign, Named

DATA = Path(__file__).parents[2] / "data"
FILES = sorted(path.relative_to(DATA).as_posix() for kind in ("*.pt", "*.pkl") for path in DATA.rglob(kind))


def as_plain(value: Any) -> Any:
    """What a trusting reader gives, in the form in which read_pickle gives it."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(as_plain(item) for item in value)
    if isinstance(value, Stub):
        foreign = Foreign(type(value).name)
        foreign.state = as_plain(value.__dict__)
        return foreign
    return value


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, Foreign):
        for slot in Foreign.__slots__:
            assert_same(getattr(ours, slot), getattr(theirs, slot))
    else:
        assert ours == theirs


class Stub:
    """Stands for a class that this test does not have; those in the files are made without arguments."""

    name = ""


class TrustingUnpickler(pickle.Unpickler):
    """pickle's own, with a stub for each class of a model: for files of known origin only."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in (
            "torch",
            "collections",
            "__builtin__",
            "builtins",
        ) and not module.startswith("torch.nn"):
            return super().find_class(module, name)
        return type(name, (Stub,), {"name": f"{module}.{name}"})


TRUSTING = types.SimpleNamespace(
    Unpickler=TrustingUnpickler, load=lambda file, **_: TrustingUnpickler(file).load(), __name__="t"
)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".pt")])
def test_files_are_read_as_pytorch_reads_them(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch misses the source of the stubs
        theirs = torch.load(DATA / name, map_location="cpu", weights_only=False, pickle_module=TRUSTING)
    assert_same(read_pickle(DATA / name), as_plain(theirs))


def test_tensors_of_every_type_and_stride_are_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = torch.randn(5, 7) * 50
    types = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
    )
    content = {str(dtype): base.to(dtype) for dtype in types}
    content |= {"uint8": base.abs().to(torch.uint8), "bool": base > 0}
    content |= {
        "transposed": base.T,
        "sliced": base[1:4, ::3],
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    content |= {
        "parameter": torch.nn.Parameter(base),
        "shape": base.shape,
        "nested": [(base[0], {"step": 7})],
    }
    for zipped in (True, False):
        torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
        ours = read_pickle(tmp_path / "file.pt")
        assert_same(ours, as_plain({**content, "shape": (5, 7)}))
        storages = {ours[name].untyped_storage().data_ptr() for name in ("transposed", "sliced")}
        assert len(storages) == 1, "as in the file"


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_is_what_pickle_says_in_every_protocol(protocol: int, tmp_path: Path) -> None:
    long = "x" * 300
    content = {
        "numbers": [0, -1, 255, 256, 65536, -(2**31), 2**63, -(10**100), 1.5, -0.0, 1e308, True, False, None],
        "text": ["", "a", "é\u2028\U0001f600", long, "\n\\u0041", "\ud800"],
        "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, (4,))),
        "dictionary": {1: "a", "b": {}, None: [], False: 2.0, long: long},
        "shared": [long, long],
        "counter": collections.Counter("abca"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, a=[1]),
    }
    if protocol >= 2:
        content |= {"bytes": [b"", b"\x00\xff", b"x" * 300], "sets": [{1, "a"}, frozenset({2}), set()]}
    (tmp_path / "file.pkl").write_bytes(pickle.dumps(content, protocol))
    ours = read_pickle(tmp_path / "file.pkl")
    assert ours == content
    assert str(ours["numbers"]) == str(content["numbers"])  # True is not 1, -0.0 not 0.0
    assert {type(value) for value in ours.values()} <= {dict, list, tuple}
    assert list(ours["ordered"]) == ["b", "a"]


def test_text_and_classes_of_python_2_are_read(tmp_path: Path) -> None:
    (tmp_path / "file.pkl").write_bytes(
        b"(dp0\nS'word'\np1\n(lp2\nI01\naL12L\naV\\u00e9\nasU\x02\xc3\xa9c__builtin__\nset\n((lK\x05atRs."
    )
    assert read_pickle(tmp_path / "file.pkl") == {"word": [True, 12, "é"], "é": {5}}


def test_foreign_instances_keep_all_that_is_said_of_them(tmp_path: Path) -> None:
    (tmp_path / "file.pkl").write_bytes(
        b"\x80\x02(cutils.vocabulary\nVocab\nK\x01K\x02\x86\x81q\x00}X\x01\x00\x00\x00aK\x03sb(K\x04K\x05eX\x01\x00\x00\x00bK\x06s"
        b"(imem_transformer\nMemTransformerLM\n}X\x01\x00\x00\x00cK\x07s}X\x01\x00\x00\x00dK\x08s\x86b"
        b"(cdata\nCorpus\noK\x09bcdata\nDictionary\nt."
    )
    vocab, model, corpus, mentioned = read_pickle(tmp_path / "file.pkl")
    assert (vocab.name, vocab.args, vocab.state) == ("utils.vocabulary.Vocab", (1, 2), {"a": 3})
    assert (vocab.items, vocab.entries) == ([4, 5], {"b": 6})
    # attributes and slots
    assert (model.name, model.state) == ("mem_transformer.MemTransformerLM", {"c": 7, "d": 8})
    assert (corpus.name, corpus.state) == ("data.Corpus", 9)
    assert mentioned == Named("data.Dictionary")


def test_the_backend_that_modules_of_2019_hold_is_nothing(tmp_path: Path) -> None:
    """PyTorch before 1.2 pickled `_backend` with every module: a call of one function, without arguments."""
    backend = call("torch.nn.backends.thnn._get_thnn_function_backend")
    module = call("torch.nn.modules.linear.Linear") + b"}" + text("_backend") + backend + b"sb"
    (tmp_path / "file.pt").write_bytes(program(module))
    assert read_pickle(tmp_path / "file.pt").state == {"_backend": None}
    given = call("torch.nn.backends.thnn._get_thnn_function_backend", text("x"))
    refused(
        tmp_path / "file.pt",
        program(given),
        "_get_thnn_function_backend",
        "1 arguments that it does not take",
    )
