"""The picture that links to a page show: a text of its model, as the page colours it.

Each token is a bar as long as its text, coloured by how surprising it was. Letters would need a font.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from pathlib import Path

import numpy as np

from runtimes import open_session
from runtimes.tasks.evaluate import evaluate
from runtimes.tasks.generate import generate
from xl_export.web.files import web_files

WIDTH, HEIGHT = 1200, 630  # pixels, as most services show pictures of links
MARGIN = 72  # pixels
CHARACTER = 13  # pixels of width
BAR, LINE = 34, 54  # pixels of height: of a bar, and from one line to the next
RADIUS = 7  # pixels; of the corners
TOKENS = 600  # enough to fill the picture with any vocabulary but one of single characters
STEPS = (0.5, 1, 2, 3.5, 5, 7, 9.5, 12)  # bits, as in `web/page/tokens.js`
COLOUR = re.compile(r"--(\w+): #(\w{6})")


def picture_of(artefact: Path, opening: str | None) -> bytes:
    """A PNG of how the model of an artefact continues the opening, or begins by itself if it is None."""
    session = open_session(artefact, threads=1, device="cpu")
    vocab = session.vocab
    first = vocab.special.before_text
    words = opening if vocab.kind != "ids" else None  # ids have no words
    tokens = [0 if first is None else first, *(vocab.encode(words).tolist() if words else ())]
    while (rest := TOKENS - len(tokens)) > 0:  # a text may end before
        tokens += [piece.token for piece in generate(session, tokens, max_tokens=rest, text=False)]
    bits = evaluate(session, np.array(tokens)).token_nats / math.log(2)
    decoder = vocab.decoder()
    texts = [decoder(token) for token in tokens][1:]
    return _png(_drawn(list(zip(texts, bits.tolist(), strict=True))))


def _drawn(tokens: list[tuple[str, float]]) -> np.ndarray:
    """The pixels [height, width, 3] of texts with their bits."""
    style = (web_files() / "page" / "style.css").read_text(encoding="utf-8")
    colours: dict[str, np.ndarray] = {}
    for name, value in COLOUR.findall(style):  # the light ones come first
        colours.setdefault(name, np.array([int(value[i : i + 2], 16) for i in (0, 2, 4)], np.float64))
    image = np.empty((HEIGHT, WIDTH, 3))
    image[:] = colours["sheet"]
    x, y = MARGIN, MARGIN
    for text, bits in tokens:
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            width = CHARACTER * len(part)
            if part == "\n" or (not part.isspace() and x + width > WIDTH - MARGIN):
                x, y = MARGIN, y + LINE
            if y + BAR > HEIGHT - MARGIN:
                return image
            if part == "\n" or (part.isspace() and x == MARGIN):
                continue
            if not part.isspace():
                step = sum(bits >= limit for limit in STEPS)
                _bar(image, x, y, width - 2, colours[f"s{step}" if step else "line"])
            x += width
    return image


def _bar(image: np.ndarray, x: int, y: int, width: int, colour: np.ndarray) -> None:
    """Draws a rectangle with round corners."""
    radius = min(RADIUS, width / 2)
    across = np.maximum(0, np.abs(np.arange(width) + 0.5 - width / 2) - (width / 2 - radius))
    down = np.maximum(0, np.abs(np.arange(BAR) + 0.5 - BAR / 2) - (BAR / 2 - radius))
    inside = np.clip(radius + 0.5 - np.hypot(down[:, None], across), 0, 1)[..., None]
    area = image[y : y + BAR, x : x + width]
    area += inside[:, : area.shape[1]] * (colour - area)


def _png(image: np.ndarray) -> bytes:
    rows = np.pad(np.rint(image).astype(np.uint8).reshape(HEIGHT, -1), ((0, 0), (1, 0)))  # filter 0 a row
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
