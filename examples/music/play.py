"""Makes four-part music with a trained artefact, as a MIDI file, a WAV file and a picture.

    python examples/music/play.py examples/music/chorales --seconds 60 --out bach
    python examples/music/play.py examples/music/chorales --endless --pipe | aplay

It needs NumPy and ONNX Runtime (`pip install '.[cpu]'`), and matplotlib only for the picture. With
--endless music is written while it is made, and the program's memory does not grow, however long it plays.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from midi import MidiFile
from perform import Slice, slices
from refuse import refusals
from scheme import END, IDS, NAMES, SHARPS, events
from sound import samples, stream_wav, write_wav

import runtimes
from runtimes.base.errors import fields_as_options
from runtimes.base.files import atomic_file, refuse_unwritable


def main() -> None:
    given = _options()
    with refusals():
        _check(given)
        _play(given)


def _play(given: argparse.Namespace) -> None:
    session = runtimes.open_session(given.artefact, threads=1)
    with fields_as_options("temperature", "top_p"):
        sampler = session.sampler.replaced(temperature=given.temperature, top_p=given.top_p)
    header = [f"{given.metre}/4"] + ([f"key{given.key:+d}"] if given.key is not None else [])
    ids = music_ids(session, [IDS[name] for name in header], sampler=sampler, seed=given.seed)
    music = slices(events(ids), tempo=given.tempo)
    if not given.endless:
        music = _whole_pieces(music, given.seconds)
    try:
        if given.pipe:
            stream_wav(sys.stdout.buffer, samples(music))
        elif given.endless:
            _write_midi(music, given)
        else:
            _write_files(list(music), given, sampler)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.stderr.write("stopped\n")


def music_ids(
    session: runtimes.Session, prompt: list[int], *, sampler: runtimes.Sampler, seed: int
) -> Iterator[int]:
    """Yields the ids of an endless stream of pieces, of which the first begins with `prompt`.

    The memory is not cleared between two pieces, as in training. Raises UserError for other models.
    """
    vocab = session.vocab.to_json()
    if vocab.get("names") != list(NAMES):
        raise runtimes.UserError(
            f"this model has {session.vocab.size} tokens that differ from scheme.py's; give the "
            "artefact of a model that was trained on the dataset of prepare.py."
        )
    return _drawn(session, [IDS[END], *prompt], sampler, np.random.default_rng(seed))


def _drawn(
    session: runtimes.Session, prompt: list[int], sampler: runtimes.Sampler, rng: np.random.Generator
) -> Iterator[int]:
    memory, draw = session.start(batch=1), runtimes.Draw([sampler], session.vocab.size)
    yield from prompt[1:]  # the end of a piece before it is not heard
    logits, memory = session.predict(np.array([prompt]), memory)
    while True:
        token = int(draw(logits, [rng.random()])[0])
        yield token
        logits, memory = session.predict(np.array([[token]]), memory)


def _whole_pieces(music: Iterator[Slice], seconds: float) -> Iterator[Slice]:
    """The music until a piece ends after `seconds`, or a phrase after a quarter more."""
    played = 0.0
    for piece in music:
        over = played >= seconds and piece.tick > 0
        if over and (piece.first or not any(pitch is not None for pitch in piece.pitches)):
            return
        yield piece
        played += piece.seconds
        if piece.fermata and played >= 1.25 * seconds:
            return


def _write_files(music: list[Slice], given: argparse.Namespace, sampler: runtimes.Sampler) -> None:
    midi, wav, png = (given.out.with_name(given.out.name + suffix) for suffix in (".mid", ".wav", ".png"))
    written = [midi, wav]
    with atomic_file(midi) as temporary:  # a full disk leaves all of the files or none
        with MidiFile(temporary, tempo=given.tempo) as file:
            for piece in music:
                file.write(piece)
        with atomic_file(wav) as temporary_wav:
            write_wav(str(temporary_wav), samples(music))
            try:
                from roll import draw

                draw(music, png, title=f"{given.artefact.name}, seed {given.seed}, {sampler}")
                written.append(png)
            except ImportError:
                print(
                    "note: there is no picture, because matplotlib is not installed (pip install matplotlib)"
                )
    seconds = sum(piece.seconds for piece in music)
    pieces = sum(piece.first for piece in music)
    print(f"{seconds:.0f} seconds, {pieces} piece{'s' * (pieces != 1)}: {', '.join(map(str, written))}")


def _write_midi(music: Iterator[Slice], given: argparse.Namespace) -> None:
    path = given.out.with_name(given.out.name + ".mid")
    print(f"writing {path} without end; stop with Ctrl-C")
    try:
        with MidiFile(path, tempo=given.tempo) as file:
            for number in itertools.count():
                file.write(next(music))
                if number % 1000 == 0:
                    print(f"{number:,} chords and notes", flush=True)
    except BrokenPipeError:  # the reader of the output has gone
        raise
    except OSError as error:
        kept = "it ends with the last piece that was whole" if path.exists() else "nothing is left there"
        raise runtimes.UserError(f"{path} could not be written on: {error.strerror}; {kept}.") from error


def _check(given: argparse.Namespace) -> None:
    """Sets defaults; raises UserError, before any work, for options and files that cannot be."""
    if not 10 <= given.tempo <= 400:
        raise runtimes.UserError(f"--tempo is {given.tempo:g}; expected 10 to 400 quarter notes a minute.")
    if given.seed < 0:
        raise runtimes.UserError(f"--seed is {given.seed}; expected 0 or a positive whole number.")
    if given.endless and given.seconds is not None:
        raise runtimes.UserError("--endless and --seconds were both given; leave one of them out.")
    if given.pipe and given.out is not None:
        raise runtimes.UserError(
            "--pipe writes sound to standard output, and --out a file; leave one of them out."
        )
    given.seconds = 60.0 if given.seconds is None else given.seconds
    given.out = Path("bach") if given.out is None else given.out
    if not 0 < given.seconds < math.inf:
        raise runtimes.UserError(f"--seconds is {given.seconds:g}; expected a positive number.")
    suffixes = [".mid"] if given.endless else [".mid", ".wav", ".png"]
    written = [] if given.pipe else [given.out.with_name(given.out.name + suffix) for suffix in suffixes]
    if (kept := [path for path in written if path.exists()]) and not given.force:
        raise runtimes.UserError(f"{kept[0]} exists; give another --out, or --force to replace it.")
    if not given.pipe and not given.out.parent.is_dir():
        raise runtimes.UserError(
            f"the folder {given.out.parent} of --out does not exist; make it, or give another --out."
        )
    for path in written:
        refuse_unwritable(path, option="--out", suffixes=(path.suffix,))


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("artefact", type=Path, help="folder of a model that was trained on prepare.py's ids")
    options.add_argument("--out", type=Path, help="files are OUT.mid, OUT.wav and OUT.png; default: bach")
    options.add_argument("--force", action="store_true", help="replace files that exist")
    options.add_argument(
        "--seconds",
        type=float,
        help="about how long: up to the end of the piece, or of a phrase after a quarter more; default: 60",
    )
    options.add_argument("--endless", action="store_true", help="go on until Ctrl-C: OUT.mid, or --pipe")
    options.add_argument("--pipe", action="store_true", help="write sound to standard output, for a player")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--temperature", type=float, help="default: the model's own")
    options.add_argument("--top-p", type=float, help="default: the model's own")
    options.add_argument("--tempo", type=float, default=76.0, help="quarter notes a minute, 10 to 400")
    options.add_argument(
        "--metre", type=int, choices=(3, 4), default=4, help="beats in a bar of the first piece"
    )
    options.add_argument(
        "--key", type=int, choices=SHARPS, help="sharps of the first key; flats are negative"
    )
    return options.parse_args()


if __name__ == "__main__":
    main()
