"""Writes the site: the page, its module, onnxruntime-web and the files of one or several artefacts."""

from __future__ import annotations

import shutil
import urllib.parse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtimes.base import kinds
from runtimes.base.errors import ArtefactError, ConfigError, UserError
from runtimes.base.files import read_bytes, read_json, write_json
from runtimes.base.folders import atomic_folder, refuse_existing
from runtimes.contract.precision import PRESETS
from runtimes.contract.sampling import GENAI, read_sampling, write_sampling
from runtimes.contract.spec import (
    BUILD,
    CUDA_GRAPH,
    FUSED,
    SPEC,
    VOCAB,
    Spec,
    load_language_model,
    refuse_unless_onnx,
)
from runtimes.contract.vocabulary import load_vocab
from runtimes.contract.vocabulary.subword import FILES
from runtimes.sessions import fused_cpu
from runtimes.tasks.check import check
from xl_export.web.files import INDEX, copy_page, introduced, web_files
from xl_export.web.packages import (
    ONNXRUNTIME_WEB,
    SUBWORDS,
    TOKENIZERS,
    WASM,
    WEBGPU,
    copy_package,
    licence_name,
)
from xl_export.web.picture import picture_of

SITE = "site.json"  # names the models for the page, and marks the folder as a site
MODELS = "models"
PICTURE = "page/preview.png"  # of links to the page
VENDOR = "vendor"  # the module looks for the packages of others here
# Files of an artefact that no browser reads: the fused operator is a native library, and genai has its own.
NOT_COPIED = (CUDA_GRAPH, FUSED, GENAI, "tokenizer_config.json")
MOST_BYTES = 1 << 31  # of weights in fp32: WebAssembly has 4 GiB of addresses, and loading takes them twice


@dataclass(frozen=True, kw_only=True)
class Site:
    """What was written."""

    models: tuple[str, ...]
    """Names of the models."""
    num_bytes: int
    """Bytes of all files."""
    warnings: tuple[str, ...]
    """Warnings, one sentence each."""


def write_site(
    artefacts: Sequence[Path],
    out: Path,
    *,
    title: str | None = None,
    about: str | None = None,
    openings: Sequence[str] = (),
    address: str | None = None,
    manual: str | None = None,
    node_modules: Path | None = None,
    force: bool = False,
) -> Site:
    """Writes a static folder that any web server can serve; returns what it holds.

    Every artefact is verified and checked on this machine before anything appears.

    - title, about: the heading and the sentence below it, which links to the page show too.
    - openings: how the texts begin that the page writes by itself; by default the model begins.
    - address: the URL of the page, without which most services show no picture of a link.
    - manual: the address that the page links to as "What is this?".
    - node_modules: a folder that holds the packages of `packages.py`; None takes them from this user's cache
      or the npm registry.

    Raises UserError for a folder that is no artefact or that no browser can run, for an opening that a
    vocabulary cannot hold, and where `out` exists unless `force` is set.
    """
    sources = list(artefacts) if node_modules is None else [*artefacts, node_modules]
    refuse_existing(out, kinds.SITE, force=force, sources=sources)
    web_files()  # before the checks, which take longer
    names = _names(artefacts)
    specs = [_servable(artefact) for artefact in artefacts]
    for artefact in artefacts:
        vocab = load_vocab(artefact / VOCAB)
        for opening in openings if vocab.kind != "ids" else ():
            vocab.encode(opening)
    for artefact in artefacts:
        _refuse_failing(artefact)
    with atomic_folder(out, kinds.SITE, force=force, sources=sources) as folder:
        copy_page(folder)
        index = folder / INDEX
        index.write_text(
            introduced(index.read_text(encoding="utf-8"), title=title, about=about, address=address),
            encoding="utf-8",
        )
        picture = picture_of(artefacts[0], openings[0] if openings else None)
        (folder / PICTURE).write_bytes(picture)
        wanted = {**WASM, **(WEBGPU if any(spec.target == "web" for spec in specs) else {})}
        copy_package(ONNXRUNTIME_WEB, wanted, folder / VENDOR, node_modules=node_modules)
        (folder / VENDOR / licence_name(ONNXRUNTIME_WEB)).write_bytes(_licence())
        if any(map(_subwords, artefacts)):
            copy_package(TOKENIZERS, SUBWORDS, folder / VENDOR, node_modules=node_modules)
        for name, artefact, spec in zip(names, artefacts, specs, strict=True):
            _copy_artefact(artefact, spec, folder / MODELS / name)
        written = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        write_json(
            folder / SITE,
            {
                "onnxruntime_web": ONNXRUNTIME_WEB.version,
                "openings": list(openings),
                **({} if manual is None else {"manual": manual}),
                "models": [
                    {
                        "name": name,
                        "path": f"{MODELS}/{urllib.parse.quote(name)}",  # part of a URL
                        "num_bytes": _num_bytes(folder / MODELS / name),
                    }
                    for name in names
                ],
                "files": written,  # of which --force replaces the site; see `runtimes.base.kinds`
            },
        )
        num_bytes = _num_bytes(folder)
    warnings = [
        warning for path, spec in zip(artefacts, specs, strict=True) if (warning := _warning(path, spec))
    ]
    return Site(models=tuple(names), num_bytes=num_bytes, warnings=tuple(warnings))


def _names(artefacts: Sequence[Path]) -> list[str]:
    """The name of each model in the site: the name of its folder."""
    names = [path.resolve().name or "model" for path in artefacts]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"two artefacts are called {twice[0]}, and a model has the name of its folder in the site; "
            "rename one of the folders."
        )
    return names


def _servable(artefact: Path) -> Spec:
    """The verified spec of an artefact that a browser can run; raises UserError for any other."""
    if (artefact / BUILD).is_file():
        raise ArtefactError(
            f"{artefact} is an engine, which only a GPU of NVIDIA runs; give the artefact it was built from."
        )
    spec = load_language_model(artefact)
    refuse_unless_onnx(spec, artefact, what="the page")
    if spec.target == "tensorrt":
        raise ArtefactError(
            f"{artefact} has a graph for tensorrt, which no browser runs; export the run again without "
            "--target tensorrt."
        )
    if spec.state_dtype != "float32":
        raise ArtefactError(
            f"{artefact} has memory in {spec.state_dtype}, which the page does not read; export the run "
            "again with --memory-precision fp32."
        )
    vocab = read_json(artefact / VOCAB)
    if vocab["kind"] == "subword" and vocab["library"] != "tokenizers":
        raise ArtefactError(
            f"{artefact} has a vocabulary of the library {vocab['library']}, which the page does not read; "
            "train or import the model with a tokenizer.json."
        )
    num_bytes = 4 * spec.model.parameters * (len(spec.token_graphs) or 1)  # each graph has its own copy
    if num_bytes >= MOST_BYTES:
        raise ArtefactError(
            f"{artefact} needs {num_bytes / 2**30:.1f} GiB for its {spec.model.parameters:,} parameters; a "
            f"browser holds models of less than {MOST_BYTES / 2**30:.0f} GiB: give a smaller model."
        )
    return spec


def _subwords(artefact: Path) -> bool:
    """Whether the page encodes text by the library of subwords; otherwise a tokenizer.json is for genai."""
    return bool(read_json(artefact / VOCAB)["kind"] == "subword")


def _refuse_failing(artefact: Path) -> None:
    """Raises UserError if an artefact fails its check on this machine."""
    report = check(artefact, device="cpu")
    if not report.passed:
        raise UserError(
            f"{artefact} fails its check on this machine, so no page is made of it: {report.sentence}; "
            "`xl-export check` shows more."
        )


def _warning(artefact: Path, spec: Spec) -> str | None:
    """What makes an artefact slow in a browser, as one sentence; None if nothing does."""
    if PRESETS[spec.precision].rounds_activations:
        return (
            f"{artefact} multiplies weights in {spec.precision}, which takes a browser 5 to 9 times as "
            "long as fp32; export the run with --precision int8-stored, which is small and as fast as fp32."
        )
    if not spec.circular and spec.target != "web" and spec.exporter != "trace":
        return (
            f"{artefact} has memory of the form {spec.form}, which is written anew in every step; "
            "a ring is not (--memory ring)."
        )
    return None


def _copy_artefact(artefact: Path, spec: Spec, target: Path) -> None:
    """Copies the files that a browser reads, and verifies by their hashes."""
    target.mkdir(parents=True)
    for name in (SPEC, f"{SPEC}.sig"):
        if (artefact / name).is_file():  # the signature is optional
            shutil.copyfile(artefact / name, target / name)
    write_sampling(target, read_sampling(artefact))
    for name in spec.files:
        if name in NOT_COPIED or (name == FILES["tokenizers"] and not _subwords(artefact)):
            continue
        shutil.copyfile(artefact / name, target / name)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _licence() -> bytes:
    """The licence of ONNX Runtime, which its package in the npm registry lacks."""
    return read_bytes(Path(fused_cpu.__file__).parent / "vendor" / "onnxruntime" / "LICENSE")
