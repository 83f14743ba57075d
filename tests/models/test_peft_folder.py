"""An adapter folder as peft writes it, given where a model is expected: its base, and the adapter merged."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from opd.config import Recipe
from opd.errors import CheckpointError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_folder import ORIGIN
from opd.models.hf_weights import check_weights
from opd.models.tokenizers import load_tokenizer
from opd.pipelines.commands.publish import publish_checkpoint
from opd.pipelines.doctor.examine import examine
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.teachers import published_teacher, streamed_source, whole_model
from opd.storage.published import PublishedModel
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.published_adapter import is_adapter

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
DIGITS = "0123456789="


def adapt(base: Path, folder: Path, seed: int = 0, **config) -> tuple[Path, dict[str, torch.Tensor]]:
    """An adapter on `base` that peft has written, and the weights that peft's own merge makes."""
    model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False)
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**options | config))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    wrapped.save_pretrained(folder)
    merged = wrapped.merge_and_unload()
    return folder, {name: tensor.detach().clone() for name, tensor in merged.named_parameters()}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path_factory.mktemp("base") / "m", {})


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"r": 1}, {"target_modules": "all-linear"}])
def test_it_is_loaded_as_peft_would_merge_it(base, tmp_path, config):
    folder, expected = adapt(base, tmp_path / "adapter", **config)
    check_weights(folder)
    found = dict(CausalLM.from_pretrained(folder).weights())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    assert not torch.equal(
        found["model.layers.0.mlp.down_proj.weight"],
        dict(CausalLM.from_pretrained(base).weights())["model.layers.0.mlp.down_proj.weight"],
    )
    assert load_tokenizer(folder).get_vocab() == tiny.tokenizer().get_vocab()
    assert LocalTeacher("t", folder, vocabulary=10).load_head().vocabulary == 10


def test_its_base_may_lie_beside_it(base, tmp_path):
    folder, _ = adapt(base, tmp_path / "adapter")
    shutil.copytree(base, tmp_path / "here")
    config = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": "../here"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert CausalLM.from_pretrained(folder).digest()


def set_config(**changes):
    def damage(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text()) | changes
        (folder / "adapter_config.json").write_text(json.dumps(config))

    return damage


def rename(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {k.replace("layers.1", "layers.7"): v for k, v in tensors.items()},
        folder / "adapter_model.safetensors",
    )


def halve(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = {
    "no such base": (
        set_config(base_model_name_or_path="org/name-of-the-hub"),
        "org/name-of-the-hub, which is no",
    ),
    "no base": (set_config(base_model_name_or_path=None), "does not name its base"),
    "dora": (set_config(use_dora=True), "describes use_dora"),
    "ia3": (set_config(peft_type="IA3"), "describes IA3"),
    "biases": (set_config(bias="all"), "bias all"),
    "saved modules": (set_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "a changed base": (set_config(init_lora_weights="pissa"), "init_lora_weights pissa"),
    "rank zero": (set_config(r=0), "not a whole adapter"),
    "other layers": (rename, r"adapts model\.layers\.7"),
    "cut short": (halve, "truncated or corrupt"),
    "gone": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "adapter_model.safetensors is missing",
    ),
    "not JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read as JSON"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_what_cannot_be_merged_is_refused_with_one_sentence(base, tmp_path, case):
    damage, told = DAMAGES[case]
    folder, _ = adapt(base, tmp_path / "adapter")
    damage(folder)
    for read in (CausalLM.from_pretrained, lambda path: publish_checkpoint(path, tmp_path / "published")):
        with pytest.raises(
            CheckpointError, match=told if read is CausalLM.from_pretrained else None
        ) as caught:
            read(folder)
        assert "\n" not in str(caught.value)


def test_a_base_of_another_width_is_refused(base, tmp_path):
    folder, _ = adapt(base, tmp_path / "adapter")
    other = save_checkpoint(tiny.model(intermediate_size=96), tiny.tokenizer(), tmp_path / "other", {})
    set_config(base_model_name_or_path=str(other))(folder)
    for read in (check_weights, CausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match=r"adapts .*down_proj\.weight, which its base"):
            read(folder)


def run_recipe(base: Path, teachers: dict[str, Path], **changes) -> Recipe:
    settings = {
        "name": "adapters",
        "model": {"path": str(base)},
        "teachers": {name: {"path": str(path)} for name, path in teachers.items()},
        "domains": {
            name: {"source": f"procedural:{task}", "params": {"digits": 3}, "prompts": 20, "teacher": name}
            for name, task in zip(teachers, ("sort", "add3"), strict=False)
        },
        "rollout": {"max_new_tokens": 4, "max_sequence": 16},
        "distill": {"steps": 2, "prompts_per_domain": 2},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 4},
    }
    return Recipe.model_validate(settings | changes)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    from opd.models.tokenizers import character_tokenizer

    tokenizer = character_tokenizer(DIGITS, ["<sort>", "<add3>"])
    model = CausalLM.from_config(tiny.LLAMA, tokenizer=tokenizer)
    return save_checkpoint(model, tokenizer, tmp_path_factory.mktemp("start") / "m", {})


def merged_by(recipe: Recipe, path: Path) -> str:
    assert [f for f in examine(recipe, run_dir=path) if f.level == "error"] == []
    with RunFolder.create(path, recipe) as folder:
        run_stage(recipe, folder, "merge")
        run_stage(recipe, folder, "evaluate")
        assert set(json.loads(folder.results.read_text())["teachers"]) == set(recipe.teachers)
        return folder.stage_done("merge")["digest"]


@pytest.mark.parametrize("teachers", ["streamed", "local"])
def test_adapters_as_teachers_are_the_models_they_make(start, tmp_path, teachers):
    adapters, whole = {}, {}
    for seed, name in enumerate(("one", "two")):
        adapters[name], _ = adapt(start, tmp_path / name, seed=seed)
        model = CausalLM.from_pretrained(adapters[name])
        whole[name] = save_checkpoint(model, load_tokenizer(start), tmp_path / f"{name}-whole", {})
    how = {"steps": 2, "prompts_per_domain": 2, "teachers": teachers}
    digests = [
        merged_by(run_recipe(start, given, distill=how), tmp_path / f"run-{i}")
        for i, given in enumerate((adapters, whole))
    ]
    assert digests[0] == digests[1]
    if teachers == "streamed":  # as adapters: their base once, nothing merged on disk
        assert not (tmp_path / "run-0" / "downloaded").exists()


def test_they_are_published_as_adapters_on_one_base_or_whole_where_that_is_asked(start, tmp_path):
    teachers = {name: adapt(start, tmp_path / name, seed=i)[0] for i, name in enumerate(("one", "two"))}
    recipe = run_recipe(start, teachers)
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        context = StageContext.open(recipe, folder, "merge", lambda *_: None)
        urls = [streamed_source(context, name) for name in teachers]
        assert all(is_adapter(url) for url in urls)
        with PublishedModel.open(published_teacher(context, "one")) as published:
            assert len(published.manifest.units) > 3
        context.metrics.close()


WHOLE = {
    "flipped bit": lambda out: flip(out / "model.safetensors"),
    "truncated": lambda out: (out / "model.safetensors").write_bytes(b"x"),
    "missing": lambda out: (out / "config.json").unlink(),
    "changed": lambda out: (out / "config.json").write_text("{}"),
    "not finished": lambda out: (out / ORIGIN).unlink(),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("what", WHOLE)
def test_the_model_it_makes_is_made_again_where_it_is_not_what_was_written(start, tmp_path, what):
    adapter, _ = adapt(start, tmp_path / "one", seed=0)
    out = whole_model(adapter, tmp_path / "out")
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    WHOLE[what](out)
    whole_model(adapter, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == written
    place = (out / "model.safetensors").stat().st_ino
    whole_model(adapter, out)
    assert (out / "model.safetensors").stat().st_ino == place  # kept
    whole_model(adapt(start, tmp_path / "two", seed=1)[0], out)
    assert (out / "model.safetensors").read_bytes() != written["model.safetensors"]


def test_a_student_may_start_from_one(start, tmp_path):
    adapter, expected = adapt(start, tmp_path / "adapter", seed=3)
    recipe = run_recipe(
        adapter, {"one": start}, distill={"steps": 1, "prompts_per_domain": 2, "optim": {"lr": 1e-9}}
    )
    merged_by(recipe, tmp_path / "run")
    for name, tensor in CausalLM.from_pretrained(tmp_path / "run" / "base").weights():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
