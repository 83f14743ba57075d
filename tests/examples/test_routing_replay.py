"""The study of routing replay: its page has the tables of its results, and its routers become undecided."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import tiny
import torch
from loaded import load_example

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "routing_replay"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return load_example("routing_replay/study.py")


def test_the_page_has_the_tables_of_the_results(study):
    page, seeds = (FOLDER / "README.md").read_text("utf-8"), study.load()
    assert len(seeds) == 3
    for lines in (study.mismatch_table(seeds), study.training_table(seeds)):
        assert "\n".join(lines) in page, "run study.py --seeds, and put its tables into the README"


def test_undecided_routers_keep_the_order_of_their_scores(study):
    mixture = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}
    model = tiny.model(**mixture, moe_intermediate_size=16).module.double()
    gate = model.model.layers[0].mlp.gate.weight
    hidden = torch.randn(50, gate.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = hidden @ gate.detach().clone().T
    wrapped = type("Model", (), {"module": model})()
    study.undecide(wrapped, 0.99)
    after = hidden @ gate.detach().T
    assert torch.equal(before.argsort(-1), after.argsort(-1))
    spread = float(
        (after.max(-1)[0] - after.min(-1)[0]).mean() / (before.max(-1)[0] - before.min(-1)[0]).mean()
    )
    assert spread == pytest.approx(0.01, rel=1e-6)


def test_an_arm_is_compared_with_exact_routing_of_its_own_seed(study):
    values = {"exact": [10.0, 50.0, 30.0], "free": [12.0, 53.0, 31.0]}
    assert study.ahead("exact", values) == ""
    assert study.ahead("free", values).startswith("+2.0 (")


def test_kept_results_have_every_arm_and_level(study):
    for path in (FOLDER / "results").glob("seed-*.json"):
        found = json.loads(path.read_text("utf-8"))
        arms = [f"{arm} {name}" for name in study.TRAINED for arm in study.ARMS]
        assert {f"{level:g}" for level in study.LEVELS} | {*arms} == found.keys()
        assert all(len(found[arm]["rewards"]) == study.STEPS for arm in arms)
