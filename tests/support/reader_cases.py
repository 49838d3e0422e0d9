"""Readers of files, each with small real files to read, for damage by `scripts/soak/readers.py`."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import kaldiio
import numpy as np
import torch
from hydra import compose
from lhotse import SupervisionSegment
from omegaconf import OmegaConf

from asr_am.data.audio import read_utterances
from asr_am.data.checksums import DONE, FIELD, file_crc32s
from asr_am.data.issue_counter import IssueCounter
from asr_am.data.kaldi_archive import write_archive
from asr_am.data.kaldi_audio import AudioOptions, ScpRecording, check_pipes, check_recording
from asr_am.data.kaldi_dir import read_kaldi_dir
from asr_am.data.manifests import RECORDINGS, SUPERVISIONS, read_recordings, read_supervisions
from asr_am.data.record import read_record
from asr_am.data.stm import check_stm
from asr_am.decode.graph import build_hclg, read_hclg
from asr_am.decode.lattice import read_lattices
from asr_am.decode.shards import Job, decode_shard, read_shard
from asr_am.decode.system import System
from asr_am.egs.loader import Loader, feature_moments
from asr_am.egs.store import EgsSet, load_pdf_counts
from asr_am.errors import InputError
from asr_am.features.adapted import Projection, read_transforms, write_transforms
from asr_am.features.ivector.ivector_archive import IvectorInfo, IvectorReader
from asr_am.features.reader import FeatureReader
from asr_am.hmm.alignments import read_alignments
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.states import StateTable
from asr_am.hmm.training_graph import read_lexicon_fst
from asr_am.hmm.tree import DecisionTree, monophone_tree
from asr_am.lang.arpa import read_arpa, write_arpa
from asr_am.lang.fsts import make_grammar, restrict
from asr_am.lang.lang_dir import Lang, read_symbols
from asr_am.lang.lexicon import read_lexicon
from asr_am.lang.units import Units
from asr_am.models.lm_file import load_lm, save_lm
from asr_am.models.lstm_lm import LstmLm, LstmLmOptions
from asr_am.models.model_file import load_acoustic_model
from asr_am.report.results import read_scores
from asr_am.report.runs import read_training_run
from asr_am.score.scoring import Reference
from asr_am.stages.resolvers import composing
from asr_am.stages.train_worker import read_config
from asr_am.train.checkpoint import Checkpoints
from tests.support.decoding_corpus import OPTIONS, write_network, write_system
from tests.support.egs_examples import write_examples
from tests.support.kaldi_corpus import write_kaldi_dir
from tests.support.report_files import write_run, write_score


@dataclass(frozen=True)
class Case:
    """A reader and the files that it reads.

    Attributes:
        files: files to damage, one at a time.
        read: reads all of them and returns a digest of what it found.
        exact: the files have checksums, so a changed one must never be read as something else.
        text: the files are text.
    """

    files: list[Path]
    read: Callable[[], str]
    exact: bool = False
    text: bool = False


def digest(*values: Any) -> str:
    """Returns a hash of arrays, tensors, dataclasses, paths' contents and plain values."""
    found = hashlib.sha256()
    for value in values:
        _update(found, value)
    return found.hexdigest()


def _update(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value) if hasattr(value, "__dict__") else asdict(value)
    if isinstance(value, np.ndarray):
        found.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Path):
        found.update(value.read_bytes() if value.is_file() else b"")
    elif isinstance(value, dict):
        for key, item in value.items():
            _update(found, key)
            _update(found, item)
    elif isinstance(value, list | tuple | Iterator):
        for item in value:
            _update(found, item)
    else:
        found.update(repr(value).encode())


def record(folder: Path) -> list[Path]:
    """Records the checksums of all files in `folder`, as a stage does. Returns the files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != DONE)
    names = [str(path.relative_to(folder)) for path in files]
    sizes = {name: (folder / name).stat().st_size for name in names}
    (folder / DONE).write_text(json.dumps({"key": "", "files": sizes, FIELD: file_crc32s(folder, names)}))
    return files


def write_all(root: Path) -> None:
    """Writes everything that the cases read, with the library's own stages."""
    system = write_system(root)
    states = StateTable.load(system.states)
    write_network(root, states.num_pdfs)
    job = Job(system.source("dev"), system.graph, system.lang_dir, system.states, OPTIONS)
    (root / "decode").mkdir()
    utterances = FeatureReader(root / "features", "mfcc", "dev").utterances[:2]
    decode_shard(job, (root / "decode/00000", tuple(utterances)))
    system.save(root / "decode")
    lang = Lang.load(root / "lang")
    states_P = {int(phone): count for phone, count in states.states_P.items()}
    tree = monophone_tree(lang.roots, states_P)
    tree.save(root / "align/tree.json")
    (root / "align/ali").mkdir()
    rng = np.random.default_rng(3)
    labels = {name: rng.integers(1, len(states.labels_L3), 30, dtype=np.int32) for name in utterances}
    kaldiio.save_ark(str(root / "align/ali/dev.ark"), labels)
    Projection(rng.standard_normal((20, 39)).astype(np.float32), 13).save(root / "align/lda.mat")
    (root / "features/fmllr").mkdir()
    speakers = {f"spk{i}": rng.standard_normal((6, 7)) for i in range(3)}
    write_transforms(root / "features/fmllr", "dev", speakers)
    (root / "features/ivector").mkdir()
    vectors = {name: rng.standard_normal((1, 5)).astype(np.float32) for name in speakers}
    write_archive(root / "features/ivector", "dev_ivectors", vectors.items())
    IvectorInfo(5, 300, {"dev": "speaker"}).save(root / "features/ivector")
    write_examples(root / "egs")


def copy_of(source: Path, folder: Path, *names: str) -> Path:
    """Copies the files `names` of a folder, or all of it."""
    if not names:
        return Path(shutil.copytree(source, folder))
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    return folder


def lexicon(root: Path, work: Path) -> Case:
    work.mkdir()
    words, noises = work / "lexicon.txt", work / "nonspeech.txt"
    words.write_text("YES Y EH S\nYES Y EH0 S\nNO N OW\nONE W AH1 N\nTWO T UW\n")
    noises.write_text("[NOISE] NSN\n")
    return Case([words, noises], lambda: digest(read_lexicon(words, noises)), text=True)


ARPA = """\\data\\
ngram 1=6
ngram 2=4

\\1-grams:
-1.0 <s> -0.3
-0.9 </s>
-0.6 YES -0.2
-0.7 NO -0.1
-1.2 ONE
-1.2 TWO -0.5

\\2-grams:
-0.3 <s> YES
-0.4 YES NO
-0.4 YES </s>
-0.5 NO </s>

\\end\\
"""


def arpa(root: Path, work: Path) -> Case:
    work.mkdir()
    path, words = work / "lm.arpa", root / "lang/words.txt"
    path.write_text(ARPA)

    def read() -> str:
        model, dropped = restrict(read_arpa(path), read_symbols(words), str(path))
        write_arpa(model, work / "out.arpa")
        make_grammar(work / "out.arpa", words, work / "G.fst")
        return digest(dropped, work / "out.arpa", work / "G.fst")

    return Case([path], read, text=True)


STM = """;; LABEL "F" "Women" "x"
en_1 A spk1 0.10 2.00 <O,F> yes { no / uh-huh } (%hesitation) one
en_1 B spk2 1.50 3.00 <O,M> two he'd YES
sw_2 A spk3 0.00 4.25 <O,F> no no one's
sw_2 A spk3 5.00 6.00 <O,F> ignore_time_segment_in_scoring
"""
CTM = """;; comment
en_1 A 0.20 0.30 YES 0.9
en_1 A 0.60 0.30 no
en_1 A 1.00 0.30 %HESITATION
en_1 B 1.60 0.40 two 0.5
en_1 B 2.10 0.40 he'd
sw_2 A 0.50 0.40 no
sw_2 A 1.50 0.40 one's 1.0
"""
GLM = """;; a GLM
* name = "small"
* max_nrules = '2500'
%HESITATION => (%HESITATION) / [ ] __ [ ]
UH-HUH => %BCACK / [ ] __ [ ]
[HE'D] => [{HE HAD / HE WOULD}] / [ ] __ [ ]
;; INPUT_DEPENDENT_APPLICATION = "ctm"
YES => YEAH / [ ] __ [ ]
"""


def scoring(root: Path, work: Path) -> Case:
    work.mkdir()
    stm, ctm, glm = work / "ref.stm", work / "hyp.ctm", work / "en.glm"
    for path, text in ((stm, STM), (ctm, CTM), (glm, GLM)):
        path.write_text(text)

    def read() -> str:
        score = Reference(stm, glm).score(ctm)
        return digest([repr(segment.counts) for segment in score.segments], sorted(score.subsets))

    return Case([stm, ctm, glm], read, text=True)


def reference(root: Path, work: Path) -> Case:
    stm = copy_of(root / "data/dev", work, "ref.stm") / "ref.stm"
    segments = list(read_supervisions(root / "data", "dev"))
    return Case([stm], lambda: digest(check_stm(stm, segments)), text=True)


def kaldi_dir(root: Path, work: Path) -> Case:
    folder = write_kaldi_dir(work, "s", speakers=2, utterances=2)
    (folder / "segments").write_text("".join(f"{n} {n} 0.1 0.9 1\n" for n in ("s0-0", "s0-1", "s1-0", "s1-1")))
    (folder / "spk2gender").write_text("s0 f\ns1 m\n")
    (folder / "reco2file_and_channel").write_text("s0-0 call A\ns0-1 call B\n")
    names = ("wav.scp", "text", "utt2spk", "segments", "spk2gender", "reco2file_and_channel")
    return Case([folder / name for name in names], lambda: _read_kaldi_dir(folder, work), text=True)


def spk2utt(root: Path, work: Path) -> Case:
    folder = write_kaldi_dir(work, "s", speakers=2, utterances=2)
    (folder / "utt2spk").unlink()
    (folder / "spk2utt").write_text("s0 s0-0 s0-1\ns1 s1-0 s1-1\n")
    return Case([folder / "spk2utt"], lambda: _read_kaldi_dir(folder, work), text=True)


def audio(root: Path, work: Path, kind: str) -> Case:
    folder = write_kaldi_dir(work, "s", speakers=1, utterances=1, kind=kind)
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".wav", ".sph", ".flac", ".ark")]
    return Case(files, lambda: _read_kaldi_dir(folder, work))


def _read_kaldi_dir(folder: Path, work: Path) -> str:
    tables = read_kaldi_dir(folder, IssueCounter())
    options = AudioOptions(root=None, allow_pipes=False, copies=work / "copies")
    check_pipes(tables.audio, options)
    found: list[Any] = [tables.text, tables.speaker, tables.gender, tables.sides]
    for name, entry in tables.audio.items():
        spans = tuple((utterance, span) for utterance, span in tables.spans.items() if span.recording == name)
        checked = check_recording(ScpRecording(name, entry, None, spans), options)
        if checked.problems:  # utterances that preparation leaves out, with a line that says why
            problem, where = checked.problems[0]
            raise InputError(f"{entry.where}: {where}: {problem}")
        segments = [
            SupervisionSegment(utterance, name, start, duration, channel)
            for utterance, (start, duration, channel) in checked.utterances.items()
        ]
        if checked.recording is not None:
            found += [(s.id, s.start, x_N) for s, x_N in read_utterances(checked.recording, segments)]
    return digest(found)


def manifests(root: Path, work: Path) -> Case:
    copy_of(root / "data", work, f"dev/{RECORDINGS}", f"dev/{SUPERVISIONS}")
    (work / "wav").symlink_to(root / "data/wav")

    def read() -> str:
        recordings, segments = list(read_recordings(work, "dev")), list(read_supervisions(work, "dev"))
        found: list[Any] = []
        for recording in recordings:
            members = [segment for segment in segments if segment.recording_id == recording.id]
            found += [(s.id, s.text, s.speaker, x_N) for s, x_N in read_utterances(recording, members)]
        return digest(found, len(segments))

    return Case([work / "dev" / RECORDINGS, work / "dev" / SUPERVISIONS], read, text=True)


def data(root: Path, work: Path) -> Case:
    folder = copy_of(root / "data", work, f"dev/{RECORDINGS}", f"dev/{SUPERVISIONS}", "wav/dev0.wav", "wav/dev1.wav")
    files = record(folder)
    recordings = [folder / "wav/dev0.wav", folder / "wav/dev1.wav"]

    def read() -> str:
        segments = list(read_supervisions(folder, "dev"))
        return digest([
            [x_N for _, x_N in read_utterances(r, [s for s in segments if s.recording_id == r.id])]
            for r in read_recordings(folder, "dev")
        ])  # fmt: skip

    return Case([*files, *recordings], read, exact=True)


def features(root: Path, work: Path, *, recorded: bool) -> Case:
    folder = copy_of(root / "features/mfcc", work / "mfcc")
    for path in folder.iterdir():
        if not path.name.startswith(("dev", "options")) or path.name.endswith((".gz", "dropped.txt")):
            path.unlink()
    if not recorded:
        for path in folder.glob("*.crc32"):
            path.unlink()
    files = record(folder) if recorded else sorted(folder.iterdir())

    def read() -> str:
        reader = FeatureReader(work, "mfcc", "dev")
        return digest([(name, reader.speaker(name), reader[name]) for name in reader.utterances])

    return Case(files, read, exact=recorded)


def adapted(root: Path, work: Path) -> Case:
    fmllr = copy_of(root / "features/fmllr", work / "fmllr")
    shutil.copyfile(root / "align/lda.mat", fmllr / "lda.mat")
    ivector = copy_of(root / "features/ivector", work / "ivector")
    files = record(fmllr) + record(ivector)

    def read() -> str:
        vectors = IvectorReader(ivector, "dev", str)
        matrix = Projection.load(fmllr / "lda.mat", 13).matrix
        return digest(read_transforms(fmllr, "dev", 6), matrix, [vectors[f"spk{i}"] for i in range(3)])

    return Case(files, read, exact=True)


def lang_dir(root: Path, work: Path, *, recorded: bool) -> Case:
    folder = copy_of(root / "lang", work, "phones.txt", "words.txt", "lexicon.txt", "lang.json")
    files = record(folder) if recorded else sorted(folder.iterdir())

    def read() -> str:
        lang = vars(Lang.load(folder))
        return digest({name: lang[name] for name in sorted(lang) if name != "directory"})

    return Case(files, read, exact=recorded, text=True)


def transducers(root: Path, work: Path) -> Case:
    """L and G as graphs are built of them, and L as alignment takes it."""
    lang, lm = copy_of(root / "lang", work / "lang"), copy_of(root / "lm", work / "lm")
    record(lang)
    record(lm)
    states, tree = StateTable.load(root / "align/states.npz"), DecisionTree.load(root / "align/tree.json")
    (work / "out").mkdir()

    def read() -> str:
        build_hclg(lang, lm, states, tree, work / "out")
        return digest(work / "out/HCLG.fst", FstArrays.from_fst(read_lexicon_fst(lang / "L.fst")))

    return Case([lang / "L.fst", lang / "L_disambig.fst", lm / "G.fst"], read, exact=True)


def graph(root: Path, work: Path) -> Case:
    folder = copy_of(root / "graph", work)
    return Case([folder / "HCLG.fst"], lambda: digest(read_hclg(folder / "HCLG.fst")), exact=True)


def gmm_system(root: Path, work: Path, *, recorded: bool) -> Case:
    folder = copy_of(root / "align", work, "states.npz", "gmm.npz", "tree.json", "ali/dev.ark")
    files = record(folder) if recorded else sorted(path for path in folder.rglob("*") if path.is_file())

    def read() -> str:
        states = StateTable.load(folder / "states.npz")
        found = [states.labels_L3, states.loop_L, states.next_L, dict(states.states_P), states.num_pdfs]
        gmms, tree = vars(DiagGmms.load(folder / "gmm.npz")), DecisionTree.load(folder / "tree.json")
        found += [gmms[name] for name in sorted(gmms)]
        return digest(found, repr(tree.roots), list(read_alignments(folder / "ali", "dev")))

    return Case(files, read, exact=recorded)


def examples(root: Path, work: Path, *, recorded: bool) -> Case:
    folder = copy_of(root / "egs", work)
    files = record(folder) if recorded else sorted(path for path in folder.rglob("*") if path.is_file())

    def read() -> str:
        found = [load_pdf_counts(folder)]
        for subset in ("train", "dev"):
            egs = EgsSet(folder, subset)
            loader = Loader(egs, batch_size=8)
            plan = loader.plan(0)
            found += [(batch.x_BTF, batch.targets_BT) for batch in loader.batches(plan, range(len(plan)))]
            found += [feature_moments(egs)]
        return digest(found)

    in_padding = [path for path in files if path.name.startswith(("features", "targets"))]
    return Case(in_padding + [path for path in files if path not in in_padding], read, exact=recorded)


def lattices(root: Path, work: Path, *, recorded: bool) -> Case:
    folder = copy_of(root / "decode", work, "00000.lat")
    files = record(folder) if recorded else [folder / "00000.lat"]
    return Case(files, lambda: digest(list(read_lattices(folder / "00000.lat"))), exact=recorded)


def decoded(root: Path, work: Path) -> Case:
    folder = copy_of(root / "decode", work, "00000.json", "00000.lat")
    files = [folder / "00000.json", folder / "00000.lat"]
    return Case(files, lambda: digest(read_shard(folder / "00000")), exact=True)


def system(root: Path, work: Path) -> Case:
    folder = copy_of(root / "decode", root / f"decode.{work.name}", "system.json")
    return Case([folder / "system.json"], lambda: digest(vars(System.load(folder))), text=True)


def acoustic_model(root: Path, work: Path) -> Case:
    path = copy_of(root, work, "best.pt") / "best.pt"

    def read() -> str:
        model, info = load_acoustic_model(path)
        return digest(model.state_dict(), {name: info[name] for name in sorted(info)})

    return Case([path], read, exact=True)


def language_model(root: Path, work: Path) -> Case:
    work.mkdir()
    torch.manual_seed(2)
    units = Units(["<s>", "</s>", "<unk>", "YES", "NO"], {})
    save_lm(work / "lm.pt", LstmLm(LstmLmOptions(embedding=4, cells=6, projection=4), len(units)), units, {"epoch": 1})

    def read() -> str:
        model, read_units, info = load_lm(work / "lm.pt")
        return digest(model.state_dict(), list(read_units.names), info)

    return Case([work / "lm.pt"], read, exact=True)


def checkpoint(root: Path, work: Path) -> Case:
    saved = Checkpoints(work, "fingerprint")
    saved.terms.open("launch")
    saved.terms.claim("0.0", lambda: None)
    saved.save_learner(7, 0, {"weights": torch.arange(50.0), "rng": torch.arange(9)})
    saved.commit(7, {"progress": {"epoch": 1, "history": [{"loss": 0.5}]}})
    files = sorted(path for path in work.rglob("*.pt"))
    return Case(files, lambda: digest(saved.load(), saved.load_learner(0)), exact=True)


def run_config(root: Path, work: Path) -> Case:
    work.mkdir()
    with composing():
        cfg = compose("config", overrides=["corpus=an4", "strategy=sync", "launcher=process", "learners=4", "exp=exp"])
    OmegaConf.save(cfg, work / "config.yaml", resolve=True)

    def read() -> str:
        config = vars(read_config(work / "config.yaml"))
        return digest({name: repr(config[name]) for name in sorted(config) if name not in ("make_tracker", "out")})

    return Case([work / "config.yaml"], read, text=True)


def results(root: Path, work: Path) -> Case:
    corpus = work / "corpus"
    run = write_run(corpus, "blstm-s1", 1, [2.5, 2.25, 2.0], batches_per_learner={"0": 5}, staleness={"0": 4})
    (run / "config.yaml").write_text("train: {batch_size: 64}\nmodel: {name: blstm}\nseed: 1\n")
    score = write_score(corpus, "blstm-s1", "kn3", [1, 2, 0] * 20, seed=1)

    def read() -> str:
        found = read_training_run(run)
        return digest(repr(found), repr(read_scores(corpus)), read_record(score / "segments.json"))

    return Case(
        [run / "summary.json", run / "config.yaml", score / "wer.json", score / "segments.json"], read, text=True
    )


CASES: dict[str, Callable[[Path, Path], Case]] = {
    "lexicon": lexicon,
    "ARPA": arpa,
    "STM, CTM, GLM": scoring,
    "STM of a set": reference,
    "Kaldi directory": kaldi_dir,
    "spk2utt": spk2utt,
    "wav": lambda root, work: audio(root, work, "wav"),
    "sphere": lambda root, work: audio(root, work, "sph"),
    "flac": lambda root, work: audio(root, work, "flac"),
    "wav archive": lambda root, work: audio(root, work, "ark"),
    "manifests": manifests,
    "data with wav": data,
    "features": lambda root, work: features(root, work, recorded=True),
    "features, no checksums": lambda root, work: features(root, work, recorded=False),
    "transforms, i-vectors": adapted,
    "lang": lambda root, work: lang_dir(root, work, recorded=True),
    "lang, no checksums": lambda root, work: lang_dir(root, work, recorded=False),
    "L and G": transducers,
    "HCLG": graph,
    "GMM system": lambda root, work: gmm_system(root, work, recorded=True),
    "GMM system, no checksums": lambda root, work: gmm_system(root, work, recorded=False),
    "examples": lambda root, work: examples(root, work, recorded=True),
    "examples, no record": lambda root, work: examples(root, work, recorded=False),
    "lattices": lambda root, work: lattices(root, work, recorded=True),
    "lattices, no checksums": lambda root, work: lattices(root, work, recorded=False),
    "decoded words": decoded,
    "system.json": system,
    "acoustic model": acoustic_model,
    "language model": language_model,
    "checkpoint": checkpoint,
    "config.yaml": run_config,
    "results": results,
}
