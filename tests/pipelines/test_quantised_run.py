"""Runs with `model.quantize`: engine and trainer hold the same FP8, which is written and gone on with."""

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attempts import merged, run_only
from pydantic import ValidationError
from recipes import NO_CURVE, tiny_recipe, write_recipe
from test_preempted_run import finish, interrupt, start

from opd.config import Recipe
from opd.config.teachers import SGLangEngineConfig
from opd.errors import RolloutError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.converted_folder import FP8Weights, convert_folder
from opd.models.hf_folder import quantisation_in
from opd.models.hf_weights import check_weights
from opd.models.tokenizers import load_tokenizer
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.served_engine import ServedHelpers
from opd.pipelines.stages.student import embedded_pool
from opd.pipelines.stages.supervised import new_base
from opd.ranks import Ranks
from opd.rollout.weight_proof import check_config
from opd.train.backend import TrainingSettings
from opd.train.backends import open_backend

FP8 = {"quantize": "fp8"}


def settings(tmp_path: Path, **model) -> dict:
    """A merge of the student's start and another model into it, in FP8."""
    for seed, name in enumerate(("start", "other")):
        if not (tmp_path / name).exists():
            new_base(tiny_recipe(base=None, seed=seed), tmp_path / name)
    domains = {name: one.model_dump() for name, one in tiny_recipe().domains.items()}
    domains["sort"] |= {"teacher": "other"}
    domains["add3"] |= {"teacher": "other"}
    return {
        "model": {"path": str(tmp_path / "start")} | FP8 | model,
        "base": None,
        "domains": domains,
        "teachers": {"other": {"path": str(tmp_path / "other"), "type": "local"}},
        "distill": {"steps": 6, "prompts_per_domain": 3, "checkpoint_every": 2},
        "baselines": {"methods": []},
        "evaluation": NO_CURVE,
    }


def done(out: Path, stage: str = "merge") -> dict:
    return json.loads((out / "stages" / stage / "done.json").read_text())


def assert_is_fp8(folder: Path, digest: str) -> None:
    """A whole FP8 folder, whose numbers are those that the student computed with last."""
    form = quantisation_in(folder)
    assert form is not None
    assert form.title == "FP8 in blocks of 128 x 128"
    check_weights(folder)
    model = CausalLM.from_pretrained(folder)
    assert model.digest() == digest
    weights = FP8Weights(model.module.config)
    assert len(weights.names) == 14
    for (name, one), (_, rounded) in zip(model.weights(), weights.of_weights(model.weights()), strict=True):
        assert torch.equal(one, rounded), name
    assert "are FP8 (e4m3, a scale for each block of 128 x 128)" in (folder / "README.md").read_text()
    assert not (folder / "plain").exists()


def test_killed_in_the_merge_it_ends_alike(tmp_path: Path) -> None:
    recipe, digests = write_recipe(tmp_path / "recipe.yaml", **settings(tmp_path)), []
    for name in ("undisturbed", "killed"):
        out = tmp_path / name
        with RunFolder.create(out, Recipe.model_validate(tiny_recipe(**settings(tmp_path)))):
            pass
        if name == "killed":
            status, said = interrupt(start("distill", recipe, out), out, "merge", 3, signal.SIGKILL)
            assert status == -signal.SIGKILL, said
        digests.append(finish("distill", recipe, out))
        assert_is_fp8(out / "merged", digests[-1])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_begins_with_what_the_trainer_rounds(tmp_path: Path, dtype: str) -> None:
    recipe = tiny_recipe(**settings(tmp_path, dtype=dtype))
    start = tmp_path / "start"  # in float32: bfloat16 is rounded once, not twice
    training = TrainingSettings(recipe.distill.optim, recipe.distill.batch, 1.0, [], quantize="fp8")
    with open_backend(
        lambda name, empty=False: CausalLM.from_pretrained(start, dtype=name or dtype),
        recipe.train,
        training,
        Ranks(),
        dtype=dtype,
    ) as backend:
        [engine] = embedded_pool(recipe, start).engines
        assert engine.model.digest() == backend.digest()  # type: ignore[attr-defined]
        assert engine.model.digest() != CausalLM.from_pretrained(start, dtype=dtype).digest()  # type: ignore[attr-defined]


def test_a_specialist_in_fp8_is_as_near_to_its_engine_as_another(tmp_path: Path) -> None:
    """And its start, which is warmed up in FP8, is written so."""
    nearest, domains = {}, settings(tmp_path)["domains"]
    for domain in domains.values():
        domain["reward"], domain["teacher"] = "recipes:varied", None
    for name, more in (("plain", {}), ("fp8", FP8)):
        model = {"config": tiny_recipe().model.config} | more
        recipe = tiny_recipe(model=model, domains=domains, evaluation=NO_CURVE, base={"steps": 5})
        run_only(recipe, tmp_path / name, "specialist-sort")
        rows = (tmp_path / name / "stages/specialist-sort/metrics.jsonl").read_text().splitlines()
        nearest[name] = max(json.loads(row)["mismatch/max_abs"] for row in rows)
    for folder, stage in (("base", "base"), ("specialists/sort", "specialist-sort")):
        assert_is_fp8(tmp_path / "fp8" / folder, done(tmp_path / "fp8", stage)["digest"])
        assert quantisation_in(tmp_path / "plain" / folder) is None
    assert nearest["fp8"] < max(1e-5, 3 * nearest["plain"])


def test_a_start_in_fp8_is_not_rounded_again(tmp_path: Path) -> None:
    """Of power-of-two scales, through bfloat16, and what comes out is FP8 again."""
    given = settings(tmp_path, path=str(tmp_path / "fp8"))
    (tmp_path / "fp8").mkdir()
    convert_folder(tmp_path / "start", tmp_path / "fp8", "fp8", lambda name: None)
    recipe = tiny_recipe(**given | {"distill": {"steps": 1, "prompts_per_domain": 1, "optim": {"lr": 1e-12}}})
    merged(recipe, tmp_path / "run", weights="model-00001.safetensors")
    assert_is_fp8(tmp_path / "run/merged", CausalLM.from_pretrained(tmp_path / "run/merged").digest())
    first, last = (CausalLM.from_pretrained(tmp_path / name) for name in ("fp8", "run/merged"))
    for (name, one), (_, other) in zip(first.weights(), last.weights(), strict=True):
        assert torch.equal(one, other) or name not in FP8Weights(first.module.config).names, name


def test_servers_begin_with_a_plain_copy_of_an_fp8_model(tmp_path: Path) -> None:
    recipe = tiny_recipe(**settings(tmp_path))
    (tmp_path / "fp8").mkdir()
    start = tmp_path / "start"
    model, tokenizer = CausalLM.from_pretrained(start), load_tokenizer(start)
    save_checkpoint(model, tokenizer, tmp_path / "fp8", {}, quantize="fp8")
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        context = SimpleNamespace(recipe=recipe, ranks=Ranks(), folder=folder, stage="merge", servers=None)
        context.helpers = None
        with ExitStack() as stack:
            served = ServedHelpers(context, SGLangEngineConfig(type="sglang", urls=["http://host"]), stack)  # type: ignore[arg-type]
            assert served._plain_model(start) == start
            plain = served._plain_model(tmp_path / "fp8")
            assert served._plain_model(tmp_path / "fp8") == plain
    assert quantisation_in(plain) is None
    digests = {CausalLM.from_pretrained(one).digest() for one in (plain, tmp_path / "fp8")}
    assert len(digests) == 1


def test_a_server_of_quantised_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(RolloutError, match=r"quantised, .*; serve the student's plain folder\."):
        check_config("http://host", {"model_path": str(tmp_path)}, {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": FP8 | {"lora": {}}}, "with model.lora adapters learn.*leave one of the two out"),
        ({"model": FP8 | {"dtype": "float16"}}, "float16 does not hold all numbers of model.quantize fp8"),
        ({"model": {"quantize": "fp4"}}, "fp8"),
        ({"model": FP8, "train": {"backend": "megatron"}}, "train.backend megatron does not keep; set"),
        ({"model": FP8, "train": {"backend": "deepspeed"}}, "train.backend deepspeed does not keep"),
        ({"model": FP8, "train": {"precision": "pure"}}, "train.precision pure does not keep; set"),
    ],
)
def test_what_fp8_cannot_be_together_with_is_said(changes: dict, said: str) -> None:
    model = {"config": tiny_recipe().model.config} | changes["model"]
    with pytest.raises(ValidationError, match=said):
        tiny_recipe(**changes | {"model": model})
