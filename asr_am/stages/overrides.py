"""Checks of Hydra overrides: sweeps that overwrite their own runs, overrides that come too late, and misspelt names."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asr_am.errors import InputError
from asr_am.extensions import declared, find_class
from asr_am.options import choices, nearest
from asr_am.stages.installed import GROUPS
from asr_am.stages.layout import STAMP
from asr_am.stages.recipe_files import CONF
from asr_am.stages.resolvers import composing
from asr_am.stages.target import Target, made_from

OTHER_NAMES = {  # what other toolkits call an option
    "lr": "schedule.base", "learning_rate": "schedule.base", "gpus": "learners", "num_workers": "train.workers",
    "hidden_size": "model.cells", "num_epochs": "train.epochs", "num_jobs": "nj",
}  # fmt: skip
RECIPE_OPTIONS = {"stage": "--stage", "stop_stage": "--stop-stage", "stop-stage": "--stop-stage"}  # of run.sh
PLUGINS = ("joblib", "submitit_local", "submitit_slurm", "optuna")  # choices of Hydra's plugins
NAME = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@:/-]*")  # of an option or a group
TargetsFn = Callable[[DictConfig], list[Target]]


def asks_help(arguments: Sequence[str]) -> bool:
    """Returns True if a command that takes overrides is asked what it does."""
    return bool({"-h", "--help"} & set(arguments))


def given_overrides(arguments: Sequence[str]) -> list[str]:
    """Returns the overrides among the arguments of a stage's command."""
    return [word for word in arguments if word[:1] != "-" and ("=" in word or word[:1] == "~")]


def sweeps(overrides: Sequence[str]) -> bool:
    """Returns True if an override has more than one value, such as seed=1,2."""
    return any(override.is_sweep_override() for override in OverridesParser.create().parse_overrides(list(overrides)))


def single_values(override: Override) -> list[str]:
    """Returns an override for each value that a sweep has, or the override itself.

    Of an interval, which only hydra/sweeper=optuna takes, these are its ends.
    """
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key = override.get_key_element()
    if override.is_interval_sweep():
        values: Iterable[object] = (override.value().start, override.value().end)  # type: ignore[union-attr]
    else:
        try:
            values = override.sweep_string_iterator()
        except HydraException as error:  # glob() needs the group's files, which Hydra alone knows
            raise InputError(f"{override.input_line}: cannot be listed here; name the values: {key}=A,B") from error
    return [f"{key}={value}" for value in values]


def jobs_of(overrides: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of every job of a command, in the order of the jobs."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [list(job) for job in product(*map(single_values, parsed))]


def is_search(overrides: Sequence[str]) -> bool:
    """Returns True if a sweeper of Hydra's plugins chooses the jobs of a sweep."""
    return any(override.startswith("hydra/sweeper=") for override in overrides)


def first_values(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides with the first value of each sweep."""
    return [single_values(override)[0] for override in OverridesParser.create().parse_overrides(list(overrides))]


def check_sweep(targets: TargetsFn, overrides: Sequence[str]) -> None:
    """Raises InputError if jobs of a sweep would write different results to the same directory.

    Varies one swept option at a time. Call it where configurations can be composed.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    first = first_values(overrides)
    clashes: dict[str, Path] = {}
    for position, override in enumerate(parsed):
        if not override.is_sweep_override():
            continue
        made: dict[Path, str] = {}
        for value in single_values(override):
            cfg = compose("config", overrides=[*first[:position], value, *first[position + 1 :]])
            for target in targets(cfg):
                source = json.dumps([target.config, [str(path) for path in target.inputs]], default=str)
                if made.setdefault(target.out, source) != source:
                    clashes[override.get_key_element().lstrip("+")] = target.out
    if clashes:
        raise InputError(_clash_message(clashes, compose("config", overrides=first)))


def _clash_message(clashes: dict[str, Path], cfg: DictConfig) -> str:
    keys, out = ", ".join(clashes), next(iter(clashes.values()))
    message = f"sweep over {keys}: its jobs would overwrite each other in {out}; "
    if out != Path(cfg.exp) / cfg.corpus.name / "train" / cfg.run:
        return message + "run them one at a time, each with exp=DIR"
    run = OmegaConf.to_container(cfg, resolve=False)["run"]  # type: ignore[index, call-overload]
    for key in clashes:
        name = f"{key}.name" if OmegaConf.is_dict(OmegaConf.select(cfg, key)) else key
        if "/" in str(OmegaConf.select(cfg, name, default="/")):  # a path, or a group without a name
            return message + "run them one at a time, each with run=NAME"
        run += f"-{key.rpartition('.')[2]}${{{name}}}"
    return message + f"add 'run={run}'"


def late_overrides(targets: Sequence[TargetsFn], overrides: Sequence[str]) -> Iterator[tuple[str, int, Path]]:
    """Yields overrides of stages that do not run and whose outputs were made with other values.

    Each comes with the number of its stage and an output. `targets` are the functions of these stages.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    first = first_values(overrides)
    given = values_of_outputs(targets, compose("config", overrides=first))
    if not any(other_keys(out, config) for configs in given for out, config in configs.items()):
        return
    for position, override in enumerate(parsed):
        try:
            others = compose("config", overrides=first[:position] + first[position + 1 :])
        except HydraException:
            continue  # others are options of this choice, as of corpus=kaldi
        without = values_of_outputs(targets, others)
        for number, configs in enumerate(given):
            late = [
                out for out, config in configs.items()
                if any(config[key] != without[number].get(out, config).get(key) for key in other_keys(out, config))
            ]  # fmt: skip
            if late:
                yield str(override.input_line), number, late[0]
                break


def made_of_other_audio(targets: Sequence[TargetsFn], overrides: Sequence[str]) -> list[Path]:
    """Returns the outputs of stages whose audio files have changed since. `targets` are the functions of the stages."""
    given = values_of_outputs(targets, compose("config", overrides=first_values(overrides)))
    outputs = [(out, config.get(STAMP), made_from(out)) for configs in given for out, config in configs.items()]
    return [out for out, stamp, made in outputs if made is not None and stamp != made.get(STAMP)]


def values_of_outputs(targets: Sequence[TargetsFn], cfg: DictConfig) -> list[dict[Path, dict[str, Any]]]:
    """Returns for each stage the values of each output as `.done` has them. {} for a stage with a wrong option."""
    found = []
    for function in targets:
        try:
            made = function(cfg)
        except (InputError, OmegaConfBaseException):
            made = []
        found.append({target.out: json.loads(json.dumps(target.config, default=str)) for target in made})
    return found


def other_keys(out: Path, config: dict[str, Any]) -> list[str]:
    """Returns the keys of `config` whose values differ from those that `out` was made from, if it was.

    The stamp of a corpus' audio is left out, as it is no option.
    """
    made = made_from(out)
    return [key for key, value in config.items() if made is not None and key != STAMP and value != made.get(key)]


@contextmanager
def configurations(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Lets configurations be composed in a program of its own. Raises InputError in place of Hydra's errors."""
    try:
        with composing():
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(explain(error, overrides)) from error


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """Returns an error of Hydra, OmegaConf or YAML in one line, with the nearest names for a misspelt one."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{mark.name}:{mark.line + 1}: not YAML ({error.problem}); correct this line"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if name in PLUGINS:
            return f"{group}={name}: needs the extra `sweeps`; pip install -e '.[sweeps]'"
        if error.options:
            return f"{group}={name}: there is no such choice{choices(name, error.options)}"
    if cause := raised_by_resolver(error):
        return str(cause)
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error.override, text)
    if found := re.match(r"Multiple values for (\S+)\. To override a value use 'override \S+ (\S+)'", text):
        return f"+{found[1]}={found[2]}: {found[1]} has a value already; write {found[1]}={found[2]} to replace it"
    if found := re.match(r"Error merging override (\S+?)=(.*)", text):  # a list for a section, or the reverse
        is_list = OmegaConf.is_list(OmegaConf.select(_chosen(overrides), found[1]))
        return f"{found[1]}={found[2]}: must be {'a list, such as [a,b]' if is_list else 'a mapping, such as {a: 1}'}"
    if found := re.match(r"Could not override '(\S+)'", text):
        key = found[1]
        cfg = _chosen(overrides)
        if _takes(cfg, key):
            return f"{key}: is not in the file of its section; write +{key}= to add it"
        names = list(_dotted(OmegaConf.to_container(cfg, resolve=False), ""))
        last = key.rpartition(".")[2]
        leaf = {name.rpartition(".")[2]: name for name in reversed(names)}
        other = f"; did you mean {OTHER_NAMES[last]}?" if last in OTHER_NAMES else ""
        if key in RECIPE_OPTIONS:
            given = [value for name, _, value in (word.partition("=") for word in overrides) if name == key]
            other = f"; did you mean {RECIPE_OPTIONS[key]} {' '.join(given[:1])}?"
        near = other or nearest(key, names) or nearest(last, leaf, leaf)
        return f"{key}: there is no such option{near}"
    return text


def raised_by_resolver(error: BaseException | None) -> InputError | None:
    """Returns the InputError that an error of OmegaConf followed, None without one."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__ or error.__context__
    return error


def _explain_syntax(override: str, text: str) -> str:
    """Returns what to write instead of an override that does not follow Hydra's grammar."""
    key, _, value = override.partition("=")
    if not NAME.fullmatch(key):
        return f"{key}: there is no such option; names consist of letters, digits, . and _"
    if value.startswith("~"):
        return home_hint(key, value)
    reason = text.partition(" See https:")[0]
    example = f"\"{key}='{value}'\"" if value else "\"name='value'\""
    if "'" in value:  # Hydra reads these within double quotes
        example = f'"{key}=\\"{value}\\""'
    return f"{override}: cannot be read ({reason}); quote special characters for Hydra and the shell: {example}"


def home_hint(key: str, path: str) -> str:
    """Returns the message for a path whose ~ the shell has not expanded."""
    return f"{key}={path}: this shell leaves ~ as it is; write {key}=$HOME{path[1:]}"


def _chosen(overrides: Sequence[str]) -> DictConfig:
    """Returns the configuration under the choices of config files and packages among the overrides."""
    pairs = [override.lstrip("+").partition("=") for override in overrides]
    chosen = [
        text for text, (key, _, name) in zip(overrides, pairs, strict=True)
        if (CONF / key / f"{name}.yaml").is_file() or name in declared(GROUPS.get(key, ""))
    ]  # fmt: skip
    with composing():
        return compose("config", overrides=chosen)


def _takes(cfg: DictConfig, key: str) -> bool:
    """Returns True if the class of a section has this option, which the section's file leaves out."""
    section, _, name = key.rpartition(".")
    try:
        target = OmegaConf.select(cfg, f"{section}._target_")
        group = GROUPS.get(section.partition(".")[0], "")
        return name in inspect.signature(find_class(target, section, "asr_am", object, group)).parameters
    except (InputError, OmegaConfBaseException, ValueError):
        return False


def _dotted(node: object, prefix: str) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _dotted(value, f"{prefix}{key}.")
