"""The first step of one merge: torch, SGLang and Megatron-Core teachers give every parameter one gradient."""

from contextlib import ExitStack

import pytest
import torch
from recipes import tiny_recipe
from served_models import PADDED, QWEN3, write_model

from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.distill import Distill
from opd.pipelines.stages.loop import PhaseTimer, StepContext

TOLERANCE = 1e-4
"""Of the largest gradient: float32 rounding of another order of sums, at the hidden states."""


def first_gradients(recipe, start, out) -> tuple[dict[str, torch.Tensor], dict[str, float], float]:
    """The gradients before the first update, the metrics that came with them, and the tokens they are of."""
    with RunFolder.create(out, recipe) as folder, ExitStack() as stack:
        quiet = lambda *words: None  # noqa: E731
        context = StageContext.open(recipe, folder, "merge", quiet)
        stack.callback(context.metrics.close)
        merge = Distill(context, start, stack)
        source, step = merge.open_source(stack), StepContext(0, 0.0, PhaseTimer(), {})
        source.start(0, {})
        samples = stack.enter_context(source.step_samples(0))
        merge.score(samples, step)
        [update] = merge.plan(samples, step).updates
        metrics = merge.student.backend.accumulate_gradient(update.samples, update.read)
        update.done()
        parameters = merge.student.backend.model.module.named_parameters()
        gradients = {name: parameter.grad.clone() for name, parameter in parameters}
        counters = merge.schedule.take_counters()
    waits = {name: value for name, value in counters.items() if name.endswith("/wait_seconds")}
    assert set(waits) == {"teacher/one/wait_seconds", "teacher/two/wait_seconds"}
    assert min(waits.values()) > 0
    return gradients, metrics, sum(len(s.response_ids) for s in samples.samples)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_back_end_gives_the_same_gradient(sglang, served_models, tmp_path, temperature):
    """Two teachers, of which one is served, or both on one Megatron-Core module."""
    pytest.importorskip("megatron.core", reason="needs the extra megatron", exc_type=ImportError)
    served = {"path": str(served_models["a"]), "type": "sglang", "urls": [sglang.url]}
    write_model(tmp_path / "two", seed=7, **QWEN3, vocab_size=PADDED)
    here = {"one": {"path": str(served_models["a"])}, "two": {"path": str(tmp_path / "two")}}
    cases = {
        "torch": (here, "streamed"),
        "sglang": (here | {"one": served}, "streamed"),
        "megatron": (here, "megatron"),
    }
    found = {}
    for name, (teachers, kind) in cases.items():
        recipe = tiny_recipe(
            model={"path": str(served_models["b"])},
            base=None,
            domains={
                domain: {"source": f"procedural:{domain}", "params": {"digits": 3}, "prompts": 200}
                | {"teacher": teacher}
                for domain, teacher in (("sort", "one"), ("add3", "two"))
            },
            teachers=teachers,
            rollout={"max_new_tokens": 8, "max_sequence": 32, "temperature": temperature},
            distill={"steps": 1, "prompts_per_domain": 6, "teachers": kind},
            baselines={"methods": []},
        )
        found[name] = first_gradients(recipe, served_models["b"], tmp_path / name)
    right, metrics, tokens = found["torch"]
    largest = max(float(gradient.abs().max()) for gradient in right.values())
    assert largest > 1e-3
    assert metrics["kl/mean"] > 0.1
    for name in ("sglang", "megatron"):
        gradients, others, count = found[name]
        assert count == tokens > 0
        assert others["kl/mean"] == pytest.approx(metrics["kl/mean"], abs=1e-4)
        for parameter, gradient in gradients.items():
            apart = float((gradient - right[parameter]).abs().max())
            assert apart <= TOLERANCE * largest, (name, parameter, apart)
