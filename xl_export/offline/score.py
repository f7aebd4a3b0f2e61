"""`xl-export score --ray`: the score of every text of a corpus, in one file in the order of the corpus."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtimes.base.files import atomic_file
from runtimes.base.records import json_text
from runtimes.cli.lines import Format
from runtimes.cli.score import Totals, line_of
from runtimes.tasks.score_texts import score_texts
from xl_export.offline.cluster import Facts, facts_of, finished_units, in_tasks, open_same
from xl_export.offline.corpus import BLOCK_BYTES, Block, blocks_of, list_files, numbered, texts_of
from xl_export.offline.finished import Finished


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Everything that the lines of a text depend on, besides the model; see `xl-export score --help`."""

    form: Format | None = None
    bos: bool = False
    eos: bool = False
    each: bool = False
    as_json: bool = False
    batch: int | None = None
    window: int
    block_bytes: int = BLOCK_BYTES


class ScoreBlock:
    """The work of an actor: the totals of a block as a line of JSON, and then its lines."""

    def __init__(self, model: str, device: str, threads: int, facts: Facts, options: dict[str, Any]) -> None:
        self._session = open_same(model, device, threads, facts)
        self._options = ScoreOptions(**options)

    def __call__(self, unit: str) -> bytes:
        own = self._options
        totals = Totals(self._session.vocab)
        scores = score_texts(
            self._session,
            texts_of(Block(**json.loads(unit))),
            bos=own.bos,
            eos=own.eos,
            tokens=own.each,
            batch=own.batch,
            window=own.window,
        )
        vocab = self._session.vocab
        lines = [
            line_of(totals.count(score), vocab, each=own.each, as_json=own.as_json) + "\n" for score in scores
        ]
        return (json_text(totals.to_json()) + "\n" + "".join(lines)).encode()


def score_corpus(
    model: Path,
    corpus: str,
    out: Path,
    *,
    options: ScoreOptions,
    work: Path,
    actors: int,
    threads: int,
    device: str = "auto",
    progress: Callable[[int, int], None] = lambda done, blocks: None,
) -> Totals:
    """Writes the lines of all texts to `out`, atomically, and returns the totals. Needs `cluster`.

    corpus: a path, a URL, or a glob; every actor reads it. work: a folder for finished blocks, which is
    removed at the end. If it exists, only the missing blocks are scored, and the file is the same.
    Raises UserError for a work folder of another call, for a file or a model that changes meanwhile, and like
    `score_texts`.
    """
    files = list_files(corpus)
    arguments = [(file, options.form, options.block_bytes) for file in files]
    blocks = numbered(in_tasks(blocks_of, arguments))
    [facts] = in_tasks(facts_of, [(str(model.resolve()), device, threads)])
    plan = facts | {
        "options": asdict(options),
        "files": [[file, _hash_of(file, blocks)] for file in files],
    }
    with closing(Finished(work, plan, blocks=len(blocks))) as finished:
        missing = finished.missing
        units = [(number, json_text(asdict(blocks[number]))) for number in missing]
        settings = {
            "model": str(model.resolve()),
            "device": device,
            "threads": threads,
            "facts": facts,
            "options": asdict(options),
        }
        done = len(blocks) - len(missing)
        progress(done, len(blocks))
        for unit in finished_units(units, ScoreBlock, settings, actors=actors, threads=threads):
            finished.write(unit.number, unit.content)
            done += 1
            progress(done, len(blocks))
        totals = Totals(None)
        with atomic_file(out) as temporary, open(temporary, "wb") as stream:
            for content in finished.contents():
                head, _, lines = content.partition(b"\n")
                totals.add(json.loads(head))
                stream.write(lines)
        finished.remove()
    return totals


def _hash_of(file: str, blocks: list[Block]) -> str:
    own = "".join(block.sha256 for block in blocks if block.file == file)
    return hashlib.sha256(own.encode()).hexdigest()
