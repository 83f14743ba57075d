"""Steps with compiled layers: who decides, what a resumed stage does, ranks that share weights."""

import json
from importlib.util import find_spec
from pathlib import Path

import backend_ranks
import pytest
from backend_ranks import assert_same
from rank_processes import run_ranks

from opd.config import TrainConfig
from opd.errors import TrainingError
from opd.models import compiled_layers
from opd.models.compiled_layers import layer_graphs
from opd.train.torch_backend import TorchBackend

pytestmark = pytest.mark.usefixtures("quick")


def backend() -> TorchBackend:
    return TorchBackend(backend_ranks.student(), backend_ranks.training())


def no_compiler(graph: object, inputs: object) -> None:
    raise RuntimeError("No working C++ compiler found")


@pytest.mark.parametrize("asked", ["auto", False])
def test_a_cpu_compiles_nothing_by_itself(asked) -> None:
    ours = backend()
    assert ours.compile_layers(asked, None) is False
    assert ours.model.compiled is None
    assert layer_graphs.cache_info().currsize == 0


@pytest.mark.slow
def test_a_compiled_step_is_the_same_step_and_says_how_many_graphs_it_has() -> None:
    own, ours = backend(), backend()
    assert ours.compile_layers(True, None) is True
    found, exact = (backend_ranks.train(one, 0, 2, backend_ranks.batch) for one in (ours, own))
    assert [metrics.pop("compiled_graphs") for metrics in found] == [2.0, 2.0]
    assert_same(found, exact)


@pytest.mark.slow
def test_a_resumed_stage_goes_on_as_it_began_unless_told() -> None:
    ours = backend()
    assert ours.compile_layers("auto", True) is True
    assert ours.compile_layers("auto", False) is False
    assert ours.compile_layers(False, True) is False
    assert ours.model.compiled is None


@pytest.mark.slow
def test_without_a_compiler_the_layers_own_code_runs_and_a_demand_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(compiled_layers, "compile_graph", no_compiler)
    ours = backend()
    with pytest.warns(
        RuntimeWarning, match=r"compiled layers of LlamaForCausalLM cannot be compiled .* used"
    ):
        assert ours.compile_layers("auto", True) is False
    with pytest.raises(TrainingError, match=r"train\.compile is true, .* set it to auto or false"):
        ours.compile_layers(True, None)
    assert ours.model.compiled is None


def test_another_back_end_cannot_be_told_to_compile() -> None:
    with pytest.raises(ValueError, match="compile has no effect with backend megatron"):
        TrainConfig(backend="megatron", compile=True)
    assert TrainConfig(backend="megatron").compile == "auto"


TASKS = {
    "sharded": {"train": {}},
    "sharded, computed again": {"train": {}, "batch": {"recompute_layers": True}},
    "shared sequences": {"train": {"context_parallel": 2}},
    "shared sequences in pieces": {"train": {"context_parallel": 2}, "batch": {"sequence_chunk": 8}},
    "adapters": {"train": {}, "model": {"lora": True}},
}


@pytest.mark.slow
def test_ranks_that_share_weights_or_sequences_compile_alike(tmp_path: Path) -> None:
    tasks = {n: t for n, t in TASKS.items() if n != "adapters" or find_spec("peft")}
    (tmp_path / "tasks.json").write_text(json.dumps([{"name": n, **t} for n, t in tasks.items()]))
    run_ranks(str(Path(__file__).with_name("compiled_ranks.py")), 2, tmp_path)
    for name in tasks:
        for rank in range(2):
            found = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            graphs = {metrics.pop("compiled_graphs") for metrics in found["compiled"]}
            assert len(graphs) == 1, name  # none was added after the check
            assert_same(found["compiled"], found["own"])
