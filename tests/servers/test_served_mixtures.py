"""Mixtures of experts as students on servers: given the tensors of files, proven in the servers' own form."""

import copy
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_types
import torch
from dialects import LITTLE, SGLANG, VLLM, Dialect
from little_models import LittleServer, little
from safetensors.torch import load_file, save_file
from served_stage import FEW, run
from torch import Tensor

from opd.config.train import LoRAConfig
from opd.errors import RolloutError
from opd.models.adapters import AdaptedLM
from opd.models.architecture import empty_model
from opd.models.causal_lm import CausalLM, bytes_of
from opd.models.hf_folder import read_config
from opd.models.stored_form import StoredForm
from opd.pipelines.stages import student
from opd.rollout.delta_push import DeltaPush
from opd.rollout.served_engine import ServedEngine, ServedModel
from opd.rollout.served_workers import FolderPush, Push
from opd.rollout.sglang_engine import TensorPush
from opd.rollout.weight_mirror import WeightMirror
from opd.rollout.weight_proof import Proof
from opd.rollout.weight_sync import WeightFolder, sync_weights

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3")


def written(family: str, folder: Path) -> Path:
    return tiny_types.write_folder(family, folder)


def teacher_of(folder: Path, out: Path) -> Path:
    """A model of the same form with other weights."""
    shutil.copytree(folder, out)
    draw = torch.Generator().manual_seed(1)
    tensors = load_file(out / "model.safetensors")
    others = {n: t + 0.3 * torch.randn(t.shape, generator=draw) for n, t in tensors.items()}
    save_file(others, out / "model.safetensors", metadata={"format": "pt"})
    return out


def learnt(model: CausalLM) -> CausalLM:
    """The same with another row in an expert, and another correction of routing if there is one."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in found.weights():
            if name.endswith("layers.1.mlp.experts.down_proj"):
                tensor[1, 3] += 0.25
            if name.endswith("e_score_correction_bias"):
                tensor += 0.125
    return found


def pushes(dialect: Dialect, sync: str, server: LittleServer, folder: Path) -> Push:
    if sync == "tensors":
        return TensorPush("127.0.0.1")
    if sync == "folder":
        return FolderPush(WeightFolder(folder.parent / "weights", folder), dialect.reads)
    place = folder.parent / "opd-weights-1"
    place.mkdir()
    return DeltaPush({server.url: WeightMirror([place])}, bytes, dialect.reads, folder, 1 << 20)


@contextmanager
def opened(
    dialect: Dialect, folder: Path, sync: str = "folder", stored: bool = True
) -> Iterator[tuple[Any, ServedEngine]]:
    """A little server of that model and an engine for a student of its form."""
    config = read_config(folder)
    form = StoredForm(empty_model(config, folder)) if stored else None
    with little(dialect.little, folder) as server:
        served = ServedModel(config.vocab_size, 64, config.vocab_size, files=form)
        engine = dialect.make_engine(
            [server.url], folder, pushes(dialect, sync, server, folder), served, LITTLE, version=-1
        )
        try:
            yield server, engine
        finally:
            engine.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dialect", "sync"),
    [(SGLANG, "folder"), (SGLANG, "tensors"), (VLLM, "folder"), (VLLM, "delta")],
    ids=["sglang", "sglang tensors", "vllm", "vllm delta"],
)
def test_a_worker_holds_what_the_student_has_learnt(dialect: Dialect, sync: str, family: str, tmp_path: Path):
    folder = written(family, tmp_path / "m")
    first = learnt(CausalLM.from_pretrained(folder))
    with opened(dialect, folder, sync) as (server, engine):
        assert sync_weights(engine, first.weights(), 0) == first.quick_digest()
        assert server.model.digest() == first.digest()
        whole = engine.take_sent_bytes()
        second = learnt(first)
        assert sync_weights(engine, second.weights(), 1) == second.quick_digest()
        assert server.model.digest() == second.digest() != first.digest()
        if sync == "delta":
            changed = engine.take_sent_bytes()
            assert whole is not None
            assert changed is not None
            assert 0 < changed < whole / 10


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dialect", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_a_worker_that_lacks_what_an_expert_has_learnt_is_not_used(
    dialect: Dialect, family: str, tmp_path: Path
):
    folder = written(family, tmp_path / "m")
    first = CausalLM.from_pretrained(folder)
    with opened(dialect, folder) as (server, engine):
        sync_weights(engine, first.weights(), 0)
        server.reads = False
        with pytest.raises(RolloutError, match=r"holds another model.layers.1.\S+experts\S*.w2_weight than"):
            sync_weights(engine, learnt(first).weights(), 1)
        assert server.paused


def test_a_worker_that_takes_up_for_gate_is_not_used(tmp_path: Path):
    folder = written("qwen3_moe", tmp_path / "m")
    with opened(SGLANG, folder) as (server, engine):
        right: Callable[[], dict[str, bytes]] = server.tensors

        def exchanged() -> dict[str, bytes]:
            found = right()
            name = "model.layers.1.mlp.experts.w13_weight"
            half = len(found[name]) // 4 // 2  # of the first of four experts
            content = bytes(found[name])
            found[name] = content[half : 2 * half] + content[:half] + content[2 * half :]
            return found

        server.tensors = exchanged
        with pytest.raises(RolloutError, match=r"holds another model.layers.1.mlp.experts.w13_weight than"):
            sync_weights(engine, CausalLM.from_pretrained(folder).weights(), 0)


def test_the_modules_own_names_are_refused_before_a_worker_is_given_them(tmp_path: Path):
    folder = written("mixtral", tmp_path / "m")
    with opened(SGLANG, folder, stored=False) as (server, engine):
        with pytest.raises(RolloutError, match=r"with a tensor model.layers.0.block_sparse_moe\S+, which"):
            sync_weights(engine, CausalLM.from_pretrained(folder).weights(), 0)
        assert "/update_weights_from_disk" not in server.told


@pytest.mark.parametrize("dialect", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_adapters_alone_go_to_a_base_that_is_a_mixture(dialect: Dialect, tmp_path: Path):
    folder, lora = written("qwen3_moe", tmp_path / "m"), LoRAConfig(rank=2, targets=["q_proj", "o_proj"])
    model = AdaptedLM(CausalLM.from_pretrained(folder), lora, folder)
    with torch.no_grad():
        for _, tensor in model.adapters():
            tensor.normal_(0, 0.3)
    with little(dialect.little, folder) as server:
        server.lora = dict(dialect.lora)
        push = dialect.adapters_alone(tmp_path / "weights", folder, lora)
        served = ServedModel(model.vocab_size, 64, model.vocab_size, files=StoredForm(model.module))
        engine = dialect.make_engine([server.url], folder, push, served, LITTLE, version=-1)
        try:
            sync_weights(engine, model.weights(), 0)
            held = server.loaded[engine._workers.target_weights.name]
            assert held.digest() == model.merge_adapters().digest()
        finally:
            engine.close()
            push.close()


@pytest.mark.parametrize(("size", "groups"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_ranks_that_cut_or_share_out_experts_are_proven(size: int, groups: int):
    """Of `size` ranks, `groups` have experts of their own; those of a group cut each expert."""
    draw = torch.Generator().manual_seed(0)
    block, cuts = "model.layers.0.mlp.experts", size // groups
    sizes = {"gate_proj": (8, 3), "up_proj": (8, 3), "down_proj": (3, 8)}
    weights = {
        f"{block}.{expert}.{name}.weight": torch.randn(shape, generator=draw)
        for expert in range(4)
        for name, shape in sizes.items()
    }

    def reported(rank: int, wrong: bool) -> dict[str, Any]:
        group, place, width = rank // cuts, rank % cuts, 8 // cuts
        own = range(group * 4 // groups, (group + 1) * 4 // groups)
        part = slice(place * width, (place + 1) * width)

        def of(expert: int, name: str) -> Tensor:
            return weights[f"{block}.{expert}.{name}.weight"]

        w13 = torch.stack([torch.cat([of(e, "gate_proj")[part], of(e, "up_proj")[part]]) for e in own])
        w2 = torch.stack([of(e, "down_proj")[:, part] for e in own])
        w2[-1, 0, 0] += wrong
        held = {"w13_weight": w13, "w2_weight": w2}
        sums = {f"{block}.{k}": hashlib.sha256(bytes_of(v.contiguous())).hexdigest() for k, v in held.items()}
        return {"checksums": sums, "parallelism_info": [{"tp_rank": rank, "tp_size": size}]}

    proof, settings = Proof(weights.items()), {"dtype": "float32", "device": "cpu"}
    proof.check("it", [reported(rank, wrong=False) for rank in range(size)], settings)
    with pytest.raises(RolloutError, match=r"holds another \S+w2_weight than"):
        proof.check("it", [reported(rank, wrong=rank == size - 1) for rank in range(size)], settings)


@pytest.mark.slow
def test_a_merge_on_a_server_that_is_resumed_ends_in_the_same_student(tmp_path: Path, monkeypatch):
    """With the most likely token always, the embedded engine and a server write the same, so both learn the
    same; also a trainer that ends in its middle and is started again.
    """
    folders = {"a": written("qwen3_moe", tmp_path / "a")}
    folders["b"] = teacher_of(folders["a"], tmp_path / "b")
    greedy: dict[str, Any] = {
        "rollout": {"top_k": 1},
        "distill": FEW | {"optim": {"lr": 3e-3}},
        "domains": {"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 20}},
        "teachers": {"sort": {"path": str(folders["b"])}},
    }
    ends: list[dict[str, Tensor]] = []

    def ended(*arguments: Any) -> str:
        if arguments[2] == 3:
            raise KeyboardInterrupt
        return sync_weights(*arguments)

    with little(SGLANG.little, folders["a"]) as server:
        engine = {"type": "sglang", "urls": [server.url], "patience": 60.0}
        monkeypatch.setattr(student, "sync_weights", ended)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "served", "merge", engine, folders, **greedy)
        monkeypatch.undo()
        for name, one in {"served": engine, "embedded": {"type": "torch"}}.items():
            run(tmp_path / name, "merge", one, folders, **greedy)
            ends.append(load_file(tmp_path / name / "merged/model.safetensors"))
    there, here = ends
    start = load_file(folders["a"] / "model.safetensors")
    moved = max(float((here[name] - start[name]).abs().max()) for name in here)
    assert moved > 1e-3
    assert max(float((here[name] - there[name]).abs().max()) for name in here) <= 1e-2 * moved
    assert server.told.count("/update_weights_from_disk") > 4
