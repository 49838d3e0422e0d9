"""Options are checked against types, and errors name the option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from asr_am.errors import InputError
from asr_am.hmm.train_lda_mllt import LdaOptions
from asr_am.options import build
from asr_am.stages.sections import check, values
from asr_am.stages.train_config import strategy_factory
from asr_am.train.train_options import TrainOptions
from tests.support.configurations import config

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = sorted(path.stem for path in (ROOT / "conf/strategy").glob("*.yaml"))


@dataclass(frozen=True)
class Inner:
    size: int = 1


@dataclass(frozen=True)
class Outer:
    count: int
    share: float = 0.5
    kind: Literal["a", "b"] = "a"
    passes: Sequence[int] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    limit: int | None = None
    flag: bool = False
    inner: Inner = field(default_factory=Inner)


def test_values_of_the_right_types_are_kept_as_they_are() -> None:
    given = {"count": 2, "share": 1, "passes": [1, 2], "seconds": {"a": 1}, "limit": None, "inner": Inner(3)}
    built = build(Outer, given, "o")
    assert vars(built) == {**given, "kind": "a", "flag": False} and type(built.share) is int


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 1.5}, r"^o\.count=1\.5: must be a whole number"),
        ({"count": True}, r"^o\.count=True: "),
        ({"count": "two"}, r"^o\.count=two: "),
        ({"share": "half"}, r"^o\.share=half: must be a number"),
        ({"share": float("nan")}, r"^o\.share=nan: must be a number"),
        ({"kind": "c"}, r"^o\.kind=c: must be 'a' or 'b'"),
        ({"passes": [1, 2.5]}, r"^o\.passes\.1=2\.5: "),
        ({"passes": "1,2"}, r"^o\.passes=1,2: "),
        ({"seconds": {"a": "x"}}, r"^o\.seconds\.a=x: "),
        ({"limit": 0.5}, r"^o\.limit=0\.5: "),
        ({"flag": "yes"}, r"^o\.flag=yes: "),
        ({"inner": {"size": 1}}, r"^o\.inner="),
        ({"colour": 1}, r"^o\.colour: there is no such option; there are count, share, kind"),
    ],
)
def test_values_of_other_types_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(Outer, {"count": 1, **changes}, "o")


def test_a_missing_option_and_a_section_that_is_no_mapping() -> None:
    with pytest.raises(InputError, match=r"^o\.count: is missing"):
        build(Outer, {}, "o")
    with pytest.raises(InputError, match=r"^o=3: must be a mapping"):
        build(Outer, 3, "o")  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [{"checkpoint_every": 1.5}, {"optimizer": {"momentum": "much"}}, {"device": "tpu"}])
def test_training_options_of_another_type(train: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^train\.\w+"):
        TrainOptions.build(train, {}, {}, seed=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_of_strategies_are_of_their_types(strategy: str) -> None:
    cfg = config(f"strategy={strategy}", "corpus=minicts")
    assert strategy_factory(values(cfg.strategy)).keywords == {
        k: v for k, v in cfg.strategy.items() if k[0] != "_" and k != "name"
    }
    for option in strategy_factory(values(cfg.strategy)).keywords:
        OmegaConf.update(changed := cfg.copy(), f"strategy.{option}", [1])
        with pytest.raises(InputError, match=rf"^strategy\.{option}="):
            strategy_factory(values(changed.strategy))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nj=two", r"^nj=two: must be a whole number"),
        ("nj=0", r"^nj=0: must be at least 1"),
        ("learners=1.5", r"^learners=1\.5: "),
        ("seed=-1", r"^seed=-1: must be at least 0"),
        ("speed_perturb_below=-1", r"^speed_perturb_below=-1: must be at least 0"),
        ("systems=nnet", r"^systems=nnet: must be a list"),
        ("run=3", r"""^run=3: must be text; quote it .* "run='3'"$"""),
        ("run=a/b", r"^run=a/b: becomes the name of a folder"),
        ("exp=null", r"^exp=None: must be text$"),
    ],
)
@pytest.mark.parametrize("corpus", ["an4", "minicts", "kaldi"])
def test_options_outside_of_sections(corpus: str, override: str, message: str) -> None:
    check(config(f"corpus={corpus}"))
    with pytest.raises(InputError, match=message):
        check(config(f"corpus={corpus}", override))


def test_lda_keeps_at_most_the_input_dimension() -> None:
    LdaOptions(context=3, dim=91).check(39)
    with pytest.raises(InputError, match=r"^align\.lda_mllt\.dim=92: 7 frames of 13 MFCCs have only 91 values"):
        LdaOptions(context=3, dim=92).check(39)
