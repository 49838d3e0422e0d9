"""Makes a table of a paper, published values beside ours: `python -m asr_am.papers.table +experiment=papers/NAME`.

    python -m asr_am.papers.table +experiment=papers/ibm_table3 nj=2
    python -m asr_am.papers.table +experiment=papers/ibm_table3 cluster.nic_bandwidth=6e9 exp=exp/slow

conf/experiment/papers/<paper>_<table>.yaml says in its section `table` what the cells are (asr_am/papers/cells.py).
Each is run with the table's seeds, `nj` runs at a time. A finished run is not run again. If one fails, the others go
on, and the same command continues. Other overrides apply to every cell.

Prints the table and writes it to exp/<corpus>/tables/NAME/table.md and table.json, with a plot as table.png and
table.svg. Exits with 1 if a run failed, a value is too far from the published one, or an order does not hold.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from importlib import import_module
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.options import build
from asr_am.papers.cells import Measures, PaperTable, Row, check_measures, count_predictions, format_rows, rows, unmet
from asr_am.papers.members import MEASURES, WORK, Member, member_of_trial, plain_name, recipe
from asr_am.papers.table_plot import plot_table
from asr_am.parallel import Failure, isolated_map
from asr_am.report.markup import code, literal
from asr_am.stages.app import ends_on_signals, reports_errors
from asr_am.stages.layout import corpus_dir
from asr_am.stages.option_checks import TABLE, compose_job
from asr_am.stages.overrides import asks_help, given_overrides
from asr_am.stages.recipe_files import CONF
from asr_am.stages.resolvers import composing
from asr_am.stages.sections import check, values
from asr_am.stages.stage_log import start_logging
from asr_am.stages.systems import language_models

log = logging.getLogger(__name__)

FITTED = re.compile(r" *(\w+):.*# \[fitted\]")
Outcome = tuple[Measures, str] | Failure  # of a run: its measures and commit, or why it failed


def experiment_of(overrides: Sequence[str]) -> str:
    """Returns what +experiment= chooses, such as papers/ibm_table3. Raises InputError if there is none."""
    for override in overrides:
        name, _, value = override.lstrip("+").partition("=")
        if name == "experiment":
            return value
    raise InputError("which table? Give +experiment=papers/NAME, a file of conf/experiment/papers that has a table")


def read_table(cfg: DictConfig, experiment: str) -> PaperTable:
    """Returns the section `table`. Raises InputError if there is none, or it is wrong."""
    if OmegaConf.select(cfg, TABLE) is None:
        raise InputError(f"experiment={experiment}: conf/experiment/{experiment}.yaml has no section `table`")
    return PaperTable.build(values(cfg.table))


def for_recipe(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides for the recipe's stages, which need no section `table` and get the jobs as --nj."""
    return [*(word for word in overrides if not word.startswith((f"{TABLE}.", "nj="))), f"{TABLE}=null"]


def members(table: PaperTable, cfg: DictConfig, overrides: Sequence[str]) -> dict[str, list[Member]]:
    """Returns the runs of each cell by seed. Raises InputError for a wrong option. Call it where one can compose."""
    stem, root = Path(experiment_of(overrides)).name, corpus_dir(cfg)
    made: dict[str, list[Member]] = {}
    for name, cell in table.cells.items():
        work = {**table.work, **cell.work}
        build(WORK[table.member], work, f"table.cells.{name}.work")  # finds mistakes before the first run
        scored = [measure for measure in table.needed(name) if measure.startswith("wer_") and work.get("score")]
        check_measures(table, name, [*MEASURES[table.member], *scored])
        for seed in table.seeds:
            run = f"{stem}-{plain_name(name)}-s{seed}"
            own = [*cell.options, *overrides, f"seed={seed}"]
            composed = compose_job(own)
            sections = {group: values(composed[group]) for group in ("cluster", "workload", "strategy")}
            lms = language_models(composed)
            if work.get("score") and len(lms) != 1:
                raise InputError(
                    f"table.cells.{name}: lms is [{', '.join(lms)}], and a table has the word error rates of one LM; "
                    f"give one, such as lms=[{(lms or [*composed.corpus.lms])[-1]}]"
                )
            config = {**sections, "learners": composed.learners, "seed": seed, "corpus": cfg.corpus.name, "lms": lms}
            arguments = [*for_recipe(own), f"run={run}", "train.threads=1"]
            folder = root / "tables" / stem / run
            made.setdefault(name, []).append(Member(run, table.member, folder, work, config, arguments, root))
    refuse_equal_names(made)
    return made


def refuse_equal_names(runs: Mapping[str, Sequence[Member]]) -> None:
    """Raises InputError if two cells, seeds or trials would be the same run, as names of runs lack some characters."""
    owners: dict[str, str] = {}
    for name, each in runs.items():
        for member in each:
            cell = f"cell {name!r}, seed {member.config['seed']}"
            trials = member.work.get("trials", [])
            named = {
                f"{cell}, trial {n} {trial}": member_of_trial(member, trial).name for n, trial in enumerate(trials, 1)
            }
            for owner, run in (named or {cell: member.name}).items():
                if run in owners:
                    raise InputError(f"table: {owners[run]} and {owner} are both named {run}; give one another name")
                owners[run] = owner


def run_all(table: PaperTable, runs: Mapping[str, Sequence[Member]], jobs: int) -> dict[str, Outcome]:
    """Runs all members, those of `table.first` before the others. Returns their outcomes by name."""
    outcomes: dict[str, Outcome] = {}
    for wave in (table.first, [name for name in table.cells if name not in table.first]):
        todo = [member for name in wave for member in runs[name]]
        if todo:
            found = isolated_map(Member.run, todo, jobs, "runs")
            outcomes |= {member.name: outcome for member, outcome in zip(todo, found, strict=True)}
    return outcomes


def fitted(runs: Mapping[str, Sequence[Member]]) -> list[str]:
    """Returns the constants that the files of the runs' clusters and workloads mark as fitted, as file.constant."""
    sections = {(group, member.config[group]["name"]) for each in runs.values() for member in each
                for group in ("cluster", "workload")}  # fmt: skip
    found = []
    for group, name in sorted(sections):
        lines = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        found += [f"{name}.{match[1]}" for line in lines if (match := FITTED.match(line))]
    return found


def check_fitted(table: PaperTable, constants: Sequence[str]) -> None:
    """Raises InputError if a cell names a constant that is not marked as fitted."""
    for name, cell in table.cells.items():
        if cell.fits is not None and cell.fits not in constants:
            raise InputError(f"table.cells.{name}.fits={cell.fits}: is not marked as fitted; there are {constants}")


def collect(
    runs: Mapping[str, Sequence[Member]], outcomes: Mapping[str, Outcome]
) -> tuple[dict[str, list[Measures]], list[str]]:
    """Returns the measures of each cell whose runs have all succeeded, and the commits that made them."""
    found: dict[str, list[Measures]] = {}
    commits: set[str] = set()
    for name, each in runs.items():
        done = [outcome for member in each if not isinstance(outcome := outcomes[member.name], Failure)]
        commits |= {commit for _, commit in done}
        if len(done) == len(each):
            found[name] = [measures for measures, _ in done]
    return found, sorted(commits)


def describe(
    table: PaperTable, made: Sequence[Row], problems: Sequence[str], constants: Sequence[str], made_by: str
) -> str:
    """Returns the table as Markdown."""
    independent, predictions = count_predictions(made)
    counted = "1 constant" if len(constants) == 1 else f"{len(constants)} constants"
    many = f"{counted} fitted ({', '.join(constants)})" if constants else "No constant fitted"
    parts = [
        f"### {literal(table.title)}", code(made_by), format_rows(made),
        f"{many}; {predictions} of {independent} independent cells are predictions.",
        f"Not as published: {'; '.join(problems)}." if problems else "", table.note.strip(),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts))


def make_table(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Runs what is not finished, writes and prints the table.

    Raises:
        InputError: a run failed, a value is too far from the published one, or an order does not hold.
    """
    experiment = experiment_of(overrides)
    table = read_table(cfg, experiment)
    runs = members(table, cfg, overrides)
    constants = fitted(runs)
    check_fitted(table, constants)
    start_logging(corpus_dir(cfg) / "log" / "table.log")
    if table.member == "train":
        recipe(cfg.corpus.name, ["--stop-stage", "5", "--nj", str(cfg.nj), *for_recipe(overrides)])
    else:
        import_module("asr_am.distributed.simulator.epoch_timing")  # torch, once and not in each process
    outcomes = run_all(table, runs, cfg.nj)
    found, commits = collect(runs, outcomes)
    made, problems = rows(table, found), unmet(table, found)
    command = shlex.join(["python", "-m", "asr_am.papers.table", *overrides])
    text = f"{describe(table, made, problems, constants, command)}\n\nCommit {', '.join(commits)}, {date.today()}."
    record = {
        "title": table.title, "command": command, "commits": commits, "date": str(date.today()), "fitted": constants,
        "unmet": problems, "measures": found,
        "rows": [vars(row) | {"mean": row.mean, "ratio": row.ratio} for row in made],
    }  # fmt: skip
    folder = corpus_dir(cfg) / "tables" / Path(experiment).name
    folder.mkdir(parents=True, exist_ok=True)
    plot_table(made, table.title, folder / "table.png")
    write_lines(folder / "table.json", [json.dumps(record, indent=1)])
    write_lines(folder / "table.md", [text])
    log.info("%s", text)
    check_outcomes(outcomes, problems)


def check_outcomes(outcomes: Mapping[str, Outcome], problems: Sequence[str]) -> None:
    """Raises InputError if runs failed, or values and orders are not as published."""
    failed = [f"{name} ({each.reason})" for name, each in outcomes.items() if isinstance(each, Failure)]
    if failed:
        total = len(outcomes)
        raise InputError(f"{len(failed)} of {total} runs failed: {'; '.join(failed)}; the same command continues")
    if problems:
        raise InputError(f"not as published: {'; '.join(problems)}")


def main() -> None:
    if asks_help(sys.argv[1:]):
        print(__doc__)
        return
    overrides = given_overrides(sys.argv[1:])
    with ends_on_signals("table"), reports_errors("table", overrides):
        if unknown := [word for word in sys.argv[1:] if word not in overrides]:
            raise InputError(f"{unknown[0]}: is no override of the form name=value")
        with composing():
            cfg = compose_job(overrides)
            check(cfg)
            make_table(cfg, overrides)


if __name__ == "__main__":
    main()
