"""Compressed checkpoints are the checkpoints in them, and a bomb is refused before it takes memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes.base.errors import UserError
from tests.commands import refused, xl
from tests.nightly import every
from tests.xl_export.importers.oracles import DATA, assert_same_tensors, read
from xl_export.importers.pickle import compressed
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.tensors import read_npz_tensors, read_safetensors

BYTES, HF = DATA / "kimiyoung-enwik8", DATA / "hf-wt103" / "pretrained"
KINDS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),  # which needs little memory
}


def squeezed(source: Path, target: Path, kind: str) -> None:
    target.write_bytes(KINDS[kind](source.read_bytes()))


@pytest.mark.parametrize("kind", every(3, KINDS))
def test_compressed_files_give_the_same_model(kind: str, tmp_path: Path) -> None:
    for name in ("model.pt", "cache.pt"):
        squeezed(BYTES / name, tmp_path / (name + kind), kind)
    shutil.copyfile(tmp_path / f"model.pt{kind}", tmp_path / "named-otherwise")
    # A folder, a file, and a name that does not tell the kind.
    for source in (tmp_path, tmp_path / f"model.pt{kind}", tmp_path / "named-otherwise"):
        assert_same_tensors(read(BYTES), read(source))


def test_compressed_weights_and_vocabulary_of_a_folder(tmp_path: Path) -> None:
    shutil.copyfile(HF / "config.json", tmp_path / "config.json")
    squeezed(HF / "model.safetensors", tmp_path / "model.safetensors.xz", ".xz")
    squeezed(HF / "vocab.pkl", tmp_path / "vocab.pkl.gz", ".gz")
    assert "vocab.pkl.gz" in xl("import", tmp_path, "--describe").output
    assert xl("import", tmp_path / "model.safetensors.xz", "--describe").exit_code == 0


def test_compressed_arrays(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(5.0))
    (tmp_path / "model.npz.gz").write_bytes(gzip.compress(stream.getvalue()))
    assert read_npz_tensors(tmp_path / "model.npz.gz")["a"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_is_refused_before_it_takes_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "LEAST", 1 << 20)
    (tmp_path / "model.pt").write_bytes(KINDS[kind](bytes(8 << 20)))
    tracemalloc.start()
    try:
        for read in (read_pickle, read_npz_tensors, read_safetensors):
            with pytest.raises(
                UserError, match=r"decompresses to more than [\d,]+, which is too much"
            ) as caught:
                read(tmp_path / "model.pt")
            assert str(caught.value).endswith(".")
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


def test_what_a_compressed_file_may_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with tarfile.open(path, "w") as archive:
        archive.add(BYTES / "model.pt", "model.pt")
    for content in (path.read_bytes(), gzip.compress(path.read_bytes())):
        path.write_bytes(content)
        refused(xl("import", path, "--describe"), "model.pt was not read")
    path.write_bytes(gzip.compress(b""))
    refused(xl("import", path, "--describe"), "model.pt is empty")


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_one_sentence(kind: str, tmp_path: Path) -> None:
    """Bytes changed, cut off and repeated: read, or refused in one sentence."""
    data, draw = KINDS[kind]((BYTES / "model.pt").read_bytes()[:60_000]), np.random.default_rng(7)
    messages = []
    for number in range(30):
        at = int(draw.integers(0, 40 if number % 2 else len(data)))
        damaged = [
            data[:at],
            data[:at] + bytes([draw.integers(256)]) + data[at + 1 :],
            data[:at] + data[at // 2 :],
        ][number % 3]
        (tmp_path / "model.pt").write_bytes(damaged)
        with pytest.raises(UserError) as caught:  # the file in it is cut off, too
            read_pickle(tmp_path / "model.pt")
        messages.append(str(caught.value))
    assert all(message.isprintable() and message.endswith(".") for message in messages)
    assert any("is damaged, or not what its first bytes promise" in message for message in messages)
