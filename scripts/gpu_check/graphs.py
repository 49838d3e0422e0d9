"""Section `graphs`: gradients by a CUDA graph against those of kernels that are launched one by one, for each loss."""

from __future__ import annotations

from dataclasses import replace

import torch

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.egs.loader import Loader
from asr_am.egs.store import EgsSet
from asr_am.models.acoustic import ModelOptions
from asr_am.models.blstm import BlstmOptions
from asr_am.models.conformer import ConformerOptions
from asr_am.models.lstm import LstmOptions
from asr_am.models.tdnnf import TdnnfOptions
from asr_am.train.chain_loss import add_xent
from asr_am.train.ctc_loss import CtcLoss
from asr_am.train.gradient import BatchLoss, ModelState
from scripts.gpu_check.check import Check
from scripts.gpu_check.examples import make_loss, random_graph, small_options, write_examples
from scripts.gpu_check.versions import seconds

PDFS = 600


def section(check: Check) -> None:
    egs = EgsSet(write_examples(check.folder / "egs", utterances=8, dim=40, pdfs=PDFS), "train")
    graph = random_graph(PDFS, 3000)
    size = 8 if check.small else 256
    tdnnf = TdnnfOptions(4, 2, size, size // 4, size, dropout=0.1)
    cases: dict[str, tuple[ModelOptions, str]] = {
        "bi-LSTM": (BlstmOptions(2, size, size, dropout=0.1), "cross-entropy"),
        "look-ahead LSTM": (LstmOptions(2, size, 3, dropout=0.1), "cross-entropy"),
        "TDNN-F": (tdnnf, "cross-entropy"),
        "Conformer": (ConformerOptions(2, size, feed_forward=2 * size), "cross-entropy"),
        "bi-LSTM, MMI": (BlstmOptions(2, size, size), "MMI"),
        "TDNN-F, chain": (replace(tdnnf, subsampling=3), "chain"),
        "TDNN-F, CTC": (replace(tdnnf, subsampling=3), "CTC"),
    }
    for name, (model, loss) in cases.items():
        compare(check, name, egs, model, make_loss(loss, graph, check.device))


def compare(check: Check, name: str, egs: EgsSet, model: ModelOptions, loss: BatchLoss) -> None:
    """Compares the gradients of three batches, and the time of one."""
    options = small_options(check, model=model, batch_size=32, precision="bfloat16")
    loader = Loader(egs, options.batch_size, chunk=30)
    plan = loader.plan(0)
    gradients, milliseconds, found = [], [], "a graph"
    for graphs in (True, False):
        torch.manual_seed(0)
        network = model.make(40, PDFS)
        if network.subsampling > 1:
            add_xent(network)
        network = network.to(check.device)
        params = FlatParams(network)
        optimizer = Optimizer(params, options.optimizer)
        state = ModelState(network, params, optimizer, loader, options, torch.device(check.device), loss, graphs)
        rows = []
        for number in range(3):
            batch = loader.batch(plan, number)
            torch.manual_seed(number)
            state.backward(batch, batch.frames, None)
            rows.append(params.g.clone())
        gradients.append(torch.stack(rows))
        milliseconds.append(1e3 * seconds(check, lambda b=batch, s=state: s.backward(b, b.frames, None)))
        if graphs and state.graph is None:
            found = "no graph"
    same = torch.equal(*gradients)
    text = f"{'same' if same else 'other'} bits, {found}: {milliseconds[0]:.2f} ms, by kernels {milliseconds[1]:.2f} ms"
    expected = "no graph" if isinstance(loss, CtcLoss) or check.device == "cpu" else "a graph"  # torch's CTC waits
    check.row(name, same and found == expected, text, milliseconds=milliseconds)
