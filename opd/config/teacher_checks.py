"""Rules across the fields of a recipe that concern who teaches, with which weights and prompts.

As in `cross_field_checks`: one function a rule, each raises `ValueError` with its sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd.config.rewards import FunctionReward, JSONSchemaReward, PythonReward
from opd.config.teachers import (
    MegatronTeacherConfig,
    ServedTeacherConfig,
    StudentTeacherConfig,
    check_temperature,
)

if TYPE_CHECKING:
    from opd.config.recipe import Recipe


def _teachers_exist(recipe: Recipe) -> None:
    for name, entry in recipe.teachers.items():
        if entry.path is None and not entry.is_student and name not in recipe.domains:
            raise ValueError(
                f"teachers.{name} has no path, and this recipe has no domain of that name to train it on;"
                f" add teachers.{name}.path"
            )
    exist = {*recipe.given_teachers(), *recipe.student_teachers()}
    specialists = {f"domains.{name}.": config.specialist for name, config in recipe.domains.items()}
    for where, specialist in {"": recipe.specialist, **specialists}.items():
        opd = specialist.opd if specialist is not None else None
        for name in opd.teacher_weights if opd is not None else ():
            if name not in exist:
                raise ValueError(
                    f"{where}specialist.opd.teacher names {name!r}, but a specialist follows teachers"
                    f" that exist already; add teachers.{name}.path, or leave opd out"
                )
    for domain in recipe.domains:
        for name in recipe.teacher_weights(domain):
            if name not in recipe.teachers and name not in recipe.domains:
                raise ValueError(
                    f"domains.{domain}.teacher names {name!r}, which is neither under `teachers` nor a"
                    f" domain of this recipe; add teachers.{name}.path"
                )


def _rounds_train_their_teachers(recipe: Recipe) -> None:
    for name in recipe.teacher_domains() if recipe.rounds > 1 else ():
        if name not in recipe.specialist_domains():
            raise ValueError(
                f"rounds {recipe.rounds} trains the merge's teachers again in each round, and"
                f" teachers.{name} is not trained here; set rounds to 1, or leave it out of teachers"
            )


def _weights_can_be_merged(recipe: Recipe) -> None:
    start, teachers = recipe.distill.start, recipe.teacher_domains()
    if start != "base" and recipe.rounds > 1:
        raise ValueError(
            f"distill.start {start} is for a run of one round, and rounds is {recipe.rounds}, whose students"
            " go on from each other; leave one of the two out"
        )
    if "slerp" in recipe.weight_merges and len(teachers) != 2:
        raise ValueError(
            f"slerp interpolates between two models, and this recipe has {len(teachers)} teachers; take it"
            " out of baselines.methods and distill.start, or merge two"
        )


def _teachers_can_read_their_prompts(recipe: Recipe) -> None:
    for name, domain in recipe.domains.items():
        specialist = recipe.for_domain(name).specialist if name in recipe.grpo_domains() else None
        follows = specialist is not None and specialist.opd is not None
        if domain.teacher_prompt is not None and not recipe.teacher_weights(name) and not follows:
            raise ValueError(
                f"domains.{name}.teacher_prompt has no effect, since {name} has no teacher; leave it out"
            )
    for trained, stage in [(None, recipe), *recipe.opd_recipes().items()]:
        for name in [trained] if trained else recipe.domains:
            read = stage.domains[name].teacher_prompt
            if read is None:
                continue
            key = f"domains.{name}.teacher_prompt"
            if read is not recipe.domains[name].teacher_prompt:
                key = "specialist.opd.teacher_prompt"
            _refuse_whole_prompts(recipe, name, key)
            if read.group_columns and stage.teacher_weights(name):
                _refuse_late_prompts(stage, name, key, read.group_columns, merge=trained is None)


def _refuse_whole_prompts(recipe: Recipe, name: str, key: str) -> None:
    """Raise `ValueError` for a teachers' prompt at `key` whose domain `name` has no single answers."""
    where, writing = f"domains.{name}", recipe.for_domain(name).rollout
    if recipe.domains[name].environment is not None or writing.generate is not None:
        part = "environment" if recipe.domains[name].environment is not None else "rollout.generate"
        raise ValueError(
            f"{key} replaces the whole prompt, which {where}.{part} may change while it writes; leave one of"
            " the two out"
        )


def _refuse_late_prompts(stage: Recipe, name: str, key: str, columns: set[str], *, merge: bool) -> None:
    """Raise `ValueError` for a stage that cannot fill what the teachers' prompt at `key` names of answers."""
    field = "distill.samples_per_prompt" if merge else "specialist.group_size"
    size = stage.distill.samples_per_prompt if merge else stage.specialist.group_size
    if "sibling" in columns and size < 2:
        raise ValueError(
            f"{key} names {{sibling}}, another answer to the same prompt, but {field} is {size}; raise it, or"
            " leave {sibling} out"
        )
    with_feedback = (FunctionReward, PythonReward, JSONSchemaReward)
    if "feedback" in columns and not isinstance(stage.domains[name].reward, with_feedback):
        raise ValueError(
            f"{key} names {{feedback}}, which python, json_schema and functions of your own alone give; set"
            f" domains.{name}.reward to one of these, or leave {{feedback}} out"
        )
    named = f"{key} names {{{min(columns)}}}"
    own = next((one for one in stage.teacher_weights(name) if stage.teacher_tokenizer(one) is not None), None)
    if own is not None:
        raise ValueError(
            f"{named}, which teachers.{own} would read in tokens of its own; give it the student's tokenizer,"
            " or leave that out"
        )
    if merge and (stage.distill.teachers_write or "off_policy" in stage.baselines.methods):
        raise ValueError(
            f"{named}, which is there once the student has answered, but distill.prefixes teacher, warm_up"
            " and the baseline off_policy learn from teachers' answers; leave one of the two out"
        )


def _used_students(recipe: Recipe) -> dict[str, StudentTeacherConfig]:
    """Return the teachers of some stage that are the student itself."""
    used = recipe.used_teachers()
    return {name: one for name, one in recipe.student_teachers().items() if name in used}


def _students_can_teach_themselves(recipe: Recipe) -> None:
    train, used = recipe.train, _used_students(recipe)
    if not used:
        return
    where = f"teachers.{next(iter(used))} of type student"
    for key, value, only in (
        ("train.backend", train.backend, "torch"),
        ("train.context_parallel", train.context_parallel, 1),
    ):
        if value != only:
            raise ValueError(
                f"{where} scores with the weights that train, which needs {key} {only}, not {value}; change"
                " it, or give the teacher a path"
            )
    kept = sorted({(one.decay, one.sync_every or 1) for one in used.values() if one.decay is not None})
    if len(kept) > 1:
        (first, often), (second, other) = kept[:2]
        raise ValueError(
            f"{where}: the run keeps one moving average of the student, and its teachers ask for decays"
            f" {first:g} and {second:g}, every {often} and {other} steps; give them one"
        )
    _nobody_needs_their_files(recipe, [name for name in recipe.teacher_domains() if name in used])
    for stage in recipe.opd_recipes().values():
        again = stage.specialist.epochs > 1 and stage.distill.loss.type != "k1"
        if again and recipe.storage.trajectories == "disk" and used.keys() & stage.teacher_domains().keys():
            raise ValueError(
                f"{where} would score samples on disk again in the second of specialist.epochs, with other"
                " weights; set epochs to 1, or storage.trajectories to memory"
            )


def _students_read_other_prompts(recipe: Recipe) -> None:
    """Of the same prompt a student has the same distribution, and its divergence is 0."""
    used = _used_students(recipe)
    for of_domain, stage in [("", recipe), *recipe.opd_recipes().items()] if used else []:
        for domain in [of_domain] if of_domain else recipe.domains:
            read = stage.domains[domain].teacher_prompt
            living = [n for n in stage.teacher_weights(domain) if n in used and used[n].decay is None]
            if living and (read is None or read.is_the_students):
                raise ValueError(
                    f"teachers.{living[0]} is the student itself and reads the same prompt in {domain}, so"
                    f" that it teaches nothing; give domains.{domain}.teacher_prompt, or the teacher a"
                    " moving_average or sync_every"
                )


def _nobody_needs_their_files(recipe: Recipe, students: list[str]) -> None:
    """Raise `ValueError` if the recipe needs a folder or answers of the teachers `students`."""
    needy = [f"baselines.methods {one}" for one in recipe.baselines.methods if one != "mixed_grpo"]
    needy += [f"distill.start {recipe.distill.start}"] if recipe.distill.start != "base" else []
    needy += [recipe.distill.teachers_write] if recipe.distill.teachers_write else []
    if students and needy:
        raise ValueError(
            f"teachers.{students[0]} of type student has no model of its own, which {needy[0]} needs; leave"
            " that out"
        )


def _servers_tell_at_the_temperature(recipe: Recipe) -> None:
    for name, config in recipe.teachers.items():
        if isinstance(config, ServedTeacherConfig):
            check_temperature(name, config, recipe.rollout.temperature)


def _stages_beside_teachers(recipe: Recipe) -> None:
    train = recipe.train
    for name in recipe.used_teachers() if train.backend == "megatron" else ():
        settings = recipe.teacher_settings(name)
        if not isinstance(settings, MegatronTeacherConfig):
            continue
        if train.pipeline_parallel > 1:
            raise ValueError(
                f"teacher {name} is of type megatron, whose ranks have all layers, but with"
                " train.pipeline_parallel Megatron-Core has stages in this process; set its type to"
                " streamed, or train.pipeline_parallel to 1"
            )
        sizes = (settings.tensor_parallel, 1), (train.tensor_parallel, train.context_size)
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"teacher {name} is of type megatron with tensor_parallel {settings.tensor_parallel} and"
                f" whole sequences, but Megatron-Core has train.tensor_parallel {train.tensor_parallel} and"
                f" train.context_parallel {train.context_size} in this process; give both the same, or set"
                " its type to streamed"
            )


TEACHER_RULES = (
    _teachers_exist,
    _rounds_train_their_teachers,
    _weights_can_be_merged,
    _teachers_can_read_their_prompts,
    _students_can_teach_themselves,
    _students_read_other_prompts,
    _servers_tell_at_the_temperature,
    _stages_beside_teachers,
)
