"""Which library of the package is loaded on which processor, and when none is."""

from __future__ import annotations

import grp
import os
import pwd
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from runtimes.sessions import fused_cpu
from runtimes.sessions.fused_cpu import library, trust, variants
from runtimes.sessions.fused_cpu.variants import VARIANTS
from tests.commands import json_of, xl

X86 = VARIANTS["x86_64"]
ALL_FLAGS = " ".join(X86[-1].features)


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folder of libraries, a few bytes each, on an x86 machine with every feature."""
    folder = tmp_path / "site-packages" / "libraries"
    folder.mkdir(parents=True, mode=0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "LIBRARIES", folder)
    for variant in X86:
        (folder / variant.file).write_bytes(variant.name.encode())
    pretend(monkeypatch, tmp_path, ALL_FLAGS)
    return folder


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, flags: str, machine: str = "x86_64") -> None:
    """Gives /proc/cpuinfo other flags, and the machine another architecture."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    (folder / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: avx512f\n")
    monkeypatch.setattr(variants, "CPUINFO", folder / "cpuinfo")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (ALL_FLAGS, "avx512"),
        (f"fpu {ALL_FLAGS} avx512_fp16 amx_int8", "avx512"),
        (ALL_FLAGS.replace(" avx512vl", ""), "avx2"),  # as the first processors with AVX-512
        (ALL_FLAGS.partition(" avx512f")[0], "avx2"),
        (ALL_FLAGS.partition(" f16c")[0], "sse4"),
        ("ssse3 sse4_1 sse4_2 popcnt", "sse4"),
        ("ssse3 sse4_1 popcnt", None),
        ("", None),
    ],
)
def test_the_processor_decides(
    flags: str, name: str | None, libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, tmp_path, flags)
    assert fused_cpu.variant() == name
    assert fused_cpu.built() == (None if name is None else libraries / f"fused-{name}.so")
    assert fused_cpu.ignored() is None


@pytest.mark.parametrize(
    ("hwcap", "hwcap2", "name"),
    [
        (0x119FFF, 1 << 13, "i8mm"),
        (0x119FFF, 0, "dotprod"),  # Neoverse N1
        (0x008FF, 0, "neon"),  # Cortex-A72
        (0x119FFF & ~(1 << 8), 0, "neon"),  # no large atomics, which the other variants may use
        (0, 0, None),
    ],
)
def test_arm_asks_the_auxiliary_vector(
    hwcap: int,
    hwcap2: int,
    name: str | None,
    libraries: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, tmp_path, ALL_FLAGS, machine="aarch64")  # /proc/cpuinfo of an emulating machine
    for variant in VARIANTS["aarch64"]:
        (libraries / variant.file).write_bytes(b"")
    monkeypatch.setattr("ctypes.CDLL", lambda _: Auxiliary({16: hwcap, 26: hwcap2}))
    assert fused_cpu.variant() == name


class Auxiliary:
    """A C library whose processor has the features of some bits."""

    def __init__(self, vector: dict[int, int]) -> None:
        self.getauxval = lambda entry: vector[entry]


def test_what_this_machine_compiled_comes_first(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "runtimes.sessions.fused_cpu.library._compile", lambda compiler, to: to.write_bytes(b"native")
    )
    assert xl("fused-kernel").output.startswith("the fused operator is built: ")
    native = fused_cpu.build()
    assert native.parent != libraries
    assert fused_cpu.built() == native
    assert fused_cpu.variant() == "native"
    native.chmod(0o666)
    assert fused_cpu.built() == libraries / X86[-1].file
    assert str(native) in str(fused_cpu.ignored())  # the slower one is not used without a word


def test_info_names_the_library(libraries: Path, artefacts: dict[str, Path]) -> None:
    told = xl("info", artefacts["ring"])
    assert "computed by ONNX Runtime, fused operator; the package's library for avx512\n" in told.stdout
    facts = json_of(xl("info", artefacts["ring"], "--json"))
    assert (facts["fused_kernel_built"], facts["fused_kernel_variant"]) == (True, "avx512")


@pytest.mark.parametrize("place", ["site-packages", "site-packages/libraries", "LIBRARY"])
@pytest.mark.parametrize("mode", [0o707, 0o1777])
def test_a_library_that_others_may_write_is_not_loaded(
    place: str, mode: int, libraries: Path, artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "_is_private_group", lambda group: False)
    changed = [v.file for v in X86] if place == "LIBRARY" else [""]
    base = libraries if place == "LIBRARY" else libraries.parents[1] / place
    for name in changed:
        (base / name).chmod(mode)
    if mode == 0o1777 and place == "site-packages":  # only the owner of a file replaces it, as in /tmp
        assert fused_cpu.variant() == "avx512"
        return
    assert fused_cpu.built() is None
    sentence = json_of(xl("info", artefacts["ring"], "--json"))["fused_kernel_ignored"]
    assert sentence.startswith("the fused operator of the package is not loaded: other users may write ")
    assert sentence.endswith("or run `xl-export fused-kernel`.")
    assert sentence.rstrip(".") in xl("info", artefacts["ring"]).stdout


@pytest.mark.parametrize(
    ("user", "groups", "accounts", "private"),
    [
        (1000, [("anna", [])], [1000], True),  # the default of Debian, Ubuntu and Fedora
        (1000, [("anna", ["anna"])], [1000], True),
        (1000, [("anna", ["bert"])], [1000], False),
        (1000, [("anna", []), ("staff", ["bert"])], [1000], False),  # two groups of one number
        (1000, [("anna", [])], [1000, 1001], False),  # it is another account's first group
        (1000, [("users", [])], [1000], False),
        (1000, [("anna", [])], [], False),  # a directory service that does not list its accounts
        (1000, [], [1000], False),
        (0, [("root", [])], [0], False),
    ],
)
def test_a_group_is_private_with_one_member(
    user: int,
    groups: list[tuple[str, list[str]]],
    accounts: list[int],
    private: bool,
    libraries: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = libraries.stat().st_gid
    account: Callable[[int], pwd.struct_passwd] = lambda number: pwd.struct_passwd(  # noqa: E731
        ("anna" if user else "root", "x", number, group, "", "/", "")
    )
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(pwd, "getpwuid", account)
    monkeypatch.setattr(pwd, "getpwall", lambda: [account(number) for number in accounts])
    entries = [grp.struct_group((name, "x", group, members)) for name, members in groups]
    monkeypatch.setattr(grp, "getgrall", lambda: entries)
    assert trust._is_private_group(group) is private
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert not trust._is_private_group(group)  # a container that knows no names


def test_a_private_group_may_write(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.chmod(0o775)
    monkeypatch.setattr(trust, "_is_private_group", lambda group: group == libraries.stat().st_gid)
    assert fused_cpu.variant() == "avx512"
    libraries.chmod(0o777)
    assert fused_cpu.built() is None


def test_a_user_whom_an_access_list_names_is_another_user(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "_is_private_group", lambda group: True)
    # The kernel's format, version 2. By kind: the owner, user 4321, the group, the bits of the group, others.
    rights = [(0x01, 7, -1), (0x02, 7, 4321), (0x04, 5, -1), (0x10, 7, -1), (0x20, 5, -1)]
    entries = b"".join(struct.pack("<HHi", *entry) for entry in rights)
    try:
        os.setxattr(libraries, "system.posix_acl_access", struct.pack("<I", 2) + entries)
    except OSError:
        pytest.skip("this file system has no access lists")
    assert libraries.stat().st_mode & 0o777 == 0o775
    assert fused_cpu.built() is None
    assert f"other users may write {libraries};" in str(fused_cpu.ignored())
