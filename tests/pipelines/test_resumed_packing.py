"""A stage that is resumed packs and compiles as it began to, whatever would be chosen now."""

import json

import pytest
import tiny
from attempts import run_only, stop
from recipes import tiny_recipe
from torch._dynamo.backends.debugging import aot_eager

from opd.config import TrainConfig
from opd.errors import RunFolderError
from opd.models import compiled_layers
from opd.pipelines.records.run_folder import AcceptedChanges, RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.loop import LoopState
from opd.train import backend
from opd.train.torch_backend import TorchBackend

STEPS, EVERY = 6, 2


def recipe(**batch: int):
    base = tiny_recipe().model_dump()["base"] | {"steps": STEPS, "checkpoint_every": EVERY}
    return tiny_recipe(base=base | {"batch": batch})


def digest(out) -> str:
    return json.loads((out / "stages/base/done.json").read_text())["digest"]


def test_micro_batches_of_a_resumed_stage_are_those_it_began_with(tmp_path, monkeypatch) -> None:
    open_size = recipe()
    for name, tokens in (("whole", 64), ("other", 4096)):
        monkeypatch.setattr(backend, "PLAIN", tokens)
        run_only(open_size, tmp_path / name, "base")
    assert digest(tmp_path / "whole") != digest(tmp_path / "other")  # the size is seen in the weights

    monkeypatch.setattr(backend, "PLAIN", 64)
    with RunFolder.create(tmp_path / "cut", open_size) as folder:
        stop(open_size, folder, "base", after=3)
    monkeypatch.setattr(backend, "PLAIN", 4096)
    with RunFolder.resume(tmp_path / "cut", open_size) as folder:
        run_stage(open_size, folder, "base")
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


def test_a_size_that_a_recipe_names_is_that_size(tmp_path, monkeypatch) -> None:
    named = recipe(max_tokens=64)
    run_only(named, tmp_path / "named", "base")
    monkeypatch.setattr(backend, "PLAIN", 64)
    run_only(recipe(), tmp_path / "chosen", "base")
    assert digest(tmp_path / "named") == digest(tmp_path / "chosen")


def test_a_run_of_an_earlier_version_goes_on_as_it_was(tmp_path, monkeypatch) -> None:
    """Its recipe says 4096, which was the default, and its checkpoints nothing of it."""
    named = recipe(max_tokens=4096)
    run_only(named, tmp_path / "whole", "base")
    described = LoopState.checkpoint_state
    with monkeypatch.context() as earlier:
        earlier.setattr(
            LoopState,
            "checkpoint_state",
            lambda self, metrics: {k: v for k, v in described(self, metrics).items() if k != "max_tokens"},
        )
        with RunFolder.create(tmp_path / "cut", named) as folder:
            stop(named, folder, "base", after=3)
    monkeypatch.setattr(backend, "PLAIN", 64)  # what would be chosen now
    with RunFolder.resume(tmp_path / "cut", recipe()) as folder:
        run_stage(recipe(), folder, "base")
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


def test_what_bounds_samples_on_disk_bounds_a_resumed_stage_too() -> None:
    back = TorchBackend(tiny.model(), tiny.training([], max_tokens="auto"))
    back.cap_tokens(50)
    assert back.max_tokens == 50
    assert back.packed_as(0) == 50  # a stage that begins
    assert back.packed_as(4096) == 50  # one of a version that kept no number
    assert back.packed_as(20) == 20


def test_another_size_may_be_given_to_a_stage_that_has_begun(tmp_path) -> None:
    with RunFolder.create(tmp_path / "run", recipe()) as folder:
        stop(recipe(), folder, "base", after=3)
    smaller = recipe(max_tokens=64)
    with pytest.raises(RunFolderError, match=r"--accept-changed-settings"):
        RunFolder.resume(tmp_path / "run", smaller)
    with RunFolder.resume(tmp_path / "run", smaller, AcceptedChanges(settings=True)) as folder:
        run_stage(smaller, folder, "base")
    changed = json.loads((tmp_path / "run/inputs.json").read_text())["setting_changes"]
    assert [one["field"] for one in changed] == ["base.batch.max_tokens"]


@pytest.mark.slow
def test_a_resumed_stage_compiles_its_layers_if_it_did(tmp_path, monkeypatch) -> None:
    """On a CPU, where `auto` would not. The compiler's back end is PyTorch's own operators."""
    monkeypatch.setattr(compiled_layers, "compile_graph", aot_eager)
    compiled_layers.layer_graphs.cache_clear()
    asked = recipe().model_copy(update={"train": TrainConfig(compile=True)})
    with RunFolder.create(tmp_path / "run", asked) as folder:
        stop(asked, folder, "base", after=3)
    with RunFolder.resume(tmp_path / "run", recipe()) as folder:
        run_stage(recipe(), folder, "base")
    lines = (tmp_path / "run/stages/base/metrics.jsonl").read_text().splitlines()
    assert ["compiled_graphs" in json.loads(line) for line in lines] == [True] * STEPS
    compiled_layers.layer_graphs.cache_clear()


def test_a_resumed_stage_keeps_its_layers_own_code_if_it_had_it(tmp_path, monkeypatch) -> None:
    asked: list[tuple[object, object]] = []

    def ask(self: backend.Backend, wish: object, begun: object) -> bool:
        asked.append((wish, begun))
        return False

    monkeypatch.setattr(TorchBackend, "compile_layers", ask)
    with RunFolder.create(tmp_path / "run", recipe()) as folder:
        stop(recipe(), folder, "base", after=3)
    with RunFolder.resume(tmp_path / "run", recipe()) as folder:
        run_stage(recipe(), folder, "base")
    assert asked == [("auto", None), ("auto", False)]
