"""Writes report/index.html: the report as one page, with the curves and the configuration of every run, and the
utterances with errors. It needs no server and no network.

Nothing from data is HTML: Markdown is read without it, and the page has a content security policy, under which no other
script than its own runs and nothing is fetched but recordings.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jinja2
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup, escape

from asr_am.data.textfile import numbered_lines, write_lines
from asr_am.report.plot_style import COLOURS, new_figure, save, tidy
from asr_am.report.results import SystemScore
from asr_am.report.runs import TrainingRun
from asr_am.report.utterance_errors import read_utterances

MOST_UTTERANCES, MOST_SYSTEMS = 100, 12  # on the page
TEMPLATE = Path(__file__).with_name("page.html")


def write_page(
    corpus_dir: Path, out: Path, text: str, runs: Sequence[TrainingRun], scores: Sequence[SystemScore]
) -> Path:
    """Writes out/index.html, and returns its path.

    `text` is Markdown with links to the figures, which are in `out`. Utterances are shown for the `scores` with the
    lowest WER.
    """
    best = sorted(scores, key=lambda score: score.subsets["all"].wer)[:MOST_SYSTEMS]
    utterances, total = read_utterances(corpus_dir, [score.run for score in best], MOST_UTTERANCES)
    body, headings = _html(text, out)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = TEMPLATE.read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        corpus=corpus_dir.name, body=body, headings=headings, runs=[_details(run, out) for run in runs],
        utterances=utterances, num_utterances=total, policy=_policy(template),
    )  # fmt: skip
    write_lines(out / "index.html", [page])
    return out / "index.html"


def _policy(template: str) -> str:
    """Returns the content security policy: the script of the page by its hash, styles, and recordings."""
    script = template.partition("<script>")[2].partition("</script>")[0]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "media-src 'self' file:; base-uri 'none'; form-action 'none'"
    )


def _html(text: str, figures: Path) -> tuple[Markup, list[tuple[str, str]]]:
    """Returns HTML of Markdown, its figures as SVG inside it, and (id, text) of the headings of second order."""

    def figure(self: RendererHTML, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        token = tokens[index]
        path = Path(unquote(str(token.attrGet("src")))).with_suffix(".svg")
        # figures of report/ are in `figures`, whose name is not the final one yet
        svg = inline_svg(figures / path.name if path.parts[0] == "report" else figures.parent / path)
        label = self.renderInlineAsText(token.children, options, env)
        return f'<span class="wide figure" tabindex="0" role="img" aria-label="{escape(label)}">{svg}</span>'

    def table(self: RendererHTML, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return '<div class="wide" tabindex="0"><table>'

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    markdown.add_render_rule("image", figure)
    markdown.add_render_rule("table_open", table)
    markdown.add_render_rule("table_close", lambda *_: "</table></div>")
    tokens, renderer = markdown.parse(text), markdown.renderer
    assert isinstance(renderer, RendererHTML)
    headings = []
    for token, inline in pairwise(tokens):
        if token.type == "heading_open":
            name = anchor(inline.content)
            token.attrSet("id", name)
            if token.tag == "h2":
                headings.append((name, renderer.renderInlineAsText(inline.children, markdown.options, {})))
    return Markup(renderer.render(tokens, markdown.options, {})), headings


def anchor(heading: str) -> str:
    """Returns the id of a heading, for links to it."""
    return re.sub(r"\W+", "-", heading.lower()).strip("-")


def inline_svg(path: Path) -> Markup:
    """Returns an SVG for use inside HTML: its black, white, grey and blue become the colours of the page.

    On a narrow screen it is shown at 80 % of its size or more, so that its text stays legible, and can be scrolled. It
    has no background of its own: a shade behind it shows that there is more.
    """
    svg = path.read_text(encoding="utf-8")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])  # ids would occur in several figures
    for colour, replacement in (
        ("#000000", "currentColor"), ("#ffffff", "var(--page)"), ("#e6e6e6", "var(--line)"), ("#0072b2", "var(--blue)"),
    ):  # fmt: skip
        svg = svg.replace(colour, replacement)
    width = re.search(r'<svg[^>]* width="([\d.]+)pt"', svg)
    if width:
        svg = svg.replace("<svg", f'<svg style="min-width: {0.8 * float(width[1]):.0f}pt"', 1)
    return Markup(svg)


def _details(run: TrainingRun, out: Path) -> dict[str, Any]:
    """Returns what the page shows of a training run. Its configuration is the resolved one, as YAML."""
    config = run.folder / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    return {"run": run, "curves": _curves(run, out), "config": text}


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics.jsonl up to one that was being written when the training was killed."""
    records = []
    for _, line in numbered_lines(path, "train again"):
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def _curves(run: TrainingRun, out: Path) -> Markup:
    """Returns an SVG of loss and learning rate by update, from metrics.jsonl. "" if nothing was recorded."""
    path = run.folder / "metrics.jsonl"
    records = _metrics(path) if path.exists() else []
    if not records:
        return Markup("")
    figure = new_figure(9, 2.6)
    loss_axes, rate_axes = figure.subplots(1, 2)
    for axes, key, label, colour, marker in (
        (loss_axes, "loss", "training", COLOURS[0], ""), (loss_axes, "heldout_loss", "held out", COLOURS[1], "o"),
        (rate_axes, "lr", "learning rate", COLOURS[2], ""),
    ):  # fmt: skip
        points = [(record["batch"], record[key]) for record in records if key in record and "batch" in record]
        axes.plot(*zip(*points, strict=True) if points else ((), ()), color=colour, marker=marker, markersize=3.5,
                  linewidth=1.2, label=label)  # fmt: skip
    for axes, quantity in ((loss_axes, "loss (nats per frame)"), (rate_axes, "learning rate")):
        axes.set_xlabel("updates")
        axes.set_ylabel(quantity)
        tidy(axes, "both")
    loss_axes.legend(fontsize=9, frameon=False)
    target = out / "runs" / f"{run.name}.png"
    target.parent.mkdir(exist_ok=True)
    save(figure, target)
    return inline_svg(target.with_suffix(".svg"))
