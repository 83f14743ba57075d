"""One base in memory for all that compute with it, and the numbers of models that have it for themselves."""

import gc
import json
import os
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_types
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from opd.config.train import LoRAConfig
from opd.errors import CheckpointError
from opd.models.adapters import FOLDER, AdaptedLM, MergingLM, read_adapter, save_adapted, weight_digests
from opd.models.causal_lm import CausalLM, WeightsDigest, held_bytes, weights_digest
from opd.models.checkpoint import save_checkpoint
from opd.models.frozen_bases import DeltaLM, FrozenBases
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.weight_sync import sync_weights
from opd.teachers import local_teacher
from opd.teachers.kinds import Placement, TeacherOpening
from opd.teachers.local_teacher import LocalTeacher
from opd.train.offload import OffloadBuffer
from opd.train.terms import CrossEntropyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutRequest, SamplingParams

pytest.importorskip("peft")

LORA = LoRAConfig(rank=3, alpha=12.0, targets=["q_proj", "v_proj", "down_proj"])
HERE = {"dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    model = tiny.model(seed=3, tie_word_embeddings=False)
    return save_checkpoint(model, tiny.tokenizer(), tmp_path_factory.mktemp("models") / "base", {})


@pytest.fixture(scope="module")
def merged(base, tmp_path_factory) -> dict[str, Path]:
    """Two models that were trained on the base, and have kept their adapters."""
    root = tmp_path_factory.mktemp("merged")
    for seed, name in enumerate("ab"):
        save_adapted(adapted(CausalLM.from_pretrained(base), base, seed), tiny.tokenizer(), root / name, {})
    return {name: root / name for name in "ab"}


def adapted(model: CausalLM, base: Path, seed: int = 0, lora: LoRAConfig = LORA) -> AdaptedLM:
    """Adapters that do something."""
    found, noise = AdaptedLM(model, lora, base, seed), torch.Generator().manual_seed(seed)
    for _, tensor in found.adapters():
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=noise))
    return found


def places(*models: CausalLM) -> set[int]:
    """Where weights of the form of a base's lie."""
    own = [(name, p) for model in models for name, p in model.module.named_parameters()]
    return {p.untyped_storage().data_ptr() for name, p in own if "lora_" not in name}


def test_teachers_on_one_base_have_it_once_and_say_what_they_said(base, merged) -> None:
    samples, bases = tiny.samples([(3, 4), (5, 2), (2, 7)]), FrozenBases()
    student = bases.open(base, **HERE, trains=True)
    before = weights_digest(student.weights())
    teachers = {name: LocalTeacher(name, folder, bases=bases) for name, folder in merged.items()}
    for name, folder in merged.items():
        whole, own = LocalTeacher(name, folder), teachers[name]
        assert torch.equal(own.score(samples).rows, whole.score(samples).rows)
        assert own.digest == whole.digest
        assert torch.equal(own.load_head().weight, whole.load_head().weight)
        assert own.borrows
        assert not whole.borrows
        assert own.weight_bytes < whole.weight_bytes / 2
    assert places(student, *(one.model for one in teachers.values())) == places(student)
    assert weights_digest(student.weights()) == before
    assert bases.resident() == {"teacher_weights": 0}  # the student tells of it


def test_a_teacher_alone_on_a_base_that_nobody_has_is_read_whole(base, merged) -> None:
    assert FrozenBases().adapted(merged["a"], **HERE) is None
    whole = CausalLM.from_pretrained(base)
    for names, held in (("a", 0), ("ab", sum(p.nbytes for p in whole.module.parameters()))):
        bases, sources = FrozenBases(), {name: str(merged[name]) for name in names}
        opening = TeacherOpening(None, Placement(), sources, bases=bases)  # type: ignore[arg-type]
        with local_teacher.KIND.open(sources, opening) as opened:
            teachers = [opened[name] for name in names]
            assert places(*(one.model for one in teachers)) == places(teachers[0].model)
            assert bases.resident() == {"teacher_weights": held}


def test_an_adapter_of_pefts_is_added_to_a_base_that_is_here(base, merged, tmp_path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(merged["a"] / FOLDER, folder)
    (folder / "base.json").unlink()  # as peft leaves it
    bases = FrozenBases()
    student = bases.open(base, **HERE)
    found, whole = bases.adapted(folder, **HERE), CausalLM.from_pretrained(folder)
    assert not places(bases.open(folder, **HERE)) & places(student)  # no base of others
    assert isinstance(found, DeltaLM)
    assert places(found) == places(student)
    assert found.digest() == whole.digest()


def test_a_copy_of_a_base_is_the_same_base_and_another_is_not(base, merged, tmp_path) -> None:
    copy, bases = shutil.copytree(base, tmp_path / "copy"), FrozenBases()
    student = bases.open(base, **HERE)
    assert places(bases.open(copy, **HERE)) == places(student)
    other = save_checkpoint(
        tiny.model(seed=4, tie_word_embeddings=False), tiny.tokenizer(), tmp_path / "o", {}
    )
    assert not places(bases.open(other, **HERE)) & places(student)
    assert not places(bases.open(base, dtype="bfloat16", device="cpu")) & places(student)
    moved = shutil.copytree(merged["a"], tmp_path / "moved")  # its base is told by its bytes
    described = json.loads((moved / FOLDER / "base.json").read_text())
    (moved / FOLDER / "base.json").write_text(json.dumps(described | {"path": str(tmp_path / "gone")}))
    (moved / "checksums.json").unlink()
    assert isinstance(bases.adapted(moved, **HERE), DeltaLM)
    assert FrozenBases().adapted(moved, **HERE, reads=True) is None


def test_files_that_have_changed_since_are_read_again(base, tmp_path) -> None:
    folder, bases = shutil.copytree(base, tmp_path / "base"), FrozenBases()
    old = bases.open(folder, **HERE)
    save_checkpoint(tiny.model(seed=5, tie_word_embeddings=False), tiny.tokenizer(), folder, {})
    new = bases.open(folder, **HERE)
    assert not places(new) & places(old)
    assert new.digest() == CausalLM.from_pretrained(folder).digest() != old.digest()


def replace_weights(folder: Path, seed: int) -> None:
    """Put other weights in the place of a folder's, as who publishes a new version does."""
    other = save_checkpoint(
        tiny.model(seed=seed, tie_word_embeddings=False), tiny.tokenizer(), folder.with_name("other"), {}
    )
    for name in ("model.safetensors", "checksums.json"):
        os.replace(other / name, folder / name)


@pytest.mark.parametrize("kept", ["merged", "peft"])
def test_adapters_on_what_has_replaced_a_base_are_not_taken_for_its_own(base, tmp_path, kept) -> None:
    folder, bases = shutil.copytree(base, tmp_path / "base"), FrozenBases()
    old = bases.open(folder, **HERE)  # nobody has asked yet for the digests of its files
    replace_weights(folder, seed=6)
    save_adapted(adapted(CausalLM.from_pretrained(folder), folder), tiny.tokenizer(), tmp_path / "new", {})
    given = tmp_path / "new"
    if kept == "peft":
        given = shutil.copytree(given / FOLDER, tmp_path / "peft")
        (given / "base.json").unlink()
    assert bases.adapted(given, **HERE) is None
    found = bases.adapted(given, **HERE, reads=True)
    assert isinstance(found, DeltaLM)
    assert not places(found) & places(old)
    assert found.digest() == CausalLM.from_pretrained(given).digest()
    copy = shutil.copytree(folder, tmp_path / "copy")  # of the new files, not of those that `old` has
    assert bases.open(copy, **HERE).digest() == CausalLM.from_pretrained(folder).digest() != old.digest()


@pytest.mark.parametrize("shared", [True, False])
def test_adapters_are_saved_with_the_base_they_were_trained_on(base, tmp_path, shared) -> None:
    folder, bases = shutil.copytree(base, tmp_path / "base"), FrozenBases()
    trained = adapted(
        bases.open(folder, **HERE) if shared else CausalLM.from_pretrained(folder), folder, seed=1
    )
    kept = shutil.copytree(folder, tmp_path / "kept")
    replace_weights(folder, seed=9)
    with pytest.raises(CheckpointError, match=r"base holds other weights than those .* put the files"):
        save_adapted(trained, tiny.tokenizer(), tmp_path / "out", {})
    assert not (tmp_path / "out").exists()
    for file in kept.iterdir():  # the same bytes in new files
        os.replace(file, folder / file.name)
    digest = save_adapted(trained, tiny.tokenizer(), tmp_path / "out", {})
    assert CausalLM.from_pretrained(tmp_path / "out").digest() == digest
    assert read_adapter(tmp_path / "out").base_files == weight_digests(base)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "granitemoe"])
def test_mixtures_of_experts_on_one_base_have_it_once(tmp_path, family) -> None:
    """Their files hold one tensor an expert, or others than the module does."""
    base, bases = tmp_path / "base", FrozenBases()
    tiny_types.tiny_model(family).save_pretrained(base)
    tiny_types.tokenizer().save_pretrained(base)
    lora = LoRAConfig(rank=3, alpha=12.0, targets=["q_proj", "v_proj"])
    for seed, name in enumerate("ab"):
        model = adapted(CausalLM.from_pretrained(base), base, seed, lora=lora)
        save_adapted(model, tiny_types.tokenizer(), tmp_path / name, {})
    found = {name: bases.adapted(tmp_path / name, **HERE, reads=True) for name in "ab"}
    whole = {name: CausalLM.from_pretrained(tmp_path / name) for name in "ab"}
    for name, own in found.items():
        assert own is not None
        assert own.digest() == whole[name].digest()
    assert places(*(own for own in found.values() if own)) == places(*filter(None, [found["a"]]))
    file = tmp_path / "b/model.safetensors"
    tensors = load_file(file)
    last = max(name for name in tensors if ".experts." in name or "moe.input" in name)
    tensors[last][0] += 1  # of one expert
    save_file(tensors, file, metadata={"format": "pt"})
    (tmp_path / "b/checksums.json").unlink()
    assert bases.adapted(tmp_path / "b", **HERE) is None


def test_a_base_that_has_gone_since_is_still_that_of_others(base, merged, tmp_path) -> None:
    folder, bases = shutil.copytree(base, tmp_path / "base"), FrozenBases()
    student = bases.open(folder, **HERE)
    assert isinstance(bases.adapted(merged["a"], **HERE), DeltaLM)  # its digests are known from here on
    shutil.rmtree(folder)
    found = bases.adapted(merged["b"], **HERE)
    assert found is not None
    assert places(found) == places(student)


def parameter_ref(model: CausalLM) -> weakref.ref[Tensor]:
    return weakref.ref(next(iter(model.module.parameters())))


def test_a_base_that_has_changed_goes_with_the_last_model_around_it(base, tmp_path) -> None:
    folder, bases = shutil.copytree(base, tmp_path / "base"), FrozenBases()
    old, whole = bases.open(folder, **HERE), held_bytes(CausalLM.from_pretrained(base).module.parameters())
    there = parameter_ref(old)
    replace_weights(folder, seed=7)
    new = bases.open(folder, **HERE)
    assert bases.resident() == {"teacher_weights": 2 * whole}
    del old
    gc.collect()
    assert there() is None
    assert bases.resident() == {"teacher_weights": whole}
    assert places(bases.open(folder, **HERE)) == places(new)


def test_a_base_that_was_read_for_nothing_does_not_stay(base, merged, tmp_path, monkeypatch) -> None:
    folder, bases, read = shutil.copytree(merged["a"], tmp_path / "a"), FrozenBases(), []
    load = CausalLM.from_pretrained.__func__

    def noted(cls, path, **place) -> CausalLM:
        model = load(cls, path, **place)
        read.append((path, parameter_ref(model)))
        return model

    monkeypatch.setattr(CausalLM, "from_pretrained", classmethod(noted))
    kept = shutil.copytree(folder / FOLDER, tmp_path / "kept")
    shutil.rmtree(folder)
    save_checkpoint(tiny.model(seed=8, tie_word_embeddings=False), tiny.tokenizer(), folder, {})
    shutil.copytree(kept, folder / FOLDER)
    assert bases.adapted(folder, **HERE, reads=True) is None
    [(path, there)] = read
    assert path == base
    gc.collect()
    assert there() is None
    assert bases.resident() == {"teacher_weights": 0}


def test_a_model_that_is_no_longer_its_base_and_adapters_is_read_whole(base, merged, tmp_path) -> None:
    folder, bases = shutil.copytree(merged["a"], tmp_path / "a"), FrozenBases()
    bases.open(base, **HERE)
    model = CausalLM.from_pretrained(folder)
    kept = shutil.copytree(folder / FOLDER, tmp_path / "kept")
    with torch.no_grad():
        dict(model.module.named_parameters())["model.norm.weight"][0] += 1
    save_checkpoint(model, tiny.tokenizer(), folder, {})
    shutil.copytree(kept, folder / FOLDER, dirs_exist_ok=True)
    (folder / "checksums.json").unlink(missing_ok=True)
    assert bases.adapted(folder, **HERE) is None
    assert LocalTeacher("a", folder, bases=bases).digest == model.digest()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by peft
def test_adapters_on_what_is_no_layer_of_the_decoder_are_read_whole(base, tmp_path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    wrapped = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["lm_head", "q_proj"])
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    wrapped.save_pretrained(tmp_path / "head", save_embedding_layers=False)
    bases = FrozenBases()
    bases.open(base, **HERE)
    assert bases.adapted(tmp_path / "head", **HERE) is None
    whole = CausalLM.from_pretrained(tmp_path / "head")
    teacher = LocalTeacher("head", tmp_path / "head", bases=bases)
    assert torch.equal(teacher.load_head().weight, whole.head().weight)


def greedy(engine: TorchEngine) -> tuple[list[int], Tensor]:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12)
    request = RolloutRequest("u", np.array([1, 2, 3], dtype=np.int32), sampling, seed=0)
    steps = list(engine.generate([request]))
    ids = [token for step in steps for token in step.token_ids.tolist()]
    return ids, torch.tensor([value for step in steps for value in step.logprobs.tolist()])


@pytest.mark.parametrize("merges", [True, False])
def test_an_engine_writes_on_the_base_that_is_trained_on(base, merges) -> None:
    bases, sampled = FrozenBases(), []
    learner = adapted(bases.open(base, **HERE, trains=True), base)
    own = bases.open(base, **HERE)
    model = MergingLM(own, LORA) if merges else AdaptedLM(own, LORA, base)
    engine = TorchEngine(model, lean=None if merges else False)
    apart = TorchEngine(MergingLM(CausalLM.from_pretrained(base), LORA))
    before = weights_digest(learner.base_weights())
    layers = 2 * len(LORA.targets or ())
    assert len(places(engine.model) - places(learner)) == layers * merges
    for version in (1, 2):
        engine.sleep()
        held = engine.resident()["engine_weights"]
        assert held < apart.resident()["engine_weights"] / 4  # nothing of the base is its own, or goes
        sync_weights(engine, learner.weights(), version)
        sync_weights(apart, learner.weights(), version)
        sampled = [greedy(one) for one in (engine, apart)]
        assert sampled[0][0] == sampled[1][0]
        torch.testing.assert_close(sampled[0][1], sampled[1][1], rtol=1e-5, atol=1e-5)
        for _, tensor in learner.adapters():
            tensor.mul_(-1.5)
    assert weights_digest(learner.base_weights()) == before
    assert engine.model.digest() == apart.model.digest()


def test_a_base_stays_while_its_student_is_away(base, tmp_path) -> None:
    bases = FrozenBases()
    learner = adapted(bases.open(base, **HERE, trains=True), base)
    reference = bases.open(base, **HERE)
    expected = weights_digest(reference.weights())
    training = tiny.training([CrossEntropyTerm()])
    backend = TorchBackend(learner, training)
    whole, mine = sum(p.nbytes for p in reference.module.parameters()), learner.module.parameters()
    shelf = OffloadBuffer(tmp_path)
    backend._shelf = shelf  # type: ignore[attr-defined]
    there = sum(p.nbytes for p in mine if p.requires_grad)
    held = backend.resident()["trainer_weights"]
    backend.offload_state()
    assert held - backend.resident()["trainer_weights"] == there
    assert backend.resident()["trainer_weights"] >= whole
    assert weights_digest(reference.weights()) == expected
    backend.reload_weights()
    assert backend.resident()["trainer_weights"] == held
    backend.close()


def test_the_digest_of_a_base_is_told_once(base, monkeypatch) -> None:
    bases, added = FrozenBases(), []
    add = WeightsDigest.add
    monkeypatch.setattr(
        WeightsDigest, "add", lambda self, name, tensor: added.append(name) or add(self, name, tensor)
    )
    for _ in range(3):
        AdaptedLM(bases.open(base, **HERE), LORA, base)
    assert len(added) == len(set(added)) > 0
