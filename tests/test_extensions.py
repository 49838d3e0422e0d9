"""A configuration names classes and functions of this project only: nothing else is imported or called."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from hydra import compose
from omegaconf import DictConfig, OmegaConf

from asr_am.errors import InputError
from asr_am.extensions import find_class
from asr_am.options import check_types
from asr_am.stages.data import corpus_function, prepare
from asr_am.stages.resolvers import composing
from asr_am.stages.train_config import TrainConfig, strategy_factory
from asr_am.train.tracking import Tracker

STRATEGIES = "asr_am.distributed.strategies"


@pytest.mark.parametrize(
    ("group", "option"), [("strategy", "form"), ("logger", None), ("strategy", None)], ids=["inner", "logger", "outer"]
)
def test_nothing_that_a_runs_config_names_is_called(group: str, option: str | None, tmp_path: Path) -> None:
    """Reads a run's config.yaml with a call of os.mkdir in place of the strategy, the tracker or an option of them."""
    saved = tmp_path / "config.yaml"
    with composing():
        OmegaConf.save(compose("config", ["strategy=sync", "learners=2", "launcher=process"]), saved, resolve=True)
    cfg = OmegaConf.load(saved)
    assert isinstance(cfg, DictConfig)
    call = {"_target_": "os.mkdir", "path": str(tmp_path / "called")}
    OmegaConf.update(cfg, f"{group}.{option}" if option else group, call, merge=False)
    with pytest.raises(InputError, match=rf"^{group}\.({option}=|_target_=os\.mkdir: must be in asr_am\.)"):
        TrainConfig.parse(cfg, tmp_path)
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torch.nn.Linear", "must be in"),
        (f"{STRATEGIES}_of_mine.Sync", "must be in"),
        (f"{STRATEGIES}.sync.no_such_class", "cannot be imported"),
        (f"{STRATEGIES}.sync.torch.save", "cannot be imported"),
        (f"{STRATEGIES}.sync.Team", "is no strategy"),
        (f"{STRATEGIES}.sync.Strategy", "is no strategy"),
        (f"{STRATEGIES}", "must be in"),
        ("", "must be in"),
    ],
)
def test_what_is_no_strategy_is_refused(target: str, said: str) -> None:
    from asr_am.distributed.strategy import Strategy

    assert find_class(f"{STRATEGIES}.sync.Sync", "strategy._target_", STRATEGIES, Strategy).__name__ == "Sync"
    with pytest.raises(InputError, match=rf"^strategy\._target_={target}: {said}"):
        find_class(target, "strategy._target_", STRATEGIES, Strategy)


@pytest.mark.parametrize(
    ("target", "said"), [("os.mkdir", "must be in"), (f"{STRATEGIES}.sync.Team", "is no strategy")]
)
def test_an_inner_strategy_is_one_of_this_project(target: str, said: str) -> None:
    chosen = {"_target_": f"{STRATEGIES}.diloco.Diloco", "inner": {"_target_": target, "path": "x"}}
    with pytest.raises(InputError, match=rf"^strategy\.inner\._target_={target}: {said}"):
        strategy_factory(chosen)


def test_a_class_of_another_kind_is_no_tracker() -> None:
    for name in ("attempt", "Tracker", "json"):
        with pytest.raises(InputError, match=rf"_target_=asr_am\.train\.tracking\.{name}: is no tracker"):
            find_class(f"asr_am.train.tracking.{name}", "logger._target_", "asr_am.train.tracking", Tracker)


def test_a_corpus_is_prepared_by_local_functions_only(tmp_path: Path) -> None:
    assert corpus_function("local.an4.prepare.prepare", "corpus.prepare._target_").__name__ == "prepare"
    for target, said in (
        ("shutil.rmtree", "must be in local, or an entry point asr_am.corpora"),
        ("local.an4.prepare.Path", "is no function of that module"),
        ("local.an4.prepare.write_set", "is no function of that module"),
    ):
        with pytest.raises(InputError, match=rf"^corpus\.prepare\._target_={target}: {said}"):
            prepare({"_target_": target}, [], inf, 1, ["train"], tmp_path)


def test_a_strategy_has_the_name_of_its_choice() -> None:
    with pytest.raises(InputError, match=r"^strategy=mine: .*Sync has the name 'sync'; make them equal"):
        strategy_factory({"name": "mine", "_target_": "asr_am.distributed.strategies.sync.Sync"})


def test_an_option_without_a_type_is_named() -> None:
    def own(k=5): ...  # type: ignore[no-untyped-def]

    with pytest.raises(InputError, match=r"^strategy\.k: its argument has no type; annotate it"):
        check_types(own, {"k": 1}, "strategy")
