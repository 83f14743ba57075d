"""A model's whole life on four ranks, each with a limit on its memory: loaded, trained, saved, resumed,
exported and asked; then gone on with by two and by three ranks, each with a limit as well.

Of a model of P numbers, training holds four of 4 bytes each (weight, gradient, two moments), 16 P, and a
checkpoint is written from a copy of three of them, 12 P. A rank of N has 1/N of that. Four ranks therefore
hold 16 P / 4 = 4 P each, as much as the weights in float32 are: no limit below these is possible there, and
the limits are below what one process takes to train. Where adapters alone learn, all of it is below the
weights.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import sharded_ranks
import tiny
from sharded_ranks import MIB
from test_sharded import said
from test_sharded_checkpoints import assert_alike, launch

from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.ranks import Ranks
from opd.train.torch_backend import TorchBackend

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2400)]

NO_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs DeepSpeed: .venv/bin/python -m pip install 'opd[deepspeed]'"
)
BATCH = {"max_tokens": 40}  # two micro-batches a rank of two
PAIRS = {"train": {"backend": "megatron", "tensor_parallel": 2}}
ZERO = {"train": {"backend": "deepspeed", "zero_stage": 3}}
SECONDS = 700
"""What one launch may take."""
EVALUATE = 88 * MIB
"""What a rank may take to be asked: its quarter of 130 MiB, a layer that is gathered, what libraries need."""
LIVES = {
    "fsdp": {"life": 320 * MIB, "writes": True},
    "adapters": {"life": 126 * MIB, "lora": True, "writes": True},
    "pairs": {"life": 440 * MIB} | PAIRS,
    "pairs, adapters": {"life": 180 * MIB, "lora": True} | PAIRS,
    "zero-3": {"life": 400 * MIB} | ZERO,
    "zero-3, adapters": {"life": 250 * MIB, "lora": True} | ZERO,
}
"""What a rank of four may take, beside what libraries took before, for all of its life."""
WITHIN = {
    "fsdp": {2: 400 * MIB, 3: 340 * MIB},
    "adapters": {2: 160 * MIB, 3: 140 * MIB},
    "pairs": {2: 400 * MIB, 3: 320 * MIB},
    "pairs, adapters": {2: 180 * MIB, 3: 170 * MIB},
    "zero-3": {2: None, 3: 440 * MIB},
    "zero-3, adapters": {2: 320 * MIB, 3: 270 * MIB},
}
"""What a rank of two and of three may take to go on. DeepSpeed has gradients twice, and temporaries of all of
a rank's numbers in a step: two ranks are not limited."""


def form(kind: str, world: int) -> dict:
    """The settings of a task of so many ranks. Three do not make pairs: there FSDP2 goes on with what
    Megatron-Core has left.
    """
    settings = ZERO if kind.startswith("zero-3") else {}
    if kind.startswith("pairs") and world != 3:
        settings = PAIRS
    return {"model": "big", "batch": BATCH} | settings | ({"lora": True} if "adapters" in kind else {})


def first(kind: str, world: int) -> dict:
    """A task without a limit, so that what libraries take is there before."""
    return {"name": "first", "does": "limited"} | form(kind, world) | {"model": "tied"}


@pytest.fixture(
    params=[pytest.param(kind, marks=NO_DEEPSPEED if kind.startswith("zero-3") else []) for kind in LIVES]
)
def lived(request, tmp_path, monkeypatch) -> tuple[str, Path]:
    """A kind, and the folder in which four ranks, then two and three, have said what they did."""
    kind: str = request.param
    for name, value in sharded_ranks.RETURNED.items():
        monkeypatch.setenv(name, value)
    save_checkpoint(tiny.model(**sharded_ranks.BIG), tiny.tokenizer(), tmp_path / "big", {})
    save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path / "tied", {})
    life = {"name": "life", "does": "life", "evaluate": EVALUATE} | form(kind, 4) | LIVES[kind]
    launch(tmp_path, 4, [first(kind, 4), life], SECONDS)
    for world, within in WITHIN[kind].items():
        resumed = {"name": f"on {world}", "does": "resumes", "from": "life checkpoints", "within": within}
        launch(tmp_path, world, [first(kind, world), resumed | form(kind, world)], SECONDS)
    return kind, tmp_path


def answers(model: CausalLM) -> list[list[int]]:
    """What one process answers with a model."""
    return sharded_ranks.speaks(sharded_ranks.engine_of(model, None, Ranks()), Ranks())


def test_a_model_lives_within_less_memory_than_one_process_trains_it_in(lived):
    kind, place = lived
    size = sum(file.stat().st_size for file in (place / "big").glob("*.safetensors"))
    assert max(filter(None, WITHIN[kind].values())) < 4 * size
    assert LIVES[kind]["life"] < (
        size if kind == "adapters" else 2 * size if "lora" in LIVES[kind] else 4 * size
    )
    assert 0.7 * size > EVALUATE
    model = sharded_ranks.whole_model(place, form(kind, 4))
    alone = TorchBackend(model, sharded_ranks.plain_training(**BATCH))
    expected = sharded_ranks.learn(alone, 0, 3)
    said_then = answers(model)
    expected += sharded_ranks.learn(alone, 3, 5)
    exported = CausalLM.from_pretrained(place / "life exported")
    asked = answers(exported)
    for rank, result in enumerate(said(place, "life")):
        assert result.get("error") is None, result
        assert_alike(result["metrics"], expected)
        assert result["said"] == (said_then if LIVES[kind].get("writes") else [])
        assert result["evaluated"] == asked
        saved, resumed, written = result["digests"]
        assert saved == resumed
        assert written == ("" if rank else exported.digest())
    for world in WITHIN[kind]:
        for result in said(place, f"on {world}", world):
            assert result.get("error") is None, result
            assert result["digest"] == saved
            assert_alike(result["metrics"], expected[3:])
