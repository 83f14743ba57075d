"""What FSDP2 does with a model that no rank holds whole, the other back ends do too; each reads the others'
checkpoints.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import sharded_ranks
import tiny
from full import FULL
from sharded_ranks import MIB
from test_sharded import adapter_of, said
from test_sharded_checkpoints import assert_alike, assert_kill_leaves_one, launch

from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.storage.checkpoints import CheckpointStore
from opd.train.torch_backend import TorchBackend

pytestmark = pytest.mark.slow

ZERO = {"train": {"backend": "deepspeed", "zero_stage": 3}}
NO_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs DeepSpeed: .venv/bin/python -m pip install 'opd[deepspeed]'"
)
TENSOR = {"train": {"backend": "megatron", "tensor_parallel": 2}}
KINDS = {"fsdp": {}, "megatron": TENSOR, "zero-3": ZERO}
INSTALLED = {name: kind for name, kind in KINDS.items() if name != "zero-3" or find_spec("deepspeed")}
OTHERS = ["megatron", pytest.param("zero-3", marks=NO_DEEPSPEED)]
PAIRS = [
    pytest.param(before, after, marks=[NO_DEEPSPEED] if "zero-3" in (before, after) else [])
    for before in KINDS
    for after in KINDS
]
MODELS = {
    "tied": {"model": "tied"},
    "masters": {"model": "files", "dtype": "bfloat16"},
    "adapter": {"model": "adapter"},
    "adapters": {"model": "tied", "lora": True},
    "adapters on bfloat16": {"model": "files", "lora": True, "dtype": "bfloat16"},
}
LONG = {"masters", "adapters", "adapter", "adapters on bfloat16"}
"""With `--full` alone."""
STAGES = {
    "adapters on stages": {
        "model": "tied",
        "lora": True,
        "train": {"backend": "megatron", "pipeline_parallel": 2},
    }
}
READ = [
    pytest.param(
        kind, model, marks=[NO_DEEPSPEED] * (kind == "zero-3") + [pytest.mark.long] * (model in LONG)
    )
    for kind in KINDS
    for model in MODELS
    if kind != "fsdp"
]
BIG = {"model": "big", "batch": {"max_tokens": 4096}}
LIMITS = {"zero-3": 122 * MIB, "megatron": 100 * MIB}
"""RLIMIT_DATA while the model of 130 MiB is loaded and tried on four ranks, beside what libraries took."""
KEPT = {"zero-3": 3, "megatron": 2}
"""Shares of a rank that there are once a model is loaded: weights and gradient; while DeepSpeed makes its
optimiser, its float32 copy too."""
EXPORT = 60 * MIB
"""What a rank may take to write that model."""
SMALL = 8 * MIB
"""What libraries and one layer take beside the shares."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Models, what two ranks have made of them on each back end, and how three have gone on from those."""
    root = tmp_path_factory.mktemp("sharded")
    save_checkpoint(tiny.model(), tiny.tokenizer(), root / "tied", {})
    save_checkpoint(tiny.model(), tiny.tokenizer(), root / "files", {}, max_shard_bytes=20_000)
    adapter_of(root / "tied", root / "adapter")
    tasks, later = [], []
    for kind, settings in INSTALLED.items():
        if kind != "fsdp":
            tasks += [
                {"name": f"alike {kind} {model}", "does": "alike"} | settings | asked
                for model, asked in (MODELS | (STAGES if kind == "megatron" else {})).items()
                if model not in LONG or FULL
            ]
        saving = {"name": f"of {kind}", "does": "saves", "into": f"of {kind}"}
        tasks += [saving | settings | MODELS["tied"]]
        alone = {"train": {"backend": "megatron"}} if kind == "megatron" else settings  # 3 make no pairs
        later += [
            {"name": f"{kind} of {other}", "does": "resumes", "from": f"of {other}"} | alone | MODELS["tied"]
            for other in INSTALLED
        ]
    misfit = {"name": "misfit", "does": "resumes", "from": "of fsdp"}
    tasks += [misfit | {"name": "pairs"} | TENSOR | MODELS["tied"]]
    later += [misfit | TENSOR | MODELS["tied"]]
    launch(root, 2, tasks)
    launch(root, 3, later)
    return root


@pytest.mark.parametrize(("kind", "model"), [*READ, ("megatron", "adapters on stages")])
def test_a_model_that_is_read_in_parts_is_the_one_that_is_read_whole(place, kind, model):
    for result in said(place, f"alike {kind} {model}", 2):
        assert result.get("error") is None, result
        assert result["differing"] == []
        assert result["kept"] < 0.1  # of the model, once a back end is closed
        one, other = result["metrics"]
        assert one == other
        assert len(set(result["digests"])) == 1


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_checkpoint_of_two_ranks_is_read_by_three_of_another_back_end(place, before, after):
    expected = said(place, f"of {before}", 2)[0]
    for result in said(place, f"{after} of {before}", 3):
        assert result.get("error") is None, result
        assert result["digest"] == expected["digest"]
        assert_alike(result["metrics"], expected["metrics"])


def test_tensor_parallel_ranks_go_on_where_they_fit(place):
    for result in said(place, "pairs", 2):
        assert_alike(result["metrics"], said(place, "of fsdp", 2)[0]["metrics"])
    for result in said(place, "misfit", 3):
        assert result["message"] == (
            "3 ranks cannot be divided into groups of train.tensor_parallel 2; set it to 1 or 3,"
            " or start 2 ranks or a multiple of that."
        )


@pytest.mark.parametrize("kind", OTHERS)
def test_each_rank_writes_its_pieces_and_one_process_goes_on(place, kind):
    checkpoint = CheckpointStore(place / f"of {kind}").latest()
    assert checkpoint is not None
    files = [checkpoint.folder / f"model-{rank:05d}-of-00002.safetensors" for rank in range(2)]
    one, other = (path.stat().st_size for path in files)
    assert max(one, other) < 0.6 * (one + other)
    backend = TorchBackend(tiny.model(seed=5), sharded_ranks.plain_training())
    backend.load_state({file: checkpoint.load(file) for file in ("model", "optimizer")})
    assert_alike(sharded_ranks.learn(backend, 3, 5), said(place, f"of {kind}", 2)[0]["metrics"])


@pytest.mark.long
@pytest.mark.parametrize("kind", OTHERS)
def test_kill_9_while_a_checkpoint_is_written_leaves_the_newest_whole_one(place, tmp_path, kind, caplog):
    assert_kill_leaves_one(KINDS[kind] | {"model": str(place / "tied")}, tmp_path, 1, caplog)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_missing_piece_is_named_before_anything_is_read(place, tmp_path, kind, caplog):
    shutil.copytree(place / f"of {kind}", tmp_path / "c")
    (tmp_path / "c" / "step_3" / "model-00001-of-00002.safetensors").unlink()
    assert CheckpointStore(tmp_path / "c").latest() is None
    [message] = caplog.messages
    assert "model-00001-of-00002.safetensors" in message


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """What four ranks have made of a model larger than the memory of each, and two and three of theirs."""
    root = tmp_path_factory.mktemp("large")
    save_checkpoint(tiny.model(**sharded_ranks.BIG), tiny.tokenizer(), root / "big", {})
    save_checkpoint(tiny.model(), tiny.tokenizer(), root / "tied", {})
    tasks = []
    for kind, settings in INSTALLED.items():
        if kind == "fsdp":
            continue
        wide = on(4, kind)
        limited = {"does": "limited"} | wide | BIG
        tasks += [
            {"name": f"{kind} first", "does": "limited"} | settings | MODELS["tied"],  # libraries' own memory
            {"name": f"{kind} too small", "limit": 16 * MIB} | limited,
            {"name": f"{kind} limited", "limit": LIMITS[kind], "export": EXPORT} | limited,
            {"name": f"{kind} saves", "does": "saves", "into": f"of {kind}"} | wide | BIG,
        ]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sharded_ranks.RETURNED.items():
            patch.setenv(name, value)
        launch(root, 4, tasks)
        for world in (2, 3):
            resuming = [
                {"name": f"{kind} resumes on {world}", "does": "resumes", "from": f"of {kind}"}
                | on(world, kind)
                | BIG
                for kind in INSTALLED
                if kind != "fsdp"
            ]
            launch(root, world, resuming)
    return root


def on(world: int, kind: str) -> dict:
    """The settings of a back end on so many ranks; of Megatron-Core all share the model, if they can."""
    if kind != "megatron":
        return KINDS[kind]
    return {"train": {"backend": "megatron", "tensor_parallel": 1 if world == 3 else world}}


@pytest.mark.long
@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_larger_than_the_memory_of_a_rank_is_trained_saved_and_exported(large, kind):
    size = sum(file.stat().st_size for file in (large / "big").glob("*.safetensors"))
    assert size > LIMITS[kind]
    alone = TorchBackend(
        CausalLM.from_pretrained(large / "big"), sharded_ranks.plain_training(max_tokens=4096)
    )
    expected = sharded_ranks.learn(alone, 0, 5)
    for rank, (result, saved) in enumerate(
        zip(said(large, f"{kind} limited"), said(large, f"{kind} saves"), strict=True)
    ):
        assert result.get("error") is None, result
        filled, tried = result["peaks"]
        assert filled <= 1.1 * KEPT[kind] * size / 4 + SMALL
        assert tried <= LIMITS[kind]
        assert_alike(result["metrics"], expected[:3])
        assert saved["peaks"][0] <= 1.1 * 3 * size / 4 + 2 * SMALL  # weights and two moments
        assert_alike(saved["metrics"], expected[3:])
        assert result["digests"][1] == ("" if rank else result["digests"][0])
    assert CausalLM.from_pretrained(large / f"{kind} limited exported").digest() == result["digests"][0]
    for world in (2, 3):
        for result in said(large, f"{kind} resumes on {world}", world):
            assert result["digest"] == saved["digest"]
            assert_alike(result["metrics"], expected[3:])
            share = size / on(world, kind)["train"].get("tensor_parallel", world)
            assert result["peaks"][0] <= 1.1 * 2 * share + 2 * SMALL  # new moments beside the old


@pytest.mark.long
@pytest.mark.parametrize("kind", OTHERS)
def test_memory_that_does_not_hold_a_share_is_one_sentence(large, kind):
    for result in said(large, f"{kind} too small"):
        assert result["error"] in ("ModelError", "CheckpointError")
        assert "no memory for its share of" in result["message"]
