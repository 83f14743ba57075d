"""Supervised fine-tuning from files: the gradient, packing, resume, and the stages it is part of."""

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from recipes import tiny_recipe
from safetensors.torch import load_file

from opd.config import OptimConfig, Recipe
from opd.data.load import load_domain
from opd.errors import DataError
from opd.pipelines.check.examine import check_demonstrations
from opd.pipelines.check.models import Models
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report import write_report
from opd.pipelines.run import run_pipeline, run_stage
from opd.pipelines.stages import sft
from opd.pipelines.stages.loop import PhaseTimer, StepContext
from opd.pipelines.stages.pipeline_plan import plan_stages
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.supervised import SupervisedAlgorithm
from opd.train.terms import CrossEntropyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import SampleGroup


def gradient(samples, max_tokens: int):
    """The gradient of a step on `samples`, tensor by tensor."""
    backend = TorchBackend(tiny.model(), tiny.training([CrossEntropyTerm()], max_tokens=max_tokens))
    step = StepSamples([SampleGroup(s.uid, s.domain, [s]) for s in samples], backend)
    (update,) = SupervisedAlgorithm(OptimConfig()).plan(step, StepContext(0, 0.0, PhaseTimer(), {})).updates
    backend.accumulate_gradient(update.samples, update.read)
    return {name: p.grad.double() for name, p in backend.model.module.named_parameters()}


def test_the_gradient_is_that_of_the_masked_cross_entropy_however_rows_are_packed():
    samples = tiny.samples([(3, 9), (5, 4), (1, 12), (7, 6)])
    rng = np.random.default_rng(0)
    for sample in samples:
        sample.loss_mask = rng.random(len(sample.response_ids)) < 0.6
        sample.loss_mask[-1] = True
    exact = copy.deepcopy(tiny.model().module).double()
    exact.set_attn_implementation("eager")
    total = sum(int(sample.loss_mask.sum()) for sample in samples)
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
        rows = exact(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
        picked = rows.gather(-1, ids[len(sample.prompt_ids) :, None])[:, 0]
        (-picked[torch.from_numpy(sample.loss_mask)].sum() / total).backward()
    for max_tokens in (1, 20, 1000):
        for name, found in gradient(samples, max_tokens).items():
            wanted = exact.get_parameter(name).grad
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


def demonstrations(path: Path, **columns) -> Path:
    """Right answers to the training prompts of the tiny recipe's domains."""
    rng, rows = np.random.default_rng(0), []
    for name, config in tiny_recipe().domains.items():
        domain = load_domain(name, config, seed=0, held_out_prompts=20)
        assert domain.demonstrations is not None
        for prompt in domain.train[:150]:
            answer = domain.demonstrations(prompt.text, rng, 1.0, 0.0)
            rows.append({"prompt": prompt.text, "completion": answer, "domain": name, **columns})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def config(path: Path, **changes) -> dict:
    return {
        "source": str(path),
        "batch_size": 64,
        "steps": 30,
        "optim": {"lr": 0.01},
        "checkpoint_every": 7,
        "evaluate_every": 10,
        **changes,
    }


def run(recipe: Recipe, out: Path, stage: str, how=RunFolder.create) -> dict:
    """The finished stage."""
    with how(out, recipe) as folder:
        run_stage(recipe, folder, stage)
    return json.loads((out / "stages" / stage / "done.json").read_text())


def metrics(out: Path, stage: str, key: str) -> dict[int, float]:
    lines = map(json.loads, (out / "stages" / stage / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


@pytest.mark.slow
def test_a_cold_start_of_the_base_is_the_same_after_a_stop_in_it(tmp_path, monkeypatch):
    recipe = tiny_recipe(base=None, sft=config(demonstrations(tmp_path / "rows.jsonl")))
    whole = run(recipe, tmp_path / "whole", "base")
    assert whole["demonstrations"] + whole["held_out"] <= 300
    measured = metrics(tmp_path / "whole", "base", "held_out/ce")
    assert list(measured) == [10, 20, 30]
    assert measured[30] == whole["held_out/ce"] < measured[10]
    made = sft._demonstration_sample

    def stop(uid, *arguments):
        if uid == f"base/{17 * 64 + 5}":
            raise KeyboardInterrupt
        return made(uid, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sft, "_demonstration_sample", stop)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "stopped", "base")
    resumed = run(recipe, tmp_path / "stopped", "base", RunFolder.resume)
    assert (resumed["digest"], resumed["held_out/ce"]) == (whole["digest"], whole["held_out/ce"])
    for key in ("loss/ce", "grad_norm", "lr", "held_out/ce"):
        assert metrics(tmp_path / "stopped", "base", key) == metrics(tmp_path / "whole", "base", key)


def test_specialists_of_demonstrations_alone_and_before_grpo(tmp_path, capsys):
    own = tiny_recipe().domains
    path = demonstrations(tmp_path / "rows.jsonl")
    domains = {
        "sort": own["sort"].model_dump() | {"sft": config(path, steps=10), "specialist": {"steps": 0}},
        "add3": own["add3"].model_dump()
        | {"sft": config(path, steps=None, epochs=2, batch_size=16), "reward": "recipes:varied"},
    }
    recipe = tiny_recipe(
        base=None,
        domains=domains,
        specialist={"steps": 2, "prompts_per_step": 4, "group_size": 8},
        distill={"steps": 2, "prompts_per_domain": 4},
        baselines={"methods": []},
        evaluation={"prompts_per_domain": 4, "every": 0},
    )
    wanted = ["base", "specialist-sort", "sft-add3", "specialist-add3", "merge", "evaluate"]
    assert list(plan_stages(recipe)) == wanted
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_pipeline(recipe, folder)
        stages = {name: folder.stage_done(name) for name in plan_stages(recipe)}
    shown = [line for line in capsys.readouterr().err.splitlines() if "cross-entropy" in line]
    assert shown
    assert not any(" 0 tok/s" in line for line in shown)
    assert stages["specialist-sort"]["steps"] == 10
    assert stages["specialist-sort"]["student_tokens"] == 0
    started = stages["sft-add3"]
    assert started["steps"] == -(-2 * started["demonstrations"] // 16)
    assert stages["specialist-add3"]["steps"] == 2
    assert stages["specialist-add3"]["student_tokens"] > 0
    base, taught, trained = (
        load_file(tmp_path / "run" / name / "model.safetensors")
        for name in ("base", "sft/add3", "specialists/add3")
    )
    moved = [sum(float((trained[name] - one[name]).norm()) for name in trained) for one in (base, taught)]
    assert moved[0] > moved[1] > 0  # reinforcement begins where demonstrations have led
    cards = {
        name: (tmp_path / "run" / name / "README.md").read_text()
        for name in ("specialists/sort", "sft/add3", "specialists/add3")
    }
    assert "with GRPO" not in cards["specialists/sort"]
    assert "begins as" in cards["sft/add3"]
    assert "rows.jsonl, then trained with GRPO" in cards["specialists/add3"]
    assert "Demonstrations: loss" in write_report(tmp_path / "run").read_text()


def test_what_is_asked_in_the_evaluation_is_never_learnt(tmp_path):
    recipe = tiny_recipe()
    asked = load_domain("sort", recipe.domains["sort"], seed=0, held_out_prompts=20).held_out
    answer = {"role": "assistant", "content": "1"}
    forms = [
        lambda text: {"prompt": text, "completion": "1"},
        lambda text: {"messages": [{"role": "user", "content": text}, answer]},
        lambda text: {
            "messages": [{"role": "system", "content": "!"}, {"role": "user", "content": text}, answer]
        },
    ]
    rows = [forms[i % 3](prompt.text) for i, prompt in enumerate(asked)]
    path = demonstrations(tmp_path / "rows.jsonl")
    path.write_text(path.read_text() + "\n" + "\n".join(map(json.dumps, rows)))
    read = sft.read_demonstrations(str(path), None)
    settings = tiny_recipe(base=None, sft=config(path, held_out=0.0)).sft
    assert settings is not None
    train, held_out = sft.split_rows(recipe, settings, read)
    assert len(held_out) == len({prompt.key for prompt in asked}) > 3
    assert len(train) == 300


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"specialist": {"steps": 0}}, "specialist of sort would learn nothing"),
        ({"sft": {"source": "rows.jsonl"}}, "not both"),
        ({"base": None, "sft": {"source": "rows.csv"}}, "come from a .jsonl or .parquet file"),
    ],
)
def test_recipes_that_teach_nothing_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny_recipe(**changes)


HEADLESS = "{% for m in messages %}<a>{{ m.content }}<eos>{% endfor %}"
ENDLESS = "{% for m in messages %}{{ m.content }}={% endfor %}"
SOUND = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "level", "sentence"),
    [
        (None, "error", "no chat template"),
        (HEADLESS, "error", "no generation prompt"),
        (ENDLESS, "error", "never learn to stop"),
        (SOUND, "ok", "1 demonstrations, 6 to 6 tokens in the 1 looked at, of which 50% are learnt"),
    ],
)
def test_the_doctor_says_what_a_chat_template_does_to_demonstrations(template, level, sentence, tmp_path):
    talk = [{"role": "user", "content": "123"}, {"role": "assistant", "content": "45"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk}))
    recipe = tiny_recipe(base=None, sft=config(tmp_path / "rows.jsonl"))
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    found = check_demonstrations(recipe, Models(tokenizer=tokenizer))
    assert (found[-1].level, found[-1].title) == (level, "sft")
    assert sentence in found[-1].detail


@pytest.mark.parametrize(
    ("line", "limit", "sentence"),
    [
        ("{", {}, "rows.jsonl:1: not a line of JSON"),
        ({"prompt": "1", "completion": None}, {}, "rows.jsonl:1: `completion` is null"),
        ({"prompt": "1", "completion": 2}, {}, "`completion` is a number; give two texts"),
        ({"prompt": "z", "completion": "1"}, {}, "rows.jsonl:1: the tokenizer cannot encode the prompt 'z'"),
        ({"prompt": "1" * 30, "completion": "1"}, {}, "give `sft` a larger max_length"),
        ({"prompt": "1" * 99, "completion": "1"}, {"max_length": 32}, "give `sft` a larger max_length"),
        (
            {"prompt": "1" * 99, "completion": "1"},
            {"max_sequence": 64},
            "max_position_embeddings.*; shorten them",
        ),
    ],
)
def test_what_is_wrong_with_a_shared_file_is_said_once_with_the_way_out(line, limit, sentence, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(line if isinstance(line, str) else json.dumps(line))
    room = {"rollout": {"max_new_tokens": 5, "max_sequence": limit.pop("max_sequence", 16)}}
    shared = config(path, **limit)
    own = tiny_recipe().domains["sort"].model_dump() | {"sft": shared}
    recipe = tiny_recipe(base=None, sft=shared, domains={"sort": own}, **room)
    found = check_demonstrations(recipe, Models(tokenizer=tiny.tokenizer()))
    assert [(finding.level, finding.title) for finding in found] == [("error", "sft")]
    assert re.search(sentence, found[0].detail), found


def test_a_file_of_other_domains_says_which(tmp_path):
    path = demonstrations(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"no demonstrations of domain math; it has rows of add3, sort"):
        sft.read_demonstrations(str(path), "math")
