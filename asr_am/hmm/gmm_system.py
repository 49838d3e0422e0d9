"""A trained GMM-HMM system (tree, states and mixtures) as a folder that alignment and decoding load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asr_am.errors import InputError
from asr_am.hmm import REMEDY
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import DecisionTree

PROJECTION = "lda.mat"  # LDA and MLLT as one matrix, in systems that use them
UNADAPTED = "unadapted.npz"  # in SAT systems: the same Gaussians for unadapted features (Kaldi's final.alimdl)
TRANSFORMS = "transforms"  # in SAT systems: the folder of the training speakers' transforms


@dataclass(frozen=True)
class GmmSystem:
    """Tree, states and mixtures that belong together: tree.json, states.npz and gmm.npz of one folder."""

    tree: DecisionTree
    states: StateTable
    gmms: DiagGmms

    def save(self, folder: Path) -> None:
        """Writes the three files. gmm.npz is last, so that a folder that contains it is complete."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tree.save(folder / "tree.json")
        self.states.save(folder / "states.npz")
        self.gmms.save(folder / "gmm.npz")

    @classmethod
    def load(cls, folder: Path) -> GmmSystem:
        """Loads a system. Raises InputError if a file is missing or damaged, or if the files do not belong together."""
        system = cls(
            DecisionTree.load(folder / "tree.json"),
            StateTable.load(folder / "states.npz"),
            DiagGmms.load(folder / "gmm.npz"),
        )
        if not system.tree.num_pdfs == system.states.num_pdfs == system.gmms.num_pdfs:
            raise InputError(f"{folder}: tree, states and mixtures have different numbers of pdfs; {REMEDY}")
        return system

    @staticmethod
    def kind(folder: Path) -> str:
        """Returns the feature kind ("mfcc", "lda" or "fmllr") that the mixtures in `folder` take."""
        if (folder / UNADAPTED).is_file():
            return "fmllr"
        return "lda" if (folder / PROJECTION).is_file() else "mfcc"

    @staticmethod
    def is_complete(folder: Path) -> bool:
        """Returns True if `save` finished in `folder`."""
        return (folder / "gmm.npz").is_file()

    @staticmethod
    def find(align_dir: Path, name: str) -> Path:
        """Returns the folder of a system. Raises InputError, with the systems that there are, if it is none of them."""
        folders = sorted(align_dir.iterdir()) if align_dir.is_dir() else []
        complete = {folder.name: folder for folder in folders if GmmSystem.is_complete(folder)}
        if not complete:
            raise InputError(f"{align_dir}: has no GMM system; run stage 3 (align)")
        if name not in complete:
            raise InputError(f"{align_dir / name}: no such GMM system; give one of {', '.join(complete)}")
        return complete[name]
