"""Parse the command line: commands, options, and words that are fields of a recipe."""

from __future__ import annotations

import argparse
import contextlib
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from opd import installed_version
from opd.config import Recipe
from opd.config.other_names import refuse_other_name
from opd.errors import ConfigError, short_repr


def _parse_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= len(text.lstrip("0")) <= 15:
        shown = short_repr(text)
        raise argparse.ArgumentTypeError(f"give a number of 1 to 15 digits, at least 1, not {shown}")
    return int(text)


def _bounded_number(least: float, most: float, kind: type = float) -> Callable[[str], float]:
    """Return a parser of numbers within these bounds. No NaN is."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= kind(text) <= most:
                return kind(text)
        integer, shown = "whole " if kind is int else "", short_repr(text)
        raise argparse.ArgumentTypeError(f"give a {integer}number from {least:,} to {most:,}, not {shown}")

    return read


class _OnceAction(argparse.Action):
    """An option that may be given once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            raise ConfigError(f"{option_string} is given twice; keep one of the two")
        setattr(namespace, self.dest, values)


def _parse_path(text: str) -> Path:
    if not text:  # an unset variable of a shell; as a path it is the current folder
        raise argparse.ArgumentTypeError("it is empty; give a path")
    return Path(text)


ACCEPTS = {
    "--accept-changed-code": "go on although rewards or other code of yours changed; it is recorded",
    "--accept-changed-settings": "go on with other rates, coefficients, bounds; each is recorded, and what"
    " a run cannot change in its middle is refused",
}
_SWITCHES = {"--help", "--version", "--resume", *ACCEPTS, "--dry-run", "--parity", "--json", "--quotas"}
ASKED = {
    "recipe": (
        _parse_path,
        "with --domain: ask held-out prompts, as this recipe samples, and score the answers",
    ),
    "domain": (str, "whose prompts are asked"),
    "prompts": (_parse_count, "how many of them (default: 8)"),
    "system": (str, "what the system says before each --prompt"),
    "max-tokens": (_parse_count, "of an answer, at most (default: the recipe's, or 512)"),
    "temperature": (_bounded_number(0, 1000), "0 is greedy (default: the recipe's, the model's own, or 1)"),
    "seed": (_bounded_number(0, 2**63 - 1, int), "other answers (default: 0)"),
}
"""Options of `opd sample`, and of `opd compare` for models: type and help."""
OF_THEIR_OWN = ("sample", "compare", "push", "watch")
"""Commands that take no field of a recipe, whatever the names of their options."""
EXAMPLES = Path(__file__).with_name("recipes")
"""Folder of the recipes that the package brings, `NAME.yaml`: those of `examples/`."""
PLAN_NUMBERS = {
    "ranks": (_bounded_number(1, 1_000_000, int), "how many share the work (default: the recipe's, or 1)"),
    "mini-batch": (_parse_count, "trajectories of a step (default: what the recipe samples, or 64)"),
    "budget-mb": (
        _bounded_number(1e-3, 1e12),
        "MiB of a device for activations, a micro-batch's data and the next's (default: 16384)",
    ),
    "tflops": (_bounded_number(1e-9, 1e9), "1e12 operations that a device computes in a second (default: 1)"),
    "read-mb": (
        _bounded_number(1e-9, 1e12),
        "MiB of data that a device is given in a second (default: 1000)",
    ),
    "gpu-gb": (
        _bounded_number(1, 1e6),
        "GiB of a GPU that the recipe names and this machine does not have (default: 80)",
    ),
    "overhead-ms": (
        _bounded_number(0, 1e9),
        "milliseconds that a micro-batch costs however small it is (default: 10)",
    ),
}
"""Options of `opd plan`, beside `--store` and `--simulate`: type and help."""
OFTEN_SET = (
    "seed",
    "model.path",
    "model.lora",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.engine",
    "specialist.steps",
    "specialist.group_size",
    "specialist.optim.lr",
    "distill.steps",
    "distill.prompts_per_domain",
    "distill.loss",
    "distill.teachers",
    "distill.optim.lr",
    "evaluation.prompts_per_domain",
    "train.ranks",
    "train.backend",
    "launch",
)
"""Fields that the help of a command names beside the sections."""
_WITH_VALUE = {
    "--out",
    "--domain",
    "--episode",
    "--reads",
    "--substrate",
    "--image",
    "--pairs",
    "--shards",
    "--store",
    "--dtype",
    "--simulate",
    *(f"--{name}" for name in PLAN_NUMBERS),
}
_REPEATED = ("--domain", "--reads")
STAGES = {
    "run": "the whole pipeline: base, specialists, merge, baselines, evaluation, report",
    "specialist": "train the specialist of one domain (--domain), or of every domain",
    "distill": "merge the specialists into one student by on-policy distillation",
    "evaluate": "measure every model of a run on held-out prompts",
}
"""The commands that take `--resume`."""
OTHERS = {
    "doctor": "check a recipe, its models, data and machine before a run",
    "publish": "write a model into an object store, so that ranks can stream it",
    "report": "write report.html of a run",
    "watch": "show runs while they train: curves, red flags, samples; a page on this machine, or --terminal",
    "compare": "compare several runs in a table and a page; or two models' answers, side by side",
    "sample": "print what a model answers, as it writes",
    "push": "upload a model's folder, with its card, to the Hub",
    "wal": "look into a write-ahead log of tokens",
    "trajectory": "show what agents did with their tools, command by command; run it again and compare",
    "plan": "print who would train on what, and in which order",
    "example": "print a recipe to begin with; without a name, what there is",
    "completion": "print what lets bash or zsh complete commands and options",
}

_WAL_ACTIONS = {
    "inspect": "what a log holds: files, requests, tokens, how the requests ended",
    "verify": "read every byte and say whether the log is whole; status 2 if it is damaged",
    "export": "write every request that has not been retired as one line of JSON",
    "repair": "give up what comes after a damaged place; the old files are kept as NAME.damaged",
}


_TRAJECTORY_ACTIONS = {
    "show": "episodes not learnt from yet, and those kept, or with --episode all that one did, in its order",
    "replay": "run the commands of --episode in a fresh sandbox; status 1 and the first that ends otherwise",
}


class _HelpAction(argparse.Action):
    """`--help` of a command that takes fields of a recipe: the command's options and sections, or a section.

    Imports the recipe's schema only here.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        from opd.config.schema import fields_listing, sections_listing

        if values is None:
            print(f"{parser.format_help()}\n{sections_listing(OFTEN_SET)}")
        else:
            print(fields_listing(None if values == "all" else values.removeprefix("--")))
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command and option, without the overrides."""
    parser = _Parser("opd", description="Train specialists and merge them by on-policy distillation.")
    parser.add_argument("--version", action="version", version=f"opd {installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in STAGES.items():
        command = _add_command(commands, name, summary)
        command.add_argument("--resume", action="store_true", help="continue the run in the folder")
        for switch, text in ACCEPTS.items():
            command.add_argument(switch, action="store_true", help=f"with --resume: {text}")
        command.add_argument("--dry-run", action="store_true", help="print the recipe, or what rules it out")
        command.add_argument("--out", type=_parse_path, metavar="DIR", help="run folder (default: runs/NAME)")
        if name == "specialist":
            command.add_argument("--domain", action="append", metavar="D", help="may be given several times")
    doctor = _add_command(commands, "doctor", OTHERS["doctor"])
    doctor.add_argument(
        "--parity", action="store_true", help="compare what the back ends say of the same samples instead"
    )
    doctor.add_argument(
        "--out", type=_parse_path, metavar="DIR", help="the run folder that `opd run` would be given"
    )
    doctor.add_argument(
        "--pairs",
        action=_OnceAction,
        type=_parse_path,
        metavar="FILE",
        help="instead: how often a domain's reward prefers `chosen` to `rejected` in these rows",
    )
    doctor.add_argument("--domain", action=_OnceAction, metavar="D", help="with --pairs: whose reward")
    doctor.add_argument("--resume", action="store_true", help="check as for a run that is to go on")
    doctor.add_argument(
        "--json", action="store_true", help="one JSON object a line: level, check, finding, numbers"
    )
    publish = _add_other(commands, "publish")
    publish.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a Hugging Face folder")
    publish.add_argument("url", metavar="URL", help="a folder, or s3://BUCKET/PREFIX")
    publish.add_argument(
        "--shards", type=_parse_count, default=1, metavar="N", help="ranks that will read it"
    )
    forms = ("float32", "bfloat16", "float16", "fp8")
    told = "of its matrices (default: as they are stored); fp8: codes and a scale for each 128 x 128"
    publish.add_argument("--dtype", action=_OnceAction, choices=forms, help=told)
    report = _add_other(commands, "report")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    watch = _add_other(
        commands,
        "watch",
        "Prints the address of a page that follows the runs until Ctrl-C; only this machine can open it. From"
        " elsewhere: ssh -L 8000:127.0.0.1:PORT HOST, then http://127.0.0.1:8000/.",
    )
    text = "run folders; one that is not there yet is waited for"
    watch.add_argument("runs", nargs="+", type=_parse_path, metavar="RUN", help=text)
    port = "of the page (default: one that the system chooses)"
    watch.add_argument("--port", action=_OnceAction, type=_parse_count, metavar="N", help=port)
    watch.add_argument("--terminal", action="store_true", help="show them here instead of in a page")
    _models_parsers(commands)
    _wal_parser(commands)
    _trajectory_parser(commands)
    _plan_parser(commands)
    text = "Example: opd example quickstart > recipe.yaml, then opd run recipe.yaml."
    example = _add_other(commands, "example", text)
    names = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
    text = f"one of: {', '.join(names)}; without it, what each of them does"
    example.add_argument("name", nargs="?", choices=names, metavar="NAME", help=text)
    text = 'Print it for a shell: eval "$(opd completion bash)" in ~/.bashrc, the same with zsh in ~/.zshrc.'
    completion = _add_other(commands, "completion", text)
    completion.add_argument("shell", choices=["bash", "zsh"])
    return parser


def _models_parsers(commands: argparse._SubParsersAction) -> None:
    compare = _add_other(
        commands,
        "compare",
        "opd compare RUN RUN ...: results of runs, in a table and a page. opd compare MODEL MODEL --prompt"
        " TEXT, or --recipe R --domain D: what two models answer.",
    )
    places = "run folders; or two models: folders, or org/name on the Hub"
    compare.add_argument("places", nargs="+", metavar="RUN_OR_MODEL", help=places)
    compare.add_argument(
        "--out", action=_OnceAction, type=_parse_path, metavar="FILE", help="the page of runs"
    )
    sample = _add_other(commands, "sample")
    sample.add_argument("model", metavar="MODEL", help="a Hugging Face folder, or org/name on the Hub")
    for parser in (compare, sample):
        parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
        for name, (kind, text) in ASKED.items():
            parser.add_argument(
                f"--{name}", action=_OnceAction, type=kind, metavar=name[0].upper(), help=text
            )
    push = _add_other(commands, "push")
    push.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face folder")
    push.add_argument("repo", metavar="REPO", help="org/name; made, and private, if it is not there")
    push.add_argument(
        "--revision", action=_OnceAction, metavar="BRANCH", help="made if it is not there (default: main)"
    )
    push.add_argument("--public", action="store_true", help="a repository that is made is for everybody")


def _plan_parser(commands: argparse._SubParsersAction) -> None:
    plan = _add_command(commands, "plan", OTHERS["plan"], "*")
    plan.add_argument("--store", type=Path, metavar="FOLDER", help="plan for the samples in this folder")
    plan.add_argument(
        "--simulate", type=Path, metavar="CLUSTER", help="instead: how long steps of this cluster would take"
    )
    for name, (kind, text) in PLAN_NUMBERS.items():
        plan.add_argument(f"--{name}", type=kind, metavar="N", help=text)


def _wal_parser(commands: argparse._SubParsersAction) -> None:
    lines = [f"{name}: {summary}." for name, summary in _WAL_ACTIONS.items()]
    text = " ".join([*lines, "Example: opd wal inspect runs/mine/stages/merge/wal"])
    wal = _add_other(commands, "wal", text)
    wal.add_argument("action", choices=list(_WAL_ACTIONS), metavar="ACTION")
    wal.add_argument("folder", type=Path, metavar="FOLDER")
    wal.add_argument(
        "--out", type=_parse_path, metavar="FILE", help="where export writes (default: the screen)"
    )


def _trajectory_parser(commands: argparse._SubParsersAction) -> None:
    lines = [f"{name}: {summary}." for name, summary in _TRAJECTORY_ACTIONS.items()]
    text = " ".join([*lines, "Example: opd trajectory show runs/mine"])
    trajectory = _add_other(commands, "trajectory", text)
    trajectory.add_argument("action", choices=list(_TRAJECTORY_ACTIONS), metavar="ACTION")
    trajectory.add_argument("run", type=Path, metavar="RUN", help="a run folder, or that of a log")
    trajectory.add_argument(
        "--episode", action=_OnceAction, metavar="UID", help="one of those that show lists"
    )
    trajectory.add_argument(
        "--reads",
        action="append",
        default=[],
        metavar="PATH",
        help="what the commands of a replay may read beside the system, where the log asks for it",
    )
    trajectory.add_argument(
        "--substrate",
        action=_OnceAction,
        metavar="KIND",
        choices=["process"],
        help="process: replay without bubblewrap, where the log says that it was written so",
    )
    trajectory.add_argument(
        "--image",
        action=_OnceAction,
        metavar="NAME",
        help="the image in which the commands of a replay may run, where the log says that they ran in it",
    )
    trajectory.add_argument(
        "--quotas",
        action="store_true",
        help="let the commands of a replay take more than a recipe's default quotas, where the log says so",
    )


def _add_other(
    commands: argparse._SubParsersAction, name: str, description: str | None = None
) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=OTHERS[name], description=description, allow_abbrev=False)


def _add_command(
    commands: argparse._SubParsersAction, name: str, summary: str, recipes: str = "+"
) -> _Parser:
    command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog="Any field of the recipe is an option: --distill.optim.lr 3e-5, --seed 1. --help SECTION lists"
        " the fields of a section, such as distill or distill.teachers; --help all lists every field.",
        allow_abbrev=False,
        add_help=False,
    )
    command.add_argument(
        "-h",
        "--help",
        action=_HelpAction,
        nargs="?",
        metavar="SECTION",
        help="this text, or the fields of a section",
    )
    command.add_argument("recipe", nargs=recipes, type=Path, metavar="RECIPE", help="YAML; later files win")
    return command


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the command's own words from recipe overrides (`--a.b VALUE`, `--a.b=VALUE`).

    Raises `ConfigError` for another library's option and for a repeated option. A misspelt option of the
    command is refused too, because it would swallow the word after it.
    """
    command_words: list[str] = []
    overrides: list[str] = []
    options, words = _SWITCHES | _WITH_VALUE, iter(argv)
    for word in words:
        name = word.partition("=")[0]
        if word != name or word.startswith("--"):
            refuse_other_name(name)
        if not word.startswith("--") or name in _SWITCHES:
            command_words.append(word)
            continue
        target = command_words if name in _WITH_VALUE else overrides
        if name not in options and "." not in name and name.removeprefix("--") not in Recipe.model_fields:
            close = difflib.get_close_matches(name, sorted(options), n=1, cutoff=0.8)
            if close:
                raise ConfigError(f"unknown option {name}; did you mean {close[0]}?")
        is_repeated = any(name == other.partition("=")[0] for other in command_words)
        if target is command_words and name not in _REPEATED and is_repeated:
            raise ConfigError(f"{name} is given twice; keep one of the two")
        target.append(word)
        if "=" not in word:
            target.extend(value for value in [next(words, None)] if value is not None)
    return command_words, overrides


def parse_command(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command's own words. Raises `ConfigError` for an option of another command, for an extra
    word, and for an option without the one that it belongs to.
    """
    parser = build_parser()
    options, unknown = parser.parse_known_args(words)
    if not unknown:
        for switch in ACCEPTS:
            if getattr(options, switch[2:].replace("-", "_"), False) and not options.resume:
                raise ConfigError(f"{switch} is for a run that goes on; give --resume with it")
        return options
    word = unknown[0].partition("=")[0]
    at = f"opd {options.command}"
    takers = [
        f"`opd {name}`"
        for name, command in _command_parsers(parser).items()
        if word in command._option_string_actions
    ]
    if f"`{at}`" in takers:
        raise ConfigError(f"{word} stands before the command; write it behind `{at}`")
    if takers:
        others = " and ".join(takers if len(takers) < 4 else [takers[0], "others"])
        raise ConfigError(f"{at} takes no {word}, which is an option of {others}; leave it out")
    raise ConfigError(f"{at} does not know what to do with {word!r}; see `{at} --help`")


def _command_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(
        action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )


def completion_script(shell: str) -> str:
    """Return a script for `shell`: after a command its options, and fields if it takes recipes."""
    from opd.config.schema import describe_fields

    parsers = _command_parsers(build_parser())
    fields = " ".join(dict.fromkeys(f"--{one.key}" for one in describe_fields() if ".NAME" not in one.key))
    cases = []
    for name, command in parsers.items():
        options = " ".join(word for word in command._option_string_actions if word.startswith("--"))
        takes_recipe = any(action.dest == "recipe" for action in command._actions)
        cases.append(f'    {name}) words="{options}{" $fields" * takes_recipe}" ;;')
    script = f"""_opd() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words="" fields="{fields}"
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(parsers)} --help --version" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{chr(10).join(cases)}
  esac
  case "$word" in -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;; esac
}}
complete -o default -F _opd opd"""
    return script if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"
