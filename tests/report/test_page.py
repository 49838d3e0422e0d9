"""Tests report/index.html: everything is in it, escaped, and it asks for nothing but the recordings."""

from __future__ import annotations

import gzip
import html
import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr_am.report.page import inline_svg
from asr_am.report.utterance_errors import read_utterances
from asr_am.report.write import write_report
from tests.support.browser import needs_browser
from tests.support.page_checks import check_page
from tests.support.report_files import SEGMENTS, write_run, write_score

ERRORS = """\
call 1 A call_a 0.00 1.00 <o>
Scores: (#C #S #D #I) 2 0 0 0
REF:  all right
HYP:  all right
Eval:

call 1 A_b 1.25 2.50 <o>
Scores: (#C #S #D #I) 2 {substitutions} 1 1
REF:  i <B>PLAYED</B> a ***  GAME
HYP:  i LIVE          a NICE ****
Eval:   S               I    D

CONFUSIONS: 1 in all, 1 different
     1  <b>played</b> -> live
"""
VOID = {"meta", "link", "br", "img", "hr"}


class Page(HTMLParser):
    """Collects tags, links and text, and checks that tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open += [] if tag in VOID else [tag]
        if "svg" not in self._open:
            self.links += [str(value) for name, value in attributes if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.fixture
def corpus_dir(tmp_path: Path) -> Path:
    corpus = tmp_path / "exp" / "tiny"
    run = write_run(corpus, "blstm-s1", 1, [2.0, 1.25, 1.5])
    (run / "config.yaml").write_text("note: <script>alert(1)</script>\n")
    lines = [{"batch": 10, "loss": 3.0, "lr": 0.1}, {"batch": 20, "loss": 2.0, "lr": 0.1}]
    lines.append({"batch": 20, "heldout_loss": 2.0})
    torn = '{"batch": 30, "lo'  # by a kill
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    for system, substitutions in (("sat", 3), ("blstm-s1", 1)):
        folder = write_score(corpus, system, "kn3", [substitutions] * SEGMENTS)
        (folder / "errors.txt").write_text(ERRORS.format(substitutions=substitutions))
    (corpus / "data/test").mkdir(parents=True)
    recording = {"id": "Call", "sources": [{"type": "file", "channels": [0], "source": "wav/a call.wav"}]}
    (corpus / "data/test/recordings.jsonl.gz").write_bytes(gzip.compress(json.dumps(recording).encode() + b"\n"))
    return corpus


def test_the_page_has_everything_and_needs_nothing(corpus_dir: Path) -> None:
    out = corpus_dir / "report.partial"  # the stage renames it when it is complete
    write_report(corpus_dir, out, "recipes/tiny/run.sh")
    text = (out / "index.html").read_text()
    page = Page(text)
    assert page.tags.count("svg") == 3  # WER, held-out loss, the run's curves
    assert {link for link in page.links if not link.startswith("#")} == {
        "data:,", "../data/wav/a%20call.wav#t=1.25,2.5", "../data/wav/a%20call.wav"
    }  # fmt: skip
    targets = set(re.findall(r'id="([^"]+)"', text))
    assert {link[1:] for link in page.links if link.startswith("#")} <= targets
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    assert '<mark class="substitution">&lt;B&gt;PLAYED&lt;/B&gt;</mark>' in text
    assert re.search(r"<pre>ref  i .*\nhyp  i .*</pre>", text)
    assert text.index("held-out loss 1.2500 after epoch\n2 of 3") < text.index("1 of the 1 utterances")
    assert text.index("blstm-s1_kn3: 3 errors") < text.index("sat_kn3: 5 errors")  # by WER


def test_alignments(corpus_dir: Path) -> None:
    utterances, total = read_utterances(corpus_dir, ["sat_kn3", "blstm-s1_kn3"], most=5)
    assert total == 1 and [each.errors for each in utterances[0].alignments] == [5, 3]
    first = utterances[0].alignments[0]
    assert [(piece.text, piece.kind) for piece in first.reference if piece.kind] == [
        ("<B>PLAYED</B>", "substitution"), ("*** ", "insertion"), ("GAME", "deletion")
    ]  # fmt: skip
    assert [piece.text for piece in first.hypothesis if piece.kind] == ["LIVE         ", "NICE", "****"]
    assert "".join(piece.text for piece in first.reference) == "i <B>PLAYED</B> a ***  GAME"


def test_figures_take_the_colours_of_the_page(corpus_dir: Path) -> None:
    write_report(corpus_dir, corpus_dir / "report", "recipes/tiny/run.sh")
    svg = inline_svg(corpus_dir / "report/wer.svg")
    assert svg.startswith("<svg") and "#ffffff" not in svg and "currentColor" in svg and "<text" in svg
    width = re.search(r'width="([\d.]+)pt"', svg)
    assert width and f'style="min-width: {0.8 * float(width[1]):.0f}pt"' in svg  # text stays legible on a phone


@needs_browser
def test_in_a_browser(corpus_dir: Path, tmp_path: Path) -> None:
    (corpus_dir / "data/wav").mkdir()
    soundfile.write(corpus_dir / "data/wav/a call.wav", np.zeros((24000, 2)), 8000, subtype="ULAW")
    write_report(corpus_dir, corpus_dir / "report", "recipes/tiny/run.sh")
    check_page(corpus_dir / "report/index.html", tmp_path / "profile")


HOSTILE = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "![a](b)", "[a](javascript:alert(1))", "a|b", "`a`",
    "**a**", '"><b>', "&lt;b&gt;", "_a_", "__a__b", "\\*a*", "</title><b>", r"$\x$", "a\nb", "a\n\n# b",
)  # fmt: skip


HARMLESS = {
    "a", "body", "code", "details", "div", "em", "h1", "h2", "h3", "head", "html", "link", "main", "mark", "meta",
    "nav", "p", "pre", "script", "small", "span", "strong", "style", "summary", "table", "tbody", "td", "th", "thead",
    "title", "tr",
}  # fmt: skip


class Shown(HTMLParser):
    """Collects the texts of elements of one kind, outside of figures, and all tags and attributes."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.attributes: list[str] = []
        self._kind, self._inside = kind, False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [name for name, _ in attributes]
        if tag == self._kind:
            self.texts.append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != self._kind

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data


def test_names_commits_and_words_are_shown_as_they_are(tmp_path: Path) -> None:
    corpus, subset = tmp_path / "exp" / "<b>_$x$_[a](b)|", "in <img src=x onerror=alert(1)> ![a](b)"
    (corpus / "lm").mkdir(parents=True)
    write_run(corpus, "local-s1", 1, [2.0, 1.0], model="m")
    words = [re.sub(r"\s", "", text) for text in HOSTILE]
    for nth, text in enumerate(HOSTILE):
        plain = text.replace("/", "-")
        settings = {"commit": text, "config_hash": text, "strategy": text, "model": "m", "learners": 2}
        run = write_run(corpus, f"{plain}-s1", 1, [2.0, 1.0], **settings)
        if nth == 0:
            (run / "metrics.jsonl").write_text(json.dumps({"batch": 1, "loss": 3.0, "lr": 0.1}) + "\n")
        lm = HOSTILE[nth % 2].replace("/", "-")
        folder = write_score(corpus, f"{plain}-s1", lm, [min(nth, 1)] * SEGMENTS)  # the best has errors.txt
        wer = json.loads((folder / "wer.json").read_text())
        wer |= {"commit": text, "lm": HOSTILE[nth % 2], subset: wer.pop("swb")}
        (folder / "wer.json").write_text(json.dumps(wer))
        if nth == 0:
            blocks = (
                ERRORS.format(substitutions=1).replace("A_b", word).replace("<B>PLAYED</B>", word) for word in words
            )
            (folder / "errors.txt").write_text("\n".join(blocks))
        model = {"name": text, "source": f"of {text}", "ngrams": [1], "dev_perplexity": 2.0}
        (corpus / f"lm/{nth}").mkdir()
        (corpus / f"lm/{nth}/lm.json").write_text(json.dumps({**model, "dev_words": 5, "dev_oov": 1}))
    write_report(corpus, corpus / "report", f"recipes/x/run.sh {HOSTILE}", HOSTILE[0])
    page = (corpus / "report/index.html").read_text()
    outside_of_figures = re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
    harmless = Page(outside_of_figures)
    assert set(harmless.tags) <= HARMLESS and harmless.tags.count("script") == 1
    assert {link for link in harmless.links if not link.startswith("#")} == {"data:,"}
    shown = {kind: Shown(outside_of_figures, kind) for kind in ("h1", "h3", "p", "td", "th", "pre", "summary")}
    assert not {name for name in shown["p"].attributes if name.startswith("on")}
    assert f"Results: {corpus.name}" in shown["h1"].texts and f"{subset} (300 words)" in shown["h3"].texts
    assert HOSTILE[0] in shown["p"].texts
    assert set(HOSTILE[:2]) <= set(shown["th"].texts)
    assert all(any(word in line for line in shown["pre"].texts) for word in words)
    for text in HOSTILE:
        line = re.sub(r"\s", " ", text)
        run = f"{line.replace('/', '-')}-s1"
        assert {line, f"of {line}", run} <= set(shown["td"].texts)
        assert any(f"{line}, 2 learners" in cell for cell in shown["td"].texts), text  # among the strategies
        assert any(f"commit {text}" in words for words in shown["summary"].texts)


def test_what_a_corpus_is_comes_first(corpus_dir: Path) -> None:
    write_report(corpus_dir, corpus_dir / "report", "recipes/tiny/run.sh", "Speech of <machines>.")
    results, page = (corpus_dir / "RESULTS.md").read_text(), (corpus_dir / "report/index.html").read_text()
    assert results.index("# Results: tiny") < results.index("Speech of \\<machines>.") < results.index("Made again by")
    assert page.index("<p>Speech of &lt;machines&gt;.</p>") < page.index("Made again by")


def test_no_script_but_the_pages_own_may_run(corpus_dir: Path) -> None:
    write_report(corpus_dir, corpus_dir / "report", "recipes/tiny/run.sh")
    text = (corpus_dir / "report/index.html").read_text()
    found = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    assert found and script
    policy = dict(part.strip().split(" ", 1) for part in html.unescape(found[1]).split(";"))
    digest = b64encode(sha256(script[1].encode()).digest()).decode()
    assert policy["default-src"] == "'none'" and policy["script-src"] == f"'sha256-{digest}'"
