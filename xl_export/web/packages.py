"""The packages of the npm registry that the page needs: one release of each, every file known by its hash.

onnxruntime-web computes. The module relies on parts of this release that are not public (memory in place), so
no other release is taken. tokenizers encodes text for vocabularies of subwords. The files stay in this user's
cache once they were downloaded.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import shutil
import tarfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from runtimes.base.errors import UserError, first_line
from runtimes.base.files import atomic_file, sha256, writing
from runtimes.base.progress import Progress
from runtimes.sessions.fused_cpu.library import cache_folder

TIMEOUT = 30  # seconds without a byte until a server counts as silent


@dataclass(frozen=True, kw_only=True)
class Package:
    """One release of a package in the npm registry."""

    name: str
    version: str
    integrity: str
    """SHA-512 of its archive in base64, as `npm view NAME@VERSION dist.integrity` prints it."""
    num_bytes: int
    """The size of the archive."""

    @property
    def release(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def url(self) -> str:
        base = self.name.rpartition("/")[2]
        return f"https://registry.npmjs.org/{self.name}/-/{base}-{self.version}.tgz"


ONNXRUNTIME_WEB = Package(
    name="onnxruntime-web",
    version="1.30.0",
    integrity="q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
    num_bytes=33_106_585,
)
TOKENIZERS = Package(
    name="@huggingface/tokenizers",
    version="0.2.0",
    integrity="LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
    num_bytes=87_011,
)
LICENCE = "LICENSE"


class UnreachableError(UserError):
    """The npm registry could not be reached."""


# Paths in a package and the SHA-256 of each file.
WASM = {
    "dist/ort.wasm.min.mjs": "219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b",
    "dist/ort-wasm-simd-threaded.mjs": "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    "dist/ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
WEBGPU = {
    "dist/ort.webgpu.min.mjs": "3dffff71811bc13a3a3d9591c57ca5ee5735b8f5f3eaf789510b02bb040ae3a0",
    "dist/ort-wasm-simd-threaded.asyncify.mjs": (
        "3d1c85995364bb643302fc6fd877a0c3ba5ae72401815e0f24828a53d9191e28"
    ),
    "dist/ort-wasm-simd-threaded.asyncify.wasm": (
        "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da"
    ),
}
SUBWORDS = {
    "dist/tokenizers.min.mjs": "258e46332101335ce8d95aed7745b19ac3b46d37f3e159a89cf894c2ea9b1d3a",
    LICENCE: "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4",
}


def copy_package(
    package: Package, wanted: Mapping[str, str], folder: Path, *, node_modules: Path | None = None
) -> None:
    """Copies files of a package into a folder, without the folders they lie in, each verified by its hash.

    wanted: paths and hashes, such as `WASM`. node_modules: a folder that holds the package, as `npm install`
    makes it; None means this user's cache, which is filled from the npm registry. Raises UserError.
    """
    source = _installed(package, wanted, node_modules) if node_modules else _cached(package, wanted)
    folder.mkdir(parents=True, exist_ok=True)
    for path in wanted:
        target = folder / (licence_name(package) if path == LICENCE else Path(path).name)
        shutil.copyfile(source / path, target)


def licence_name(package: Package) -> str:
    """The file name of a package's licence among the files of several packages."""
    return f"LICENSE.{package.name.rpartition('/')[2]}"


def _elsewhere(package: Package) -> str:
    return f"run `npm install {package.release}` where there is one, and give its folder as --node-modules"


def _installed(package: Package, wanted: Mapping[str, str], node_modules: Path) -> Path:
    """The folder of the package that the user named, with every wanted file verified."""
    folder = node_modules / package.name
    for path, expected in wanted.items():
        if not (folder / path).is_file():
            raise UserError(
                f"{folder / path} does not exist; run `npm install {package.release}` and give the folder "
                "node_modules that it writes."
            )
        if sha256(folder / path) != expected:
            raise UserError(
                f"{folder / path} is not from {package.release}, which the page is written for; run "
                f"`npm install {package.release}`."
            )
    return folder


def _cached(package: Package, wanted: Mapping[str, str]) -> Path:
    """The folder of this user's cache, filled with the wanted files where they are not there yet."""
    cache = cache_folder()
    if cache is None:
        raise UserError(
            f"there is no home folder to keep {package.release} in; name a folder in the variable "
            "XDG_CACHE_HOME."
        )
    folder = cache / "npm" / package.release.replace("/", "-")
    if any(not _is(folder / path, expected) for path, expected in wanted.items()):
        _unpack(_download(package), folder, wanted)
    return folder


def _is(path: Path, expected: str) -> bool:
    return path.is_file() and sha256(path) == expected


def _unpack(archive: bytes, folder: Path, wanted: Mapping[str, str]) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for path, expected in wanted.items():
            stream = members.extractfile(f"package/{path}")
            content = stream.read() if stream else b""
            assert hashlib.sha256(content).hexdigest() == expected, f"{path} of a verified archive"
            with writing(folder):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(folder / path) as temporary:
                temporary.write_bytes(content)


def _blocks(response: http.client.HTTPResponse, package: Package) -> Iterator[bytes]:
    """The bytes of a download, and at most one more than the package has, which shows that it is another."""
    megabyte = 1_000_000
    left = package.num_bytes + 1
    what = f"downloading {package.release} from the npm registry"
    click.echo(f"{what} ({package.num_bytes / megabyte:.1f} MB)", err=True)
    with Progress(what, -(-package.num_bytes // megabyte), "MB") as progress:
        while left and (block := response.read(min(left, megabyte))):
            left -= len(block)
            progress((package.num_bytes - left) // megabyte)
            yield block


def _download(package: Package) -> bytes:
    """The archive from the npm registry; raises UserError unless it is the published one by its SHA-512."""
    request = urllib.request.Request(package.url, headers={"User-Agent": "xl-export"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            archive = b"".join(_blocks(response, package))
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or first_line(
            reason if isinstance(reason, Exception) else error
        )
        raise UnreachableError(
            f"{package.url} could not be downloaded ({why}); connect to a network, or {_elsewhere(package)}."
        ) from error
    if base64.b64encode(hashlib.sha512(archive).digest()).decode() != package.integrity:
        raise UserError(
            f"{package.url} sent another file than the published one (its SHA-512 differs); try again later, "
            f"or {_elsewhere(package)}."
        )
    return archive
