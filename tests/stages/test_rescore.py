"""Stage rescore: its targets, and that stage score finds them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.lang.units import Units
from asr_am.models.lstm_lm import LstmLm
from asr_am.stages import decode, rescore, score
from asr_am.stages.sections import values
from asr_am.train.lm import LmOptions
from tests.support.configurations import config

CONF = Path(__file__).resolve().parents[2] / "conf"


def config_of(tmp_path: Path, *overrides: str) -> DictConfig:
    text = tmp_path / "minicts/data/lm/train.txt"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("A B\n")
    return config(f"exp={tmp_path}", *overrides)


def made(cfg: DictConfig) -> list[str]:
    root = Path(cfg.exp) / "minicts"
    return [str(target.out.relative_to(root)) for target in rescore.targets(cfg)]


def test_nothing_unless_asked_for(tmp_path: Path) -> None:
    cfg = config_of(tmp_path, "systems=[tri]")
    assert made(cfg) == []
    assert [target.out.name for target in score.targets(cfg)] == ["tri_kn3"]


def test_the_lm_then_every_run(tmp_path: Path) -> None:
    cfg = config_of(tmp_path, "systems=[tri,nnet]", "rescore=true", "run=net")
    assert made(cfg) == ["lm/lstm", "rescore/tri_kn3+lstm", "rescore/net_kn3+lstm"]
    names = [target.out.name for target in score.targets(cfg)]
    assert names == ["tri_kn3", "tri_kn3+lstm", "net_kn3", "net_kn3+lstm"]
    sources = {target.out.name: target.inputs[-1].parent.name for target in score.targets(cfg)}
    assert sources["net_kn3"] == "decode" and sources["net_kn3+lstm"] == "rescore"


def test_the_type_on_the_wire_makes_the_lm_anew(tmp_path: Path) -> None:
    shared = ("rescore=true", "lm.learners=2", "launcher@lm.launcher=process", "strategy@lm.strategy=sync")
    full, half = (
        rescore.targets(config_of(tmp_path, *shared, f"lm.launcher.wire={w}")) for w in ("float32", "float16")
    )
    assert half[0].config == full[0].config | {"wire": "float16"}


def test_how_to_rescore_does_not_make_the_lm_anew(tmp_path: Path) -> None:
    one, other = (rescore.targets(config_of(tmp_path, "rescore=true", f"lm.lattice.beam={beam}")) for beam in (4, 5))
    assert one[0].config == other[0].config and one[1].config != other[1].config


def test_without_data_the_stage_to_run_is_named(tmp_path: Path) -> None:
    cfg = config_of(tmp_path, "rescore=true", f"exp={tmp_path}/other")
    with pytest.raises(InputError, match=r"minicts/data does not exist; run stage 0 "):
        rescore.targets(cfg)[0].run()


def test_a_text_by_name_or_by_path(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("B A\n")
    assert own in rescore.targets(config_of(tmp_path, "rescore=true", f"lm.text={own}"))[0].inputs
    with pytest.raises(InputError, match=r"lm.text=nowhere: no such text, neither .*lm/nowhere.txt nor nowhere"):
        rescore.targets(config_of(tmp_path, "rescore=true", "lm.text=nowhere"))


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"lm\.name=kn3: is the name of an n-gram LM"):
        rescore.targets(config_of(tmp_path, "rescore=true", "lm.name=kn3"))


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "lm").glob("*.yaml")))
def test_every_lm_can_be_made_from_its_file(tmp_path: Path, name: str) -> None:
    cfg = config_of(tmp_path, f"lm={name}", "lm.model.cells=24", "lm.model.projection=8", "lm.model.embedding=8")
    plain = values(cfg.lm)
    options = LmOptions.build({**plain["model"], "samples": min(1, plain["model"]["samples"])}, plain["train"])
    assert LstmLm(options.model, len(Units(["</s>", "<unk>", "A"], {}))).options.cells == 24


@pytest.mark.parametrize(
    "override",
    [
        "decode.lm_weights=[]", "decode.lm_weights=[0]", "decode.lm_weights=[-5]", "decode.lm_weights=7",
        "decode.insertion_penalties=[]", "decode.insertion_penalties=[.inf]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", [decode, rescore], ids=["decode", "rescore"])
def test_what_dev_cannot_choose_from_is_refused_before_any_work(
    tmp_path: Path, stage: ModuleType, override: str
) -> None:
    with pytest.raises(InputError, match=override.partition("=")[0]):
        stage.targets(config_of(tmp_path, "corpus=minicts", "rescore=true", override))


def test_resamples_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"score\.bootstrap"):
        score.targets(config_of(tmp_path, "corpus=minicts", "score.bootstrap=0"))
