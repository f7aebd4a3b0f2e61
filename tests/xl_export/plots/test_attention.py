"""Pictures: valid images of sensible sizes that show what they were given, at odd sizes, with any symbols."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from runtimes.base.errors import MissingPackageError, UserError
from runtimes.contract.rule import MemoryRule
from tests.nightly import every
from xl_export.plots import attention as pictures
from xl_export.plots import canvas


def weights(*shape: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(0, 2, shape)
    return drawn / drawn.sum(-1, keepdims=True)


def assert_picture(path: Path, *, at_least: tuple[int, int] = (400, 800)) -> np.ndarray:
    """The pixels [height, width, channel] of a PNG that is no smaller than that and not blank."""
    assert path.read_bytes().startswith(b"\x89PNG")
    pixels: np.ndarray = image.imread(path)
    assert pixels.shape[0] >= at_least[0]
    assert pixels.shape[1] >= at_least[1]
    assert max(pixels.shape) <= 8000
    assert pixels[..., :3].std() > 0.02
    assert (pixels[..., :3].min(-1) < 0.95).mean() > 0.05, "blank"
    return pixels


def redness(pixels: np.ndarray) -> float:
    """The share of the picture that is red."""
    return float(((pixels[..., 0] > 0.3) & (pixels[..., 1] < 0.5 * pixels[..., 0])).mean())


def test_figure_5_is_darker_where_weights_are_higher(tmp_path: Path) -> None:
    near, far = (
        np.geomspace(first, last, 40)[None, None].repeat(4, 1) for first, last in ((1, 1e-4), (1e-4, 1))
    )
    halves = []
    for name, average in (("near", near), ("far", far)):
        pictures.draw_average(tmp_path / f"{name}.png", average, None, title="x")
        pixels = assert_picture(tmp_path / f"{name}.png")[200:400, 150:1400, 0]
        halves.append(pixels[:, :600].mean() - pixels[:, -600:].mean())
    assert halves[0] < -0.3
    assert halves[1] > 0.3


def test_figure_6_shows_marked_cells_in_red_and_no_others(tmp_path: Path) -> None:
    drawn = weights(8, 33)
    for name, marked in (("none", drawn > 1), ("fifth", drawn > np.quantile(drawn, 0.8))):
        pictures.draw_stretch(
            tmp_path / f"{name}.png",
            drawn,
            np.ones_like(marked),
            marked,
            ["a"] * 40,
            first=32,
            title="layer 0, head 0",
        )
    none, fifth = (redness(image.imread(tmp_path / f"{name}.png")) for name in ("none", "fifth"))
    assert none == 0
    assert 0.08 < fifth < 0.12, "the cells of a fifth of the weights cover about a tenth of the picture"


def test_any_symbol_can_be_drawn_without_a_warning(tmp_path: Path) -> None:
    symbols = [
        pictures.legible(text)
        for text in ("中文", "$a$", "\\frac", "\x00", "a very long token indeed", "", "\n", "😀", "_^{")
    ]
    pictures.draw_stretch(
        tmp_path / "6.png",
        weights(3, 7),
        np.ones((3, 7), bool),
        weights(3, 7) > 0.2,
        symbols,
        first=6,
        title="$x$ and $",
    )
    assert_picture(tmp_path / "6.png", at_least=(200, 1500))


@pytest.mark.parametrize(
    ("L", "H", "first", "last", "count"),
    [
        (10, 4, "layer 0, head 0", "layer 9, head 3", 40),
        (1, 41, "layer 0", "layer 0", 1),
        (11, 4, "layer 0", "layer 10", 11),
        (40, 2, "layer 0", "layer 39", 40),
        (41, 1, "layer 0", "layer 40", 21),  # every second layer
        (100, 2, "layer 0", "layer 99", 34),
    ],
)
def test_heads_have_labels_and_many_heads_share_those_of_layers(
    L: int, H: int, first: str, last: str, count: int
) -> None:
    axes = canvas.new_figure(9, 9).subplots()
    pictures._label_heads(axes, L, H)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert (labels[0], labels[-1], len(labels)) == (first, last, count)
    for label, at in zip(labels, axes.get_yticks(), strict=True):
        layer, _, head = label.removeprefix("layer ").partition(", head ")
        assert at == int(layer) * H + (int(head) if head else (H - 1) / 2)


@pytest.mark.parametrize(("L", "H"), every(2, [(26, 4), (1, 1)]))
def test_spans(L: int, H: int, tmp_path: Path) -> None:
    spans = np.linspace(0, 100, L * H).reshape(L, H)
    pictures.draw_spans(
        tmp_path / "spans.png", spans.tolist(), (spans + 8).astype(int).tolist(), maximum=128, title="x"
    )
    pixels = image.imread(tmp_path / "spans.png")
    assert pixels.shape[0] >= 700
    assert pixels.shape[1] >= 1300
    blue = (pixels[..., 2] > 0.7) & (pixels[..., 0] < 0.3)
    assert blue.sum() > 40 * L * H, "a dot for every head"


def test_what_cannot_become_a_picture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--out is spans\.pdf; expected a file name that ends in \.png"):
        canvas.check_picture(Path("spans.pdf"), "--out")
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "none" / "spans.png", tmp_path / "folder.png"):
        with pytest.raises(UserError, match=r"could not be written|which is a folder"):
            canvas.check_picture(path, "--out")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install .*'matplotlib>"):
        canvas.check_picture(tmp_path / "spans.png", "--out")


@pytest.mark.parametrize("width", every(2, [9, 16]))
def test_long_titles_stay_inside_the_picture(width: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = canvas.new_figure(width, 5)
    rule = MemoryRule(mem_len=128, segment=64, clamp_len=1000)
    canvas.set_title(
        figure, f"Learned attention span of every head\nat most 128 tokens; {rule}; {'and so on ' * 12}"
    )
    FigureCanvasAgg(figure).draw()
    box = figure._suptitle.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
