"""Signal-to-noise of each estimator's gradient, on the same prompts at the same weights.

For every estimator the gradient of one merge step is taken on `--draws` independent rollouts of the same
prompts. Noise is the trace of the gradient's covariance, signal the squared norm of the mean (less the noise
left in it).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from study import DOMAINS, ESTIMATORS, HERE

from opd.config.load import load_recipe
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.distill import Distill
from opd.pipelines.stages.loop import PhaseTimer, StepContext
from opd.pipelines.stages.samples import StepSamples
from opd.train.torch_backend import TorchBackend


def gradients(whole: Path, start: Path, words: Sequence[str], draws: int, *files: Path) -> torch.Tensor:
    """[draws, P] float32: gradients of the same prompts under fresh sampling noise, of the recipe with more
    `files` and `words`, as on the command line.
    """
    teachers = {domain: {"path": str(whole / "specialists" / domain)} for domain in DOMAINS}
    settings = ["--base", "null", "--model.config", "null", "--model.path", str(start)]
    settings += ["--teachers", json.dumps(teachers), *words]
    recipe = load_recipe([HERE / "recipe.yaml", *files], settings)
    rows = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        RunFolder.create(Path(scratch) / "run", recipe) as folder,
        ExitStack() as stack,
    ):
        context = StageContext.open(recipe, folder, "merge", lambda *_: None)
        merge, step = Distill(context, start, stack), StepContext(0, 0.0, PhaseTimer(), {})
        student, backend = merge.student, merge.student.backend
        assert isinstance(backend, TorchBackend)
        module = backend.model.module
        parameters = [p for p in module.parameters() if p.requires_grad]
        for draw in range(draws):
            prompts = [replace(prompt, uid=f"{draw}/{prompt.uid}") for prompt in merge.batch_prompts(0)]
            samples = StepSamples(student.sample_groups(prompts, 1, student.rollout_engine), backend)
            merge.score(samples, step)
            [update] = merge.plan(samples, step).updates
            backend.accumulate_gradient(update.samples, update.read)
            update.done()
            rows.append(torch.cat([p.grad.flatten() for p in parameters]))
            module.zero_grad()
    return torch.stack(rows)


def signal_to_noise(rows: torch.Tensor) -> dict[str, float]:
    """Unbiased estimates of |mean gradient|^2 and of the covariance's trace, and their ratio."""
    draws, mean = len(rows), rows.mean(0)
    noise = float((rows - mean).square().sum() / (draws - 1))
    signal = max(float(mean.square().sum()) - noise / draws, 0.0)
    return {"signal": signal, "noise": noise, "snr": signal / noise}


def main() -> None:
    """Measure at the base and at the merged student of one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="a whole run of the study")
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole = options.run
    estimators = {"full-reverse": ()} | {name: (HERE / "variants" / f"{name}.yaml",) for name in ESTIMATORS}
    found = {
        point: {
            name: signal_to_noise(gradients(whole, start, (), options.draws, *files))
            for name, files in estimators.items()
        }
        for point, start in (("base", whole / "base"), ("merged", whole / "merged"))
    }
    options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
