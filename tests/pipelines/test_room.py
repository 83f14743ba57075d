"""When ranks share one copy of the student to write with, and what cannot be together with that."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from recipes import tiny_recipe

from opd import untrusted
from opd.errors import ConfigError
from opd.models.causal_lm import CausalLM
from opd.pipelines.stages.precision import LAID_OUT, check_turns, cuts_engines, is_cut, room_for, weight_bytes
from opd.pipelines.stages.supervised import new_base
from opd.ranks import Ranks
from opd.untrusted import machine_memory

ROLLOUT = {"max_new_tokens": 5, "max_sequence": 16}


def recipe(sharded: bool | None = None, **changes):
    """One whose engine is asked so, on a CPU."""
    engine = {"type": "torch", "sharded": sharded}
    plain = tiny_recipe()
    model = plain.model.model_dump(mode="json", exclude_none=True) | {"device": "cpu"}
    return tiny_recipe(rollout=ROLLOUT | {"engine": engine} | changes, model=model)


def test_ranks_share_a_copy_where_a_machine_has_no_memory_for_one_each(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    together, memory = room_for(recipe(), 4)
    assert together == 4
    assert memory <= machine_memory()
    assert not is_cut(recipe(), 4, memory // 4)
    assert is_cut(recipe(), 4, memory // 4 + 1)
    assert not is_cut(recipe(), 1, 2 * memory)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the other two are elsewhere
    assert not is_cut(recipe(), 4, memory // 2)
    assert is_cut(recipe(), 4, memory // 2 + 1)


@pytest.mark.parametrize(
    ("changes", "learns"),
    [({}, 3), ({"runtime": {"offload": {"trainer": True}}}, 0)],
    ids=["beside a student", "offloaded"],
)
def test_a_gpus_room_is_what_is_free_without_all_that_comes(pretended, monkeypatch, changes, learns):
    free, size = 1000 << 20, 100 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1 << 40))
    plain = tiny_recipe(**changes)
    model = plain.model.model_dump(mode="json", exclude_none=True) | {"device": "cuda:1"}
    asked = tiny_recipe(model=model, **changes)
    together, room = room_for(asked, 2, size)
    assert together == 1
    assert room == free - int(LAID_OUT * size) - learns * size // 2
    assert not is_cut(asked, 2, size)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: (int((1 + LAID_OUT + learns / 2) * size) - 1, 1 << 40)
    )
    assert is_cut(asked, 2, size)  # whatever the memory of the device


@pytest.mark.parametrize(("limit", "memory"), [("4096", 4096), ("max", None), (str(1 << 60), None)])
def test_a_control_group_may_have_less_than_the_machine(limit, memory, monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(untrusted, "GROUP", tmp_path)
    assert room_for(recipe(), 4)[1] == (memory or machine_memory())


def test_a_recipe_may_say_whether_they_do():
    assert is_cut(recipe(True), 2, 1)
    assert not is_cut(recipe(False), 2, 1 << 60)
    assert not is_cut(recipe(True), 1, 1)


def test_one_rank_has_all_of_a_model(tmp_path):
    new_base(tiny_recipe(), tmp_path / "model")
    assert not cuts_engines(recipe(True), tmp_path / "model", Ranks())
    count = CausalLM.from_pretrained(tmp_path / "model").parameter_count
    assert weight_bytes(tmp_path / "model", "float32") == 4 * count
    assert weight_bytes(tmp_path / "model", "bfloat16") == 2 * count


def test_ranks_that_share_write_in_turn():
    with pytest.raises(ValidationError, match=r"engine\.sharded writes with the weights that are trained"):
        recipe(True, schedule="ahead")
    check_turns(recipe(), Path("m"), 1 << 30)
    with pytest.raises(
        ConfigError, match=r"does not hold m \(1\.0 GiB\) once more .* rollout\.schedule to in"
    ):
        check_turns(recipe(schedule="async"), Path("m"), 1 << 30)


def test_an_actor_has_a_copy_of_its_own():
    with pytest.raises(ValidationError, match=r"launch ray has them elsewhere"):
        tiny_recipe(launch={"type": "ray"}, rollout=ROLLOUT | {"engine": {"type": "torch", "sharded": True}})
