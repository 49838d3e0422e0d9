"""What stage egs makes for chain models, and what later stages take of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_am.errors import InputError
from asr_am.stages import decode, egs, speaker, train
from asr_am.stages.layout import denominator_path, egs_dir, layout
from asr_am.stages.networks import network_configs
from asr_am.stages.systems import plans
from asr_am.stages.train_config import schedule_values
from tests.support.configurations import config

CHAIN = ("corpus=minicts", "train=chain", "model=tdnnf", "model.subsampling=3", "systems=[sat,nnet]")


def test_chain_models_have_states_examples_and_a_denominator() -> None:
    cfg = config(*CHAIN)
    states, examples, graph = egs.targets(cfg)
    corpus = layout(cfg).root
    assert states.out == corpus / "egs/chain3-sat" == layout(cfg).system("chain3-sat")
    assert examples.out == egs_dir(cfg) == corpus / "egs/fmllr+logmel-chain3-sat"
    assert graph.out == denominator_path(cfg).parent == corpus / "egs/denominator-chain3-sat"
    assert {layout(cfg).align, corpus / "features/fmllr"} <= set(states.inputs)
    assert states.out in examples.inputs and graph.inputs == [states.out]
    (run,) = train.targets(cfg)
    assert {graph.out, examples.out} <= set(run.inputs)
    assert [target.out for target in egs.targets(config("corpus=minicts"))] == [corpus / "egs/fmllr+logmel-sat"]


def test_chain_models_are_decoded_with_their_states_and_transitions() -> None:
    cfg = config(*CHAIN)
    sat, network = plans(cfg)
    assert (sat.gmm, network.gmm) == ("sat", "chain3-sat")
    (graph,) = decode.graph_targets(cfg, network, "kn3")
    assert graph.out.name == "chain3-sat_kn3" and graph.config == {"self_loop_scale": 1.0}
    assert layout(cfg).system("chain3-sat") in graph.inputs
    assert decode.graph_targets(cfg, sat, "kn3")[0].config == {"self_loop_scale": 0.1}
    made = [target.out.name for target in decode.targets(cfg)]
    assert made == ["sat_kn3", "sat_kn3", "chain3-sat_kn3", f"{cfg.run}_kn3"]


def test_an_lm_that_knows_dev_has_a_second_graph(tmp_path: Path) -> None:
    cfg = config("corpus=minicts", f"exp={tmp_path}", "systems=[sat]", "align=sat")
    paths = layout(cfg)
    (paths.lm("kn3") / "unseen").mkdir(parents=True)
    graph, unseen, run = decode.targets(cfg)
    assert (graph.out, unseen.out) == (paths.graph("sat", "kn3"), paths.dev_graph("sat", "kn3"))
    assert graph.out != unseen.out and {graph.out, unseen.out} < set(run.inputs)
    *_, first, second, transforms = [target for target in speaker.targets(cfg) if target.out.name != "ivector"]
    assert (first.out, second.out) == (graph.out, unseen.out) and {graph.out, unseen.out} < set(transforms.inputs)


def test_the_last_networks_are_trained_on_with_dev_and_decode_test() -> None:
    base = ("corpus=minicts", "systems=[sat,nnet]", "final.train=true")
    cfg = config(*base, "second.train=true", "schedule.base=0.002", "final.rate=0.5")
    runs = {run.out.name: run for run in train.targets(cfg)}
    conformer, combined = "blstm-local-b64-conformer-s1", "blstm-local-b64-combined-s1"
    finals = {name: f"{name.removesuffix('-s1')}-final-s1" for name in (cfg.run, conformer)}
    assert list(runs) == [cfg.run, conformer, *finals.values()]
    paths, configs = layout(cfg), network_configs(cfg)
    for name, network in (("train", cfg.run), ("train second", conformer)):
        before, final = configs[name], configs[f"{name} final"]
        assert final.train.with_dev and final.train.init == str(paths.run(network) / "best.pt")
        assert final.train.epochs == cfg.final.epochs and final.model == before.model
        assert schedule_values(final)["base"] == pytest.approx(0.5 * schedule_values(before)["base"])
        assert Path(final.train.init) in runs[finals[network]].inputs
        assert "with_dev" not in runs[network].config["train"]
    assert {plan.name: plan.final and plan.final.name for plan in plans(cfg)} == {
        "sat": None, **finals, combined: None,
    }  # fmt: skip
    assert paths.run(finals[conformer]) in decode.decode_target(cfg, plans(cfg)[2], "kn3").inputs
    with_mmi = config(*base, "second.train=true", "mmi.train=true")
    assert [plan.final and plan.final.name for plan in plans(with_mmi)] == [None, None, None, finals[conformer], None]
    assert list(network_configs(with_mmi))[-2:] == ["train second", "train second final"]
    only_mmi = config(*base, "mmi.train=true")  # as recipes/kaldi second.train=false by its sizes
    assert list(network_configs(only_mmi)) == ["train", "train mmi"]
    assert [plan.final for plan in plans(only_mmi)] == [None, None, None]


def test_ctc_has_states_of_phones_without_context_and_no_denominator() -> None:
    cfg = config("corpus=minicts", "train=ctc", "model=conformer", "systems=[nnet]", "combine=[a,b]")
    states, examples = egs.targets(cfg)
    assert states.out.name == "chainctc3-sat" and states.config["leaves"] == 1 and states.out in examples.inputs
    assert not [path for run in train.targets(cfg) for path in run.inputs if "denominator" in path.name]
    network, combined = plans(cfg)
    assert (combined.name, combined.gmm, combined.combined) == ("combined", network.gmm, ("a", "b"))
    assert layout(cfg).decoded("a_kn3") in decode.decode_target(cfg, combined, "kn3").inputs


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InputError, match=r"mmi\.train=true: train\.chain is sequence training already"):
        train.targets(config(*CHAIN, "mmi.train=true"))
    cfg = config("corpus=minicts", "systems=[sat,nnet]", "second.train=true", "mmi.train=true")
    *_, mmi, second, combined = plans(cfg)
    assert (second.name, second.windows) == ("blstm-local-b64-conformer-s1", ("63/31", "30/10"))
    assert (combined.name, combined.combined) == ("blstm-local-b64-combined-s1", (mmi.name, second.name))
    assert plans(config(*CHAIN[:1], "second.train=true", "combine=[a,b]"))[-1].combined == ("a", "b")
    assert [plan.name for plan in plans(config(*CHAIN[:1], "second.train=true", "systems=[mono]"))] == ["mono"]
    with pytest.raises(InputError, match=r"combine=\['combined'\]: combined is the system that they make"):
        plans(config(*CHAIN, "combine=[combined]"))
    with pytest.raises(InputError, match=r"train\.chain: lfbe64_lfr joins frames; use other features"):
        egs.check_options(config(*CHAIN, "features=lfbe64_lfr"))
