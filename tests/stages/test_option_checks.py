"""Every option is checked before a stage runs, also those of other stages and of outputs that are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from asr_am.errors import InputError
from asr_am.stages.option_checks import check_jobs, check_options, compose_job, trained_with
from asr_am.stages.resolvers import composing
from asr_am.stages.train_config import with_schedule


def check(exp: Path, *overrides: str) -> None:
    with composing():
        check_jobs([f"exp={exp}", "logger=none", *overrides])


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    with composing():
        return compose_job([f"exp={tmp_path_factory.mktemp('exp')}", "logger=none"])


@pytest.mark.parametrize(
    "overrides",
    [
        ("+experiment=try",), ("+experiment=fusion", "corpus=an4"), ("+experiment=papers/psp", "corpus=an4"),
        ("corpus=kaldi", "corpus.name=mine", "+corpus.subsets.swb=sw_", "~corpus.lms.kn3", "+corpus.lms.mine.order=2"),
        ("features=lfbe64_lfr", "align=triphone", "schedule=newbob"),
        ("train=paper", "schedule=anneal", "model=blstm_swb2000"),
        ("cluster=ibm_a,aws_p3", "strategy=sync,bmuf", "launcher=virtual", "learners=2,4"),
        ("strategy=psp", "launcher=process", "learners=4", "strategy.apart=true", "strategy.servers=2"),
        ("strategy=diloco", "+strategy@strategy.inner=topk", "strategy.group_size=2", "launcher=virtual", "learners=4"),
        ("+workload.frames_per_second.gpu=3", "cluster.device=gpu", "+cluster.fabric_bandwidth=1e9", "lm=parallax_lm"),
        ("lm.learners=4", "launcher@lm.launcher=process", "strategy@lm.strategy=adpsgd", "strategy=parallax"),
        ("mmi.train=true", "learners=4", "launcher=process", "strategy=adpsgd"),
        ("cluster.faults.crashes=[{learner:1,at:30}]", "learners=4", "launcher=process", "strategy=sync"),
        ("model=tdnnf,conformer", "model.subsampling=3", "train=chain,small", "strategy=sync", "launcher=virtual"),
    ],
    ids=lambda overrides: overrides[0],
)  # fmt: skip
def test_right_options_are_accepted(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    check(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+stratgy=sync", r"^stratgy: there is no such option; did you mean strategy\?$"),
        ("+corpus.hourz=3", r"^corpus\.hourz: there is no such option; did you mean hours\?$"),
        ("second.suits.batch=many", r"^second\.suits\.batch=many: must be a whole number$"),
        ("second.suits.windows=[]", r"^suits\.windows: is empty"),
        ("+suits.chunks=9", r"^suits\.chunks: there is no such option; did you mean chunk\?$"),
        ("+corpus.lms.kn3.ordr=2", r"^corpus\.lms\.kn3\.ordr: .* did you mean order\?"),
        ("corpus.lang.oov=drop", r"^corpus\.lang\.oov=drop: "), ("corpus.lang.silence_prob=1", "silence_prob=1: must"),
        ("features.name=fmlr+logmel", r"^features\.name=.* no kind fmlr; did you mean fmllr\?"),
        ("+features.kinds.plp.num_bins=2", r"^features: .* with num_bins=2"),
        ("+features.kinds.lda.num_bins=23", r"^features\.kinds\.lda: is the name of features that are made of others"),
        ("+features.kinds.plp._target_=os.mkdir", r"^features\.kinds\.plp\._target_=os\.mkdir: must be in"),
        ("features.kinds.mfcc.num_ceps=null", r"^features\.kinds\.mfcc\.num_ceps: is missing"),
        ("features.kinds.mfcc.num_ceps=99", "^features: num_ceps=99"),
        ("+align.trii.leaves=2", r"^align\.trii: .* did you mean tri\?"), ("align.system=gmm", r"^align\.system=gmm: "),
        ("align.tri.leaves=many", r"^align\.tri\.leaves=many: "), ("+speaker.pass=1", r"^speaker\.pass: .*passes\?"),
        ("speaker.lm=kn9", r"^speaker\.lm=kn9: .* did you mean kn3\?"), ("ivectors.dim=0", r"^ivectors\.dim=0: "),
        ("+egs.chunks=1", r"^egs\.chunks: .* did you mean chunk\?"), ("egs.dtype=int8", r"^egs\.dtype=int8: "),
        ("schedule.base=x", r"^schedule\.base=x: "), ("train.device=tpu", r"^train\.device=tpu: "),
        ("train.report_every=0", r"^train\.report_every=0: "), ("+strategy.foo=1", r"^strategy\.foo: "),
        ("+strategy.params=1", r"^strategy\.params: there is no such option"),
        ("learners=3", "^learners=3 need launcher"), ("launcher.name=horovod", r"^launcher\.name=horovod: "),
        ("cluster.hosts=0", r"^cluster\.hosts: "), ("workload.bytes=-1", r"^workload\.bytes: "),
("+decode.nbst=3", r"^decode\.nbst: .* did you mean nbest\?"),
        ("decode.windows=[9/10]", r"^decode\.windows: '9/10'"), ("decode.lm_weights=[]", r"^decode\.lm_weights="),
        ("systems=[nnet,st]", r"^systems: 'st' is unknown; did you mean sat\?"), ("lms=[kn4]", "^lms: 'kn4'"),
        ("lm.units=char", r"^lm\.units=char: "), ("lm.train.epochs=0", r"^lm\.train\.epochs=0: "),
        ("lm.learners=4", r"^lm\.learners=4 need launcher@lm\.launcher="), ("lm.learners=0", r"^lm\.learners=0: must"),
        ("lm.launcher.name=torchrun", "must be one of alone, virtual, process"),
        ("lm.strategy.path=mail", r"^lm\.strategy\.path=mail: "),
        ("+lm.strategy.foo=1", r"^lm\.strategy\.foo: there is no such"),
        ("mmi.epochs=0", r"^mmi\.epochs=0: must"), ("mmi.windows=[9/10]", r"^mmi\.windows: '9/10'"),
        ("+mmi.foo=1", r"^mmi\.foo: there is no such"), ("train.chunk=-1", r"^train\.chunk=-1: must"),
        ("+train.chain.leeky=1", r"^train\.chain\.leeky: .* did you mean leaky\?"),
        ("chain.leaves=0", r"^chain\.leaves must be"), ("+chain.leafs=1", r"^chain\.leafs: .* did you mean leaves\?"),
        ("run=tri", r"^run=tri: is the name of another system"), ("run=combined", "^run=combined: is the name"),
        ("combine=[a]", "^combine=.*: name two networks or more"), ("combine=[a,b,a]", "^combine=.*, each once$"),
        ("score.subsets={seed: sw_}", r"^score\.subsets: 'seed' is the name of something else"),
        ("lm.name=lstm+big", r"^lm\.name=lstm\+big: must have no \+"),
        ("corpus.lms.kn3={arpa: /nowhere/x.arpa}", r"^corpus\.lms\.kn3\.arpa=/nowhere/x\.arpa: no such file"),
        ("score.bootstrap=0", r"^score\.bootstrap=0: "), ("egs=null", "^egs=None: must be a section"),
    ],
)  # fmt: skip
def test_a_wrong_option_of_any_group_is_named(default: DictConfig, override: str, message: str) -> None:
    parsed = OverridesParser.create().parse_override(override)
    OmegaConf.update(cfg := default.copy(), parsed.key_or_group, parsed.value(), force_add=True)
    with pytest.raises(InputError, match=message):
        check_options(cfg, [override])


def test_a_second_network_has_a_name_of_its_own(default: DictConfig) -> None:
    OmegaConf.update(cfg := default.copy(), "second", {"train": True, "model": {"name": "combined"}})
    with pytest.raises(InputError, match=r"^second\.model\.name=combined: ends the names of other runs"):
        check_options(cfg, ["second.model.name=combined"])


def test_fmllr_needs_sat(default: DictConfig) -> None:
    overrides = ["corpus=minicts", "align=triphone", "features=fmllr"]
    with composing(), pytest.raises(InputError, match=r"fmllr is made with align\.sat, which .*; set align=sat, or"):
        check_options(compose_job(overrides), overrides)


def test_an_experiment_without_its_first_line_is_told(default: DictConfig) -> None:
    OmegaConf.update(cfg := default.copy(), "experiment", {"train": {"epochs": 3}}, force_add=True)
    with pytest.raises(InputError, match="lacks its first line, `# @package _global_`"):
        check_options(cfg, ["experiment=mine"])


def test_a_wrong_option_in_a_later_job_of_a_sweep_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^seed=-2: "):
        check(tmp_path, "seed=1,-2")


def test_options_of_a_finished_run_are_not_checked_again_unless_they_differ(tmp_path: Path) -> None:
    overrides = [f"exp={tmp_path}", "logger=none", "+experiment=try", "train.epochs=2", "schedule.base=null"]
    with composing():
        cfg = compose_job(overrides)
        run = tmp_path / cfg.corpus.name / "train" / cfg.run
        run.mkdir(parents=True)
        OmegaConf.save(with_schedule(cfg), run / "config.yaml", resolve=True)
        assert not trained_with(cfg), "it is not finished"
        (run / ".done").write_text("{}")
        assert trained_with(cfg)
        assert not trained_with(compose_job([*overrides, "nj=7"]))
        with pytest.raises(InputError, match=r"schedule\.base=x"):
            check_options(compose_job([*overrides, "schedule.base=x"]), ["schedule.base=x"])
