"""Random examples that a network can learn, and the options of the runs that train on them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy import sparse

from asr_am.distributed.cluster_config import Cluster
from asr_am.distributed.optimizer import OptimizerOptions
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.diloco import Diloco
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.htm import Htm
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.powersgd import Powersgd
from asr_am.distributed.strategies.ps_async import PsAsync
from asr_am.distributed.strategies.ps_sync import PsSync
from asr_am.distributed.strategies.psp import Psp
from asr_am.distributed.strategies.slowmo import Slowmo
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategies.topk import Topk
from asr_am.egs.store import EgsInfo, Index, crc32_of
from asr_am.hmm.denominator import DenominatorGraph
from asr_am.models.blstm import BlstmOptions
from asr_am.train.chain_loss import ChainLoss, ChainOptions
from asr_am.train.ctc_loss import CtcLoss, CtcOptions
from asr_am.train.frame_loss import batch_loss
from asr_am.train.gradient import BatchLoss
from asr_am.train.mmi_loss import MmiLoss, MmiOptions
from asr_am.train.run_setup import StrategyFactory
from asr_am.train.schedule import Anneal
from asr_am.train.train_options import TrainOptions
from scripts.gpu_check.check import Check

CHUNK = 21
STRATEGIES: dict[str, StrategyFactory] = {
    "sync": Sync, "hybrid": Hybrid, "dpsgd": Dpsgd, "adpsgd": Adpsgd, "gtc": partial(Gtc, density=0.1),
    "bmuf": partial(Bmuf, block_size=3), "htm": partial(Htm, group_size=2, block_size=3, density=0.1),
    "ps_sync": partial(PsSync, servers=2), "ps_async": partial(PsAsync, servers=2), "psp": partial(Psp, servers=2),
    "diloco": partial(Diloco, block_size=3), "slowmo": partial(Slowmo, block_size=3),
    "powersgd": partial(Powersgd, rank=2), "topk": partial(Topk, density=0.1),
}  # fmt: skip
ASYNCHRONOUS = ("adpsgd", "ps_sync", "ps_async", "psp")
EPOCHS, PDFS = 2, 20  # of short runs


def write_examples(directory: Path, *, utterances: int, dim: int, pdfs: int, frames: int = 500) -> Path:
    """Writes a set `train` and a set `dev` of a quarter of its size, in which a frame's features depend on its pdf."""
    rng = np.random.default_rng(0)
    means_PF = rng.standard_normal((pdfs, dim), dtype=np.float32)
    sizes = {}
    for subset, count in (("train", utterances), ("dev", max(utterances // 4, 1))):
        folder = directory / subset
        folder.mkdir(parents=True)
        y_T = np.repeat(rng.integers(0, pdfs, -(-count * frames // 5) + CHUNK), 5)[: count * frames + CHUNK]
        x_TF = (means_PF[y_T] + rng.standard_normal((len(y_T), dim), dtype=np.float32)).astype(np.float16)
        np.save(folder / "features.0.npy", x_TF)
        y_T = y_T.astype(np.int16)
        np.save(folder / "targets.0.npy", y_T)
        begins, length = np.arange(count) * frames, frames - 7
        crc32s = [crc32_of(y_T[begin : begin + length], x_TF[begin : begin + length]) for begin in begins]
        columns = np.zeros(count, dtype=np.int64), begins, np.full(count, length), np.array(crc32s, dtype=np.uint32)
        Index([f"{subset}-{number:06d}" for number in range(count)], *columns).save(folder)
        sizes[subset] = {"utterances": count, "frames": count * (frames - 7)}
    np.save(directory / "pdf_counts.npy", np.full(pdfs, 10, dtype=np.int64))
    EgsInfo(kind="logmel", dim=dim, num_pdfs=pdfs, chunk=CHUNK, sets=sizes).save(directory)
    return directory


def small_examples(check: Check) -> Path:
    """Writes examples for a short run."""
    return write_examples(check.folder / "egs", utterances=8 if check.small else 64, dim=12, pdfs=PDFS, frames=200)


def random_graph(pdfs: int, states: int) -> DenominatorGraph:
    """Returns a graph whose states follow each other at random. Half of the time they stay."""
    rng = np.random.default_rng(0)
    target_SN = rng.integers(0, states, (states, 8))
    rows_SN = np.arange(states)[:, None].repeat(8, 1)
    share_SN = rng.random((states, 8)) + 0.1
    arcs = (share_SN.ravel(), (rows_SN.ravel(), target_SN.ravel()))
    go_on_SS = sparse.csr_array(sparse.coo_array(arcs, (states, states)))
    arcs_SS = sparse.csr_array(go_on_SS + sparse.diags_array(np.full(states, 4.0)))
    arcs_SS = sparse.csr_array(sparse.diags_array(1 / arcs_SS.sum(1)) @ arcs_SS).astype(np.float32)
    pdf_S = rng.permutation(np.arange(states) % pdfs).astype(np.int32)
    return DenominatorGraph(arcs_SS, pdf_S, np.full(states, 1 / states, np.float32), pdfs)


def make_loss(name: str, graph: DenominatorGraph, device: str) -> BatchLoss:
    """Returns the loss MMI, chain or CTC, else the cross-entropy."""
    where = torch.device(device)
    if name == "MMI":
        return MmiLoss(graph, np.zeros(graph.num_pdfs, np.float32), MmiOptions(), where)
    if name == "chain":
        return ChainLoss(graph, ChainOptions(), where)
    return CtcLoss(graph.num_pdfs, CtcOptions()) if name == "CTC" else batch_loss


def small_options(check: Check, **changes: object) -> TrainOptions:
    """Returns the options of a short run."""
    values = {
        "epochs": EPOCHS, "batch_size": 16, "model": BlstmOptions(1, 16, 12, dropout=0.1), "checkpoint_every": 4,
        "schedule": Anneal(base=0.05 if check.small else 0.01),
        "optimizer": OptimizerOptions("adam", clip_norm=5.0), "report_every": 2,
        "random_offset": True, "device": check.device, "threads": 1,
    }  # fmt: skip
    return TrainOptions(**(values | changes))  # type: ignore[arg-type]


CLUSTER = {
    "name": "gpu_check", "hosts": 2, "devices_per_host": 2, "device": "cuda", "nic_bandwidth": 1e9,
    "nic_latency": 1e-4, "host_bandwidth": 1e10, "host_latency": 1e-5, "all_reduce_efficiency": 1.0,
    "overlap_speed": 0.8, "update_bandwidth": 1e10, "averaging_bandwidth": 1e10,
    "jitter": 0.1,
}  # fmt: skip


def cluster() -> Cluster:
    """Returns two hosts with two devices each."""
    return Cluster.build(CLUSTER)
