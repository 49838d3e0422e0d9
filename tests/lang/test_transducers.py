"""L and G compared with their definitions: pronunciations with optional silence, and the backoff model."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import kaldifst
import pytest
from lhotse import SupervisionSegment, SupervisionSet

from asr_am.decode.lattice import LmScale
from asr_am.errors import InputError
from asr_am.lang.arpa import read_arpa, write_arpa
from asr_am.lang.fsts import make_grammar
from asr_am.lang.lang_dir import Lang, vocabulary
from asr_am.lang.ngram import estimate
from asr_am.lang.ngram_automaton import LmPair
from asr_am.lang.prepare import prepare_lang, prepare_lm
from asr_am.lang.transcripts import check_transcripts
from asr_am.stages.systems import scales_to_try

LEXICON = "A AH\nAB AH B\nRED R EH D\nREAD R EH D\nREAD R IY D\n"
TEXT = ["A RED AB", "READ A", "RED A RED", "[NOISE] AB READ", "A A", "ZZZ A"] * 3


def write_supervisions(data_dir: Path, subset: str, texts: Sequence[str | None]) -> None:
    segments = [
        SupervisionSegment(f"s1-{subset}{i}", "rec", start=float(i), duration=1.0, text=text)
        for i, text in enumerate(texts)
    ]
    (data_dir / subset).mkdir(parents=True, exist_ok=True)
    SupervisionSet.from_segments(segments).to_file(data_dir / subset / "supervisions.jsonl.gz")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    (path / "lexicon.txt").write_text(LEXICON)
    (path / "nonspeech.txt").write_text("[NOISE] NSN\n")
    (path / "lm").mkdir()
    (path / "lm" / "train.txt").write_text("\n".join(TEXT) + "\n")
    write_supervisions(path, "train", TEXT)
    write_supervisions(path, "dev", ["A RED", "AB QQQ A"])
    return path


@pytest.fixture(scope="module")
def lang(data_dir: Path) -> Lang:
    out = data_dir / "out-lang"
    out.mkdir()
    prepare_lang(data_dir, out, position_dependent=True, silence_prob=0.25)
    return Lang.load(out)


def paths(fst: kaldifst.StdVectorFst) -> list[tuple[tuple[int, ...], float]]:
    """Returns every path of an acyclic transducer: input labels without epsilon, cost."""
    found = []
    stack: list[tuple[int, tuple[int, ...], float]] = [(fst.start, (), 0.0)]
    while stack:
        state, labels, cost = stack.pop()
        final = fst.final(state).value
        if math.isfinite(final):
            found.append((labels, cost + final))
        for arc in kaldifst.ArcIterator(fst, state):
            more = (*labels, arc.ilabel) if arc.ilabel else labels
            stack.append((arc.nextstate, more, cost + arc.weight.value))
    return found


def accept(labels: Sequence[int]) -> kaldifst.StdVectorFst:
    return kaldifst.make_linear_acceptor(list(labels))


def test_lang_tables(lang: Lang) -> None:
    assert [lang.phone_names[i] for i in lang.silence_phones] == ["SIL", "SPN", "NSN"]
    assert lang.optional_silence == lang.phones["SIL"] == 1
    assert list(lang.words)[:2] == ["<eps>", "<unk>"] and list(lang.words)[-3:] == ["#0", "<s>", "</s>"]
    assert lang.word_ids("A ZZZ") == [lang.words["A"], lang.unk]
    assert [lang.phone_names[i] for i in lang.disambig] == ["#0", "#1", "#2", "#3"]
    assert len(lang.pronunciations["READ"]) == 2
    everything = sorted(phone for root in lang.roots for phone in root)
    assert everything == sorted(lang.silence_phones + lang.nonsilence_phones)
    ids = {name: lang.phones[name] for name in ("AH_S", "AH_B", "EH_I", "D_E", "SIL", "#0")}
    flags = {name: (lang.is_word_begin(i), lang.is_word_end(i)) for name, i in ids.items()}
    assert flags == {
        "AH_S": (True, True), "AH_B": (True, False), "EH_I": (False, False),
        "D_E": (False, True), "SIL": (False, False), "#0": (False, False),
    }  # fmt: skip


def test_every_pronunciation_with_and_without_silences(lang: Lang) -> None:
    l_fst = kaldifst.StdVectorFst.read(str(lang.directory / "L.fst"))
    words = ["READ", "A"]
    found = dict(paths(kaldifst.compose(l_fst, accept(lang.word_ids(" ".join(words))))))
    expected = {}
    for first, second in itertools.product(*(lang.pronunciations[word] for word in words)):
        for places in itertools.product((False, True), repeat=3):
            silences = [(lang.optional_silence,) if place else () for place in places]
            labels = (*silences[0], *first, *silences[1], *second, *silences[2])
            expected[labels] = -sum(math.log(0.25 if place else 0.75) for place in places)
    assert found.keys() == expected.keys()
    for labels, cost in expected.items():
        assert found[labels] == pytest.approx(cost, abs=1e-5)


def test_pronunciations_have_their_probabilities(data_dir: Path, tmp_path: Path) -> None:
    first, second = [
        line.split()[1:] for line in (data_dir / "lexicon.txt").read_text().splitlines() if "READ " in line
    ]
    (tmp_path / "data").mkdir()
    for name in ("lexicon.txt", "nonspeech.txt"):
        shutil.copy(data_dir / name, tmp_path / "data")
    (tmp_path / "data/lexiconp.txt").write_text(f"READ 0.25 {' '.join(second)}\n")
    (tmp_path / "lang").mkdir()
    prepare_lang(tmp_path / "data", tmp_path / "lang", position_dependent=True, silence_prob=0.0)
    lang = Lang.load(tmp_path / "lang")
    found = dict(
        paths(kaldifst.compose(kaldifst.StdVectorFst.read(str(tmp_path / "lang/L.fst")), accept(lang.word_ids("READ"))))
    )
    costs = {tuple(lang.phone_names[p][:-2] for p in phones): cost for phones, cost in found.items()}
    assert costs == {tuple(first): pytest.approx(0.0), tuple(second): pytest.approx(-math.log(0.25))}
    (tmp_path / "data/lexiconp.txt").write_text("READ 1.25 R\n")
    with pytest.raises(InputError, match=r"lexiconp.txt:1: the probability must be above 0 and at most 1"):
        prepare_lang(tmp_path / "data", tmp_path / "lang", position_dependent=True, silence_prob=0.0)


def test_without_silence_there_is_none(data_dir: Path, tmp_path: Path) -> None:
    prepare_lang(data_dir, tmp_path, position_dependent=False, silence_prob=0.0)
    lang = Lang.load(tmp_path)
    l_fst = kaldifst.StdVectorFst.read(str(tmp_path / "L.fst"))
    found = paths(kaldifst.compose(l_fst, accept(lang.word_ids("AB A"))))
    assert found == [(tuple(lang.phones[p] for p in ("AH", "B", "AH")), pytest.approx(0.0))]
    assert not lang.is_word_begin(lang.phones["AH"]) and not lang.is_word_end(lang.phones["AH"])


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_grammar_scores_as_the_model(data_dir: Path, lang: Lang, tmp_path: Path, order: int) -> None:
    prepare_lm(data_dir, lang.directory, tmp_path, name="kn", order=order, arpa=None, text="train")
    arpa = read_arpa(tmp_path / "lm.arpa")
    grammar = kaldifst.StdVectorFst.read(str(tmp_path / "G.fst"))
    assert ("<unk>",) not in arpa.logprobs[0]
    for sentence in ["A RED AB", "AB AB", "READ [NOISE] RED A A", "A"]:
        state, cost = grammar.start, 0.0
        for number in lang.word_ids(sentence):
            state, cost = _step(grammar, state, cost, number, lang.words["#0"])
        while not math.isfinite(grammar.final(state).value):
            state, cost = _back_off(grammar, state, cost, lang.words["#0"])
        cost += grammar.final(state).value
        history, expected = ["<s>"], 0.0
        for word in [*sentence.split(), "</s>"]:
            expected -= math.log(10) * arpa.logprob(history, word)
            history.append(word)
        assert cost == pytest.approx(expected, abs=1e-3)


def _step(grammar: kaldifst.StdVectorFst, state: int, cost: float, word: int, back: int) -> tuple[int, float]:
    while True:
        for arc in kaldifst.ArcIterator(grammar, state):
            if arc.ilabel == word:
                return arc.nextstate, cost + arc.weight.value
        state, cost = _back_off(grammar, state, cost, back)


def _back_off(grammar: kaldifst.StdVectorFst, state: int, cost: float, back: int) -> tuple[int, float]:
    (arc,) = [arc for arc in kaldifst.ArcIterator(grammar, state) if arc.ilabel == back]
    assert arc.olabel == 0
    return arc.nextstate, cost + arc.weight.value


def test_lexicon_and_grammar_determinize(data_dir: Path, lang: Lang, tmp_path: Path) -> None:
    prepare_lm(data_dir, lang.directory, tmp_path, name="kn2", order=2, arpa=None, text="train")
    l_fst = kaldifst.StdVectorFst.read(str(lang.directory / "L_disambig.fst"))
    arcs = [arc for state in range(l_fst.num_states) for arc in kaldifst.ArcIterator(l_fst, state)]
    # Every silence is followed by the highest symbol, the back-off symbol passes, and each other symbol ends a word.
    assert {arc.ilabel for arc in arcs} >= set(lang.disambig)
    (after_silence,) = [arc.nextstate for arc in arcs if arc.ilabel == lang.optional_silence]
    assert [arc.ilabel for arc in kaldifst.ArcIterator(l_fst, after_silence)] == [lang.disambig[-1]]
    assert [arc.olabel for arc in arcs if arc.ilabel == lang.disambig[0]] == [lang.words["#0"]]
    grammar = kaldifst.StdVectorFst.read(str(tmp_path / "G.fst"))
    kaldifst.arcsort(grammar, "ilabel")
    lg = kaldifst.compose(l_fst, grammar)
    kaldifst.determinize_star(lg)
    for state in kaldifst.StateIterator(lg):
        labels = [arc.ilabel for arc in kaldifst.ArcIterator(lg, state)]
        assert len(labels) == len(set(labels)) and 0 not in labels


def test_a_large_model_is_pruned_for_the_graph_only(data_dir: Path, lang: Lang, tmp_path: Path) -> None:
    options = {"name": "kn2", "order": 2, "arpa": None, "text": "train"}
    prepare_lm(data_dir, lang.directory, tmp_path, **options, max_ngrams=1)  # type: ignore[arg-type]
    whole, small = read_arpa(tmp_path / "lm.arpa"), read_arpa(tmp_path / "first_pass.arpa")
    assert len(whole.logprobs[1]) > 1 and len(small.logprobs[1]) == 1
    pair = LmPair.load(tmp_path)
    assert [len(lm.word_A) for lm in pair] == [sum(map(len, arpa.logprobs)) for arpa in (small, whole)]
    summary = json.loads((tmp_path / "lm.json").read_text())
    assert summary["ngrams"][1] > 1 and summary["first_pass"]["ngrams"][1] == 1
    grammar = kaldifst.StdVectorFst.read(str(tmp_path / "G.fst"))
    make_grammar(tmp_path / "first_pass.arpa", lang.directory / "words.txt", tmp_path / "expected.fst")
    assert grammar.num_states == kaldifst.StdVectorFst.read(str(tmp_path / "expected.fst")).num_states
    (tmp_path / "fits").mkdir()
    prepare_lm(data_dir, lang.directory, tmp_path / "fits", **options, max_ngrams=1000)  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / "fits").iterdir()) == ["G.fst", "lm.arpa", "lm.json"]


def test_users_arpa_loses_the_words_outside(data_dir: Path, lang: Lang, tmp_path: Path) -> None:
    text = (
        "\\data\\\nngram 1=9\nngram 2=3\nngram 3=2\n\\1-grams:\n-1 </s>\n-99 <s> -0.3\n-1 A -0.2\n-1 RED -0.1\n"
        "-1 FOREIGN -1\n-3 <eps>\n-3 #0\n-2 <UNK>\n-1 AB\n\\2-grams:\n-0.5 <s> A\n-0.1 A FOREIGN\n-0.2 A RED\n"
        "\\3-grams:\n-0.1 <s> A RED\n-0.1 RED A AB\n\\end\\\n"
    )
    (tmp_path / "own.arpa").write_text(text)
    prepare_lm(
        data_dir, lang.directory, tmp_path, name="own", order=None, arpa=str(tmp_path / "own.arpa"), text="train"
    )
    left = read_arpa(tmp_path / "lm.arpa")
    assert {word for (word,) in left.logprobs[0]} == {"<s>", "</s>", "A", "RED", "AB"}
    assert list(left.logprobs[1]) == [("<s>", "A"), ("A", "RED")]
    assert list(left.logprobs[2]) == [("<s>", "A", "RED")]  # RED A AB has lost nothing but never had its history RED A
    summary = json.loads((tmp_path / "lm.json").read_text())
    assert summary["words_dropped"] == 3 and summary["dev_words"] == 5 and summary["dev_oov"] == 1


def test_a_model_that_knows_the_dev_sentences_is_noticed(
    data_dir: Path, lang: Lang, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = [[8, 12, 16], [0.0, 1.0]]
    for name, sentences, known in (("own", ["A RED", "AB A"], True), ("other", ["RED RED", "AB A AB"], False)):
        folder = tmp_path / name
        folder.mkdir()
        model = estimate([text.split() for text in sentences], vocabulary(lang.words), 2)
        write_arpa(model, folder / "given.arpa")
        caplog.clear()
        prepare_lm(
            data_dir, lang.directory, folder, name=name, order=None, arpa=str(folder / "given.arpa"), text="train"
        )
        assert ("probably estimated on them" in caplog.text) == known
        assert len(scales_to_try(folder, grid)) == 6
        assert (folder / "unseen").exists() == known
        if known:  # the LM to choose with is that of the training text
            expected = estimate([text.split() for text in TEXT], vocabulary(lang.words), 3)
            assert read_arpa(folder / "unseen/lm.arpa").logprobs[2].keys() <= expected.logprobs[2].keys()
            assert kaldifst.StdVectorFst.read(str(folder / "unseen/G.fst")).num_states > 3
            shutil.rmtree(folder / "unseen")  # as without a training text
            assert scales_to_try(folder, grid) == [LmScale(12.0, 0.0)]
    with pytest.raises(InputError, match=r"lm.json: missing or damaged .*run stage 1"):
        scales_to_try(tmp_path, grid)


def test_model_for_another_lexicon_is_refused(data_dir: Path, lang: Lang, tmp_path: Path) -> None:
    words = "".join(f"-1 {word}\n" for word in ("a", "ab", "red", "read"))
    text = f"\\data\\\nngram 1=6\n\\1-grams:\n-1 </s>\n-99 <s>\n{words}\\end\\\n"
    (tmp_path / "own.arpa").write_text(text)
    with pytest.raises(InputError, match="other case"):
        prepare_lm(data_dir, lang.directory, tmp_path, name="x", order=None, arpa=str(tmp_path / "own.arpa"), text="")


def test_bad_requests(data_dir: Path, lang: Lang, tmp_path: Path) -> None:
    for count in (-1, 2.5, "many"):
        with pytest.raises(InputError, match=rf"corpus\.lms\.x\.max_ngrams={count}: must be a whole number"):
            prepare_lm(data_dir, lang.directory, tmp_path, name="x", order=2, arpa=None, text="train", max_ngrams=count)  # type: ignore[arg-type]
    for order, arpa in ((None, None), (2, "x.arpa")):
        with pytest.raises(InputError, match="either an order or an ARPA"):
            prepare_lm(data_dir, lang.directory, tmp_path, name="x", order=order, arpa=arpa, text="train")
    with pytest.raises(InputError, match=r"no such ARPA file.*corpus\.lms\.\w+\.arpa"):
        prepare_lm(data_dir, lang.directory, tmp_path, name="x", order=None, arpa="no.arpa", text="train")
    with pytest.raises(InputError, match=r"no such file; set corpus\.lms\.\w+\.text"):
        prepare_lm(data_dir, lang.directory, tmp_path, name="x", order=2, arpa=None, text="absent")
    (data_dir / "lm" / "marked.txt").write_text("A\n<s> A </s>\n")
    with pytest.raises(InputError, match=r"marked.txt:2: holds <s>"):
        prepare_lm(data_dir, lang.directory, tmp_path, name="x", order=2, arpa=None, text="marked")
    with pytest.raises(InputError, match="silence_prob"):
        prepare_lang(data_dir, tmp_path, position_dependent=True, silence_prob=1.0)


def test_damaged_lang_directory(lang: Lang, tmp_path: Path) -> None:
    for name in ("phones.txt", "words.txt", "lexicon.txt", "lang.json"):
        for change in ("missing", "empty", "cut", "binary"):
            for file in ("phones.txt", "words.txt", "lexicon.txt", "lang.json"):
                (tmp_path / file).write_bytes((lang.directory / file).read_bytes())
            whole = (lang.directory / name).read_bytes()
            if change == "missing":
                (tmp_path / name).unlink()
            else:
                (tmp_path / name).write_bytes({"empty": b"", "cut": whole[:-3], "binary": b"\xff\xfe" + whole}[change])
            with pytest.raises(InputError):
                Lang.load(tmp_path)


def test_words_outside_the_lexicon_are_counted(data_dir: Path, lang: Lang, tmp_path: Path) -> None:
    counts = check_transcripts(data_dir, lang, tmp_path)
    assert counts == {"ZZZ": 3, "QQQ": 1}
    assert (tmp_path / "oov_counts.txt").read_text() == "3 ZZZ s1-train5\n1 QQQ s1-dev1\n"
    with pytest.raises(InputError, match=r"ZZZ \(s1-train5\)"):
        check_transcripts(data_dir, lang, tmp_path, oov="error")


def test_transcripts_that_do_not_belong_to_the_lexicon(lang: Lang, tmp_path: Path) -> None:
    write_supervisions(tmp_path, "train", ["A b c d"])
    write_supervisions(tmp_path, "dev", ["A"])
    with pytest.raises(InputError, match=r"3 of 5 words.*b \(s1-train0\)"):
        check_transcripts(tmp_path, lang, tmp_path)
    write_supervisions(tmp_path, "dev", ["A", None])
    with pytest.raises(InputError, match=r"s1-dev1 has no transcript"):
        check_transcripts(tmp_path, lang, tmp_path)
