"""The options of conf/config.yaml that are in no section."""

from __future__ import annotations

from dataclasses import dataclass

from asr_am.errors import InputError


@dataclass(frozen=True)
class RecipeOptions:
    """See conf/config.yaml."""

    exp: str
    data_dir: str | None
    speed_perturb: list[float]
    nj: int
    learners: int
    seed: int
    systems: list[str]
    lms: list[str]
    rescore: bool
    log_likelihoods: bool
    run: str

    def __post_init__(self) -> None:
        """InputError where a value is out of range."""
        for name, least in (("nj", 1), ("learners", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not self.run or "/" in self.run:
            raise InputError(f"run={self.run}: is the name of a folder in exp/<corpus>/train, without a /")
