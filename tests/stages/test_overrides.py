"""Overrides: sweeps that overwrite their own runs, overrides of stages that do not run, and misspelt names."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from hydra import compose
from hydra.errors import HydraException

from asr_am.errors import InputError
from asr_am.stages import data, egs
from asr_am.stages.app import outputs_kept
from asr_am.stages.check import check_recipe
from asr_am.stages.option_checks import changed_output
from asr_am.stages.overrides import explain, sweeps
from asr_am.stages.resolvers import composing


@pytest.mark.parametrize(
    "overrides",
    [
        ("seed=1,2", "train.batch_size=64,128"), ("strategy=sync,bmuf", "launcher=virtual", "learners=2,4"),
        ("model=blstm,lstm_htm",), ("train.threads=1,2",), ("lms=[kn3],[]",),
        ("model.layers=2,3", "schedule.base=0.1,0.2", "run=l${model.layers}-r${schedule.base}"),
    ],
)  # fmt: skip
def test_a_sweep_with_a_name_for_each_run_is_accepted(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    check_recipe(0, 10, [f"exp={tmp_path}", *overrides])


@pytest.mark.parametrize(
    ("overrides", "keys", "ending"),
    [
        (("model.layers=2,3", "schedule.base=0.1,0.2"), "model.layers, schedule.base",
         "-s${seed}-layers${model.layers}-base${schedule.base}'"),
        (("schedule=small,warmup", "seed=1,2"), "schedule", "each with run=NAME"),
        (("model.layers=2,3", "seed=1,2", "run=mine"), "model.layers, seed",
         "'run=mine-layers${model.layers}-seed${seed}'"),
    ],
)  # fmt: skip
def test_a_sweep_that_overwrites_its_runs_is_stopped_with_a_remedy(
    tmp_path: Path, overrides: tuple[str, ...], keys: str, ending: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_recipe(0, 10, [f"exp={tmp_path}", *overrides])
    message = str(caught.value)
    assert message.startswith(f"sweep over {keys}: ") and message.endswith(ending)
    check_recipe(0, 5, [f"exp={tmp_path}", *overrides])  # nothing is trained
    if ending.endswith("'"):
        check_recipe(0, 10, [f"exp={tmp_path}", *overrides, message.split("'")[1]])


@pytest.mark.parametrize("corpus", [[], ["corpus=kaldi", "corpus.name=own", "corpus.prepare.g2p=letters"]])
def test_an_override_of_a_stage_that_does_not_run_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, corpus: list[str]
) -> None:
    here = [f"exp={tmp_path}", *corpus]
    with composing():
        (target,) = egs.targets(compose("config", overrides=[*here, "egs.dtype=float32"]))
    target.out.mkdir(parents=True)
    (target.out / ".done").write_text(json.dumps({"key": "", "config": target.config, "files": {}}))
    check_recipe(6, 10, [*here, "egs.dtype=float32", "nj=1", "train.epochs=3"])  # the same again
    check_recipe(5, 10, [*here, "egs.dtype=float32", "egs.chunk=11"])
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        check_recipe(6, 10, [*here, "egs.dtype=float32", "egs.chunk=11", "train.epochs=3"])
    (message,) = caplog.messages
    assert message.startswith("egs.chunk=11 has no effect: ") and message.endswith("start with --stage 5")


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[list[str], Path]:
    """The overrides of a corpus of a folder of recordings, and one of these. Its data is marked as finished."""
    wav = tmp_path / "speech/amy/1.wav"
    wav.parent.mkdir(parents=True)
    wav.write_text("samples")
    overrides = ["corpus=kaldi", "corpus.name=own", f"+corpus.prepare.folder={tmp_path / 'speech'}"]
    overrides += [f"exp={tmp_path / 'exp'}", "corpus.prepare.g2p=letters"]
    with composing():
        (target,) = data.targets(compose("config", overrides=overrides))
    target.out.mkdir(parents=True)
    (target.out / ".done").write_text(json.dumps({"key": "", "config": target.config, "files": {}}))
    return overrides, wav


def test_audio_that_has_changed_is_told(prepared: tuple[list[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    overrides, wav = prepared
    check_recipe(2, 10, overrides)
    assert not caplog.messages
    wav.write_text("other samples")
    check_recipe(2, 10, overrides)
    (message,) = caplog.messages
    assert message.endswith("own/data: audio files have changed since it was made; start with --stage 0 to use them")


def test_what_another_command_has_made_is_told(prepared: tuple[list[str], Path]) -> None:
    overrides, wav = prepared
    with composing():
        wav.write_text("other samples")  # a stage on its own would not look at these either
        assert changed_output(compose("config", overrides=overrides), "align", 0) is None
        cfg = compose("config", overrides=[*overrides, "corpus.prepare.max_words=9"])
        found = changed_output(cfg, "align", 0)
        assert found is not None and found[0].name == "data" and found[1] == "max_words"
        assert changed_output(cfg, "align", 1) is changed_output(cfg, "data", 0) is None


@pytest.mark.parametrize("error", [KeyError("phone"), None])
def test_a_change_while_a_stage_works_is_told(
    prepared: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    overrides, _ = prepared
    monkeypatch.setenv("ASR_AM_RECIPE", str(os.getppid()))
    with composing():
        cfg = compose("config", overrides=overrides)
        done = data.targets(cfg)[0].out / ".done"
    with pytest.raises(InputError, match="another value of g2p since this one began"), outputs_kept("align", cfg):
        done.write_text(done.read_text().replace('"g2p": "letters"', '"g2p": "espeak"'))
        if error:
            raise error


def test_results_do_not_lie_in_the_corpus(prepared: tuple[list[str], Path]) -> None:
    overrides, wav = prepared
    with composing(), pytest.raises(InputError, match=r"lies in .*speech, of which the corpus is made"):
        data.targets(compose("config", overrides=[*overrides, f"exp={wav.parent / 'exp'}"]))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("strateg=sync", "did you mean strategy"), ("train.epoch=3", "did you mean train.epochs"),
        ("epochs=3", "did you mean mmi.epochs or train.epochs"),
        ("stage=6", "did you mean --stage 6?"), ("stop_stage=7", "did you mean --stop-stage 7?"),
        ("train.lr=0.1", "option; did you mean schedule.base?"),
        ("strategy=snyc", "strategy=snyc: there is no such choice; did you mean sync?"),
        ("corpus=_sizes", "corpus=_sizes: there is no such choice; there are an4,"),
        ("seed=[1", "seed=[1: cannot be read (no viable alternative"), ("run=ü", "and the shell: \"run='ü'\""),
        ("exp=it's", "and the shell: \"exp=\\\"it's\\\"\""), ("20s.x=3", "20s.x: there is no such option"),
        ("~20s", "~20s: there is no such option"), ("+strategy=bmuf", "write strategy=bmuf to replace it"),
        ("decode.lm_weights={a: 3}", "decode.lm_weights={a: 3}: must be a list, such as [a,b]"),
        ("decode.search=[1]", "decode.search=[1]: must be a mapping, such as {a: 1}"),
        ("exp=~/a", "exp=~/a: this shell leaves ~ as it is; write exp=$HOME/a"),
    ],
)  # fmt: skip
def test_a_typo_is_one_line_with_the_nearest_names(override: str, expected: str) -> None:
    with composing(), pytest.raises(HydraException) as caught:
        compose("config", overrides=[override])
    message = explain(caught.value, [override])
    assert expected in message and "\n" not in message


@pytest.mark.parametrize("override", ["strategy=glob(*)", "seed=glob(*)"])
def test_a_sweep_over_a_pattern_is_one_line_with_a_remedy(tmp_path: Path, override: str) -> None:
    with pytest.raises(InputError, match=r"glob\(\*\): cannot be listed here; name the values: \w+=A,B"):
        check_recipe(0, 10, [f"exp={tmp_path}", override])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=1,2"], True), (["seed=1", "lms=[kn3],[]"], True), (["seed=range(3)"], True),
        (["lms=choice([],[kn3])"], True),
        (["systems=[mono,nnet]", "corpus.name='a,b'", "~lm.name", "+x={a:1,b:2}"], False), ([], False),
    ],
)  # fmt: skip
def test_only_more_than_one_value_is_a_sweep(overrides: list[str], expected: bool) -> None:
    assert sweeps(overrides) is expected
