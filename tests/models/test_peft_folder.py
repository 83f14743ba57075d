"""An adapter folder as peft writes it, given where a model is expected: its base, and the adapter merged."""

import dataclasses
import json
import shutil
import subprocess
import sys
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
from opd.pipelines.check.examine import run_checks
from opd.pipelines.cli import main
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.publishing import publish_checkpoint, whole_model
from opd.pipelines.stages.teachers import published_teacher, streamed_source
from opd.storage.published import PublishedModel
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.published_adapter import is_adapter, publish_adapter
from opd.teachers.skeleton import download_model

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model .* .tie_word_embeddings=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
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


PLAIN = {
    "both, by patterns": {
        "rank_pattern": {r".*\.1\..*(q|v)_proj": 3, "^model.layers.0.mlp.down_proj": 5},
        "alpha_pattern": {r"layers\.\d+\.mlp\.\w+": 11, "q_proj": 1},
        "use_rslora": True,
    },
    "plain": {},
    "rank-stabilised": {"use_rslora": True},
    "rank one": {"r": 1},
    "every layer": {"target_modules": "all-linear"},
    "a pattern": {"target_modules": r".*\.(q_proj|down_proj)"},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "but some": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "ranks by layer": {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 7}},
    "alphas by layer": {"alpha_pattern": {"q_proj": 64, "layers.0.mlp.down_proj": 0.5}},
    "a pattern of no layer": {"rank_pattern": {"k_proj": 3, "_proj": 9}, "alpha_pattern": {"proj": 1}},
    "an alpha of nothing": {"lora_alpha": 0, "alpha_pattern": {"q_proj": 3}},
    "dropped out": {"lora_dropout": 0.5},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "a target that no layer has": {"target_modules": ["q_proj", "query_key_value"]},
    "no task": {"task_type": None},
}


@pytest.mark.some(1)
@pytest.mark.parametrize("case", PLAIN)
def test_it_is_loaded_as_peft_would_merge_it(base, tmp_path, case):
    same_as_peft(base, tmp_path / "adapter", **PLAIN[case])


def test_the_process_that_matches_patterns_imports_no_library_of_models():
    code = "import sys, opd.models.config_values; print({'torch', 'transformers'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "set()\n"


def same_as_peft(base: Path, to: Path, **config) -> None:
    folder, expected = adapt(base, to, **config)
    check_weights(folder)
    found = dict(CausalLM.from_pretrained(folder).weights())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    plain = dict(CausalLM.from_pretrained(base).weights())
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in found.items())
    assert load_tokenizer(folder).get_vocab() == tiny.tokenizer().get_vocab()
    assert LocalTeacher("t", folder, vocabulary=10).load_head().vocabulary == 10


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> Path:
    """A base whose head is not its embedding."""
    made = tiny.model(tie_word_embeddings=False)
    return save_checkpoint(made, tiny.tokenizer(), tmp_path_factory.mktemp("apart") / "m", {})


def test_an_adapter_on_the_head_is_read_beside_the_copy_that_peft_keeps_of_it(apart, tmp_path):
    same_as_peft(apart, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert "base_model.model.lm_head.base_layer.weight" in names


def test_an_adapter_on_a_head_that_is_the_embedding_is_refused_at_every_door(base, tmp_path):
    folder, _ = adapt(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    url = f"file://{tmp_path / 'base'}"
    publish_checkpoint(base, url)
    doors = (check_weights, CausalLM.from_pretrained, lambda f: publish_adapter(f, tmp_path / "out", url))
    for read in doors:
        with pytest.raises(
            CheckpointError, match=r"adapts lm_head\.weight, which its base shares with its emb"
        ):
            read(folder)


@pytest.mark.parametrize("fan_in_fan_out", [True, False])
def test_it_lies_on_gpt_2_s_layers_which_are_transposed(tmp_path, fan_in_fan_out):
    from transformers import GPT2Config, GPT2LMHeadModel

    small = GPT2Config(
        vocab_size=20, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )
    GPT2LMHeadModel(small).save_pretrained(tmp_path / "base")
    # A square weight fits either way around.
    folder, expected = adapt(tmp_path / "base", tmp_path / "a", target_modules=["c_attn", "c_proj", "c_fc"])
    set_config(fan_in_fan_out=fan_in_fan_out)(folder)
    check_weights(folder)
    for name, tensor in CausalLM.from_pretrained(folder).weights():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_an_adapter_is_published_as_the_model_it_makes(base, tmp_path, capsys):
    folder, expected = adapt(base, tmp_path / "adapter")
    assert main(["publish", str(folder), f"file://{tmp_path / 'out'}"]) == 0
    assert "published merged with its base" in capsys.readouterr().out
    fetched = download_model(f"file://{tmp_path / 'out'}", tmp_path / "fetched")
    for name, tensor in CausalLM.from_pretrained(fetched).weights():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    again = publish_checkpoint(folder, f"file://{tmp_path / 'out'}")
    assert not again.written


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


def tensors(change):
    """Damage to the adapter's tensors: `change` adds to them or replaces some."""

    def damage(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        found = load_file(path)
        save_file(found | change(found), path)

    return damage


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
SAVED = torch.ones(15, 32)
DAMAGES = {
    "no such base": (
        set_config(base_model_name_or_path="org/name-of-the-hub"),
        "org/name-of-the-hub, which is no",
    ),
    "no base": (set_config(base_model_name_or_path=None), "does not name its base"),
    "dora": (set_config(use_dora=True), "describes use_dora"),
    "activated": (set_config(alora_invocation_tokens=[1, 2]), "describes alora_invocation_tokens"),
    "activated by the token 0": (set_config(alora_invocation_tokens=[0]), "describes alora_invocation"),
    "ia3": (set_config(peft_type="IA3"), "describes IA3"),
    "no kind": (set_config(peft_type=None), "describes None"),
    "a classifier's": (set_config(task_type="SEQ_CLS"), "describes task_type SEQ_CLS"),
    "biases": (set_config(bias="all"), "bias all"),
    "lora biases": (set_config(lora_bias=True), "describes lora_bias"),
    "saved modules": (set_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "ranks that it has not": (set_config(rank_pattern={"q_proj": 8}), r"rank 4 on .*q_proj and says r 8"),
    "a rank of zero": (set_config(rank_pattern={"q_proj": 0}), "a rank in rank_pattern"),
    "a rank that is no number": (set_config(rank_pattern={"q_proj": "x"}), "a rank in rank_pattern"),
    "no patterns": (set_config(rank_pattern=[["q_proj", 8]]), "rank_pattern is no object"),
    "an alpha that is none": (set_config(alpha_pattern={"q_proj": float("1e999")}), "is not|Infinity"),
    "a pattern that is none": (set_config(alpha_pattern={"(q_proj": 8}), "is no regular expression"),
    "a pattern without end": (set_config(alpha_pattern={"(([a-z_.0-9]+)*)*!": 8}), "take more than 5 sec"),
    "tokens": (set_config(trainable_token_indices=[1]), "describes trainable_token_indices"),
    "parameters": (set_config(target_parameters=["mlp.experts"]), "describes target_parameters"),
    "layers twice": (set_config(layer_replication=[[0, 2], [1, 2]]), "describes layer_replication"),
    "Megatron's": (set_config(megatron_config={"a": 1}), "describes megatron_config"),
    "turned round, as peft corrects it": (set_config(fan_in_fan_out=True), None),
    "a changed base": (set_config(init_lora_weights="pissa"), "init_lora_weights pissa"),
    "a base changed in rounds": (set_config(init_lora_weights="pissa_niter_4"), "init_lora_weights pissa_n"),
    "corda": (set_config(init_lora_weights="corda"), "init_lora_weights corda"),
    "loftq": (set_config(init_lora_weights="loftq"), "init_lora_weights loftq"),
    "what comes after this release": (set_config(use_whirl=True), "describes use_whirl"),
    "a number of a later release": (set_config(whirl_rank=0.5), "describes whirl_rank"),
    "nothing of a later release": (set_config(whirl_config=None, whirls=[], use_whirl=False), None),
    "rank-stabilised, perhaps": (set_config(use_rslora="false"), "describes use_rslora false"),
    "rank zero": (set_config(r=0), "not a whole adapter"),
    "another rank": (set_config(r=8), "of rank 4 on .* says r 8"),
    "other targets": (
        set_config(target_modules=["q_proj"]),
        r"on model\.layers\.0\.mlp\.down_proj, which target",
    ),
    "other layers": (rename, r"adapts model\.layers\.7"),
    "cut short": (halve, "truncated or corrupt"),
    "gone": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "adapter_model.safetensors is missing",
    ),
    "not JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read as JSON"),
    "no tensor": (
        lambda folder: save_file({}, folder / "adapter_model.safetensors"),
        "no adapter of any layer",
    ),
    "a magnitude": (
        tensors(lambda t: {f"{FIRST}.lora_magnitude_vector": torch.ones(32)}),
        "magnitude_vector",
    ),
    "a magnitude as a weight": (
        tensors(lambda t: {f"{FIRST}.lora_magnitude_vector.weight": torch.ones(32)}),
        "magnitude_vector.weight, which is no lora_A",
    ),
    "a bias": (tensors(lambda t: {f"{FIRST}.lora_B.bias": torch.ones(32)}), r"lora_B\.bias, which is no"),
    "an adapter by name": (
        tensors(lambda t: {f"{FIRST}.lora_A.default.weight": torch.ones(4, 32)}),
        r"default\.weight, which is no",
    ),
    "a name twice": (
        tensors(lambda t: {f"{FIRST}.lora_A.weight".removeprefix("base_model.model."): torch.ones(4, 32)}),
        "which is no lora_A or lora_B of a linear layer as peft names them",
    ),
    "half a pair": (
        tensors(lambda t: {f"{FIRST.replace('q_', 'k_')}.lora_A.weight": torch.ones(4, 32)}),
        "only one of",
    ),
    "an embedding": (
        tensors(lambda t: {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 15)}),
        "lora_embedding_A, which is no",
    ),
    "an embedding that was trained": (
        tensors(lambda t: {"base_model.model.model.embed_tokens.weight": SAVED}),
        r"brings model\.embed_tokens\.weight, which is not that of its base",
    ),
    "a vocabulary that has grown": (
        tensors(lambda t: {"base_model.model.lm_head.weight": torch.ones(17, 32)}),
        r"brings lm_head\.weight, which is not that of its base",
    ),
    "a norm": (
        tensors(lambda t: {"base_model.model.model.norm.weight": torch.full((32,), 2.0)}),
        r"brings model\.norm\.weight",
    ),
    "what its base has": (tensors(lambda t: {"base_model.model.model.norm.weight": torch.ones(32)}), None),
    "NaN": (tensors(lambda t: {f"{FIRST}.lora_B.weight": torch.full((32, 4), float("nan"))}), "holds NaN or"),
}


IN_A_PROCESS = ("a pattern that is none", "a pattern without end")
"""Those whose patterns a process of its own looks at, for five seconds."""


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name in IN_A_PROCESS)) for name in DAMAGES]
)
def test_what_cannot_be_merged_is_refused_with_one_sentence(base, tmp_path, case):
    damage, told = DAMAGES[case]
    folder, _ = adapt(base, tmp_path / "adapter")
    damage(folder)
    if told is None:
        assert CausalLM.from_pretrained(folder).digest()
        return
    for read in (CausalLM.from_pretrained, lambda path: publish_checkpoint(path, tmp_path / "published")):
        with pytest.raises(CheckpointError, match=told) as caught:
            read(folder)
        assert "\n" not in str(caught.value)


def test_no_setting_that_peft_has_or_will_have_is_read_without_being_known(tmp_path):
    """Each setting of the installed peft is listed as harmless, or refused when it is set."""
    from opd.models.peft_folder import _FREE, _ONE_OF, read_peft

    save_file(
        {f"{FIRST}.lora_A.weight": torch.ones(2, 32), f"{FIRST}.lora_B.weight": torch.ones(32, 2)},
        tmp_path / "adapter_model.safetensors",
    )
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    refused = {field.name for field in dataclasses.fields(peft.LoraConfig)} - _FREE
    assert len(refused) > 15
    for key in sorted(refused | {"a_setting_of_tomorrow"}):
        for value in (True, 3, "x", ["x"], {"x": 1}, 0.5):
            if key in _ONE_OF and value in _ONE_OF[key]:
                continue
            (tmp_path / "adapter_config.json").write_text(json.dumps(plain | {key: value}))
            with pytest.raises(CheckpointError, match=r"describes .*only plain LoRA"):
                read_peft(tmp_path)


def test_a_base_of_another_width_is_refused(base, tmp_path):
    folder, _ = adapt(base, tmp_path / "adapter")
    other = save_checkpoint(tiny.model(intermediate_size=96), tiny.tokenizer(), tmp_path / "other", {})
    set_config(base_model_name_or_path=str(other))(folder)
    for read in (check_weights, CausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match=r"adapts .*down_proj\.weight .*which its base"):
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
    assert [f for f in run_checks(recipe, run_dir=path) if f.level == "error"] == []
    with RunFolder.create(path, recipe) as folder:
        run_stage(recipe, folder, "merge")
        run_stage(recipe, folder, "evaluate")
        assert set(json.loads(folder.results_path.read_text())["teachers"]) == set(recipe.teachers)
        return folder.stage_done("merge")["digest"]


@pytest.mark.slow
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


@pytest.mark.some(1)
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
