"""A picture of one utterance: its features, the aligned phones and words, and the hypothesised words.

Shapes: T frames, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asr_am.decode.ctm import FRAME_SHIFT, CtmWord
from asr_am.report.plot_style import COLOURS, new_figure, save_png, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES_PER_SECOND = 2.5
WIDTH = 9.0, 60.0  # inches
CORRECT, WRONG = COLOURS[0], COLOURS[1]
SHADES = "#E8E8E8", "#CFCFCF"  # of neighbouring phones


def plot_utterance(
    path: Path, title: str, features: Mapping[str, np.ndarray], phones: Sequence[CtmWord], words: Sequence[CtmWord],
    hypothesis: Sequence[tuple[CtmWord, bool]],
) -> None:  # fmt: skip
    """Writes a PNG with a panel for each kind of features [T, D], one for the alignment and one for the hypothesis.

    Each word of the hypothesis comes with whether it is correct.
    """
    seconds = max([FRAME_SHIFT, *(len(x_TD) * FRAME_SHIFT for x_TD in features.values())])
    width = min(max(WIDTH[0], INCHES_PER_SECOND * seconds), WIDTH[1])
    heights = [2.0] * len(features) + [1.1, 1.6]
    figure = new_figure(width, sum(heights) + 1.2)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axes, (name, x_TD) in zip(panels, features.items(), strict=False):
        _draw_features(axes, name, x_TD)
    _draw_alignment(panels[-2], phones, words)
    _draw_hypothesis(panels[-1], hypothesis)
    panels[-1].set_xlim(0.0, seconds)
    panels[-1].set_xlabel("seconds from the start of the utterance")
    figure.suptitle(title, fontsize=10)
    figure.align_ylabels(panels)
    save_png(figure, path)


def _draw_features(axes: Axes, name: str, x_TD: np.ndarray) -> None:
    """Draws features as an image. Colours span the middle 98 % of their values."""
    low, high = np.percentile(x_TD, (1, 99)) if x_TD.size else (0.0, 1.0)
    extent = (0.0, len(x_TD) * FRAME_SHIFT, -0.5, x_TD.shape[1] - 0.5)
    axes.imshow(
        x_TD.T, origin="lower", aspect="auto", interpolation="nearest", extent=extent, vmin=low, vmax=high,
        cmap="magma",
    )  # fmt: skip
    axes.set_ylabel(name)


def _draw_alignment(axes: Axes, phones: Sequence[CtmWord], words: Sequence[CtmWord]) -> None:
    """Draws the phones as boxes, and above them the words."""
    for number, phone in enumerate(phones):
        _box(axes, phone, 0.0, 1.0, SHADES[number % 2])
        name = phone.word.rpartition("_")[0] or phone.word  # without the marker of its position
        axes.text(_middle(phone), 0.5, name, ha="center", va="center", fontsize=6, rotation=90, clip_on=True)
    for word in words:
        _box(axes, word, 1.05, 1.75, "white")
        axes.text(_middle(word), 1.4, word.word, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_ylim(0.0, 1.8)
    axes.set_yticks([0.5, 1.4], ["phones", "words"] if phones else ["not aligned", ""])
    axes.set_ylabel("reference")


def _draw_hypothesis(axes: Axes, hypothesis: Sequence[tuple[CtmWord, bool]]) -> None:
    """Draws the recognised words as bars as high as their posterior."""
    for word, correct in hypothesis:
        colour = CORRECT if correct else WRONG
        _box(axes, word, 0.0, word.confidence, colour, alpha=0.35)
        axes.text(_middle(word), 0.06, word.word, ha="center", va="bottom", fontsize=7, rotation=90, clip_on=True)
    handles = [_box(axes, CtmWord(0, 0, "", 0.0), 0.0, 0.0, colour, alpha=0.35) for colour in (CORRECT, WRONG)]
    axes.legend(handles, ["correct", "error"], loc="upper right", ncols=2, fontsize=7, frameon=False)
    axes.set_ylim(0.0, 1.3)
    axes.set_yticks([0.0, 0.5, 1.0])
    axes.set_ylabel("posterior")
    tidy(axes, "y")


def _middle(word: CtmWord) -> float:
    return (word.start + word.frames / 2) * FRAME_SHIFT


def _box(axes: Axes, word: CtmWord, low: float, high: float, colour: str, alpha: float = 1.0):  # type: ignore[no-untyped-def]
    begin, end = word.start * FRAME_SHIFT, (word.start + word.frames) * FRAME_SHIFT
    return axes.fill_between([begin, end], low, high, facecolor=colour, edgecolor="0.4", linewidth=0.6, alpha=alpha)
