"""The console command `opd`. Each command imports its heavy modules itself."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.config.load import absolute_paths, dump_recipe, load_recipe
from opd.errors import ConfigError, RunFolderError
from opd.imports import pause_collection
from opd.pipelines.commands.exit_status import (
    ERROR,
    one_line,
    record_command,
    require_address_space,
    run_command,
)
from opd.pipelines.options import (
    ASKED,
    EXAMPLES,
    OF_THEIR_OWN,
    OTHERS,
    PLAN_NUMBERS,
    STAGES,
    completion_script,
    parse_command,
    split_overrides,
)
from opd.pipelines.records.stage_names import specialist_stage

if TYPE_CHECKING:
    from opd.pipelines.check.checks import Finding
    from opd.pipelines.commands.sample import SampleOptions
    from opd.pipelines.records.run_folder import HubRecord, RunFolder


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, described in `ended`."""
    words = list(sys.argv[1:] if argv is None else argv)
    # The first word that names a command. A command's options come after it.
    command = next((word for word in words if word in STAGES or word in OTHERS), None)
    resumes = command in STAGES and "--dry-run" not in words
    with record_command(words):
        return run_command(lambda: _run_audibly(words, command or "opd"), resumes=resumes, last=argv is None)


def _run_audibly(words: list[str], command: str) -> int:
    """Run the command, with progress messages if it takes long. Only the first rank prints them."""
    if os.environ.get("RANK", "0") != "0":
        return _dispatch(words)
    from opd.progress import never_silent

    with never_silent(command):
        return _dispatch(words)


def _dispatch(argv: list[str]) -> int:
    command = next((word for word in argv if word in STAGES or word in OTHERS), None)
    words, overrides = (list(argv), []) if command in OF_THEIR_OWN else split_overrides(argv)
    try:
        options = parse_command(words)
    except SystemExit:  # --help and --version; an error is a `ConfigError`
        return 0
    without_recipe = {
        "report": _write_report,
        "watch": _show_runs,
        "compare": _compare_command,
        "wal": _wal_command,
        "trajectory": _trajectory_command,
        "publish": _publish_checkpoint,
        "plan": _plan_command,
        "sample": _sample_command,
        "push": _push_model,
        "example": _print_example,
    }
    if options.command in without_recipe:
        return without_recipe[options.command](options, overrides)
    if options.command == "completion":
        print(completion_script(options.shell))
        return 0
    recipe = load_recipe(options.recipe, overrides)
    if options.command != "doctor":
        _refuse_run(recipe, options)
    if options.command != "doctor" and options.dry_run:
        return _dry_run(recipe)
    recipe = absolute_paths(recipe)
    require_address_space(cache=recipe.storage.cache_mb > 0)
    if options.command == "doctor":
        return _run_doctor(recipe, options)
    return _run_stages(recipe, options, argv)


def _from_hub(
    recipe: Recipe, path: Path | None = None, resume: bool = False, weights: bool = True
) -> tuple[Recipe, HubRecord]:
    """Fetch the recipe's names on the Hub as `records.hub.fetch_recipe` does."""
    from opd.pipelines.records.hub import fetch_recipe

    return fetch_recipe(recipe, path, resume=resume, weights=weights)


def _dry_run(recipe: Recipe) -> int:
    """Print `recipe`, unless a run would refuse the functions, files and folders that it names."""
    from opd.pipelines.check.examine import examine_paths

    if not _print_findings(examine_paths(absolute_paths(recipe))):
        return ERROR
    print(dump_recipe(recipe), end="")
    return 0


def _run_doctor(recipe: Recipe, options: argparse.Namespace) -> int:
    recipe, _ = _from_hub(recipe, options.out, options.resume)
    if options.domain is not None and options.pairs is None:
        raise ConfigError("--domain goes with --pairs: whose reward is asked")
    if options.pairs is not None:
        from opd.pipelines.check.measured import check_pairs

        return check_pairs(recipe, options.pairs, options.domain, as_json=options.json)
    if options.parity:
        from opd.pipelines.check.parity import check_parity

        return check_parity(recipe)
    from opd.pipelines.check.examine import print_diagnosis

    return print_diagnosis(recipe, run_dir=options.out, resume=options.resume, as_json=options.json)


def _print_example(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ConfigError(f"opd example prints a recipe as it is; give {overrides[0]} to opd run")
    if options.name is not None:
        print((EXAMPLES / f"{options.name}.yaml").read_text(encoding="utf-8"), end="")
        return 0
    for path in sorted(EXAMPLES.glob("*.yaml")):
        comment = itertools.takewhile(lambda line: line[0] == "#", path.read_text("utf-8").splitlines())
        summary = " ".join(line.removeprefix("# ") for line in comment)
        print(f"{path.stem:18} {textwrap.shorten(summary, 110, placeholder=' ...')}")
    print("opd example NAME > recipe.yaml writes one of them.")
    return 0


def _write_report(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ConfigError(f"opd report takes a run folder and no settings; remove {overrides[0]}")
    if not options.run_dir.is_dir():
        raise RunFolderError(f"there is no run folder {options.run_dir}; check the path")
    from opd.pipelines.report import write_report

    print(write_report(options.run_dir))
    return 0


def _show_runs(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from opd.pipelines.commands.watch import show_runs

    return show_runs(options.runs, options.port, terminal=options.terminal)


def _compare_command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Compare runs, or with prompts two models. Raises `ConfigError` for options of the other form."""
    of_models = [f"--{name}" for name in ("prompt", *ASKED) if _option_value(options, name) is not None]
    folders = [Path(path) for path in options.places]
    if not of_models:
        for folder in folders:
            is_run = not (folder / "config.json").is_file() or (folder / "inputs.json").exists()
            if not is_run and any(folder.glob("*.safetensors")):
                raise ConfigError(
                    f"{folder} is a model's folder: to compare what two models answer, give --prompt TEXT, or"
                    " --recipe R --domain D; else give run folders"
                )
        from opd.pipelines.report.comparison import compare_runs

        print(compare_runs(folders, options.out or Path("compare.html")))
        return 0
    if len(folders) != 2 or options.out is not None:
        wrong = f"{len(folders)} are given" if len(folders) != 2 else "and no --out, which is a page of runs"
        raise ConfigError(f"opd compare with {of_models[0]} takes two models, {wrong}")
    sampling = _sample_options(options)
    from opd.pipelines.commands.sample import run_compare

    return run_compare(options.places, sampling)


def _sample_command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    sampling = _sample_options(options)
    from opd.pipelines.commands.sample import run_sample

    return run_sample(options.model, sampling)


def _option_value(options: argparse.Namespace, name: str) -> Any:
    return getattr(options, name.replace("-", "_"))


def _sample_options(options: argparse.Namespace) -> SampleOptions:
    """Return the options of sampling. Raises `ConfigError` for options that exclude each other."""
    require_address_space()
    recipe = None if options.recipe is None else absolute_paths(load_recipe([options.recipe]))
    from opd.pipelines.commands.sample import SampleOptions

    fields = {"system": "system", "domain": "domain", "prompts": "count"}
    fields |= {"max-tokens": "max_tokens", "temperature": "temperature", "seed": "seed"}
    values = {field: _option_value(options, name) for name, field in fields.items()}
    values = {field: value for field, value in values.items() if value is not None}
    return SampleOptions(prompts=tuple(options.prompt or ()), recipe=recipe, **values)


def _push_model(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    require_address_space()
    from opd.pipelines.commands.publish import run_push

    return run_push(options.model, options.repo, revision=options.revision, public=options.public)


def _publish_checkpoint(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ConfigError(
            f"opd publish takes a checkpoint, a URL, --shards and --dtype; remove {overrides[0]}"
        )
    require_address_space()
    from opd.pipelines.commands.publish import run_publish

    return run_publish(options.checkpoint, options.url, options.shards, options.dtype)


def _wal_command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ConfigError(f"opd wal takes a folder and no settings; remove {overrides[0]}")
    from opd.pipelines.commands.logs import wal_command

    return wal_command(options.action, options.folder, options.out)


def _trajectory_command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ConfigError(f"opd trajectory takes a run folder and --episode; remove {overrides[0]}")
    allowed = (tuple(options.reads), options.substrate, options.image, options.quotas)
    if options.action != "replay" and any(allowed):
        raise ConfigError(
            "--reads, --substrate, --image and --quotas are for opd trajectory replay; leave them out of show"
        )
    from opd.pipelines.commands.logs import ReplayPermissions, trajectory_command

    return trajectory_command(options.action, options.run, options.episode, ReplayPermissions(*allowed))


def _plan_command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print a plan or a simulation. Raises `ConfigError` if options exclude each other."""
    if overrides and not options.recipe:
        raise ConfigError(f"opd plan without a recipe takes no settings of one; remove {overrides[0]}")
    names = [name.replace("-", "_") for name in ("store", *PLAN_NUMBERS)]
    values = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.simulate is not None:
        if values:
            raise ConfigError(
                "opd plan --simulate takes a cluster, perhaps with a recipe, and no other option;"
                " see examples/cluster"
            )
        if not options.recipe:
            from opd.pipelines.check.simulate import print_simulation

            return print_simulation(options.simulate)
        values["simulate"] = options.simulate
    from opd.pipelines.check.plan import PlanOptions, print_plan

    recipe = load_recipe(options.recipe, overrides) if options.recipe else None
    recipe = recipe and _from_hub(recipe, weights=False)[0]
    return print_plan(recipe, PlanOptions(**values))


def _refuse_run(recipe: Recipe, options: argparse.Namespace) -> None:
    """Raise if the recipe or the options alone make a run impossible, dry or not."""
    from opd.pipelines.check.checks import check_sizes
    from opd.pipelines.launch.local import is_rank, wants_ranks

    if options.command != "run":
        _stage_names(recipe, options)
    _run_path(recipe, options)
    if not is_rank(recipe):
        wants_ranks(recipe)
    for finding in check_sizes(recipe):
        raise ConfigError(finding.detail)


def _run_stages(recipe: Recipe, options: argparse.Namespace, argv: Sequence[str]) -> int:
    stages = None if options.command == "run" else _stage_names(recipe, options)
    recipe, hub = _from_hub(recipe, _run_path(recipe, options), options.resume)
    from opd.pipelines.launch.local import is_rank, launch_ranks, wants_ranks

    if is_rank(recipe):
        from opd.pipelines.launch.supervisor import parent

        launcher = parent()  # from now on this process ends with its parent
        with pause_collection():
            from opd.pipelines.launch.ranks import run_rank

        status = run_rank(
            recipe, _run_path(recipe, options), lambda: _open_folder(recipe, options, hub), stages
        )
        if launcher is not None and status == 0:
            # Status 0 alone is no evidence: C code may end the process with it.
            launcher.send_message("done", status)
        return status
    if wants_ranks(recipe):
        from opd.pipelines.records.run_folder import AcceptedChanges, RunFolder

        # Before the ranks, which start slowly. It prints and writes nothing.
        accepted = AcceptedChanges(options.accept_changed_code, options.accept_changed_settings)
        path, resumed = _run_path(recipe, options), _is_resumed(recipe, options)
        RunFolder.check(path, recipe, resume=resumed, accepted=accepted)
        return launch_ranks(recipe, argv, hub)
    with pause_collection():
        opened = _open_folder(recipe, options, hub)
        if opened is None:
            return ERROR
        from opd.pipelines.report.verdict import closing_summary
        from opd.pipelines.run import run_pipeline, run_stage
        from opd.pipelines.stages.student import tell_remarks

    with opened as folder:
        tell_remarks(recipe)
        if stages is None:
            run_pipeline(recipe, folder)
        for stage in stages or []:
            run_stage(recipe, folder, stage)
        print(closing_summary(folder.path))
    return 0


def _run_path(recipe: Recipe, options: argparse.Namespace) -> Path:
    from opd.pipelines.records.run_folder import default_path

    # Absolute from here on, because the user's own code may change the folder.
    return (options.out or default_path(recipe)).absolute()


def _is_resumed(recipe: Recipe, options: argparse.Namespace) -> bool:
    """Return whether there is a run to resume."""
    return options.resume and (options.command == "evaluate" or _run_path(recipe, options).exists())


def _open_folder(recipe: Recipe, options: argparse.Namespace, hub: HubRecord) -> RunFolder | None:
    """Open the run folder, or return `None` if the checks before a run have printed an error."""
    from opd.pipelines.records.run_folder import AcceptedChanges, RunFolder

    path, resumed = _run_path(recipe, options), _is_resumed(recipe, options)
    if resumed != options.resume:
        # The run was killed before it had a folder. A scheduler that always says --resume must get through.
        print(f"opd: there is no run in {path} yet; starting one", file=sys.stderr)
    accepted = AcceptedChanges(options.accept_changed_code, options.accept_changed_settings, _print_change)
    RunFolder.check(path, recipe, resume=resumed, accepted=accepted)
    made_here = (recipe.trains_base or recipe.model.config is not None) and not recipe.given_teachers()
    if options.command == "evaluate" and not resumed and made_here:
        raise RunFolderError(
            f"there is no run in {path}, and the models of this recipe are made by one; `opd run` makes and"
            " measures them"
        )
    from opd.pipelines.check.examine import run_checks

    findings = run_checks(recipe, run_dir=path, resume=resumed, accepted=accepted, thorough=False)
    if not _print_findings(findings):
        return None
    if not resumed:
        return RunFolder.create(path, recipe, hub)
    return RunFolder.resume(path, recipe, accepted, hub)


def _print_change(kind: str, changes: str) -> None:
    text = f"going on with changed {kind}, as inputs.json, results.json and the report will say: {changes}"
    print(f"opd: {one_line(text)}", file=sys.stderr)


def _stage_names(recipe: Recipe, options: argparse.Namespace) -> list[str]:
    """Return the names of the stages of a single-stage command."""
    if options.command != "specialist":
        return {"distill": ["merge"], "evaluate": ["evaluate"]}[options.command]
    trained = recipe.specialist_domains()
    if not trained:
        raise ConfigError("this recipe trains no specialist: every teacher is given under `teachers`")
    domains = options.domain or trained
    for domain in domains:
        if domain not in trained:
            raise ConfigError(
                f"--domain {domain}: this recipe trains no such specialist; it trains {', '.join(trained)}"
            )
    return [specialist_stage(domain) for domain in domains]


def _print_findings(findings: Sequence[Finding]) -> bool:
    """Print the findings, and return whether a run with them can start."""
    for finding in findings:
        if finding.level != "ok":
            print(f"opd: {finding.level}: {one_line(f'{finding.title}: {finding.detail}')}", file=sys.stderr)
    return not any(finding.level == "error" for finding in findings)


if __name__ == "__main__":
    sys.exit(main())
