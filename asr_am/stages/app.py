"""The frame of every stage: Hydra, and one clear line for a user's mistake or a Ctrl-C.

A stage module has a function `targets(cfg)`, and `main = stage("name", targets)`. A target takes its part of the
configuration as plain values, `options = values(cfg.section)`, which are part of its key, and passes them to its build
function: `Target(out, inputs, options, partial(build_it, options))`. Only the build function imports torch and converts
the values, `asr_am.options.build(SectionOptions, options, "section")`, so a stage that is up to date ends at once.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asr_am.errors import DISK_FULL, EXIT_PREEMPTED, InputError, Preempted, is_disk_full
from asr_am.progress import mute
from asr_am.signals import discard_output, signal_again_if_lost, signal_on_parent_death
from asr_am.stages import PREEMPTION, end_with_recipe, preempt_at_once, started_by_recipe, terminate_at_once
from asr_am.stages.layout import layout
from asr_am.stages.overrides import asks_help, check_sweep, explain, given_overrides, is_search, jobs_of, sweeps
from asr_am.stages.recipe_files import CONF
from asr_am.stages.resolvers import composing, register_resolvers
from asr_am.stages.sections import check, job_options
from asr_am.stages.stage_log import LogFile, start_logging

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from asr_am.stages.target import Target

log = logging.getLogger(__name__)


def stage(
    name: str, targets: Callable[[DictConfig], list[Target]], result: Callable[[DictConfig], float] | None = None,
    sweep_table: Callable[[Sequence[DictConfig]], str] | None = None,
) -> Callable[[], None]:  # fmt: skip
    """Returns the `main` of a stage module, which composes the configuration and makes the stage's targets in turn.

    A user's mistake ends the process with exit status 1 and one line on stderr, Ctrl-C with 130, and SIGTERM with 143.
    In a sweep the other jobs go on after a mistake.

    Args:
        name: name of the stage and of its log file.
        result: returns what a sweep by hydra/sweeper=optuna minimises, after the targets are made.
        sweep_table: returns the results of the jobs of a sweep, as a table.
    """

    def run(cfg: DictConfig) -> float | None:
        with reports_job(name, cfg):
            log_file = layout(cfg).logs / f"{name}.log"
            start_logging(log_file)
            log_job(cfg)
            begin = time.monotonic()
            with outputs_kept(name, cfg), job_cluster(cfg):
                made = [target.run() for target in targets(cfg)]
            if any(made):
                log.info("stage %s: %.1f s, log: %s", name, time.monotonic() - begin, log_file)
            return result(cfg) if result else None

    hydra_main = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run)

    def main() -> None:
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises errors and leaves the printing to us
        os.environ[LAUNCHED_BY] = str(os.getpid())
        overrides = given_overrides(sys.argv[1:])
        with ends_on_signals(name), reports_errors(name, overrides):
            register_resolvers()  # before Hydra composes
            if sweeps(overrides):
                check_before_sweep(targets, overrides)
                start_logging(None)  # jobs of other launchers than Hydra's own log in processes of their own
                os.environ[NUM_JOBS] = "" if is_search(overrides) else str(len(jobs_of(overrides)))
            else:  # Hydra composes four times for --multirun, else twice
                sys.argv = [word for word in sys.argv if word not in ("--multirun", "-m")]
            try:
                hydra_main()
            except JobFailed:
                log_table(sweep_table, overrides)
                raise
            log_table(sweep_table, overrides)

    return main


def check_before_sweep(targets: Callable[[DictConfig], list[Target]], overrides: Sequence[str]) -> None:
    """Checks the options of all jobs before the first one, unless the recipe has done so.

    Raises:
        InputError: an option is wrong, or jobs of a sweep would overwrite each other's outputs.
    """
    from asr_am.stages.option_checks import check_jobs

    with composing():
        if not started_by_recipe():
            check_jobs(overrides)
        check_sweep(targets, overrides)


@contextmanager
def outputs_kept(name: str, cfg: DictConfig) -> Iterator[None]:
    """Raises InputError if another command changes what this recipe has made in the stages before, also meanwhile."""
    check_earlier(name, cfg)
    try:
        yield
    except Exception:
        check_earlier(name, cfg)
        raise
    check_earlier(name, cfg)


def check_earlier(name: str, cfg: DictConfig) -> None:
    """Raises InputError if what this recipe has made in stages before this one has been changed."""
    if started_by_recipe():
        from asr_am.stages.option_checks import changed_output

        if changed := changed_output(cfg, name, int(os.environ.get(FIRST_STAGE, "0"))):
            out, option = changed
            raise InputError(
                f"{out}: another command has made it with another value of {option} since this one began; wait until "
                "that has ended, and give it exp=DIR or the corpus another name"
            )


def log_job(cfg: DictConfig) -> None:
    """Logs which job of a sweep begins."""
    job = HydraConfig.get().job
    if not OmegaConf.is_missing(job, "num"):
        jobs = os.environ.get(NUM_JOBS, "")
        log.info("job %d%s: run=%s", int(job.num) + 1, f" of {jobs}" if jobs else "", cfg.run)


def log_table(table: Callable[[Sequence[DictConfig]], str] | None, overrides: Sequence[str]) -> None:
    """Logs the results of the jobs of a sweep, unless a search has chosen them: it has a line of its own."""
    if table is None or not sweeps(overrides) or is_search(overrides):
        return
    from asr_am.stages.option_checks import compose_job

    with composing():
        log.info("%s", table([compose_job(job) for job in jobs_of(overrides)]))


NUM_JOBS = "ASR_AM_NUM_JOBS"  # environment: number of jobs of a sweep
FIRST_STAGE = "ASR_AM_FIRST_STAGE"  # environment: number of the first stage of a recipe
LAUNCHED_BY = "ASR_AM_LAUNCHED_BY"  # environment: process that has started the jobs of a sweep


class JobFailed(Exception):
    """A job of a sweep has failed and has said why."""


@contextmanager
def reports_job(name: str, cfg: DictConfig) -> Iterator[None]:
    """Checks the options of a job and reports its errors. A failed job of a sweep raises JobFailed: others go on."""
    from asr_am.stages.option_checks import check_options

    hydra_cfg = HydraConfig.get()
    overrides = given_overrides(OmegaConf.to_container(hydra_cfg.overrides.task, resolve=False))  # type: ignore[arg-type]
    if OmegaConf.is_missing(hydra_cfg.job, "num"):
        with reports_errors(name, overrides):
            check(cfg)
            if not started_by_recipe():
                check_options(cfg, overrides)
            yield
        return
    if os.environ.get(LAUNCHED_BY) != str(os.getpid()):  # Hydra's launcher runs jobs in processes of their own
        mute()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that has started it ends it
        signal_on_parent_death(signal.SIGTERM)
    try:
        with reports_errors(f"{name}, run={cfg.run}", overrides):
            check(cfg)
            yield
    except SystemExit as error:
        if error.code != 1:
            raise
        continues = "the same command continues with what is not finished"
        if isinstance(error.__context__, InputError):
            message = f"run={cfg.run} failed ({error.__context__}); when that is corrected, {continues}"
        else:
            message = f"run={cfg.run} failed; when its cause is gone, {continues}"
        raise JobFailed(message) from None


@contextmanager
def reports_errors(name: str, overrides: Sequence[str]) -> Iterator[None]:
    """Ends the process with exit status 1 after an exception, with one line on stderr if a user can fix it."""
    try:
        yield
    except (InputError, JobFailed) as error:
        end_stage(f"stage {name}: {error}", 1)
    except Preempted as error:
        end_stage(f"stage {name}: asked to end by a signal: {error}", EXIT_PREEMPTED)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        end_stage(f"stage {name}: {explain(error, overrides)}", 1)
    except Exception as error:
        if stop := signal_behind(error):
            raise stop from None
        if isinstance(error, UnicodeDecodeError) and (file := not_utf8(CONF)):
            end_stage(f"stage {name}: {file}: is not UTF-8; save it as UTF-8", 1)
        if line := disk_problem(error, None):
            end_stage(f"stage {name}: {line}", 1)
        if isinstance(error, BrokenPipeError) and asks_help(sys.argv[1:]):  # `--help | head`
            discard_output()
            sys.exit(0)
        log.exception("stage %s failed%s", name, _log_hint())
        sys.exit(1)


def not_utf8(conf: Path) -> Path | None:
    """Returns the first file of a folder of configurations that is not UTF-8, None if all are."""
    for path in sorted(conf.rglob("*.yaml")):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return path
    return None


def signal_behind(error: BaseException | None) -> KeyboardInterrupt | SystemExit | None:
    """Returns the Ctrl-C or SIGTERM that an exception followed, as while a C++ module is imported. None without one."""
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__cause__ or error.__context__
    return error


def disk_problem(error: Exception, folder: Path | None) -> str | None:
    """Returns what is wrong with a disk or a path, and what to do. None if the exception is not about that."""
    file = error.filename if isinstance(error, OSError) else None
    if is_disk_full(error, folder):
        return f"{folder or file or 'exp'}: {DISK_FULL}"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        file = file or folder  # an open file is written without its name
    if isinstance(error, OSError) and file and error.errno in NOT_WRITABLE:
        return f"{file}: {error.strerror}; make it accessible, or write elsewhere with exp=DIR"
    return None


NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


@contextmanager
def ends_on_signals(name: str) -> Iterator[None]:
    """Ends the process with one line: exit status 130 on Ctrl-C, 143 on SIGTERM or with a killed recipe, and 75 on
    SIGUSR1 and SIGUSR2, which schedulers send before they take a machine away.
    """

    def terminate(number: int, frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, *PREEMPTION):
        signal.signal(number, terminate)
    end_with_recipe()
    signal_again_if_lost(signal_raised)
    try:
        yield
        signal.signal(signal.SIGTERM, terminate_at_once)
        for number in PREEMPTION:
            signal.signal(number, preempt_at_once)
    except (KeyboardInterrupt, SystemExit) as error:
        ended_by = signal_raised(error)
        if ended_by is None:
            raise
        how = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}.get(ended_by, "asked to end by a signal")
        status = EXIT_PREEMPTED if ended_by in PREEMPTION else 128 + ended_by
        end_stage(f"stage {name}: {how}; the same command continues", status)


def signal_raised(error: BaseException | None) -> signal.Signals | None:
    """Returns the signal whose handler raises this exception in `ends_on_signals`, None for any other."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    numbers = {128 + number: number for number in (signal.SIGTERM, *PREEMPTION)}
    return numbers.get(error.code) if isinstance(error, SystemExit) else None  # type: ignore[arg-type]


def end_stage(message: str, status: int) -> None:
    """Ends the process with an error message, in the log as well if there is one."""
    if logging.getLogger().handlers:
        log.error("%s%s", message, _log_hint())
    else:
        print(f"ERROR {message}", file=sys.stderr)
    tell_torchrun(message)
    sys.exit(status)


def tell_torchrun(message: str) -> None:
    """Gives torchrun, if it has started this process, the message to end its report with, which is 40 lines long."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(path).write_text(json.dumps(error), encoding="utf-8")


def _log_hint() -> str:
    handlers = logging.getLogger().handlers
    files = [handler.path for handler in handlers if isinstance(handler, LogFile) and handler.stream is not None]
    return f" (log: {files[0]})" if files else ""


def job_cluster(cfg: DictConfig) -> AbstractContextManager[None]:
    """Returns the context in which parallel maps run on the cluster of group `jobs`."""
    options = job_options(cfg)
    if options.name == "local":
        return nullcontext()
    from asr_am.dask_jobs.client import DaskJobs
    from asr_am.parallel import on_cluster

    return on_cluster(DaskJobs(options, layout(cfg).logs / "jobs"))
