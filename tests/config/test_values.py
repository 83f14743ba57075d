"""Values that no setting can mean, or that change nothing: one sentence, once, with the setting's name."""

import re

import pytest
from pydantic import ValidationError
from recipes import tiny_recipe

from opd.config import DistillConfig
from opd.config.load import load_recipe
from opd.errors import ConfigError

RECIPE = """
name: r
model: {path: x}
domains:
  a: {source: a.jsonl, reward: exact, specialist: {steps: 3}}
  b: {source: b.jsonl, reward: exact}
"""


def said(tmp_path, *words, more: str = ""):
    path, beside = tmp_path / "recipe.yaml", tmp_path / "more.yaml"
    path.write_text(RECIPE, "utf-8")
    beside.write_text(more, "utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe([path, beside] if more else [path], list(words))
    return str(caught.value)


NUMBERS = (
    *(
        "distill.optim.lr",
        "distill.steps",
        "rollout.temperature",
        "rollout.top_p",
        "distill.optim.weight_decay",
    ),
    *("domains.a.held_out", "domains.a.weight", "specialist.group_size", "seed", "rollout.max_new_tokens"),
)


@pytest.mark.parametrize("option", NUMBERS)
def test_no_number_is_endless(option, tmp_path):
    for value in ("nan", ".nan", "NaN", "inf", ".inf", "-.inf", "-inf", "+Infinity"):
        sentence = said(tmp_path, f"--{option}={value}")
        assert sentence == f"--{option}: `{option}` is {value!r}, which is no finite number; give one"
    *parents, last = option.split(".")
    text = f"{last}: .nan"
    for parent in reversed(parents):
        text = f"{parent}: {{{text}}}"
    assert "which is no finite number; give one" in said(tmp_path, more=text)


@pytest.mark.parametrize(
    ("option", "value", "one"),
    [
        ("rollout.stop_ids", "[1, 2, 1]", "1"),
        ("rollout.stop", "[a, a]", "'a'"),
        ("baselines.methods", "[ties, ties]", "'ties'"),
        ("runtime.sinks", "[wandb, tensorboard, wandb]", "'wandb'"),
        ("evaluation.pass_at", "[4, 4]", "4"),
        ("baselines.scales", "[0.5, 0.5]", "0.5"),
        ("model.lora.targets", "[q_proj, q_proj]", "'q_proj'"),
    ],
)
def test_a_list_names_nothing_twice(option, value, one, tmp_path):
    sentence = said(tmp_path, f"--{option}", value)
    assert sentence.startswith(f"--{option}: `{option}` is [")
    assert sentence.endswith(f": it names {one} twice; leave one of them out")


@pytest.mark.parametrize("option", ["domains", "model", "domains.a"])
def test_an_option_that_changes_nothing_is_told(option, tmp_path):
    assert f"--{option} {{}} changes nothing" in said(tmp_path, f"--{option}", "{}")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--specialist.optim.lr", "-1"), "is -1: input should be greater than 0"),
        (("--specialist.group_size", "1"), "group_size is 1, but advantage grpo"),
        (("--specialist.optim.lr", "nan"), "no finite number"),
        (("--specialist.advantage", "nope"), "takes a mapping"),
        (("--rollout.temperature", "-1"), "`rollout.temperature` is -1"),
    ],
)
def test_what_domains_have_from_the_recipe_is_said_once(words, part, tmp_path):
    more = "domains: {a: {rollout: {top_p: 0.9}}}"
    sentence = said(tmp_path, *words, more=more)
    assert sentence.count(part) == 1
    assert sentence.startswith(words[0])
    assert "domains.a" not in sentence


def test_what_a_domain_says_itself_is_said_of_it(tmp_path):
    sentence = said(tmp_path, more="domains: {a: {specialist: {optim: {lr: -1}}}}")
    assert "`domains.a.specialist.optim.lr` is -1" in sentence


@pytest.mark.parametrize("name", ["MATH", "Math", "EXACT", "Json_Schema"])
def test_a_reward_in_capitals_is_the_one_in_small_letters(name, tmp_path):
    assert f"did you mean {name.lower()!r}?" in said(tmp_path, "--domains.a.reward", name)


@pytest.mark.parametrize(
    ("text", "meant"), [("DISTILL: {steps: 3}", "distill"), ("distill: {Steps: 3}", "distill.steps")]
)
def test_a_key_in_capitals_is_the_one_in_small_letters(text, meant, tmp_path):
    assert f"did you mean `{meant}`?" in said(tmp_path, more=text)


def test_the_merge_learns_at_the_rate_that_the_results_were_made_with():
    optim = DistillConfig().optim
    said = (optim.lr, optim.schedule, optim.final_lr_fraction, optim.warmup_steps)
    assert said == (1e-3, "cosine", 0.0, 5)


SAMPLES = {"samples_per_prompt": 4}
PROMPTS = {"type": "gap", "moves": "prompts"}
FULL = {"type": "full"}
LATER, SELECT = FULL | {"later": [[3, "forward"]]}, FULL | {"select": {"share": 0.5}}
LOSSES = [
    ({"loss": FULL | {"later": [[0, "forward"]]}}, "greater than 0"),
    ({"loss": FULL | {"later": [[5, "forward"], [5, "reverse"]]}}, "the steps of later do not grow"),
    ({"loss": FULL | {"later": [[5, "backward"]]}}, "skew_forward"),
    ({"loss": FULL | {"select": {"share": 1.0}}}, "less than 1"),
    ({"loss": FULL | {"select": {"by": "loss"}}}, "'divergence' or 'entropy'"),
    ({"loss": LATER, "mixture": "arithmetic"}, "mixture arithmetic is defined for"),
    ({"loss": SELECT, "mixture": "geometric"}, "chooses tokens by one teacher"),
    ({"loss": {"type": "k1"}, "mixture": "entropy"}, "which loss k1 does not"),
]
BUDGETS = [
    ({"type": "schedule", "weights": {}}, {}, "no domain has a schedule"),
    ({"type": "schedule", "weights": {"sort": []}}, {}, "at least 1 item"),
    ({"type": "schedule", "weights": {"sort": [[5, 1.0], [5, 2.0]]}}, {}, "the steps of sort do not grow"),
    ({"type": "schedule", "weights": {"sort": [[-1, 1.0]]}}, {}, "the steps of sort do not grow"),
    ({"type": "schedule", "weights": {"sort": [[0, 0.0]]}}, {}, "a weight of sort is not above 0"),
    ({"type": "schedule", "weights": {"sort": [[0, float("nan")]]}}, {}, "weights"),
    ({"type": "schedule", "weights": {"sorts": [[0, 1.0]]}}, {}, "weights names 'sorts', which is no domain"),
    ({"type": "gap", "goals": {"sorts": 0.5}}, {}, "goals names 'sorts', which is no domain"),
    ({"type": "gap", "goals": {"sort": 1.5}}, {}, "less than or equal to 1"),
    ({"type": "gap", "gain": 0.0}, {}, "greater than 0"),
    ({"type": "gap", "limit": 1.0}, {}, "greater than 1"),
    ({"type": "progress", "goals": {"sort": 0.5}}, {}, "goals have no effect with budget progress"),
    ({"type": "gap"}, {"normalise": "token"}, "have no effect with distill.normalise token"),
    ({"type": "progress"}, {"loss": {"type": "k1"}}, "which loss k1 does not log"),
    ({"type": "gradient", "moves": "prompts"}, {}, "cannot move shares of the gradient by prompts"),
    (PROMPTS, {"prefixes": "teacher"}, r"moves prompts needs distill\.prefixes student"),
]
ALONE = {"group_size": 1, "advantage": {"type": "reinforce_plus_plus"}, "filter_zero_variance": False}
RULES = [
    ({"evaluation": SAMPLES | {"pass_at": [5]}}, "pass_at 5 needs as many answers .* raise it to 5"),
    ({"evaluation": SAMPLES | {"maj_at": [1, 8]}}, "maj_at 8 needs as many answers"),
    ({"evaluation": {"sets": {"sort": {"source": "x.jsonl"}}}}, r"sets\.sort has the name of a domain"),
    ({"teachers": {"other": {}}}, r"teachers\.other has no path, and this recipe has no domain of that name"),
    ({"model": {}}, r"give exactly one of model\.path"),
    ({"model": {"path": "/m", "config": {}}}, r"give exactly one of model\.path"),
    (
        {"specialist": ALONE | {"shaping": {"length_coef": 0.1}}},
        r"shaping\.length_coef compares the lengths .* group_size of 1",
    ),
    ({"rollout": {"model_stop_ids": False}}, "with model_stop_ids false no response ends"),
    (
        {"rollout": {"model_stop_ids": False, "stop": ["x"], "engine": {"type": "sglang", "urls": ["http://h:1"]}}},
        "model_stop_ids false needs engine torch: sglang workers always stop",
    ),
    (
        {"rollout": {"engine": {"type": "sglang", "urls": ["http://h:1"]}}, "runtime": {"workers": 2}},
        "stages cannot run side by side; set runtime.workers to 1",
    ),
    ({"domains": {"a": {"environment": {"type": "verifiers"}}}}, r"type verifiers needs params\.id"),
    ({"domains": {"a": {"environment": {"type": "verifiers", "params": {"id": ""}}}}}, r"needs params\.id"),
    ({"domains": {"a": {"environment": {"type": "agent", "params": {"run": "a.b"}}}}}, r"needs params\.run"),
    *[({"distill": {"budget": budget} | more}, said) for budget, more, said in BUDGETS],
    *[({"distill": changes}, said) for changes, said in LOSSES],
    (
        {"distill": {"loss": SELECT}, "train": {"ranks": 2, "context_parallel": 2}},
        "which train.context_parallel shares",
    ),
    (
        {
            "specialist": {"opd": {"teacher": "t", "loss": SELECT}},
            "teachers": {"t": {"path": "/m"}},
            "train": {"ranks": 2, "context_parallel": 2},
        },
        "specialist.opd.loss.select compares all tokens",
    ),
    (
        {"distill": {"budget": PROMPTS}, "rollout": {"over_sample": 1.25}},
        r"moves prompts needs rollout\.over_sample 1.0",
    ),
    ({"specialist": {"opd": {"teacher": "t", "loss": LATER}}}, "later counts steps of the merge"),
    ({"distill": {"budget": {"type": "gap"}}, "evaluation": {"every": 0}}, "gap follows the learning curve"),
    (
        {"distill": {"budget": PROMPTS}, "rollout": {"schedule": "ahead"}},
        r"moves prompts needs rollout\.schedule in_turn",
    ),
    (
        {"distill": {"budget": {"type": "gap"}}, "domains": {"a": {"source": "procedural:sort"}}},
        "shares steps out between domains, and there is one",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("teachers", "said"),
    [
        ({"sort": "sort", "add3": "sort"}, "domains sort and add3 have the same"),
        ({"sort": {"sort": 0.5, "add3": 0.5}, "add3": "add3"}, "domain sort has several in turn"),
    ],
)
def test_a_budget_knows_whose_progress_it_reads(teachers, said):
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains = {name: domain | {"teacher": teachers[name]} for name, domain in domains.items()}
    for kind in ("progress", "gradient"):
        with pytest.raises(ValidationError, match=said):
            tiny_recipe(domains=domains, distill={"budget": {"type": kind}})
    assert tiny_recipe(domains=domains, distill={"budget": {"type": "gap"}})


@pytest.mark.parametrize(
    ("own", "teacher", "distill", "said"),
    [
        ({"loss": {"kind": "forward"}}, "add3", {}, "domains sort and add3 share the teacher add3"),
        ({"loss": {"kind": "forward"}}, None, {"loss": {"type": "topk"}}, "beside distill.loss topk"),
        (
            {"loss": {"kind": "forward"}},
            None,
            {"mixture": "arithmetic"},
            "sort.distill.loss: mixture arithmetic",
        ),
        ({"loss": {"type": "topk"}}, None, {}, "'full'"),
        (
            {"loss": {"kind": "jsd"}, "kl_coef": 0},
            None,
            {"rl_coef": 1.0, "samples_per_prompt": 2},
            "has no effect, since sort has no teacher",
        ),
    ],
)
def test_a_domain_has_a_loss_of_its_own_or_says_why_not(own, teacher, distill, said):
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"] |= {"distill": own, "teacher": teacher}
    with pytest.raises(ValidationError, match=said):
        tiny_recipe(domains=domains, distill=distill, baselines={"methods": []})


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        ([], "at least 1 item"),
        ([[3, 1.0], [3, 2.0]], "the steps of sort do not grow"),
        ([[-1, 1.0]], "the steps of sort do not grow"),
        ([[0, 1.0], [5, 0.0]], "a weight of sort is not above 0"),
        ([[0, 1.0], [5, 1e-9]], "'sort' has less than a millionth of the weight"),
        ([[0, float("inf")]], "finite|not above 0 and at most"),
        ([[0.5, 1.0]], "integer"),
        (-1.0, "several with positive weights"),
        ("much", "number|float"),
    ],
)
def test_a_teachers_weight_goes_by_steps_or_says_why_not(weight, said):
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    with pytest.raises(ValidationError, match=said):
        tiny_recipe(domains=domains | {"sort": domains["sort"] | {"teacher": {"sort": weight, "add3": 1.0}}})


@pytest.mark.parametrize(("changes", "said"), RULES)
def test_what_does_not_go_together_is_refused(changes, said):
    with pytest.raises(ValidationError) as caught:
        tiny_recipe(**changes)
    assert re.search(said, str(caught.value)), caught.value


def test_what_just_goes_together_is_taken():
    samples = tiny_recipe(evaluation=SAMPLES | {"pass_at": [1, 4], "maj_at": [4]}).evaluation
    assert (samples.pass_at, samples.maj_at) == ([1, 4], [4])
    assert tiny_recipe(specialist=ALONE).specialist.group_size == 1
    assert tiny_recipe(rollout={"model_stop_ids": False, "stop": ["x"]}).rollout.stop == ["x"]
