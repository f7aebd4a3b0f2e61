"""Models, and the servers that answer operations on them; tests/conftest.py starts the libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import runtimes
from runtimes.contract.spec import load_spec
from runtimes.contract.vocabulary import ByteVocab, IdsVocab, Vocab, WordVocab, save_vocab
from tests.architectures import ARCHITECTURES, SMALLEST, UNSEEN
from tests.parity.operations import HttpServer, Implementation, ReplicaClient
from tests.serve.http.conftest import running, sources
from tests.web.cases import byte_level, subwords
from xl_export.artefact.export import export
from xl_export.serve.core.settings import EngineSettings, Limits
from xl_export.serve.replica import Replica, SharedStreams


@pytest.fixture(scope="session")
def model(
    artefacts: dict[str, Path],
    make_run: Callable[..., Path],
    module_artefact: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """`model(name)` → an artefact: of each form, of other architectures and vocabularies, of bytes."""
    made = dict(artefacts)
    words = WordVocab(["<unk>", "<eos>", *(f"w{number}" for number in range(78))])
    kinds: dict[str, tuple[Vocab, dict[str, Any], dict[str, Any]]] = {
        "words, adaptive softmax": (words, ARCHITECTURES["adaptive-softmax"], {"memory": "shift"}),
        "bytes, groups of heads": (ByteVocab(), ARCHITECTURES["all-attention-groups"], {}),
        "subwords, zeros": (subwords(byte_level()), {"rule": UNSEEN}, {}),
        "fixed sizes": (ByteVocab(), {}, {"rows": 1, "tokens": (1, 8)}),
        "empty weights": (IdsVocab(SMALLEST["vocab_size"]), SMALLEST, {}),
        "empty weights, hidden": (IdsVocab(SMALLEST["vocab_size"]), SMALLEST, {"memory": "hidden"}),
    }

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("model") / "artefact"
            if name.endswith("lstm"):
                made[name] = module_artefact(name)
            elif name == "memory of bytes":
                made[name] = export(make_run(), folder, memory_precision="int8")
            else:
                vocab, sizes, options = kinds[name]
                run = make_run(**{**sizes, "vocab_size": vocab.size})
                save_vocab(run, vocab)
                made[name] = export(run, folder, **options)
        return made[name]

    return make


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Path], Implementation]]:
    """`serve("server" or "replica", artefact)` → its client."""
    with ExitStack() as stack:

        def started(kind: str, folder: Path) -> Implementation:
            state = tmp_path_factory.mktemp("state")
            spec = load_spec(folder)
            if kind == "server":
                limits = Limits(max_tokens=99, prompt_tokens=2000)
                server = stack.enter_context(running(sources(("m", folder)), limits=limits, state=state))
                client: HttpServer | ReplicaClient = HttpServer(server.at, spec)
            else:
                session = runtimes.open_session(folder, threads=1, device="cpu")
                streams = SharedStreams(state, session, ram_bytes=1 << 20)
                replica = Replica(session, streams, EngineSettings(rows=4))
                stack.callback(replica.stop)
                client = ReplicaClient(replica, spec)
            stack.callback(client.close)
            return client

        yield started
