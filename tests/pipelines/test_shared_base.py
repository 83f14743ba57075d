"""A run of adapters has its base once: trainer, engine, teachers and reference; and plan says so."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pretend_cuda
import pytest
import torch
from attempts import stop
from recipes import NO_CURVE, tiny_recipe
from torch import Tensor

from opd.config import Recipe
from opd.config.train import LoRAConfig
from opd.metrics import MemoryMeter, read_metrics
from opd.models.adapters import AdaptedLM, save_adapted
from opd.models.causal_lm import CausalLM, held_bytes, tensors_of
from opd.models.frozen_bases import FrozenBases
from opd.models.tokenizers import load_tokenizer
from opd.pipelines.check.memory import memory_by_phase, sizes_of
from opd.pipelines.check.models import Models, check_models
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages import precision
from opd.pipelines.stages.domains import load_domains
from opd.pipelines.stages.student import Student
from opd.pipelines.stages.supervised import new_base
from opd.rollout.torch_engine import TorchEngine
from opd.teachers.local_teacher import LocalTeacher
from opd.train.frozen import FrozenModel

pytest.importorskip("peft")

LORA = LoRAConfig(rank=2, alpha=4.0)
NAMES = ("sort", "add3")
WEIGHTS = ("trainer_weights", "trainer_gradients", "trainer_moments", "engine_weights")
KINDS = (*WEIGHTS, "teacher_weights", "teacher_heads")
ANGLES, FILE_HEADERS = 512 * 8 * 4, 4096
"""Bytes of a table of angles, and of a header of an adapter's file, at most."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A base, and two teachers that are adapters on it."""
    root = tmp_path_factory.mktemp("models")
    new_base(tiny_recipe(seed=1), root / "base")
    for seed, name in enumerate(NAMES):
        model = AdaptedLM(CausalLM.from_pretrained(root / "base"), LORA, root / "base", seed)
        noise = torch.Generator().manual_seed(seed)
        for _, tensor in model.adapters():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=noise))
        save_adapted(model, load_tokenizer(root / "base"), root / name, {})
    return root


def recipe_of(models: Path, **changes: Any) -> Recipe:
    """A merge of both, which measures how far it is from its base."""
    rollout = {"max_new_tokens": 5, "max_sequence": 16} | changes.pop("rollout", {})
    settings = {
        "model": {"path": str(models / "base"), "lora": LORA.model_dump()},
        "base": None,
        "teachers": {name: {"path": str(models / name)} for name in NAMES},
        "rollout": rollout,
        "distill": {"steps": 3, "prompts_per_domain": 4, "checkpoint_every": 2, "teachers": "local"},
        "baselines": {"methods": []},
        "evaluation": NO_CURVE | {"base_kl_every": 1},
    }
    return tiny_recipe(**settings | changes)


class Ran(NamedTuple):
    """A merge."""

    path: Path
    digest: str
    rows: list[dict[str, Any]]
    """Its metrics."""
    held: dict[str, int]
    """Bytes of the most weights that were there together, apart from adapters: all of them, and by whom those
    that nobody before had."""


class Counted:
    """Where the weights lie of all that a stage opens."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._opened: dict[str, Callable[[], list[Tensor]]] = {}
        self.most: dict[str, int] = {}
        self._note(patch, LocalTeacher, lambda one: f"teacher {one.name}", _of_teacher)
        self._note(patch, FrozenModel, lambda one: "reference", lambda one: _weights(one.model))
        opened, sample = Student.open.__func__, MemoryMeter.sample

        def open_student(cls: type[Student], *given: Any) -> Student:
            student = opened(cls, *given)
            self._opened = {"trainer": lambda: _weights(student.backend.model)} | self._opened
            [engine] = student.engine_pool.engines
            self._opened["engine"] = lambda: _of_engine(engine)
            return student

        def noted(meter: MemoryMeter) -> dict[str, int]:
            self._count()
            return sample(meter)

        patch.setattr(Student, "open", classmethod(open_student))
        patch.setattr(MemoryMeter, "sample", noted)

    def _note(self, patch: pytest.MonkeyPatch, kind: type, name: Any, weights: Any) -> None:
        begun = kind.__init__

        def begin(one: Any, *given: Any, **options: Any) -> None:
            begun(one, *given, **options)
            self._opened[name(one)] = lambda: weights(one)

        patch.setattr(kind, "__init__", begin)

    def _count(self) -> None:
        seen: list[Tensor] = []
        found = {}
        for name, weights in self._opened.items():
            before = held_bytes(seen)
            seen += weights()
            found[name] = held_bytes(seen) - before
        if sum(found.values()) >= sum(self.most.values()):
            self.most = found


def _weights(model: CausalLM) -> list[Tensor]:
    return [own for name, own in model.module.named_parameters() if "lora_" not in name]


def _of_teacher(teacher: LocalTeacher) -> list[Tensor]:
    return _weights(teacher.model) if "model" in teacher.__dict__ else []


def _of_engine(engine: TorchEngine) -> list[Tensor]:
    lean = engine._runner.lean
    laid_out = [] if lean is None else [x for layer in lean._layers for x in layer.weight_tensors()]
    return [*_weights(engine.model), *getattr(engine.model, "_base", {}).values(), *laid_out]


@pytest.fixture(scope="module")
def ran(models, tmp_path_factory) -> Callable[[str], Ran]:
    @functools.cache
    def merged(lora: str) -> Ran:
        path = tmp_path_factory.mktemp("merged") / "run"
        recipe = recipe_of(models, rollout={"engine": {"type": "torch", "lora": lora}})
        with pytest.MonkeyPatch.context() as patch, RunFolder.create(path, recipe) as folder:
            counted = Counted(patch)
            run_stage(recipe, folder, "merge")
            digest = (folder.stage_done("merge") or {})["digest"]
        return Ran(path, digest, read_metrics(path / "stages/merge/metrics.jsonl"), counted.most)

    return merged


def test_trainer_engine_teachers_and_reference_have_one_base(models, ran) -> None:
    base = held_bytes(CausalLM.from_pretrained(models / "base").module.parameters())
    held = ran("adapters").held
    assert held["trainer"] == base
    others = {"engine", "reference", *(f"teacher {name}" for name in NAMES)}
    assert {name: held[name] for name in others} == dict.fromkeys(others, 0)


def test_an_engine_that_merges_has_the_adapted_layers_once_more(models, ran) -> None:
    model = CausalLM.from_pretrained(models / "base")
    fused = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    sizes = {n: p.nbytes for n, p in model.module.named_parameters() if n.endswith("_proj.weight")}
    joined = sum(size for name, size in sizes.items() if name.split(".")[-2] in fused)
    held = ran("merged").held
    assert held["engine"] == sum(sizes.values()) + joined
    assert sum(held.values()) == held["trainer"] + held["engine"]
    assert ran("merged").digest == ran("adapters").digest  # the same tokens, and so the same steps


@pytest.mark.parametrize("lora", ["adapters", "merged"])
def test_plan_says_what_is_held(models, ran, lora) -> None:
    recipe = recipe_of(models, rollout={"engine": {"type": "torch", "lora": lora}})
    found = Models()
    check_models(recipe, load_domains(recipe), found)
    assert found.student is not None
    parts = sizes_of(memory_by_phase(recipe, found.student, found.teachers)["train"])
    row = ran(lora).rows[-1]
    held = {name: row[f"memory/train/{name}"] for name in KINDS}
    model = CausalLM.from_pretrained(models / "base")
    buffers = held_bytes(tensors_of(model.module)[1])
    assert parts["base"] == held_bytes(model.module.parameters())
    assert held["trainer_weights"] == parts["base"] + parts["weights"] + buffers
    assert held["trainer_gradients"] == parts["gradients"]
    counts = 4 * 2 * 7 * LORA.rank  # of steps, of each half; no more than this
    assert 0 <= held["trainer_moments"] - parts["AdamW"] <= counts
    engine = parts["engine copy"] + parts["weights laid out for decode"]
    # Small weights keep their layout, and angles are a table beside them.
    assert parts["engine copy"] <= held["engine_weights"] <= engine + buffers + ANGLES
    own = sum(half.nbytes for name in NAMES for half in _halves(models / name))
    told = held["teacher_weights"] + held["teacher_heads"]
    assert own <= told <= parts["teachers"] <= own + 4 * FILE_HEADERS
    assert "frozen copy of the start" not in parts
    assert 0 < max(one["memory/train/hidden_states"] for one in ran(lora).rows) <= parts["hidden states"]


@pytest.mark.parametrize("lora", [LORA.model_dump(), None], ids=["adapters", "all weights"])
def test_merged_models_of_another_dtype_are_whole_and_counted_so(models, lora) -> None:
    """Adapters alone are added to the base in any dtype."""
    given = {"path": str(models / "base"), "lora": lora}
    sizes, held = {}, {}
    for dtype in ("float32", "bfloat16"):
        recipe, found, bases = recipe_of(models, model=given | {"dtype": dtype}), Models(), FrozenBases()
        check_models(recipe, load_domains(recipe), found)
        assert found.student is not None
        sizes[dtype] = sizes_of(memory_by_phase(recipe, found.student, found.teachers)["train"])["teachers"]
        place = {"dtype": dtype, "device": "cpu"}
        if lora is not None:
            bases.open(models / "base", **place, trains=True)
        opened = [LocalTeacher(name, models / name, **place, bases=bases, joins=True) for name in NAMES]
        own = [held_bytes(_weights(one.model)) for one in opened if one.model.borrowed is None]
        held[dtype] = bases.resident()["teacher_weights"] + sum(own)
    base = held_bytes(CausalLM.from_pretrained(models / "base").module.parameters())
    assert held == {"float32": base * (lora is None), "bfloat16": base}  # two halves
    assert 0 < sizes["float32"] - held["float32"] < base
    assert sizes["bfloat16"] == held["bfloat16"]


def _halves(folder: Path) -> list[Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "adapter/adapter_model.safetensors").values())


def test_a_run_that_is_resumed_on_one_base_takes_the_same_steps(models, ran, tmp_path) -> None:
    recipe = recipe_of(models, rollout={"engine": {"type": "torch", "lora": "adapters"}})
    with RunFolder.create(tmp_path / "cut", recipe) as folder:
        stop(recipe, folder, "merge", after=2)
    with RunFolder.resume(tmp_path / "cut", recipe) as folder:
        run_stage(recipe, folder, "merge")
    done = json.loads((tmp_path / "cut/stages/merge/done.json").read_text())
    assert done["digest"] == ran("adapters").digest


def test_what_merging_takes_is_compared_with_the_memory(models, monkeypatch) -> None:
    recipe = recipe_of(models)
    monkeypatch.setattr(precision, "group_memory", lambda: 1600)
    assert precision.merges_adapters(recipe, 100)
    assert not precision.merges_adapters(recipe, 101)
    for lora in ("adapters", "merged"):
        asked = recipe_of(models, rollout={"engine": {"type": "torch", "lora": lora}})
        assert precision.merges_adapters(asked, 1 if lora == "adapters" else 10**9) == (lora == "merged")


@pytest.mark.slow
def test_a_trainer_and_an_engine_that_go_leave_the_base(models, ran, tmp_path) -> None:
    offload = {"engine": True, "trainer": True}
    for lora in ("adapters", "merged"):
        engine = {"type": "torch", "lora": lora}
        recipe = recipe_of(models, rollout={"engine": engine}, runtime={"offload": offload})
        with RunFolder.create(tmp_path / lora, recipe) as folder:
            run_stage(recipe, folder, "merge")
            assert (folder.stage_done("merge") or {})["digest"] == ran(lora).digest


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["adapters", "merged"])
def test_a_base_on_a_gpu_is_there_once(models, ran, tmp_path, lora) -> None:
    given = {"path": str(models / "base"), "lora": LORA.model_dump(), "device": "cuda:1"}
    recipe = recipe_of(models, model=given, rollout={"engine": {"type": "torch", "lora": lora}})
    read, load = [], CausalLM.from_pretrained.__func__
    with (
        pytest.MonkeyPatch.context() as patch,
        pretend_cuda.on("cuda:1"),
        RunFolder.create(tmp_path / "run", recipe) as folder,
    ):
        counted = Counted(patch)
        patch.setattr(
            CausalLM,
            "from_pretrained",
            classmethod(lambda cls, path, **place: read.append(path) or load(cls, path, **place)),
        )
        run_stage(recipe, folder, "merge")
    assert counted.most == ran(lora).held
    assert read == [models / "base"]  # once, and not again when the merged model is written
    ours, theirs = (_halves(place / "merged") for place in (tmp_path / "run", Path(ran(lora).path)))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-5)
