"""Domains with settings of their own: each is written in its own way and has its own share of the merge."""

from pathlib import Path

import numpy as np
import pytest
import tiny
from attempts import run_only
from recipes import own_rollout, tiny_recipe

from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.student import ways_of
from opd.rollout.collect import DomainSampling, EncodedPrompt, collect, generate_groups
from opd.rollout.torch_engine import TorchEngine
from opd.types import SamplingParams

OWN = {
    "rollout": {"max_new_tokens": 2, "temperature": 0.5},
    "specialist": {"steps": 1},
    "distill": {"prompts_per_domain": 3},
}


def engine() -> TorchEngine:
    return TorchEngine(tiny.model(), max_running=8, max_sequence=40)


def asked(domain: str, count: int) -> list[EncodedPrompt]:
    rng = np.random.default_rng(len(domain))
    return [
        EncodedPrompt(f"{domain}/{i}", domain, rng.integers(0, 15, 3).astype(np.int32), None)
        for i in range(count)
    ]


@pytest.mark.slow
def test_each_prompt_is_written_as_its_domain_says():
    """Together, in their order, and to the same tokens as alone."""
    called: list[list[str]] = []

    def one_by_one(engine, prompts, group_size, sampling, seed):
        called.append([prompt.uid for prompt in prompts])
        return own_rollout(engine, prompts, group_size, sampling, seed)

    ways = {
        "a": DomainSampling(SamplingParams(max_new_tokens=7), collect),
        "b": DomainSampling(SamplingParams(temperature=0.3, max_new_tokens=2), collect),
        "c": DomainSampling(SamplingParams(max_new_tokens=4), one_by_one),
        "dd": DomainSampling(SamplingParams(max_new_tokens=4), one_by_one),
        "eee": DomainSampling(SamplingParams(max_new_tokens=5), one_by_one),
    }
    prompts = [prompt for four in zip(*(asked(name, 3) for name in ways), strict=True) for prompt in four]
    groups = generate_groups(engine(), prompts, 2, ways, 5)
    assert [group.uid for group in groups] == [prompt.uid for prompt in prompts]
    assert sorted(called) == [["c/0", "dd/0", "c/1", "dd/1", "c/2", "dd/2"], ["eee/0", "eee/1", "eee/2"]]
    for prompt, group in zip(prompts, groups, strict=True):
        (alone,) = collect(engine(), [prompt], 2, ways[prompt.domain].sampling, 5)
        for found, expected in zip(group.samples, alone.samples, strict=True):
            assert found.response_ids.tolist() == expected.response_ids.tolist()
            assert len(found.response_ids) == ways[prompt.domain].sampling.max_new_tokens


def test_domains_that_share_a_rollout_of_ones_own_have_one_way():
    """So `write` calls it once for all of them."""
    settings = {"max_new_tokens": 5, "max_sequence": 16, "generate": "recipes:own_rollout"}
    ways = ways_of(tiny_recipe(rollout=settings), tiny.tokenizer())
    assert ways["sort"] == ways["add3"]
    assert ways["sort"].generate is not collect


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "base"
    recipe = tiny_recipe(base=None)
    run_only(recipe, out, "base")
    return out / "base"


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["memory", "disk"])
@pytest.mark.parametrize("own", [None, "recipes:own_rollout"], ids=["engine", "own"])
def test_a_run_of_domains_with_settings_of_their_own(base, tmp_path, kept, own):
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"] |= OWN
    domains["sort"]["rollout"] = OWN["rollout"] | ({"generate": own} if own else {})
    recipe = tiny_recipe(
        base=None,
        model={"path": str(base)},
        domains=domains,
        specialist={"steps": 2, "prompts_per_step": 4, "group_size": 4, "filter_zero_variance": False},
        distill={"steps": 2, "prompts_per_domain": 5},
        baselines={"methods": ["off_policy", "mixed_grpo"]},
        evaluation={"prompts_per_domain": 4, "base_kl_every": 1},
        storage={"trajectories": kept},
    )
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        for stage in ("merge", "baseline-off_policy", "baseline-mixed_grpo"):
            run_stage(recipe, folder, stage)
        tokens = (folder.stage_done("merge") or {})["student_tokens"]
    rows = {
        stage: read_metrics(tmp_path / f"run/stages/{stage}/metrics.jsonl")
        for stage in ("specialist-sort", "specialist-add3", "merge")
    }
    assert [len(rows[stage]) for stage in ("specialist-sort", "specialist-add3")] == [1, 2]
    assert rows["specialist-sort"][0]["length/max"] == 2
    assert rows["specialist-add3"][0]["length/max"] == 5
    assert 2 * 5 * 5 < tokens <= 2 * (3 * 2 + 5 * 5)  # some end earlier
    # What is drawn at 0.5 and trained at 1 differs by that and not by the engine; and no student has left the
    # base before its first step.
    for stage in rows:
        assert rows[stage][0]["mismatch/max_abs"] < 1e-3
        assert rows[stage][0]["base_kl"] == pytest.approx(0.0, abs=1e-4)
