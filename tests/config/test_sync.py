"""How new weights get to servers: what a recipe means that does not say it, and what cannot be."""

import pytest
from recipes import tiny_recipe

HERE, OWN = {"type": "sglang", "urls": ["http://127.0.0.1:1"]}, {"type": "sglang", "servers": "own"}
RAY = {"launch": {"type": "ray"}}
GROUP = {"servers": {"own": {}}}
VLLM = {"servers": {"own": {"type": "vllm"}}}


@pytest.mark.parametrize(
    ("engine", "others", "sync"),
    [
        (OWN, GROUP | RAY, "delta"),
        (OWN | {"type": "vllm"}, VLLM | RAY, "delta"),
        (OWN | {"folder": "/shared"}, GROUP | RAY, "folder"),
        (OWN | {"sync": "disk"}, GROUP | RAY, "disk"),
        (OWN | {"sync": "tensors"}, GROUP | RAY, "tensors"),
        (OWN, GROUP, "folder"),
        (HERE, RAY, "folder"),
        (OWN | {"sync": "delta"}, GROUP | RAY, "delta"),
    ],
)
def test_weights_go_the_way_that_a_recipe_means(engine, others, sync):
    recipe = tiny_recipe(rollout={"engine": engine}, **others)
    assert recipe.rollout.engine.sync_of(recipe.launch.type) == sync


@pytest.mark.parametrize(
    ("engine", "others", "words"),
    [
        (HERE | {"sync": "delta"}, RAY, r"rollout\.engine\.urls are others'; leave sync out"),
        (OWN | {"sync": "delta"}, GROUP, "launch is local; leave sync out, or set launch to ray"),
        (OWN | {"sync": "delta", "folder": "/shared"}, GROUP | RAY, "leave one of them out"),
        (OWN | {"sync": "deltas"}, GROUP | RAY, "'disk', 'tensors' or 'delta'"),
        (OWN | {"type": "vllm", "sync": "delta"}, VLLM, "launch is local"),
    ],
)
def test_changes_are_refused_where_nobody_can_take_them(engine, others, words):
    with pytest.raises(ValueError, match=words):
        tiny_recipe(rollout={"engine": engine}, **others)


def test_adapters_alone_have_a_folder_beside_changes():
    engine = OWN | {"sync": "delta", "folder": "/shared"}
    base = tiny_recipe().model.model_dump(exclude_none=True)
    recipe = tiny_recipe(rollout={"engine": engine}, model=base | {"lora": {}}, **GROUP, **RAY)
    assert recipe.merged_because is None
    merged = engine | {"lora": "merged"}
    with pytest.raises(ValueError, match="leave one of them out"):
        tiny_recipe(rollout={"engine": merged}, model=base | {"lora": {}}, **GROUP, **RAY)


@pytest.mark.parametrize("kind", [HERE, {"type": "torch"}])
def test_how_adapters_are_written_with_needs_some(kind):
    for lora in ("adapters", "merged"):
        with pytest.raises(ValueError, match=f"engine.lora is {lora}, but no adapters are trained"):
            tiny_recipe(rollout={"engine": kind | {"lora": lora}})


def test_ranks_that_share_the_trained_model_merge_nothing():
    base = tiny_recipe().model.model_dump(exclude_none=True)
    engine = {"type": "torch", "sharded": True, "lora": "merged"}
    with pytest.raises(ValueError, match="merge nothing; leave one of them out"):
        tiny_recipe(rollout={"engine": engine}, model=base | {"lora": {}})
