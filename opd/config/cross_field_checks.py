"""Rules across the fields of a recipe: one function a rule, each with its error sentence.

They raise `ValueError`. The recipe reader adds file and line. Their order is the order of reported errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opd.config.engine_checks import ENGINE_RULES
from opd.config.rl import DistillLoss, FullVocabularyKL, check_mixture, route_names
from opd.config.specialist import SpecialistConfig
from opd.config.teacher_checks import TEACHER_RULES
from opd.config.teachers import ServedTeacherConfig, TorchEngineConfig
from opd.config.watch import check_metrics

if TYPE_CHECKING:
    from opd.config.recipe import Recipe


def check_together(recipe: Recipe) -> None:
    """Raise `ValueError` for the first rule that `recipe` breaks."""
    for rule in RULES:
        rule(recipe)


def _sets_have_names_of_their_own(recipe: Recipe) -> None:
    for name in recipe.evaluation.sets:
        if name in recipe.domains:
            raise ValueError(
                f"evaluation.sets.{name} has the name of a domain, whose held-out prompts are measured"
                " under it; choose another name"
            )


def _all_is_trained(recipe: Recipe) -> None:
    if recipe.base is not None and recipe.sft is not None:
        raise ValueError(
            "give `base` (demonstrations that the domains make up) or `sft` (those of a file), not both"
        )
    learners = recipe.specialist_domains()
    for domain, config in recipe.domains.items():
        if config.sft is not None and domain not in learners:
            raise ValueError(
                f"domains.{domain}.sft has no effect: this run trains no specialist of {domain}; leave it"
                f" out, or {domain} out of `teachers`"
            )
        if domain in learners and config.sft is None and not recipe.for_domain(domain).specialist.steps:
            raise ValueError(
                f"with specialist.steps 0 the specialist of {domain} would learn nothing; give"
                f" domains.{domain}.sft, or domains.{domain}.specialist.steps"
            )


def _domains_have_an_effect(recipe: Recipe) -> None:
    rollout, distill = recipe.rollout, recipe.distill
    k1 = distill.loss.type == "k1"
    corrected = (distill.loss.loss if distill.loss.type == "k1" else distill.policy_loss).correction
    sampled = k1 or distill.rl_coef or distill.weighs_samples
    for name in recipe.domains:
        where, domain_recipe = f"domains.{name}", recipe.for_domain(name)
        if domain_recipe.distill.rl_coef != distill.rl_coef == 0:
            raise ValueError(
                f"{where}.distill.rl_coef needs a policy stream; set distill.rl_coef above 0, and to 0 in"
                " the domains whose rewards should not count"
            )
        drawn = [
            (config.temperature, config.top_p, config.top_k) for config in (domain_recipe.rollout, rollout)
        ]
        if drawn[0] != drawn[1] and sampled and corrected is None:
            loss = "loss.loss" if k1 else "policy_loss"
            raise ValueError(
                f"{where}.rollout draws the merge's tokens otherwise than rollout, at whose temperature"
                f" they are learnt from; set distill.{loss}.correction to {{type: tis}}, or leave"
                " temperature, top_p and top_k out"
            )


def _each_domain_teaches_something(recipe: Recipe) -> None:
    if not recipe.distill.kl_coef:
        raise ValueError(
            "distill.kl_coef is 0, so no domain has a teacher and there is nothing to merge; set it above"
            " 0, and domains.NAME.distill.kl_coef to 0 where the reward alone counts"
        )
    alone = [name for name in recipe.domains if not recipe.teacher_weights(name)]
    for name in alone:
        where = f"domains.{name}"
        if not recipe.for_domain(name).distill.rl_coef:
            raise ValueError(
                f"{where}.distill.kl_coef 0 leaves {name} its reward alone, which has no weight; set"
                f" distill.rl_coef or {where}.distill.rl_coef above 0"
            )
        if recipe.domains[name].teacher is not None:
            raise ValueError(
                f"{where}.teacher has no effect with {where}.distill.kl_coef 0; leave one of the two out"
            )
    if len(alone) == len(recipe.domains):
        raise ValueError(
            "distill.kl_coef is 0 in every domain, so there is nothing to merge; leave it out in one"
        )
    if alone and "off_policy" in recipe.baselines.methods:
        raise ValueError(
            f"the baseline off_policy learns from answers of teachers, and domain {alone[0]} has none;"
            " leave it out of baselines.methods"
        )


def _rules_have_metrics(recipe: Recipe) -> None:
    stages = [recipe, *recipe.opd_recipes().values()]
    routes = [{name: stage.teacher_plan(name) for name in stage.domains} for stage in stages]
    names = [name for of_stage in routes for name in route_names(of_stage).values()]
    teachers = dict.fromkeys([*names, *(t for of_stage in routes for r in of_stage.values() for t in r)])
    check_metrics(recipe.watch, list(recipe.domains), list(teachers))


def _nobody_waits_for_teachers(recipe: Recipe) -> None:
    where = recipe.distill.teachers_write
    if where is None:
        return
    needed: list[tuple[str, str | float, str | float]] = [
        ("rollout.schedule", recipe.rollout.schedule, "in_turn"),
        ("storage.trajectories", recipe.storage.trajectories, "memory"),
    ]
    if recipe.distill.warm_up is not None:
        needed.append(("rollout.over_sample", recipe.rollout.over_sample, 1.0))
    for key, value, only in needed:
        if value != only:
            raise ValueError(
                f"{where} needs {key} {only}: teachers' answers are all there, in memory, before the steps"
                " that learn from them; leave one of the two out"
            )


def _warm_ups_can_be_decided(recipe: Recipe) -> None:
    distill, budget = recipe.distill, recipe.distill.budget
    if distill.warm_up is None:
        return
    if budget.type != "static" and budget.moves != "loss":
        raise ValueError(
            f"distill.warm_up has teachers answer the prompts of many steps at once, which"
            f" distill.budget.moves {budget.moves} knows one by one; set moves to loss, or leave warm_up out"
        )
    if budget.type == "progress":
        raise ValueError(
            "distill.budget progress compares each KL with the first step's, and distill.warm_up takes KLs of"
            " another kind after that; take another budget, or leave warm_up out"
        )
    _refuse_shared_routes(recipe, "distill.warm_up", "")


def _budgets_have_something_to_move(recipe: Recipe) -> None:
    distill, budget = recipe.distill, recipe.distill.budget
    if budget.type == "static":
        return
    where = f"distill.budget {budget.type}"
    if len(recipe.domains) < 2:
        raise ValueError(f"{where} shares steps out between domains, and there is one; leave it out")
    named = {"schedule": "weights", "gap": "goals"}.get(budget.type)
    for name in () if named is None else getattr(budget, named):
        if name not in recipe.domains:
            raise ValueError(f"distill.budget.{named} names {name!r}, which is no domain; correct the name")
    if budget.moves != "prompts" and distill.normalise == "token":
        raise ValueError(
            f"{where} moves weights of domains, which have no effect with distill.normalise token; set"
            " distill.budget.moves to prompts, or normalise to teacher"
        )
    if budget.moves != "loss":
        for key, value, only in (
            ("rollout.schedule", recipe.rollout.schedule, "in_turn"),
            ("rollout.over_sample", recipe.rollout.over_sample, 1.0),
            ("distill.prefixes", distill.prefixes, "student"),
        ):
            if value != only:
                raise ValueError(
                    f"distill.budget.moves {budget.moves} needs {key} {only}: the next prompts are known"
                    " after a step; change it, or set moves to loss"
                )
    _needs_can_be_measured(recipe, where)


def _losses_of_domains_go_together(recipe: Recipe) -> None:
    distill, of_teacher = recipe.distill, {}
    for name in recipe.domains:
        loss, where = recipe.for_domain(name).distill.loss, f"domains.{name}.distill.loss"
        if loss is not distill.loss and distill.loss.type != "full":
            raise ValueError(
                f"{where} is a full divergence beside distill.loss {distill.loss.type}; set that to full, or"
                " leave it out"
            )
        if loss is not distill.loss and not recipe.teacher_weights(name):
            raise ValueError(f"{where} has no effect, since {name} has no teacher; leave it out")
        try:
            check_mixture(loss, distill.mixture)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        for teacher in recipe.teacher_weights(name):
            other, theirs = of_teacher.setdefault(teacher, (name, loss))
            if theirs != loss:
                raise ValueError(
                    f"domains {other} and {name} share the teacher {teacher}, but not their distill.loss;"
                    " give them one, or a teacher each"
                )
        if _selects(loss) and recipe.train.context_parallel != 1:
            raise ValueError(f"distill.loss.select {_OF_WHOLE_RESPONSES}")
        if _selects(loss) and recipe.domain_tokenizer(name) is not None:
            raise ValueError(
                f"distill.loss.select chooses among tokens that student and teacher share, and domain {name}"
                " has a teacher with a tokenizer of its own; leave one of the two out"
            )
    stages = recipe.opd_recipes().values() if recipe.train.context_parallel != 1 else ()
    if any(_selects(stage.distill.loss) for stage in stages):
        raise ValueError(f"specialist.opd.loss.select {_OF_WHOLE_RESPONSES}")


_OF_WHOLE_RESPONSES = (
    "compares all tokens of a response, which train.context_parallel shares out; set that to 1, or leave"
    " select out"
)


def _selects(loss: DistillLoss) -> bool:
    """Return whether `loss` is learnt at chosen tokens alone."""
    return isinstance(loss, FullVocabularyKL) and loss.select is not None


def _needs_can_be_measured(recipe: Recipe, where: str) -> None:
    """Raise `ValueError` if the budget, called `where`, follows what this merge does not log by domain."""
    distill, budget = recipe.distill, recipe.distill.budget
    if budget.type == "gap" and not recipe.evaluation.every:
        raise ValueError(f"{where} follows the learning curve, which evaluation.every 0 leaves out; set it")
    if budget.type not in ("progress", "gradient"):
        return
    if budget.type == "progress" and distill.loss.type == "k1":
        raise ValueError(f"{where} follows each teacher's KL, which loss k1 does not log; take another loss")
    if budget.type == "gradient" and budget.moves == "prompts" and distill.normalise != "token":
        raise ValueError(
            f"{where} cannot move shares of the gradient by prompts, which distill.normalise"
            f" {distill.normalise} evens out; set distill.budget.moves to loss"
        )
    _refuse_shared_routes(recipe, where, ", or take budget gap")


def _refuse_shared_routes(recipe: Recipe, where: str, otherwise: str) -> None:
    """Raise `ValueError` if a domain's KL is not logged by itself, which the setting at `where` needs.
    `otherwise` ends the sentence.
    """
    routes: dict[tuple[str, ...], str] = {}
    for name in recipe.domains:
        route = tuple(recipe.teacher_weights(name))
        if len(route) > 1 and recipe.distill.mixture == "one_hot":
            raise ValueError(
                f"{where} follows what is logged by teacher, and domain {name} has several in turn; give it"
                f" one, or pool them (distill.mixture){otherwise}"
            )
        if route and route in routes:
            raise ValueError(
                f"{where} follows what is logged by teacher, and domains {routes[route]} and {name} have the"
                f" same; merge the two domains{otherwise}"
            )
        routes[route] = name


def _trained_with(recipe: Recipe) -> list[tuple[str, SpecialistConfig]]:
    """Return each domain that is trained with GRPO, with its training settings."""
    met = [(name, recipe.for_domain(name).specialist) for name in recipe.specialist_domains()]
    if "mixed_grpo" in recipe.baselines.methods or recipe.baselines.mixed_grpo_all_tokens:
        met += [(name, recipe.specialist) for name in recipe.domains]
    return met


def _specialists_can_be_trained(recipe: Recipe) -> None:
    for name, specialist in _trained_with(recipe):
        specialist.check_rollout(name, recipe.for_domain(name).rollout)


def _groups_can_go_on(recipe: Recipe) -> None:
    rollout = recipe.rollout
    if rollout.over_sample == 1:
        return
    agents = [name for name, domain in recipe.domains.items() if domain.environment is not None]
    own = [name for name in recipe.domains if recipe.for_domain(name).rollout.generate is not None]
    chosen = [
        f"specialist.{key} (of domain {name})"
        for name, specialist in _trained_with(recipe)
        for key in ("difficulty", "curriculum", "refill", "replay")
        if getattr(specialist, key) is not None
    ]
    for others, why in (
        ([f"domains.{name}.environment" for name in agents], "episodes do not go on from their tokens"),
        ([f"rollout.generate (of domain {name})" for name in own], "only single answers go on"),
        (chosen, "the prompts of a step would depend on groups that it does not have"),
    ):
        if others:
            raise ValueError(
                f"rollout.over_sample does not go with {others[0]}, since {why}; leave one of the two out"
            )
    merged = [recipe.for_domain(name).distill for name in recipe.domains]
    stages = [
        _in_flight(recipe, [(one.prompts_per_step, one.group_size)]) for _, one in _trained_with(recipe)
    ]
    most = max(
        *stages, _in_flight(recipe, [(one.prompts_per_domain, one.samples_per_prompt) for one in merged]), 0
    )
    timed = rollout.schedule == "async"  # anyway it depends on the clock there who ends first
    if isinstance(rollout.engine, TorchEngineConfig) and most > rollout.max_running and not timed:
        raise ValueError(
            f"rollout.over_sample puts {most} requests in flight, and rollout.max_running decodes"
            f" {rollout.max_running} together, so who ends first would depend on the queue; set max_running"
            f" to {most} or more"
        )


def _in_flight(recipe: Recipe, asked: Sequence[tuple[int, int]]) -> int:
    """Return the most requests of a rank in flight in a step of `asked`: prompts, and answers to each."""
    own = math.ceil(sum(count for count, _ in asked) / (recipe.train.ranks or 1))
    early = sum(recipe.rollout.early_prompts(count) for count, _ in asked)
    return (own + min(own, early)) * max(size for _, size in asked)


def _episodes_have_one_writer(recipe: Recipe) -> None:
    sets = {f"evaluation.sets.{name}": domain for name, domain in recipe.evaluation.sets.items()}
    for where, domain in (
        {f"domains.{name}": domain for name, domain in recipe.domains.items()} | sets
    ).items():
        writing = domain.rollout or recipe.rollout
        if domain.environment is not None and writing.generate is not None:
            raise ValueError(
                f"{where} has both an environment and rollout.generate, which would each write its"
                " responses; leave one of the two out"
            )


def _tokens_can_be_aligned(recipe: Recipe) -> None:
    """Teachers with a tokenizer of their own read whole responses again, in their own tokens."""
    for teacher in recipe.opd_teachers():
        if recipe.teacher_tokenizer(teacher) is not None:
            raise ValueError(
                f"teachers.{teacher}.tokenizer names another tokenizer, which only the merge aligns; give"
                " specialist.opd a teacher with the student's"
            )
    for name in recipe.domains:
        own = {teacher: recipe.teacher_tokenizer(teacher) for teacher in recipe.teacher_weights(name)}
        first = next((teacher for teacher, tokenizer in own.items() if tokenizer is not None), None)
        if first is None:
            continue
        if len(set(own.values())) > 1:
            raise ValueError(
                f"the teachers {', '.join(own)} of domain {name} have different tokenizers, but read one"
                f" prompt; give each of them teachers.{first}.tokenizer, or a domain of its own"
            )
        mixture = recipe.distill.mixture
        if len(own) > 1 and mixture != "one_hot":
            raise ValueError(
                f"distill.mixture {mixture} mixes teachers token by token, which teachers.{first}.tokenizer"
                f" does not allow; set it to one_hot, or give domain {name} one teacher"
            )
        _refuse_with_own_tokens(recipe, name, first)


def _refuse_with_own_tokens(recipe: Recipe, domain: str, teacher: str) -> None:
    """Raise `ValueError` for a setting that a teacher with a tokenizer of its own cannot have."""
    settings, writing = recipe.teachers[teacher], recipe.for_domain(domain).rollout
    loss, train = recipe.distill.loss.type, recipe.train
    served = isinstance(settings, ServedTeacherConfig)
    single = recipe.domains[domain].environment is None and writing.generate is None
    for is_right, reason, mend in (
        (loss in ("full", "k2"), f"distill.loss.type {loss} compares tokens one by one", "take full or k2"),
        (
            not recipe.distill.teachers_write and "off_policy" not in recipe.baselines.methods,
            "distill.prefixes teacher, warm_up and off_policy learn from the teacher's own tokens",
            "set prefixes to student, leave warm_up out, and give baselines.methods without off_policy",
        ),
        (
            single,
            f"domain {domain} has an environment or rollout.generate, whose responses are not aligned",
            "give it a teacher with the student's tokenizer",
        ),
        (
            train.backend != "megatron" and train.context_parallel == 1,
            "train.backend megatron and train.context_parallel cut the head or responses over ranks",
            "take backend torch, and context_parallel 1",
        ),
        (
            not served or settings.signal == "hidden",
            f"teachers.{teacher}.signal gives no hidden states",
            "set it to hidden",
        ),
    ):
        if not is_right:
            raise ValueError(f"{reason}, but teachers.{teacher}.tokenizer names another tokenizer; {mend}")


def _what_critics_need(recipe: Recipe) -> None:
    specialists = [recipe.specialist, *(recipe.for_domain(name).specialist for name in recipe.domains)]
    critic = any(specialist.advantage.type == "gae" for specialist in specialists)
    backend, context = recipe.train.backend, recipe.train.context_parallel
    for key, value, fits, wanted in (
        ("train.backend", backend, backend == "torch", "torch"),
        ("train.context_parallel", context, context != "auto", "a number"),
    ):
        if critic and not fits:
            raise ValueError(
                f"the critic of advantage gae needs {key} {wanted}, not {value}; change it, or take"
                " another advantage"
            )


def _a_step_is_seen_before_it_is_dealt_out(recipe: Recipe) -> None:
    if recipe.train.context_parallel == "auto" and recipe.storage.trajectories == "disk":
        raise ValueError(
            "train.context_parallel auto looks at all lengths of a step, but with storage.trajectories"
            " disk samples are dealt out while they are written; give the number, or keep them in memory"
        )


def parts_in_pieces(recipe: Recipe) -> list[str]:
    """Return the parts of `recipe` that learn from sequences in pieces (`batch.sequence_chunk`)."""
    parts = {
        "distill": recipe.distill,
        "specialist": recipe.specialist,
        "base": recipe.base,
        "sft": recipe.sft,
    }
    for name, config in recipe.domains.items():
        parts |= {f"domains.{name}.specialist": config.specialist, f"domains.{name}.sft": config.sft}
    return [
        where for where, part in parts.items() if part is not None and part.batch.sequence_chunk is not None
    ]


def _pieces_fit_trainers(recipe: Recipe) -> None:
    for where in parts_in_pieces(recipe):
        if recipe.train.backend != "torch":
            raise ValueError(
                f"{where}.batch.sequence_chunk has no effect with train.backend {recipe.train.backend};"
                " remove it, or set train.backend to torch"
            )
        if recipe.train.expert_parallel not in (1, "auto"):
            raise ValueError(
                f"with train.expert_parallel {recipe.train.expert_parallel} ranks compute experts equally"
                f" often, but {where}.batch.sequence_chunk has them run unequal numbers of pieces; leave one"
                " of the two out"
            )
        if recipe.train.router_losses:
            raise ValueError(
                f"train.{recipe.train.router_losses[0]} is a loss of whole micro-batches, and"
                f" {where}.batch.sequence_chunk runs layers in pieces; leave one of the two out"
            )


def _routers_learn(recipe: Recipe) -> None:
    if recipe.train.balance_rate and recipe.model.lora is not None:
        raise ValueError(
            "train.balance_rate is set, and model.lora trains adapters, which do not hold what routers add to"
            " their scores; leave one of the two out"
        )


def _rounded_weights_have_masters(recipe: Recipe) -> None:
    quantize, train = recipe.model.quantize, recipe.train
    for key, value, only in (
        ("backend", train.backend, "torch"),
        ("precision", train.precision, "mixed"),
    ):
        if quantize is not None and value != only:
            raise ValueError(
                f"model.quantize {quantize} rounds a copy of float32 weights, which train.{key} {value} does"
                f" not keep; set it to {only}, or leave model.quantize out"
            )


RULES = (
    _sets_have_names_of_their_own,
    _all_is_trained,
    _domains_have_an_effect,
    _each_domain_teaches_something,
    _rules_have_metrics,
    _nobody_waits_for_teachers,
    _warm_ups_can_be_decided,
    _budgets_have_something_to_move,
    _losses_of_domains_go_together,
    _specialists_can_be_trained,
    _episodes_have_one_writer,
    _groups_can_go_on,
    _tokens_can_be_aligned,
    *ENGINE_RULES,
    _what_critics_need,
    _a_step_is_seen_before_it_is_dealt_out,
    _pieces_fit_trainers,
    _routers_learn,
    *TEACHER_RULES,
    _rounded_weights_have_masters,
)
