"""Compiles the fused operator into wheels, and puts the page of `xl-export web` into them. Everything else
about the package is in pyproject.toml.

A wheel holds one library for each variant of its architecture; the choice among them is made on the device
(`runtimes/sessions/fused_cpu/library.py`). They are plain libraries that ONNX Runtime loads, not modules of
Python, so one wheel serves all versions of Python.

Without a compiler the package is installed without them. XL_EXPORT_FUSED_KERNEL=required makes that an error,
as for a release, and XL_EXPORT_FUSED_KERNEL=none compiles nothing. An editable installation never holds them:
its sources change, and `xl-export fused-kernel` compiles those.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shlex
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, ExecError

PACKAGE = "runtimes.sessions.fused_cpu"
FOLDER = Path(*PACKAGE.split("."))
KERNEL = runpy.run_path(str(FOLDER / "variants.py"))
WANTED = os.environ.get("XL_EXPORT_FUSED_KERNEL", "optional")
# `_PYTHON_HOST_PLATFORM=linux-aarch64`, with a cross compiler in CXX, builds for another machine than this.
MACHINE = sysconfig.get_platform().rpartition("-")[2]


class BuildLibraries(build_ext):
    """Compiles the variants side by side."""

    def run(self) -> None:
        if self.editable_mode or self.inplace or WANTED == "none":
            return
        self.parallel = os.cpu_count()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Compiles one variant, or copies what the same command made of the same sources before."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.unlink(missing_ok=True)  # of an earlier build
        command = [
            *shlex.split(os.environ.get("CXX", "g++")),
            *ext.extra_compile_args,
            "-shared",
            *ext.sources,
            *(f"-l{name}" for name in ext.libraries),
        ]
        digest = hashlib.sha256(repr(command).encode())
        for name in ext.depends:
            digest.update(Path(name).read_bytes())
        kept = Path(self.build_temp, f"{target.stem}-{digest.hexdigest()[:16]}.so")
        if not kept.is_file():
            part = kept.with_suffix(".part")
            kept.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.spawn([*command, "-o", str(part)])
            except ExecError as error:
                raise CompileError(str(error)) from error
            part.replace(kept)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kept, target)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


class BuildPage(build_py):
    """Copies the page and the module of `web/` to where `xl_export/web/files.py` looks in an installation."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # finds them in the checkout
            return
        for part in ("page", "src"):
            target = Path(self.build_lib, "xl_export", "web", "static", part)
            shutil.rmtree(target, ignore_errors=True)  # of an earlier build
            shutil.copytree(Path("web", part), target)


class AnyPython(bdist_wheel):
    """Names the wheel after its platform and no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"{PACKAGE}.libraries.{Path(variant.file).stem}",
            [str(FOLDER / KERNEL["SOURCES"][0])],
            depends=[str(FOLDER / name) for name in KERNEL["SOURCES"]],
            libraries=["dl"],  # NVIDIA's driver is loaded at run time
            extra_compile_args=[*KERNEL["FLAGS"], "-g0", *variant.flags],
            language="c++",
            optional=WANTED != "required",
        )
        for variant in KERNEL["VARIANTS"].get(MACHINE, ())
    ],
    cmdclass={"build_ext": BuildLibraries, "build_py": BuildPage, "bdist_wheel": AnyPython},
)
