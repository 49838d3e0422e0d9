"""Common plot style: colours, line styles, empty figures, and saving.

The palette is that of Okabe and Ito, which is safe for colour-blind readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from asr_am.data.temporary import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")  # tell bars apart in greyscale
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Style:
    """Line style: colour and marker by kind, dash pattern for the nth line of a kind."""

    colour: str
    marker: str
    line: str

    @classmethod
    def of(cls, kind: int, nth: int = 0) -> Style:
        nth += kind // len(COLOURS)
        return cls(COLOURS[kind % len(COLOURS)], MARKERS[kind % len(MARKERS)], STYLES[nth % len(STYLES)])


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of the given size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display and no pyplot state
    return figure


def tidy(axes: Axes, grid: Literal["both", "y"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)


def whole_numbers(axis: Axis) -> None:
    """Restricts the ticks to integers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG for Markdown, and the same as SVG beside it for the page, with text as text and no background."""
    from matplotlib import rc_context

    save_png(figure, path)
    figure.set_layout_engine("none")  # keeps that of the PNG: laying out takes a third of the time
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):  # the same bytes for the same figure
        _write(figure, path.with_suffix(".svg"), {"Date": None}, transparent=True)


def save_png(figure: Figure, path: Path) -> None:
    from matplotlib.text import Text

    for artist in figure.findobj(Text):
        if isinstance(artist, Text) and artist.get_text():  # powers at ticks have no text yet
            artist.set_parse_math(False)  # a name with two dollars is no formula
    _write(figure, path, {"Software": None})


def _write(figure: Figure, path: Path, metadata: dict[str, None], transparent: bool = False) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, metadata=metadata, transparent=transparent)
