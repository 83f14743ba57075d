"""One rank of a merge whose ranks read the teachers together; run by test_s3_merge.py, one process a rank.

    python merge_ranks.py RANK WORLD FOLDER

Runs the merge of `FOLDER/recipe.yaml` three times, in the run folders `FOLDER/MODE-RANK`:

replicated: every rank makes the whole step; only the reading of the teachers is shared.
copied: the same, with the node's copies of what was read, in `FOLDER/copies`.
parallel: every rank scores and trains its own samples; the gradients are added up.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from zlib import crc32

import torch.distributed as dist
import yaml
from rank_processes import joined

from opd.config import Recipe
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages import distill, teachers
from opd.pipelines.stages.context import StageContext
from opd.train.backend import Read
from opd.types import Sample


def is_mine(sample: Sample) -> bool:
    """Whether this rank scores and trains `sample`."""
    return crc32(sample.uid.encode()) % dist.get_world_size() == dist.get_rank()


class ParallelMerge(distill.Distill):
    """Every rank writes all responses, which keeps them the same, and scores and trains its own."""

    def __init__(self, context: StageContext, start: Path, stack: ExitStack) -> None:
        """As the merge of one process, with its schedule and trainer kept to this rank's samples."""
        super().__init__(context, start, stack)
        backend, score, train = (
            self.student.backend,
            self.schedule.score,
            self.student.backend.accumulate_gradient,
        )

        def score_mine(samples: Sequence[Sample]) -> None:
            score([sample for sample in samples if is_mine(sample)])

        def train_mine(samples: Sequence[Sample], read: Read) -> dict[str, float]:
            # The weights of the terms are normalised over the samples of all ranks already.
            mine = [place for place, sample in enumerate(samples) if is_mine(sample)]
            metrics = train(
                [samples[place] for place in mine],
                lambda parts: read([[mine[place] for place in part] for part in parts]),
            )
            for parameter in backend.model.module.parameters():
                dist.all_reduce(parameter.grad)
            return metrics

        self.schedule.score, backend.accumulate_gradient = score_mine, train_mine


MODES = {"replicated": distill.Distill, "copied": distill.Distill, "parallel": ParallelMerge}


def main() -> None:
    """Join the group and run the merges."""
    with joined(seconds=120) as (rank, folder):
        given = yaml.safe_load((folder / "recipe.yaml").read_text())
        # What a launcher of several ranks would pass to the stage.
        distill.open_schedule = partial(teachers.open_schedule, group=dist.group.WORLD)
        for mode, merge in MODES.items():
            distill.Distill = merge
            most = None if mode == "copied" else 0
            runtime = {"weights_cache_mb": most, "weights_cache": str(folder / "copies")}
            recipe = Recipe.model_validate(given | {"runtime": given["runtime"] | runtime})
            with RunFolder.create(folder / f"{mode}-{rank}", recipe) as own:
                run_stage(recipe, own, "merge")
            dist.barrier()


if __name__ == "__main__":
    main()
