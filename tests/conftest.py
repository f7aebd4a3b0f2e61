"""Small runs and artefacts that many tests share. The weights are random but large, so that errors show."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from runtimes.base import progress
from runtimes.base.startup import prepare_libraries
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import FORMS
from tests.browsers import browsers, executable, playwright  # noqa: F401 (fixtures of one browser for all)
from tests.once import made_in, made_once

if TYPE_CHECKING:
    from tests.parity.operations import Program

# Tests start many processes: the first keeps the compiled modules for the others.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

with contextlib.suppress(ImportError):  # the edge part of the suite runs without hypothesis
    import hypothesis

    # The same examples in every run, and none is too slow on a busy machine. Fixtures of one test are shared
    # by its examples, which change nothing in them.
    hypothesis.settings.register_profile(
        "certain",
        derandomize=True,
        deadline=None,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.function_scoped_fixture,
        ],
    )
    hypothesis.settings.load_profile("certain")

prepare_libraries()  # before any test module imports ONNX Runtime: no test reports to its maker
RULE = MemoryRule(mem_len=16, segment=8)

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in a background job, whose programs would inherit it: some tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # the same under `nohup`
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage collections would read thousands of collected tests and all modules again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report objects that are left at the end as leaks


@pytest.fixture(scope="session")
def text() -> str:
    """Real English: the built-in corpus."""
    from trainer.data.text import built_in_corpus

    return built_in_corpus().decode("utf-8")


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory, text: str) -> Callable[..., Path]:
    """`make_run(rule=…, pre_norm=…)` → a run folder with random weights and the corpus's characters.

    shares: of adaptive spans, for each head of every layer; random ones when none are given.
    """
    from runtimes.base.files import write_json
    from runtimes.base.records import to_json
    from runtimes.contract.vocabulary import CharVocab
    from trainer.model.config import ModelConfig
    from trainer.model.model import LanguageModel
    from trainer.run.checkpoint import save_tensors
    from trainer.run.config import TrainConfig

    vocab = CharVocab.build(text)

    def make(
        *, rule: MemoryRule = RULE, seed: int = 0, shares: tuple[float, ...] = (), **sizes: object
    ) -> Path:
        import torch

        folder = tmp_path_factory.mktemp("run")
        settings = {
            "layers": 2,
            "d_model": 16,
            "heads": 2,
            "head_dim": 6,
            "d_ff": 20,
            "vocab_size": vocab.size,
            **sizes,
        }
        config = TrainConfig(model=ModelConfig(**settings), training=rule, evaluation=rule)  # type: ignore[arg-type]
        torch.manual_seed(seed)
        model = LanguageModel(config.model)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.3)
        for span in model.spans():
            span.share.data = torch.tensor(shares) if shares else torch.rand(len(span.share))
        write_json(folder / "config.json", to_json(config))
        write_json(folder / "vocab.json", vocab.to_json())
        save_tensors(folder / "model.safetensors", model.state_dict())
        return folder

    return make


@pytest.fixture(scope="session")
def run(make_run: Callable[..., Path]) -> Path:
    """One run with the default rule."""
    return make_run()


@pytest.fixture(scope="session")
def artefacts(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """That run exported in each form of memory. Tests must not change these folders; copy them first."""
    from xl_export.artefact.export import export

    folder = tmp_path_factory.mktemp("artefacts")
    return {form: export(run, folder / form, memory=form) for form in FORMS}


@pytest.fixture(scope="session")
def cut_ring(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That run for engines whose memory is a ring: segments are cut at its end. Tests must not change it."""
    from xl_export.artefact.export import export

    # ONNX Attention rounds all rows alike, which the body of the project's operator does not.
    folder = tmp_path_factory.mktemp("artefacts") / "cut-ring"
    return export(run, folder, target="tensorrt", precision="fp32", attention="native")


@pytest.fixture(scope="session")
def fast_traces() -> Iterator[None]:
    """For tests that trace: torch.onnx would parse the sources of all its translations for each trace."""
    from torch.onnx._internal.exporter._registration import onnxscript_apis

    with pytest.MonkeyPatch.context() as patch:
        found = functools.cache(onnxscript_apis.get_torchlib_ops)
        patch.setattr(onnxscript_apis, "get_torchlib_ops", found)
        yield


@pytest.fixture(scope="session", autouse=True)
def quiet_logs() -> Iterator[None]:
    """Work that takes long only on a slow machine prints nothing in its log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "LOG_SECONDS", float("inf"))
        yield


@pytest.fixture(scope="session")
def module_artefact(fast_traces: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`module_artefact(name)` → a row of `TRACED`, made once for all processes. Tests must not change it."""
    from tests.xl_export.tracing.modules import RULE, TRACED
    from xl_export import trace

    def make(name: str) -> Path:
        module, options = TRACED[name]
        return made_once(
            tmp_path_factory,
            f"traced-{name}",
            lambda to: trace(module(), to / "artefact", **{"rule": RULE, **options}),
        ).joinpath("artefact")

    return make


@pytest.fixture(scope="session")
def policy(module_artefact: Callable[[str], Path]) -> Path:
    """A step that is no language model; `tests.steps.observed` makes its inputs."""
    return module_artefact("policy")


@pytest.fixture(scope="session")
def cpp() -> Iterator[Program]:
    """The C++ library, which answers operations."""
    from tests.cpp.program import DRIVER, SIGNATURES, compiled
    from tests.parity.operations import Program

    running = Program(compiled(DRIVER, "-O0", *SIGNATURES), tolerance=1e-5)
    yield running
    assert running.close() == 0


@pytest.fixture(scope="session")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The module in Node, on WebAssembly, which answers operations."""
    from tests.parity.operations import Program
    from tests.web.npm import copied_module, node, packages

    node(), packages()
    module = copied_module(tmp_path_factory.mktemp("module") / "web")
    # Code that WebAssembly's second compiler makes pays only in programs that run for long.
    running = Program(node(), "--liftoff-only", "test/driver.js", tolerance=1e-3, goes_on=True, cwd=module)
    yield running
    assert running.close() == 0


@pytest.fixture(scope="session")
def tokens(text: str) -> np.ndarray:
    """The corpus as character ids, int64 [N]."""
    from runtimes.contract.vocabulary import CharVocab

    return CharVocab.build(text).encode(text)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models here are tiny: more threads only wait for each other, above all beside other jobs.

    Each worker of a parallel run keeps to one CPU, with all processes that it starts. Otherwise their threads
    look for work on the CPU on which another worker computes.
    """
    import runtimes.sessions.onnx_runtime

    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker.isdecimal() and hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[int(worker) % len(cpus)]})
    runtimes.sessions.onnx_runtime.available_cpus = lambda: 1
    try:
        import torch
    except ImportError:  # the edge part of the suite runs without PyTorch
        return
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """An export waits for the disk a dozen times; only a power failure could tell the difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def fonts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One list of this machine's fonts for all processes: Matplotlib takes seconds to make it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(made_once(tmp_path_factory, "matplotlib", lambda _: None)))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whether the fused operator is built is up to the tests, not to the machine's cache.

    The compiler is busy with it for 20 seconds, or 7 with fewer optimisations, which the default tests use.
    So its library stays in build/, under a hash of what it was compiled from, and every build gets a copy.
    Other compilers than g++ are started as they are.
    """
    from runtimes.sessions.fused_cpu import library

    compile_really = library._compile

    def compile_once(compiler: list[str], to: Path) -> None:
        if compiler != ["g++"]:
            return compile_really(compiler, to)

        with pytest.MonkeyPatch.context() as patch:
            if "not slow" in request.config.getoption("markexpr"):
                patch.setattr(library, "FLAGS", [*library.FLAGS, "-O1"])
            kept = Path(__file__).parents[1] / "build" / f"fused-{library._key()}"
            made_in(kept, lambda folder: compile_really(compiler, folder / "fused.so"))
        shutil.copyfile(kept / "fused.so", to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(library, "_compile", compile_once)
        yield
