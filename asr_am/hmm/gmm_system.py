"""A trained GMM-HMM system: tree, states and mixtures, as a directory that alignment and decoding load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asr_am.errors import InputError
from asr_am.hmm import REMEDY
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import DecisionTree

PROJECTION = "lda.mat"  # LDA and MLLT in one matrix, where a system has them
UNADAPTED = "unadapted.npz"  # where a system is of adapted features: the same mixtures for features without adaptation
TRANSFORMS = "transforms"  # and the transforms of its training speakers


@dataclass(frozen=True)
class GmmSystem:
    """tree.json, states.npz and gmm.npz, which belong together."""

    tree: DecisionTree
    states: StateTable
    gmms: DiagGmms

    def save(self, folder: Path) -> None:
        """Write the three files; gmm.npz last, so that a directory that has it is complete."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tree.save(folder / "tree.json")
        self.states.save(folder / "states.npz")
        self.gmms.save(folder / "gmm.npz")

    @classmethod
    def load(cls, folder: Path) -> GmmSystem:
        """InputError where a file is missing or damaged, or where they do not belong together."""
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
        """The kind of features that the mixtures in `folder` take."""
        if (folder / UNADAPTED).is_file():
            return "fmllr"
        return "lda" if (folder / PROJECTION).is_file() else "mfcc"

    @staticmethod
    def is_complete(folder: Path) -> bool:
        """Whether `save` finished there."""
        return (folder / "gmm.npz").is_file()
