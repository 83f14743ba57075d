"""A specialist on shaped rewards: the same wherever its samples are, and what it says of them."""

import pytest
from attempts import run_only
from pydantic import ValidationError
from recipes import shaped_specialist, tiny_recipe

from opd.errors import TrainingError
from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage


@pytest.mark.slow
def test_a_specialist_learns_the_same_of_samples_in_memory_and_on_disk(tmp_path):
    ends, rows = [], []
    run_only(tiny_recipe(base=None), tmp_path / "base", "base")
    for kept in ("memory", "disk"):
        recipe = tiny_recipe(
            base=None,
            model={"path": str(tmp_path / "base" / "base")},
            specialist=shaped_specialist() | {"steps": 3, "filter_zero_variance": False},
            storage={"trajectories": kept},
        )
        with RunFolder.create(tmp_path / kept, recipe) as folder:
            run_stage(recipe, folder, "specialist-sort")
            ends.append((folder.stage_done("specialist-sort") or {})["digest"])
        found = read_metrics(tmp_path / kept / "stages" / "specialist-sort" / "metrics.jsonl")
        rows.append(
            [{key: row[key] for key in row if key.startswith(("reward", "shaping"))} for row in found]
        )
    assert ends[0] == ends[1]
    assert rows[0] == rows[1]
    for row in rows[0]:
        assert {
            "shaping/mean",
            "shaping/std",
            "shaping/clipped",
            "shaping/overlong",
            "shaping/length",
        } <= set(row)
        assert row["shaping/overlong"] > 0  # of a model made from noise some are cut


def test_nothing_is_learned_from_what_was_cut(tmp_path):
    """No response ends by itself here."""
    recipe = tiny_recipe(
        base=None,
        rollout={
            "max_new_tokens": 3,
            "max_sequence": 16,
            "model_stop_ids": False,
            "stop": ["no such answer"],
        },
        specialist={"steps": 1, "filter_zero_variance": False, "shaping": {"mask_truncated": True}},
    )
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, "base")
        with pytest.raises(TrainingError, match="all responses of the last step were cut, which shaping"):
            run_stage(recipe, folder, "specialist-sort")
    (row,) = read_metrics(tmp_path / "run" / "stages" / "specialist-sort" / "metrics.jsonl")
    assert row["truncated"] == 1


@pytest.mark.parametrize("buffer", [5, 6])
def test_a_penalty_for_every_response_is_refused(buffer):
    with pytest.raises(ValidationError, match="penalises every response of domain sort"):
        tiny_recipe(specialist={"shaping": {"overlong_buffer": buffer}})
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["add3"]["specialist"] = {"shaping": {"overlong_buffer": buffer}}
    with pytest.raises(ValidationError, match="penalises every response of domain add3"):
        tiny_recipe(domains=domains)
