import io
import json
import os
import re
import resource
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from opd.config import Recipe
from opd.errors import RunFolderError, StorageError
from opd.kernels import projection
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.check import checks, memory, resources
from opd.pipelines.check.checks import Finding, check_extras, check_ranks, check_sizes, format_bytes
from opd.pipelines.check.domains import check_domains, check_rewards
from opd.pipelines.check.examine import print_diagnosis, run_checks
from opd.pipelines.check.measured import mean_kl
from opd.pipelines.check.memory import (
    format_phases,
    memory_by_phase,
    sizes_of,
    teacher_answer_sizes,
    total_bytes,
)
from opd.pipelines.check.models import Models, group_errors, unreadable_teachers
from opd.pipelines.check.plan import PlanOptions, print_plan
from opd.pipelines.check.resources import answer_counts, check_answers, check_resources, remaining_disk
from opd.pipelines.check.servers import check_servers
from opd.pipelines.check.shapes import ModelShape, shape_of
from opd.pipelines.cli import main
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.rollout.torch_engine import TorchEngine
from opd.teachers.local_teacher import LocalTeacher
from opd.types import RolloutRequest, Sample, SamplingParams

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def memory_parts(*given) -> dict[str, int]:
    return sizes_of(memory.memory_parts(*given))


def disk_parts(*given) -> dict[str, int]:
    return sizes_of(resources.disk_parts(*given))


def save_model(
    folder: Path, seed: int, alphabet: str = "0123456789=", tags: tuple[str, ...] = ("<sort>",)
) -> Path:
    tokenizer = character_tokenizer(alphabet, tags)
    model = CausalLM.from_config(LLAMA, tokenizer=tokenizer, seed=seed)
    save_checkpoint(model, tokenizer, folder, {"base": "random", "settings": {"seed": seed}})
    (folder / "checksums.json").unlink()  # models from elsewhere, which have none: tests change them
    return folder


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("student") / "model", seed=0)


def make_recipe(student: Path, teacher: Path | None = None, **changes) -> Recipe:
    data = {
        "name": "demo",
        "model": {"path": str(student)},
        "domains": {"sort": {"source": "procedural:sort", "prompts": 50}},
        "rollout": {"max_sequence": 64, "max_running": 16},
        "evaluation": {"prompts_per_domain": 20},
    }
    if teacher is not None:
        data["domains"]["sort"]["teacher"] = "expert"
        data["teachers"] = {"expert": {"path": str(teacher)}}
    return Recipe.model_validate({**data, **changes})


def find(findings: list[Finding], level: str) -> dict[str, str]:
    return {finding.title: finding.detail for finding in findings if finding.level == level}


def diagnose_text(recipe: Recipe) -> tuple[int, str]:
    console = Console(width=400, record=True, file=io.StringIO())
    status = print_diagnosis(recipe, console)
    return status, " ".join(console.export_text().split())


def test_a_sound_recipe_has_no_errors(student, tmp_path):
    findings = run_checks(make_recipe(student, student), run_dir=tmp_path / "run")
    assert find(findings, "error") == {}
    fine = find(findings, "ok")
    assert {"student", "teacher expert", "domain sort", "prompts sort", "memory", "disk"} <= set(fine)
    assert fine["KL to expert on sort"] == "0.000 nats per token at the start"
    assert not (tmp_path / "run").exists()


def test_a_far_teacher_is_a_warning(student, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(student, teacher)
    model = CausalLM.from_pretrained(student)
    with torch.no_grad():
        for name, weight in model.module.named_parameters():
            if "norm" not in name:
                weight.mul_(100)
    save_checkpoint(model, character_tokenizer("0123456789=", ["<sort>"]), teacher, {"base": "random"})
    findings = run_checks(make_recipe(student, teacher), run_dir=tmp_path / "run")
    assert "no merge was measured from beyond 3.1" in find(findings, "warning")["KL to expert on sort"]
    assert find(findings, "error") == {}
    assert not [
        f for f in run_checks(make_recipe(student, teacher), thorough=False) if f.title.startswith("KL")
    ]


def test_another_tokenizer_is_an_error(student, tmp_path):
    teacher = save_model(tmp_path / "teacher", seed=1, alphabet="9876543210=")
    errors = find(run_checks(make_recipe(student, teacher)), "error")
    assert "10 of the student's 14 ids stand for other tokens: id 3 is '0'" in errors["teacher expert"]
    others = "name its tokenizer in teachers.expert.tokenizer, or use a teacher with the student's tokens"
    assert errors["teacher expert"].endswith(f"; {others}"), "nothing else helps"
    config = {"path": None, "config": LLAMA}
    named = {"path": str(student), "tokenizer": str(save_model(tmp_path / "other", 0, "5432109876="))}
    for model, expert, advice in (
        (config, teacher, "set model.tokenizer to the teacher's, which a new student can have"),
        (named, teacher, others),
        (named, student, "leave out model.tokenizer: the tokenizer in model.path has the teacher's tokens"),
    ):
        errors = find(run_checks(make_recipe(student, expert, model=model), thorough=False), "error")
        assert advice in errors["teacher expert"]


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_a_student_that_was_not_downloaded_names_its_field(student, key):
    recipe = make_recipe(student, model={"path": str(student)} | {key: "Qwen/Qwen3-0.6B"})
    told = find(run_checks(recipe, thorough=False), "error")["student"]
    assert re.fullmatch(
        rf"model\.{key}: \S*Qwen/Qwen3-0\.6B is not a folder; download the \w+ first .*", told
    )


def warnings(findings: list[Finding], title: str) -> list[str]:
    return [f.detail for f in findings if f.level == "warning" and f.title == title]


@pytest.mark.slow
def test_a_teacher_with_more_tokens_or_no_tokenizer_is_a_warning(student, tmp_path):
    teacher = save_model(tmp_path / "teacher", seed=1, alphabet="0123456789=abc")
    found = run_checks(make_recipe(student, teacher, baselines={"methods": []}))
    assert find(found, "error") == {}
    assert warnings(found, "teacher expert") == [
        "it knows 3 more tokens than the student, which are left out of its scores; if they join tokens of"
        " the student, name its tokenizer in teachers.NAME.tokenizer"
    ]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (teacher / name).unlink()
    found = run_checks(make_recipe(student, teacher, baselines={"methods": []}))
    assert find(found, "error") == {}
    assert "its folder has no tokenizer" in warnings(found, "teacher expert")[0]
    small = save_model(tmp_path / "small", seed=1, alphabet="01234")
    (small / "tokenizer.json").unlink()
    errors = find(run_checks(make_recipe(student, small, baselines={"methods": []})), "error")
    assert "its vocabulary has 8 rows, but the tokenizer's ids go on to 13" in errors["teacher expert"]


TEMPLATE = "{% for m in messages %}{{ m.content }}={% endfor %}"
ENDING = "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"


def chat_recipe(student: Path, teacher: Path, folder: Path, **model) -> Recipe:
    lines = [{"prompt": [{"role": "user", "content": f"{n}"}], "label": str(n)} for n in range(40)]
    data = folder / "chat.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    domains = {"chat": {"source": str(data), "reward": "operator:truth", "teacher": "expert"}}
    recipe = make_recipe(student, teacher, domains=domains)
    settings = recipe.model_dump()
    settings["model"] |= model
    settings["teachers"] = {"expert": {"path": str(teacher)}}
    return Recipe.model_validate(settings)


def with_template(source: Path, folder: Path, template: str | None) -> Path:
    shutil.copytree(source, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (TEMPLATE, TEMPLATE, []),
        (TEMPLATE, "{# a comment #}" + TEMPLATE, []),
        (TEMPLATE, None, ["it has no chat template: prompts are written with the student's"]),
        (TEMPLATE, ENDING, ["it has another chat template"]),
        (None, TEMPLATE, []),
    ],
)
def test_chat_templates_that_write_the_same_are_the_same(student, tmp_path, ours, theirs, told):
    mine = with_template(student, tmp_path / "mine", ours)
    teacher = with_template(student, tmp_path / "teacher", theirs)
    model = {} if ours else {"chat_template": str(teacher)}  # a base student takes its teacher's
    found = run_checks(chat_recipe(mine, teacher, tmp_path, **model), thorough=False)
    assert find(found, "error") == {}
    assert len(warnings(found, "teacher expert")) == len(told)
    assert all(a in b for a, b in zip(told, warnings(found, "teacher expert"), strict=True))


@pytest.mark.parametrize(
    ("written", "kwargs", "told"),
    [
        ("{{ date_string or strftime_now('%d %b %Y') }}", {}, ["the date into prompts", "as date_string"]),
        ("{{ strftime_now('%d %b %Y') }}", {}, ["the date into prompts", "one without it"]),
        ("{{ now_time or strftime_now('%H:%M:%S') }}", {}, ["the time of day", "as now_time"]),
        ("{{ strftime_now('%s') }}", {}, ["the time of day", "one without it"]),
        ("{{ ['a', 'b'] | random }}", {}, ["at random"]),
        ("{{ range(9999)|random }}", {}, ["at random"]),
        ("{{ lipsum(1) }}", {}, ["at random"]),
        ("{{ range(9999)|random }}{{ strftime_now('%Y') }}", {}, ["at random", "the date into prompts"]),
        ("{{ date_string or strftime_now('%d %b %Y') }}", {"date_string": "0"}, []),
    ],
)
def test_a_chat_template_that_writes_another_prompt_each_time_is_told(
    student, tmp_path, written, kwargs, told
):
    mine = with_template(student, tmp_path / "mine", written + TEMPLATE)
    recipe = chat_recipe(mine, mine, tmp_path, chat_template_kwargs=kwargs)
    found = warnings(run_checks(recipe, thorough=False), "chat template")
    assert len(found) == sum("prompts" in one or "random" in one or "day" in one for one in told)
    assert all(any(one in sentence for sentence in found) for one in told)
    assert not any("date" in sentence for sentence in found) or any("date" in one for one in told)


def test_a_chat_template_without_a_generation_prompt_is_told(student, tmp_path):
    headless = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    mine = with_template(student, tmp_path / "mine", headless)
    (told,) = warnings(run_checks(chat_recipe(mine, mine, tmp_path), thorough=False), "chat template")
    assert "prompts end before 'assistant', which the model would have to write" in told


@pytest.mark.parametrize("shows", [True, False])
def test_a_chat_template_that_ignores_the_tools_is_told(student, tmp_path, shows):
    mine = with_template(student, tmp_path / "mine", "{{ tools | length if tools }}" * shows + TEMPLATE)
    settings = chat_recipe(mine, mine, tmp_path).model_dump()
    settings["domains"]["chat"]["environment"] = {"type": "tools", "params": {"tools": ["calculator"]}}
    found = run_checks(Recipe.model_validate(settings), thorough=False)
    assert find(found, "error") == {}
    told = [one for one in warnings(found, "tools chat") if "the chat template writes no tools" in one]
    assert len(told) == (not shows)


def test_plan_counts_the_tools_that_prompts_tell_of(student, tmp_path, capsys):
    """As a run writes its prompts, and as the doctor counts them."""
    mine = with_template(student, tmp_path / "mine", "{{ '7' * 9 if tools }}" + TEMPLATE)
    tokens = []
    for environment in (None, {"type": "tools", "params": {"tools": ["calculator"]}}):
        settings = chat_recipe(mine, mine, tmp_path).model_dump()
        settings["domains"]["chat"]["environment"] = environment
        recipe = Recipe.model_validate(settings)
        assert print_plan(recipe, PlanOptions()) == 0
        step = sum(recipe.for_domain(name).distill.prompts_per_domain for name in recipe.domains)
        said = re.search(r"(?m)^tokens +([\d,]+);", capsys.readouterr().out)
        tokens.append(int(said[1].replace(",", "")) / (step * recipe.distill.samples_per_prompt))
    assert tokens[1] == tokens[0] + 9


def test_what_is_wrong_with_a_sandbox_is_told_once(student, tmp_path):
    mine = with_template(student, tmp_path / "mine", TEMPLATE)
    settings = chat_recipe(mine, mine, tmp_path).model_dump()
    params = {"tools": ["calculator"], "sandbox": {"memory": 3}}
    settings["domains"]["chat"]["environment"] = {"type": "tools", "params": params}
    found = run_checks(Recipe.model_validate(settings))
    (error,) = [one for one in found if one.level == "error"]
    assert (error.title, "did you mean `memory_mb`" in error.detail) == ("environment chat", True)


def test_a_turn_that_ends_where_no_response_does_is_found_early(student, tmp_path):
    mine = with_template(student, tmp_path / "mine", ENDING)
    found = run_checks(chat_recipe(mine, mine, tmp_path), thorough=False)
    assert "ends an answer with 0 '<pad>', at which responses do not end" in warnings(found, "stop ids")[0]
    (mine / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    found = run_checks(chat_recipe(mine, mine, tmp_path), thorough=False)
    assert warnings(found, "stop ids") == []
    shown = find(found, "ok")["stop ids"]
    assert "1 '<eos>' (tokenizer, generation_config.json, config.json)" in shown
    assert "0 '<pad>' (generation_config.json)" in shown


@pytest.mark.parametrize("damage", ["missing", "truncated", "no folder"])
def test_a_teacher_that_cannot_be_read_is_an_error(student, tmp_path, damage):
    teacher = tmp_path / "teacher"
    if damage != "no folder":
        shutil.copytree(student, teacher)
        shard = teacher / "model.safetensors"
        data = shard.read_bytes()
        shard.unlink()
        if damage == "truncated":
            shard.write_bytes(data[:-100])
    errors = find(run_checks(make_recipe(student, teacher)), "error")
    assert str(teacher) in errors["teacher expert"]


def test_wrong_ids_and_temperatures_are_found(student, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(student, teacher)
    (teacher / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    findings = [f for f in run_checks(make_recipe(student, teacher), thorough=False) if f.level == "warning"]
    details = " ".join(finding.detail for finding in findings)
    assert "also ends its responses at 5 '2' (config.json), where the student's go on" in details
    assert "says temperature 0.6, rollout.temperature is 1" in details


def test_a_vocabulary_smaller_than_the_tokenizer_is_an_error(student, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(student, model)
    character_tokenizer("0123456789=abcdef", ["<sort>"]).save_pretrained(model)
    errors = find(run_checks(make_recipe(model)), "error")
    assert "its vocabulary has 14 rows, but the tokenizer's ids go on to 19" in errors["student"]


def test_a_tokenizer_without_an_end_is_an_error(student, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(student, model)
    tokenizer = character_tokenizer("0123456789=", ["<sort>"])
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    for name in ("config.json", "generation_config.json"):
        described = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**described, "eos_token_id": None}))
    assert "no response could end" in find(run_checks(make_recipe(model)), "error")["stop ids"]
    found = run_checks(make_recipe(model, rollout={"stop_ids": [5], "max_sequence": 64}), thorough=False)
    assert find(found, "ok")["stop ids"] == "a response ends at 5 '2' (rollout.stop_ids)"
    outside = make_recipe(model, rollout={"stop_ids": [99], "max_sequence": 64})
    assert "99 lie outside" in find(run_checks(outside, thorough=False), "error")["stop ids"]


def test_messages_need_a_chat_template(student, tmp_path):
    lines = [{"prompt": [{"role": "user", "content": f"{n}="}], "label": str(n)} for n in range(40)]
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    domains = {"chat": {"source": str(data), "reward": "operator:truth"}}
    errors = find(run_checks(make_recipe(student, domains=domains)), "error")
    assert "no chat template" in errors["prompts chat"]


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"source": "procedural:chess"}, "domain sort"),
        ({"source": "none.jsonl"}, "domain sort"),
        ({"source": "procedural:sort", "reward": "nowhere:reward"}, "domain sort"),
    ],
)
def test_a_domain_that_cannot_be_used_is_an_error(student, changes, title):
    errors = find(run_checks(make_recipe(student, domains={"sort": changes})), "error")
    assert title in errors


def test_cut_sampling_and_a_too_short_sequence(student):
    rollout = {"top_p": 0.9, "top_k": 5, "max_sequence": 20}
    findings = run_checks(make_recipe(student, rollout=rollout), thorough=False)
    said = "rollout.top_p = 0.9 and rollout.top_k = 5: specialists learn over what it keeps (at most 20 bytes"
    assert said in find(findings, "ok")["sampling"]
    told = find(findings, "error")["prompts sort"]
    assert (
        "longer than the 4 tokens that rollout.max_sequence 20 leaves beside rollout.max_new_tokens 16"
        in told
    )


def test_a_model_from_a_config_is_checked_without_being_made(tmp_path):
    recipe = make_recipe(Path("unused"), model={"config": LLAMA})
    assert find(run_checks(recipe, run_dir=tmp_path), "error") == {}
    wrong = make_recipe(Path("unused"), model={"config": {**LLAMA, "hiden_size": 3}})
    assert "did you mean 'hidden_size'?" in find(run_checks(wrong, run_dir=tmp_path), "error")["student"]


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_an_error(tmp_path):
    huge = {**LLAMA, "hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 200}
    errors = find(run_checks(make_recipe(Path("unused"), model={"config": huge}), run_dir=tmp_path), "error")
    assert "does not fit" in errors["memory"]
    assert "does not fit" in errors["disk"]


def test_the_estimate_adds_up():
    settings = {"rollout": {"max_running": 2, "max_new_tokens": 5}, "storage": {"cache_mb": 3}}
    recipe = make_recipe(Path("unused"), model={"config": LLAMA}, **settings)
    shape = ModelShape(parameters=1000, hidden_size=4, windows=(None, None), vocabulary=10, kv_width=4)
    parts = memory_parts(recipe, shape, {})
    assert parts["weights"] == parts["gradients"] == parts["engine copy"] == 4000
    assert parts["teachers"] == 4000 + 10 * 4 * 4  # a buffer of one teacher's size, and its head
    assert parts["AdamW"] == 8000
    assert parts["KV cache"] == 2 * 10 * 2 * 4 * 2 * 4
    models, answers = (
        10 * 4000 + (4 * 2 + 1) * 12000,
        teacher_answer_sizes(recipe, recipe.distill.steps)[1],
    )  # those that off_policy logs
    assert sum(disk_parts(recipe, shape, {}).values()) == models + answers + 3 * 2**20
    assert [format_bytes(size) for size in (3, 1536, 5 * 2**30)] == ["3 B", "1.5 KiB", "5.0 GiB"]


def in_shape(**changes) -> CausalLM:
    """With weights large enough for a layout of their own, and a head that is not the embedding."""
    config = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024, "tie_word_embeddings": False}
    tokenizer = character_tokenizer("0123456789=", ["<a>", "<b>"])
    return CausalLM.from_config({**config, **changes}, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("dtype", "wide", "packs"),
    [
        ("float32", False, False),
        ("float32", False, True),
        ("bfloat16", False, True),
        ("bfloat16", True, True),
    ],
)
def test_the_estimate_counts_the_weights_that_decode_holds(monkeypatch, dtype, wide, packs):
    for name in ("onednn_packs", "onednn_is_faster"):
        monkeypatch.setattr(projection, name, lambda: packs)
    monkeypatch.setattr(projection, "widens", lambda given: wide and given == torch.bfloat16)
    model = in_shape()
    model.module.to(getattr(torch, dtype))
    engine = TorchEngine(model)
    shared = {parameter.data_ptr() for parameter in model.module.parameters()}
    held = 0
    for layer in engine._runner.lean._layers:
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
            own = weight._packed or weight.laid_out.data_ptr() not in shared
            held += own * weight.laid_out.numel() * weight.laid_out.dtype.itemsize
    if engine._runner.head.weight.data_ptr() not in shared:
        held += engine._runner.head.weight.nbytes
    recipe = make_recipe(Path("unused"), model={"config": LLAMA, "dtype": dtype})
    parts = memory_parts(recipe, shape_of(model.module.config, model.module), {})
    assert parts["weights laid out for decode"] == held


def test_no_weights_are_laid_out_where_a_model_decodes_by_itself():
    module = in_shape(model_type="olmo2").module
    shape = shape_of(module.config, module)
    assert shape.fused == shape.linear == 0


def test_the_estimate_counts_what_captured_steps_hold(pretended):
    model = in_shape()
    recipe = make_recipe(
        Path("unused"), model={"config": LLAMA, "device": "cuda"}, rollout={"max_running": 6}
    )
    parts = memory_parts(recipe, shape_of(model.module.config, model.module), {})
    engine = TorchEngine(pretended.model(model), max_running=6)
    params = SamplingParams(max_new_tokens=8, top_p=0.9)
    list(engine.generate([RolloutRequest(str(i), np.array([1, 2], np.int32), params) for i in range(6)]))
    buffers, graphs = engine._runner.buffers, engine._runner.graphs._captured.values()
    held = sum(value.nbytes for value in vars(buffers).values() if isinstance(value, torch.Tensor))
    # What a graph makes lies there at the same time only in part; the largest of it does.
    largest = max(memory.nbytes() for graph in graphs for memory in graph._recording.own)
    assert held + largest <= parts["decode buffers and graphs"]
    assert engine._runner.cache.nbytes <= parts["KV cache"]
    copied = sum(
        layer.qkv.laid_out.nbytes + layer.gate_up.laid_out.nbytes for layer in engine._runner.lean._layers
    )
    assert parts["weights laid out for decode"] == copied


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_device_that_is_elsewhere_sets_no_budget(device):
    recipe = make_recipe(Path("unused"), model={"config": LLAMA, "device": device})
    found = memory_parts(recipe, SHAPE, {})
    assert found["KV cache"] == 16 * 64 * 2 * 4 * 2 * 4
    assert found["decode buffers and graphs"] > 0


def test_the_estimate_of_keys_and_values_ends_at_their_budget():
    runtime = {"decode": {"kv_cache_mb": 1}}
    recipe = make_recipe(
        Path("unused"), model={"config": LLAMA}, rollout={"max_running": 10**6}, runtime=runtime
    )
    assert memory_parts(recipe, SHAPE, {})["KV cache"] == 1 << 20


def test_the_estimate_on_several_ranks_is_that_of_one():
    shape = ModelShape(parameters=1000, hidden_size=4, windows=(None, None), vocabulary=10, kv_width=4)
    found = {}
    for name, train in {
        "alone": {},
        "fsdp": {"ranks": 4},
        **{f"zero {n}": {"ranks": 4, "backend": "deepspeed", "zero_stage": n} for n in (1, 2, 3)},
        "megatron": {"ranks": 4, "backend": "megatron", "tensor_parallel": 2},
        "stages": {"ranks": 4, "backend": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2},
    }.items():
        recipe = make_recipe(Path("unused"), model={"config": LLAMA}, train=train)
        parts = memory_parts(recipe, shape, {})
        found[name] = [parts[part] for part in ("weights", "gradients", "AdamW", "engine copy")]
    assert found == {
        "alone": [4000, 4000, 8000, 4000],
        "fsdp": [1000, 1000, 2000, 4000],
        "zero 1": [4000, 4000, 2000, 4000],
        "zero 2": [4000, 1000, 2000, 4000],
        "zero 3": [1000, 1000, 2000, 4000],
        "megatron": [2000, 2000, 4000, 4000],
        "stages": [1000, 1000, 2000, 4000],
    }
    mixture = replace(shape, experts=600, expert_count=4)  # of which two ranks of the four share each half
    recipe = make_recipe(
        Path("unused"),
        model={"config": LLAMA},
        train={"ranks": 4, "backend": "megatron", "tensor_parallel": 2},
    )
    parts = memory_parts(recipe, mixture, {})
    assert [parts[part] for part in ("weights", "gradients", "AdamW")] == [1400, 1400, 2800]
    recipe = make_recipe(Path("unused"), model={"config": LLAMA}, train={"ranks": 4})
    titles = [finding.title for finding in check_resources(recipe, Models(student=shape), Path())]
    assert "memory of a rank" in titles


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tensor_parallel": 3}, "cannot be cut into 3 equal slices; choose a tensor parallel size of"),
        ({"pipeline_parallel": 3}, "a model of 2 layers cannot be cut into 3 stages; set train.pipeline_"),
    ],
)
def test_a_model_that_cannot_be_cut_as_asked_is_found_before_ranks_start(tmp_path, given, told):
    train = {"ranks": 3, "backend": "megatron", **given}
    recipe = make_recipe(tmp_path, model={"config": LLAMA | {"num_hidden_layers": 2}}, train=train)
    (error,) = find(run_checks(recipe, thorough=False), "error").values()
    assert told in error


def test_a_cache_that_holds_no_response_is_found():
    shape = ModelShape(parameters=1000, hidden_size=4, windows=(None,) * 2, vocabulary=10, kv_width=2**20)
    settings = {"model": {"config": LLAMA}, "rollout": {"max_new_tokens": 5}}
    for given, level in ((16 * 5, None), (16 * 5 - 1, "error")):
        recipe = make_recipe(Path("unused"), **settings, runtime={"decode": {"kv_cache_mb": given}})
        found = check_resources(recipe, Models(student=shape), Path())
        levels = {finding.title: finding.level for finding in found}
        assert levels.get("runtime.decode.kv_cache_mb") == level


def test_ranks_that_nothing_starts_are_named():
    recipe = make_recipe(Path("unused"), train={"context_parallel": 2})
    (finding,) = check_ranks(recipe)
    assert finding.level == "warning"
    assert "1 rank cannot be divided into groups of train.context_parallel 2" in finding.detail
    assert not check_ranks(make_recipe(Path("unused"), train={"context_parallel": 2, "ranks": 4}))


SHAPE = ModelShape(1000, 4, (None, None), vocabulary=10, kv_width=4, adapters=50, adapted=600, stored=2000)


@pytest.mark.parametrize(
    ("train", "weights", "copies", "gradients", "moments"),
    [
        ({}, 4000, 2 * 2000, 4000, 8000),  # with the gradients of one micro-batch
        ({"ranks": 2}, 2000, (40 + 2 * 960 // 2) * 2, 2000, 4000),  # FSDP2: one layer and the next
        ({"backend": "megatron"}, 4000, 2000, 4000, 8000),
        ({"precision": "pure"}, 2000, 0, 2000, 4000),
    ],
)
def test_the_estimate_counts_master_weights(train, weights, copies, gradients, moments):
    recipe = make_recipe(Path("unused"), model={"config": LLAMA, "dtype": "bfloat16"}, train=train)
    parts, disk = memory_parts(recipe, SHAPE, {}), disk_parts(recipe, SHAPE, {})
    found = [parts[name] for name in ("weights", "copies in bfloat16", "gradients", "AdamW", "engine copy")]
    assert found == [weights, copies, gradients, moments, 2000]
    assert disk["model folders"] == 9 * 2000
    assert disk["checkpoints"] == 4 * 2 * (weights + moments) * train.get("ranks", 1)


@pytest.mark.parametrize(
    ("ranks", "dtype", "copies"),
    [
        (1, "float32", 2 * 4000),  # the rounded matrices, with the gradients of one micro-batch
        (1, "bfloat16", 2 * 2000),
        (2, "float32", 4000 // 2),  # a rank's share
        (2, "bfloat16", 4000 // 2 + (40 + 2 * 960 // 2) * 2),
    ],
)
def test_the_estimate_counts_what_is_rounded_to_fp8(ranks, dtype, copies):
    model = {"config": LLAMA, "dtype": dtype, "quantize": "fp8"}
    recipe = make_recipe(Path("unused"), model=model, train={"ranks": ranks})
    parts = memory_parts(recipe, SHAPE, {})
    assert (parts[f"copies in {dtype}"], parts["weights"]) == (copies, 4000 // ranks)


def test_the_estimate_counts_adapters_and_given_teachers():
    given = {name: {"path": f"/models/{name}"} for name in ("sort", "add3")}
    model = {"config": LLAMA, "dtype": "bfloat16", "lora": {"rank": 4}}
    recipe = make_recipe(Path("unused"), model=model, teachers=given)
    shapes = {"sort": SHAPE, "add3": replace(SHAPE, published=True)}
    parts, disk = memory_parts(recipe, SHAPE, shapes), disk_parts(recipe, SHAPE, shapes)
    assert (parts["base"], parts["weights"]) == (2000, 50 * 4)  # of all, and adapters in float32
    assert parts["AdamW"] == 2 * parts["gradients"] == 2 * 50 * 4
    assert parts["engine copy"] == (600 + 50) * 2  # merged beside the base
    ranks = memory_parts(
        make_recipe(Path("unused"), model=model, teachers=given, train={"ranks": 2}), SHAPE, {}
    )
    assert "base" not in ranks
    assert ranks["weights"] == (2000 + 50 * 4) // 2
    assert ranks["engine copy"] == (1000 + 600 + 50) * 2  # a base of its own
    assert disk["published teachers"] == 2000  # a published one is streamed from where it is
    assert disk["fetched teachers"] == 2000  # for the baselines
    assert disk["checkpoints"] == 3 * 2 * 3 * 50 * 4


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_the_estimate_counts_critics(lora):
    """One of two specialists has one, all of whose weights are trained, whatever the student trains."""
    domains = {name: {"source": f"procedural:{name}"} for name in ("sort", "add3")}
    model, run = {"config": LLAMA, "lora": lora}, {"workers": 2}
    plain = make_recipe(Path("unused"), model=model, domains=domains, runtime=run)
    domains["sort"]["specialist"] = {"advantage": {"type": "gae"}, "filter_zero_variance": False}
    recipe = make_recipe(Path("unused"), model=model, domains=domains, runtime=run)
    large = replace(SHAPE, parameters=10**9)  # so that specialists take more than the merge
    assert memory_parts(recipe, large, {})["critics"] == 4 * 4 * 10**9
    apart = disk_parts(recipe, SHAPE, {})["checkpoints"] - disk_parts(plain, SHAPE, {})["checkpoints"]
    assert apart == 2 * 3 * 4000
    assert "critics" not in memory_parts(plain, large, {})


@pytest.mark.parametrize(
    ("own", "evaluation", "copies"),
    [
        ({}, {}, 0),
        ({"reference_kl": {"coef": 0.1}}, {}, 1),  # of one of two specialists
        ({}, {"base_kl_every": 4}, 2),
        ({"reference_kl": {"coef": 0.1}}, {"base_kl_every": 4}, 2),  # one serves both
    ],
)
def test_the_estimate_counts_frozen_copies(own, evaluation, copies):
    domains = {name: {"source": f"procedural:{name}"} for name in ("sort", "add3")}
    domains["sort"]["specialist"] = own
    settings = {"domains": domains, "runtime": {"workers": 2}, "evaluation": evaluation}
    parts = memory_parts(make_recipe(Path("unused"), model={"config": LLAMA}, **settings), SHAPE, {})
    assert parts["weights"] == 2 * 4000
    assert parts.get("frozen copy of the start", 0) == copies * 4000
    domains["sort"]["specialist"] = None
    merge = make_recipe(Path("unused"), model={"config": LLAMA}, **settings | {"runtime": {"workers": 1}})
    held = memory_parts(merge, SHAPE, {})
    assert "teachers" in held, "the merge"
    assert held.get("frozen copy of the start", 0) == 4000 * bool(evaluation)


def test_the_estimate_counts_a_baseline_that_alone_has_a_critic():
    """Where no specialist is trained; teachers are given."""
    settings = {"model": {"config": LLAMA}, "teachers": {"sort": {"path": "/models/sort"}}}
    own = {"advantage": {"type": "gae"}, "filter_zero_variance": False}
    large = replace(SHAPE, parameters=10**9)  # so that it takes more than the merge
    for methods, critics in (["average"], 0), (["mixed_grpo"], 4 * 4 * 10**9):
        recipe = make_recipe(Path("unused"), specialist=own, baselines={"methods": methods}, **settings)
        assert memory_parts(recipe, large, {}).get("critics", 0) == critics


def test_what_specialists_ask_is_counted():
    """Of a step at most what refill allows, and beside the steps what measures difficulty."""
    choice = {"refill": {"limit": 5}, "difficulty": {"samples": 6, "prompts": 900}, "replay": {"share": 0.3}}
    sizes = {"steps": 7, "prompts_per_step": 10, "group_size": 4}
    domains = {
        "sort": {"source": "procedural:sort", "prompts": 50, "specialist": choice},
        "add3": {"source": "procedural:add3"},
    }
    settings = {"model": {"config": LLAMA}, "rollout": {"max_new_tokens": 20}, "specialist": sizes}
    recipe = make_recipe(Path("unused"), domains=domains, **settings)
    told, numbers = answer_counts(recipe, "sort")
    assert numbers == {
        "answers": 7 * 50 * 4,
        "tokens": 7 * 50 * 4 * 20,
        "replayed prompts": 7 * 3,
        "answers before": 50 * 6,
        "tokens before": 300 * 20,
    }
    assert (
        "7 steps of 10 prompts x 4 answers of at most 20 tokens: 5,600 tokens; refill takes up to 5" in told
    )
    (found,) = check_answers(recipe)
    assert (found.title, found.detail) == ("answers of specialist sort", told)
    assert answer_counts(recipe, "add3")[1] == {"answers": 280, "tokens": 5600}
    assert memory_parts(recipe, SHAPE, {})["answers of a step"] == 5 * 10 * 4 * (2000 + 13 * 20)
    many = make_recipe(
        Path("unused"),
        domains=domains,
        **settings | {"specialist": sizes | {"group_size": 10_000, "prompts_per_step": 500}},
    )
    assert [f.detail for f in check_sizes(many)] == [
        "domains.sort.specialist.prompts_per_step x group_size x refill.limit makes 25,000,000 responses at"
        " once; give 10,000,000 at most"
    ]


def test_the_estimate_counts_what_teachers_write_before_the_first_step():
    domains = {
        "sort": {"source": "procedural:sort"},
        "add3": {
            "source": "procedural:add3",
            "rollout": {"max_new_tokens": 40},
            "distill": {"prompts_per_domain": 5},
        },
    }
    distill = {"steps": 7, "prompts_per_domain": 3, "samples_per_prompt": 2, "prefixes": "teacher"}
    settings = {"model": {"config": LLAMA}, "domains": domains, "rollout": {"max_new_tokens": 20}}
    parts, disk = (
        estimated(make_recipe(Path("unused"), distill=distill, **settings), SHAPE, {})
        for estimated in (memory_parts, disk_parts)
    )
    answers = 7 * 2 * (3 * (2000 + 20 * 13) + 5 * (2000 + 40 * 13))
    assert parts["teachers' answers"] == disk["log of teachers' answers"] == answers
    assert parts["a teacher that writes"] == 4000 + parts["KV cache"]
    own = make_recipe(Path("unused"), distill=distill | {"prefixes": "student"}, **settings)
    assert memory_parts(own, SHAPE, {}).keys() == parts.keys() - {
        "teachers' answers",
        "a teacher that writes",
    }
    warm_up = {"prefixes": "student", "warm_up": {"steps": 2}}
    begins = make_recipe(Path("unused"), distill=distill | warm_up, **settings)
    for found in (
        memory_parts(begins, SHAPE, {})["teachers' answers"],
        disk_parts(begins, SHAPE, {})["log of teachers' answers"],
    ):
        assert found == answers * 2 // 7


@pytest.mark.parametrize("workers", [1, 2])
def test_the_parts_are_those_of_the_stage_that_needs_the_most(workers):
    domains = {name: {"source": f"procedural:{name}"} for name in ("sort", "add3")}
    settings = {"model": {"config": LLAMA}, "domains": domains, "runtime": {"workers": workers}}
    parts = memory_parts(make_recipe(Path("unused"), **settings), SHAPE, {})
    assert parts["weights"] == workers * 4000  # two specialists side by side, or the merge
    assert ("teachers" in parts) == (workers == 1)


def test_settings_of_a_specialist_that_nobody_trains_are_told(student):
    domains = {name: {"source": f"procedural:{name}", "prompts": 50} for name in ("sort", "add3")}
    for config in domains.values():
        config["specialist"] = {"steps": 3}
    teachers = {"sort": {"path": str(student)}}
    found = check_domains(make_recipe(student, domains=domains, teachers=teachers), {})
    (warning,) = [finding for finding in found if finding.level == "warning"]
    assert warning.title == "domain sort"
    assert warning.detail.startswith("domains.sort.specialist has no effect: this run trains no specialist")


def parted(sample):
    """A reward in parts."""
    return {"right": 1.0, "short": 0.5}


@pytest.mark.parametrize(
    ("general", "methods", "own", "where"),
    [
        ({"right": 1.0, "kind": 0.5}, ["mixed_grpo"], {"teacher": "expert"}, "specialist"),
        ({"right": 1.0, "kind": 0.5}, [], {"teacher": "expert"}, None),
        ({}, [], {"specialist": {"shaping": {"weights": {"kind": 1.0}}}}, "domains.sort.specialist"),
        ({}, ["mixed_grpo"], {"specialist": {"shaping": {"weights": {"right": 1.0}}}}, None),
    ],
    ids=["of the baseline", "of nobody", "its own", "right"],
)
def test_weights_of_parts_that_a_reward_lacks_are_found_before_a_run(student, general, methods, own, where):
    """Those of the recipe are the baseline's, too, which comes after all else is trained."""
    config = {"source": "procedural:sort", "prompts": 50, "reward": f"{__name__}:parted"} | own
    settings = {
        "domains": {"sort": config},
        "teachers": {"expert": {"path": str(student)}},
        "baselines": {"methods": methods},
        "specialist": {"shaping": {"weights": general}},
    }
    recipe = make_recipe(student, **settings)
    loaded: dict = {}
    assert not find(check_domains(recipe, loaded), "error")
    errors = find(check_rewards(recipe, loaded), "error")
    if where is None:
        assert errors == {}
        return
    assert f"{where}.shaping.weights names the part 'kind'" in errors["reward sort"]
    assert "which the reward of domain sort lacks (its parts: right, short)" in errors["reward sort"]


def test_the_estimate_counts_the_teachers_of_specialists():
    domains = {name: {"source": f"procedural:{name}"} for name in ("sort", "add3")}
    opd = {"teacher": {"big": 1.0, "old": 1.0}}
    settings = {
        "model": {"config": LLAMA},
        "domains": domains,
        "teachers": {"big": {"path": "/models/big", "type": "local"}, "old": {"path": "/models/old"}},
        "runtime": {"workers": 2},
        "storage": {"cache_mb": 3},
    }
    shapes = {"big": replace(SHAPE, parameters=7000), "old": SHAPE}
    alone, recipe = (make_recipe(Path("unused"), **settings, specialist={"opd": own}) for own in (None, opd))
    assert [*alone.opd_teachers()] == []
    assert recipe.opd_teachers() == {key: ["sort", "add3"] for key in ("big", "old")}
    parts, disk = memory_parts(recipe, SHAPE, shapes), disk_parts(recipe, SHAPE, shapes)
    head = 10 * 4 * 4  # beside the buffer that `old` passes through in 16 bits, and a part of it in 32
    assert parts["teachers"] == 2 * (7000 * 4 + 1000 * 2 + head + head)  # of two specialists side by side
    assert disk["hidden states"] == 2 * 3 * 2**20
    before = disk_parts(alone, SHAPE, {})
    assert disk["published teachers"] == before["published teachers"] + 2000  # `old`; `big` is read whole


def test_mean_kl_is_the_divergence_of_the_models_own_logits(student, tmp_path):
    other = save_model(tmp_path / "other", seed=7)
    models = [CausalLM.from_pretrained(student), CausalLM.from_pretrained(other)]
    sequences = [
        (np.array([2, 5, 6], np.int32), np.array([7, 8], np.int32)),
        (np.array([2], np.int32), np.array([3, 4, 1], np.int32)),
        (np.array([2, 3], np.int32), np.array([], np.int32)),
    ]
    expected = []
    for prompt, response in sequences:
        ids = torch.tensor([[*prompt, *response]])
        rows = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        with torch.no_grad():
            hidden = [m.hidden(ids[0], torch.arange(ids.shape[1]), [0, ids.shape[1]]) for m in models]
        logits = [
            h[rows].double() @ m.head().weight.double().T / 0.8 for h, m in zip(hidden, models, strict=True)
        ]
        p, t = (torch.log_softmax(values, -1) for values in logits)
        expected += (p.exp() * (p - t)).sum(-1).tolist()
    samples = [
        Sample(str(number), str(number), "d", prompt, response_ids=response)
        for number, (prompt, response) in enumerate(sequences)
    ]
    vocabulary = models[0].vocab_size
    teacher = LocalTeacher("other", other, vocabulary=vocabulary)
    value = mean_kl(models[0], teacher, samples, vocabulary, 0.8)
    assert value == pytest.approx(float(np.mean(expected)), rel=1e-4)
    assert value > 1e-6


def test_the_table_and_the_exit_status(student, tmp_path):
    status, text = diagnose_text(make_recipe(student))
    assert (status, "0 errors" in text) == (0, True)
    status, text = diagnose_text(make_recipe(tmp_path / "none"))
    assert (status, str(tmp_path / "none") in text) == (2, True)


def test_opd_run_stops_at_the_doctors_errors(student, tmp_path, ends):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: demo\nmodel: {{path: {student}}}\ndomains: {{chess: {{source: 'procedural:chess'}}}}\n"
    )
    assert "opd: error: domain chess: " in ends(2, ["run", str(recipe), "--out", str(tmp_path / "run")]).err
    assert not (tmp_path / "run").exists()


def test_a_warm_up_needs_demonstrations(student, tmp_path):
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}=", "label": str(n)}) + "\n" for n in range(40)))
    domains = {"sums": {"source": str(data), "reward": "operator:truth"}}
    errors = find(run_checks(make_recipe(student, domains=domains, base={})), "error")
    assert "no demonstrations" in errors["domain sums"]


def started(folder: Path, recipe: Recipe) -> Path:
    RunFolder.create(folder, recipe).close()
    return folder


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "state", ["nothing", "empty", "a run", "another run", "not a run", "a file", "in use"]
)
def test_the_doctor_says_of_a_folder_what_a_run_would(student, tmp_path, state, resume):
    recipe, path = make_recipe(student), tmp_path / "run"
    if state in ("empty", "not a run"):
        path.mkdir()
    if state == "not a run":
        (path / "notes.txt").touch()
    if state == "a file":
        path.touch()
    if state in ("a run", "in use"):
        started(path, recipe)
    if state == "another run":
        started(path, make_recipe(student, seed=7))
    holding = RunFolder.resume(path, recipe) if state == "in use" else None
    # A lock of this process's own would be seen by the file system too.
    before = sorted(p.name for p in tmp_path.rglob("*"))
    findings = run_checks(recipe, run_dir=path, resume=resume, thorough=False)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before, "the doctor writes nothing"
    said = find(findings, "error").get("run folder")
    told = None
    try:
        (RunFolder.resume if resume else RunFolder.create)(path, recipe).close()
    except RunFolderError as error:
        told = str(error)
    finally:
        if holding is not None:
            holding.close()
    assert said == told


@pytest.mark.slow
def test_what_the_doctor_prints_can_be_read_by_programs(student, tmp_path, capsys, ends):
    enough = make_recipe(student, evaluation={"prompts_per_domain": 100})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(enough.model_dump(mode="json", exclude_none=True)))
    assert main(["doctor", str(recipe), "--out", str(tmp_path / "run"), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(list(line) == ["level", "check", "finding", "numbers"] for line in lines)
    memory = next(line["numbers"] for line in lines if line["check"] == "memory")
    parts = {name: size for name, size in memory.items() if name not in ("needed", "free")}
    assert sum(parts.values()) == memory["needed"]
    *plain, last = ends(0, ["doctor", str(recipe), "--out", str(tmp_path / "run")]).out.splitlines()
    assert [line.split()[0] for line in plain] == [line["level"] for line in lines]
    assert f"ok       run folder: {tmp_path / 'run'}" in plain
    assert last == "0 errors, 0 warnings"
    started(tmp_path / "run", make_recipe(student))
    *again, last = ends(2, ["doctor", str(recipe), "--out", str(tmp_path / "run")]).out.splitlines()
    assert last == "1 error, 0 warnings"
    assert "error    run folder: " in again[0]
    made = [[line.split(":")[0].split(maxsplit=1)[1] for line in lines] for lines in (plain, again)]
    assert made[0] == made[1], "a folder that is taken stands in the way of no other check"


@pytest.mark.some(1)
@pytest.mark.parametrize("place", ["{0}/a_file", "{0}/a_file/run", "{0}/" + "x" * 300])
def test_no_run_folder_keeps_the_doctor_from_the_other_checks(student, tmp_path, place):
    (tmp_path / "a_file").touch()
    found = run_checks(make_recipe(student, student), run_dir=Path(place.format(tmp_path)))
    assert find(found, "error").keys() <= {"run folder", "resources"}
    made = {finding.title for finding in found}
    assert {"student", "prompts sort", "memory"} <= made or "resources" in made
    assert ("resources" in made) != ("KL to expert on sort" in made)


def test_the_disk_estimate_counts_what_remains(tmp_path, monkeypatch):
    """On a full disk a run that is done resumes, and one that has everything before it does not start."""
    recipe = make_recipe(Path("unused"), model={"config": LLAMA}, storage={"cache_mb": 3})
    run, left = tmp_path / "run", [sum(disk_parts(recipe, SHAPE, {}).values())]
    for stage in ("base", "specialist-sort", "merge", "evaluate"):
        (run / "stages" / stage).mkdir(parents=True)
        for step in (1, 2):
            checkpoint = run / "stages" / stage / "checkpoints" / f"step_{step}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "model.safetensors").write_bytes(bytes(12_000))
            left.append(total_bytes(remaining_disk(recipe, SHAPE, {}, run)))
        (run / "stages" / stage / "done.json").write_text("{}")
        left.append(total_bytes(remaining_disk(recipe, SHAPE, {}, run)))
    for method in recipe.baselines.methods:
        (run / "stages" / f"baseline-{method}").mkdir()
        (run / "stages" / f"baseline-{method}" / "done.json").write_text("{}")
        left.append(total_bytes(remaining_disk(recipe, SHAPE, {}, run)))
    assert left == sorted(left, reverse=True)
    assert left[0] > left[-1] == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 30, free=10_000))
    assert find(check_resources(recipe, Models(student=SHAPE), run), "error") == {}
    assert "does not fit" in find(check_resources(recipe, Models(student=SHAPE), tmp_path), "error")["disk"]


def test_teachers_that_cannot_be_reached_are_asked_together_and_named_in_one_sentence():
    together = threading.Barrier(3, timeout=60)

    def look(source: str) -> None:
        together.wait()  # passes only if all three are being asked at once
        raise StorageError(f"{source}/latest cannot be read: no answer; start the store.")

    teachers = {name: f"s3://bucket/{name}" for name in ("math", "code", "prose")}
    lost = unreadable_teachers(teachers | {"here": "/a/folder"}, look)
    (finding,) = group_errors(teachers, lost)
    assert (finding.level, finding.title) == ("error", "teacher math, code, prose")
    assert finding.detail == (
        "s3://bucket/math/latest cannot be read: no answer; start the store; the same for code, prose"
    )


def test_a_published_teacher_that_is_gone_is_found_by_the_doctor(student, tmp_path):
    publish_checkpoint(student, f"file://{tmp_path}/a")
    (tmp_path / "a" / "latest").write_bytes(b"nothing")
    recipe = make_recipe(student, Path("x"), teachers={"expert": {"path": f"{tmp_path}/a"}})
    findings = run_checks(recipe, run_dir=tmp_path / "run", thorough=False)
    assert "teacher expert" in find(findings, "error")


def test_a_reward_that_goes_elsewhere_and_closes_the_output_hinders_nothing(
    student, tmp_path, monkeypatch, ends
):
    """The models are loaded after the first reward was called, and by then from another folder."""
    shutil.copytree(student, tmp_path / "model")
    (tmp_path / "wanders.py").write_text(
        "import os, sys\ndef f(sample):\n    os.chdir('/')\n    sys.stdout.close()\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    recipe = make_recipe(
        Path("model"), domains={"sort": {"source": "procedural:sort", "reward": "wanders:f"}}
    )
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    said = ends(0, ["doctor", "recipe.yaml", "--out", "run"]).out
    assert "reward sort: 1 for an empty answer" in said
    assert "reward sort, the base: 1 for" in said
    assert "0 errors" in said
    assert Path.cwd() == Path("/")


def test_the_estimate_counts_copies_of_teachers_in_object_stores(tmp_path, monkeypatch):
    """Once for each base, however many adapters it has; of a served teacher the head."""
    paths = {name: f"s3://x/{name}" for name in "abc"} | {"near": "file:///x/near", "here": "/models/here"}
    teachers = {name: {"path": path} for name, path in paths.items()}
    served = {"type": "sglang", "path": "s3://x/d", "urls": ["http://127.0.0.1:1"]}
    domains = {"sort": {"source": "procedural:sort", "teacher": dict.fromkeys([*paths, "served"], 1.0)}}
    shape = replace(SHAPE, published=True)
    shapes = {name: replace(shape, digest=digest) for name, digest in zip("abc", "112", strict=True)}
    shapes |= {"served": replace(shape, digest="3"), "near": shape, "here": SHAPE}
    part, given = "copies of teachers in object stores", teachers | {"served": served}

    def recipe_of(published=None, **runtime):
        settings = {"model": {"config": LLAMA}, "domains": domains, "baselines": {"methods": []}}
        storage = {"published": published, "cache_mb": 3}
        return make_recipe(Path("unused"), **settings, teachers=given, storage=storage, runtime=runtime)

    recipe = recipe_of()
    read = 2 * 2000 + 2000 * 10 * 4 // 1000
    assert disk_parts(recipe, SHAPE, shapes)[part] == read
    assert disk_parts(recipe_of(published="s3://x"), SHAPE, shapes)[part] == read + 2000  # `here` too
    assert part not in disk_parts(recipe_of(weights_cache_mb=0), SHAPE, shapes)
    large = {name: replace(own, stored=800 << 20) for name, own in shapes.items() if name in "abc"}
    assert disk_parts(recipe_of(weights_cache_mb=9), SHAPE, large)[part] == 9 << 20
    models = Models(student=SHAPE, teachers=large)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1, free=1500 << 20))
    found = find(check_resources(recipe, models, tmp_path), "error")
    assert "copies of teachers in object stores 1.6 GiB" in found["disk"]
    assert "lower runtime.weights_cache_mb, or free" in found["disk"]
    elsewhere = recipe_of(weights_cache=str(tmp_path / "node" / "disk"))
    found = find(check_resources(elsewhere, models, tmp_path), "error")
    assert found.keys() == {"runtime.weights_cache"}
    (tmp_path / "node" / "disk").mkdir(parents=True)
    (tmp_path / "node" / "disk" / "copies").write_bytes(b"")
    os.truncate(tmp_path / "node" / "disk" / "copies", 900 << 20)  # that much of it is there
    assert find(check_resources(elsewhere, models, tmp_path), "error") == {}
    (tmp_path / "file").touch()
    for place, level in (("file/copies", "warning"), ("s3://x/copies", "error")):
        place = place if "s3" in place else str(tmp_path / place)
        found = find(check_resources(recipe_of(weights_cache=place), models, tmp_path), level)
        assert found.keys() == {"runtime.weights_cache"}


def test_a_cache_that_does_not_fit_is_to_be_made_smaller(tmp_path, monkeypatch):
    recipe = make_recipe(Path("unused"), model={"config": LLAMA}, storage={"cache_mb": 900})
    for free, mend in [
        (800 << 20, "lower storage.cache_mb, or free"),
        (1000, "use a smaller model or batch, or free"),
    ]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(total=1, free=free))
        found = find(check_resources(recipe, Models(student=SHAPE), tmp_path), "error")
        assert mend in found["disk"]


def test_a_rank_has_libraries_and_no_more_than_its_process_may(tmp_path, monkeypatch):
    def found(**train):
        recipe = make_recipe(tmp_path, model={"config": LLAMA}, train=train)
        models = Models(student=SHAPE)
        return {f.title: f for f in check_resources(recipe, models, tmp_path)}

    monkeypatch.setattr(resources, "available_memory", lambda device: 8 << 30)
    alone, ranks = found()["memory"], found(ranks=2)["memory of a rank"]
    assert (alone.numbers["libraries"], ranks.numbers["libraries"]) == (0, resources._LIBRARIES)
    assert (alone.numbers["free"], ranks.numbers["free"]) == (8 << 30, 4 << 30)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, limits[1]))
    try:
        assert found(ranks=2)["memory of a rank"].numbers["free"] == 3 << 30
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    few = found(ranks=64)["memory of a rank"]  # 128 MiB each
    assert few.level == "error"
    assert "libraries 290.0 MiB" in few.detail


def test_an_offload_that_would_change_nothing_is_not_told(tmp_path):
    for offload in ({}, {"engine": True, "trainer": True}):
        recipe = make_recipe(tmp_path, model={"config": LLAMA}, runtime={"offload": offload})
        told, sizes, _ = format_phases(recipe, SHAPE, {})
        assert ("with runtime.offload" in told) == ("with offload" in sizes) == (not offload)
    recipe = make_recipe(tmp_path, model={"config": LLAMA}, runtime={"offload": {"trainer": True}})
    largest = max(map(total_bytes, memory_by_phase(recipe, SHAPE, {}).values()))
    told, sizes, _ = format_phases(recipe, SHAPE, {})
    assert sizes.get("with offload", largest - 1) < largest


@pytest.mark.parametrize(("rank", "warned"), [(15, False), (16, True)])
def test_adapters_that_are_larger_than_what_they_change_are_a_warning(tmp_path, rank, warned):
    recipe = make_recipe(tmp_path, model={"config": LLAMA, "lora": {"rank": rank}})
    found = find(run_checks(recipe, thorough=False), "warning")
    assert ("model.lora.rank" in found) == warned


SERVED = {"type": "sglang", "servers": "own"}


@pytest.mark.parametrize(
    ("lacks", "extra", "changes"),
    [
        ("peft", "lora", {"model": {"lora": {}, "config": {"model_type": "llama"}}}),
        ("orjson", "sglang", {"servers": {"own": {}}, "rollout": {"engine": SERVED}}),
        ("aiohttp", "sglang", {"servers": {"own": {}}, "teachers": {"sort": SERVED}}),
        ("deepspeed", "deepspeed", {"train": {"backend": "deepspeed"}}),
        ("megatron", "megatron", {"train": {"backend": "megatron"}}),
    ],
)
def test_an_extra_that_is_not_installed_is_named_before_anything_is_started(
    student, tmp_path, monkeypatch, lacks, extra, changes
):
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == lacks else SimpleNamespace())
    recipe = make_recipe(student, **changes)
    [finding] = check_extras(recipe)
    assert (finding.level, finding.title) == ("error", f"extra {extra}")
    assert f"pip install 'opd[{extra}]'" in finding.detail
    assert finding in run_checks(recipe, run_dir=tmp_path / "run", thorough=False)
    assert check_extras(make_recipe(student, **changes, launch="ray")) == []
    assert check_extras(make_recipe(student)) == []


@pytest.mark.parametrize(
    ("group", "others", "gpus"),
    [
        ({}, {}, "0"),
        ({"devices": [0]}, {}, "0"),
        ({"devices": [1]}, {}, None),
        ({"devices": [1]}, {"train": {"ranks": 2}}, "1"),
        ({"count": 2, "devices": [0, 1]}, {"train": {"ranks": 2}}, "0, 1"),
        ({"count": 2, "devices": [2, 3]}, {"train": {"ranks": 2}}, None),
        ({"devices": [1]}, {"model": {"device": "cuda:1"}}, "1"),
        ({"devices": [0]}, {"model": {"device": "cuda:1"}}, None),
        ({"devices": [0]}, {"model": {"device": "cpu"}}, None),
        ({"arguments": {"mem-fraction-static": 0.4}}, {}, None),
        ({}, {"runtime": {"offload": {"engine": True}}}, None),
        ({}, {"launch": "ray"}, None),
    ],
)
def test_servers_that_fill_a_trainers_gpu_are_named(student, group, others, gpus):
    model = {"path": str(student), "device": "cuda"} | others.get("model", {})
    group = {"command": [sys.executable, "-m", "served"]} | group
    settings = {**others, "model": model, "rollout": {"engine": SERVED}, "servers": {"own": group}}
    found = warnings(check_servers(make_recipe(student, **settings)), "servers own")
    assert len(found) == (gpus is not None)
    assert all(f"nearly all memory of GPU {gpus}, where the student trains" in text for text in found)


def test_what_a_cluster_needs_here_is_named_before_it_is_started(student, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "ray" else SimpleNamespace())
    recipe = make_recipe(student, launch="ray", runtime={"workers": 2})
    [finding] = check_extras(recipe)
    assert (finding.level, finding.title) == ("error", "extra ray")
    [misfit] = check_ranks(recipe)
    assert (misfit.level, misfit.title) == ("error", "train.ranks")
    assert "set runtime.workers to 1" in misfit.detail
    assert {finding.title for finding in (finding, misfit)} <= {
        found.title for found in run_checks(recipe, run_dir=tmp_path / "run", thorough=False)
    }
    assert not check_ranks(make_recipe(student, launch="ray"))
