"""A domain whose responses an agent of one's own writes, from a recipe to a merged student."""

import json

import pytest
from attempts import digests, killed_run, run_only
from recipes import episode_settings, tiny_recipe, write_recipe
from test_samples_on_disk import outcome

from opd.errors import ConfigError
from opd.pipelines.check.examine import run_checks
from opd.pipelines.records.inputs import user_code
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_pipeline

pytest.importorskip("aiohttp")
AGENT = {"type": "agent", "params": {"run": "agents:plain", "turns": 2}}
BRANCHING = {"type": "agent", "params": {"run": "agents:branching"}}


def settings(**environment) -> dict:
    """One domain of agents and one of single answers."""
    return episode_settings(AGENT | environment)


@pytest.mark.long
def test_a_specialist_on_disk_learns_of_branches_what_it_does_in_memory(tmp_path):
    made = {"base": {"steps": 2, "batch_size": 8}, "specialist": settings()["specialist"] | {"steps": 2}}
    recipe = tiny_recipe(**settings(**BRANCHING) | made)
    run_only(recipe, tmp_path / "base", "base")
    own = settings(**BRANCHING) | made | {"base": None}
    own["model"] = {"path": str(tmp_path / "base" / "base")}
    found = []
    for home in ("memory", "disk"):
        recipe = tiny_recipe(**own, storage={"trajectories": home})
        found.append(outcome(tmp_path / home, "specialist-sort", recipe))
    assert found[0][0] == found[1][0]
    for memory, disk in zip(found[0][1], found[1][1], strict=True):
        assert disk == pytest.approx(memory, rel=1e-6, abs=1e-6)
    assert [row["episode/branches"] for row in found[1][1]] == [4.0] * 2


@pytest.mark.slow
def test_killed_in_the_middle_of_conversations_and_resumed_the_weights_are_the_same(tmp_path):
    recipe = tiny_recipe(**settings(**BRANCHING))
    with RunFolder.create(tmp_path / "whole", recipe) as folder:
        run_pipeline(recipe, folder)
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    merged = next(model for model in results["models"] if model["name"] == "merged")
    assert merged["domains"]["sort"]["sampled"]["total"] == 6

    path, out = write_recipe(tmp_path / "recipe.yaml", **settings(**BRANCHING)), tmp_path / "run"
    killed_run(path, out, 1, 1500)
    assert digests(out) == digests(tmp_path / "whole")


def test_the_doctor_and_the_records_know_the_agent():
    recipe = tiny_recipe(**settings())
    found = {one.title: one for one in run_checks(recipe, thorough=False)}
    assert found["environment sort"].level == "ok"
    assert "agents:plain" in found["environment sort"].detail
    assert user_code(recipe)["domains.sort.environment"] == "agents:plain"
    missing = tiny_recipe(**settings(params={"run": "agents:missing"}))
    found = {one.title: one for one in run_checks(missing, thorough=False)}
    assert found["environment sort"].level == "error"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({}, r"needs params.run, package.module:function"),
        ({"run": 3}, r"needs params.run"),
        ({"run": "agents"}, r"needs params.run"),
    ],
)
def test_an_agent_without_a_function_is_refused_by_the_recipe(params, said):
    with pytest.raises(ValueError, match=said):
        tiny_recipe(**settings(params=params))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"run": "agents:missing"}, "cannot be loaded"),
        ({"run": "agents:SEEN"}, "is no function"),
        ({"run": "agents:plain", "turn": 3}, r"do not fit.*turn"),
    ],
)
def test_a_function_that_does_not_fit_stops_the_run_before_it_begins(tmp_path, params, said):
    recipe = tiny_recipe(**settings(params=params))
    with pytest.raises(ConfigError, match=said), RunFolder.create(tmp_path / "run", recipe) as folder:
        run_pipeline(recipe, folder)
