"""The weights of another run as the start of this one.

Ladkat et al. (Interspeech 2019, section 3.2) train on a part of the data with one learner first, and begin every
experiment with the same weights: train one run with train.subset=0.125, then all others with train.init=<its best.pt>.
"""

from __future__ import annotations

from pathlib import Path

from asr_am.egs.store import EgsInfo
from asr_am.errors import InputError
from asr_am.model.acoustic import AcousticModel
from asr_am.model.checkpoint import load_acoustic_model


def start_from(path: Path, model: AcousticModel, examples: EgsInfo) -> None:
    """Copy weights and normalisation of the model file `path` into `model`.

    InputError where it is not a model file, or one of other inputs, senones or sizes.
    """
    start, info = load_acoustic_model(path)
    remedy = f"train.init={path}: %s; give the best.pt of a run with this model on these examples, or null"
    if info["kind"] != examples.kind:
        raise InputError(remedy % f"is for features {info['kind']}, the examples have {examples.kind}")
    ours, theirs = examples.senones, info.get("senones", "")
    if info["num_pdfs"] != examples.num_pdfs or (ours and theirs and ours != theirs):
        raise InputError(remedy % f"its {info['num_pdfs']} senones are not the {examples.num_pdfs} of the examples")
    if type(start) is not type(model):
        raise InputError(remedy % f"is a {type(start).__name__}, not a {type(model).__name__}")
    here, there = ({name: tuple(w.shape) for name, w in m.state_dict().items()} for m in (model, start))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise InputError(remedy % f"{name} has shape {there.get(name)}, here it is {here.get(name)}")
    model.load_state_dict(start.state_dict())
