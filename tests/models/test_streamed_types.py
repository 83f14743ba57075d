"""What cannot be a streamed teacher is said in one sentence, by whoever is asked first."""

from pathlib import Path

import pytest
import tiny_types
import torch
from recipes import tiny_recipe

from opd.errors import OpdError
from opd.models.causal_lm import CausalLM
from opd.pipelines.check.models import Models, check_models
from opd.pipelines.cli import main
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.teachers.hf_reader import HFFolderReader, stream_fault
from opd.teachers.kinds import Placement
from opd.teachers.streamed_teacher import streamed_teachers

UNPUBLISHED = {
    "gpt2": "it has no embed_tokens",
    "exaone": "belongs to no known part of a decoder",
    "longcat_flash": "counts 4 layers where it has 2",
    "falcon": "takes none from outside",
    "deepseek_v4": "is of kind 'compressed_sparse_attention'",
    "cpmant": "does not attend through the attention interface",  # and are not tied as it says
}
ONLY_SERVED = {
    "jamba": "JambaMambaMixer",
    "nanochat": "not one chain",
    "falcon_h1": "not one chain",
    "inkling_text": "a bias of scores by distance",
    "diffllama": "attends more than once",
}
"""Published with a warning, since servers and Megatron-Core read weights otherwise."""


def cause(said: str, *places: Path) -> str:
    """What is wrong, without advice, and wherever the model lies."""
    for place in places:
        said = said.replace(str(place), "FOLDER")
    return said.partition(";")[0]


def doctors_word(folder: Path, student: Path) -> str:
    teachers = {"sort": {"type": "streamed", "path": str(folder)}}
    domains = {"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 20}}
    changes = {"teachers": teachers, "domains": domains, "baselines": {"methods": []}}
    recipe = tiny_recipe(model={"path": str(student)}, base=None, **changes)
    found = check_models(recipe, {}, Models())
    [error] = [one.detail for one in found if one.level == "error"]
    return error


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [*UNPUBLISHED, *ONLY_SERVED])
@pytest.mark.filterwarnings("ignore")
def test_everybody_says_the_same_of_a_streamed_teacher(name: str, tmp_path: Path, capsys):
    folder, store = tiny_types.write_folder(name, tmp_path / "model"), tmp_path / "store"
    fault = stream_fault(folder)
    sentence = cause(str(fault), folder)
    assert (UNPUBLISHED | ONLY_SERVED)[name] in sentence
    student = tiny_types.write_folder("llama", tmp_path / "student")
    assert cause(doctors_word(folder, student), folder) == sentence
    capsys.readouterr()
    assert main(["publish", str(folder), str(store)]) == (2 if name in UNPUBLISHED else 0)
    told = " ".join(capsys.readouterr().err.split())
    level = "error" if name in UNPUBLISHED else "warning"
    assert cause(told.partition(f"opd: {level}: ")[2], folder) == sentence
    assert store.exists() == (name in ONLY_SERVED)
    if name in UNPUBLISHED:
        with pytest.raises(OpdError) as refused:
            publish_checkpoint(folder, store)
    else:
        teacher = streamed_teachers({"t": str(store)}, Placement(), prefetch_bytes=1 << 20)["t"]
        with pytest.raises(OpdError) as refused:
            _ = teacher.skeleton
        teacher.close()
        assert cause(doctors_word(store, student), store) == sentence
    assert cause(str(refused.value), folder, store) == sentence


@pytest.mark.parametrize("name", ["gpt2", "longcat_flash"])
def test_a_server_is_compared_with_no_model_that_cannot_be_cut(name: str, tmp_path: Path):
    folder = tiny_types.write_folder(name, tmp_path / "model")
    with pytest.raises(OpdError) as refused:
        HFFolderReader(folder)
    assert str(refused.value) == str(stream_fault(folder))


@pytest.mark.parametrize(
    ("name", "changes"), [("gemma2", {"final_logit_softcapping": 5.0}), ("cohere", {"logit_scale": 0.3})]
)
def test_the_head_of_a_folder_is_that_of_its_model(name: str, changes: dict, tmp_path: Path):
    folder = tiny_types.write_folder(name, tmp_path / "model", **changes)
    found, due = HFFolderReader(folder).read_head(), CausalLM.from_pretrained(folder).head()
    assert (found.scale, found.softcap) == (due.scale, due.softcap) != (1.0, None)
    assert torch.equal(found.weight, due.weight)


def test_damage_is_said_before_what_the_whole_model_could_not_do(tmp_path: Path, ends):
    folder = tiny_types.write_folder("mixtral", tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "truncated" in ends(2, ["publish", str(folder), str(tmp_path / "store")]).err
