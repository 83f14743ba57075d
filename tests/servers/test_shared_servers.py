"""Two URLs that lead to one server: the run refuses them where one would get another's weights, and the
doctor says so before.
"""

from functools import partial

import pytest
from little_models import LittleSGLang, little
from recipes import tiny_recipe
from served_models import recipe_tokenizer

from opd.errors import TeacherError
from opd.pipelines.check.servers import check_shared
from opd.teachers.kinds import Placement, TeacherOpening, open_kinds

pytest.importorskip("aiohttp", reason="needs the extra sglang")
little_sglang = partial(little, LittleSGLang)


@pytest.fixture
def models(vllm_models, vllm_published):
    return vllm_published | {"folder": str(vllm_models["a"])}


def recipe_of(models, sort, add3, **changes):
    """Both teachers' model and URLs."""
    teachers = {
        name: {"type": "sglang", "path": models[model], "urls": urls, "patience": 1.0}
        for name, (model, urls) in {"sort": sort, "add3": add3}.items()
    }
    own = {"model": {"path": models["folder"]}, "base": None, "baselines": {"methods": []}}
    return tiny_recipe(teachers=teachers, **own, **changes)


def opened(recipe):
    names = list(recipe.teachers)
    sources = {name: entry.path for name, entry in recipe.teachers.items()}
    placement = Placement(vocabulary=len(recipe_tokenizer()))
    with open_kinds(names, TeacherOpening(recipe, placement, sources)) as teachers:
        return set(teachers)


def test_two_teachers_of_two_models_are_both_named(models):
    with little_sglang(models["folder"]) as server:
        urls = [server.url], [server.url.replace("127.0.0.1", "localhost")]
        recipe = recipe_of(models, ("a", urls[0]), ("b", urls[1]))
        sentence = (
            f"teachers.sort.urls: {urls[0][0]} and teachers.add3.urls: {urls[1][0]} lead to one server; give"
            " each of the two servers of its own."
        )
        with pytest.raises(TeacherError) as refused:
            opened(recipe)
        assert str(refused.value) == sentence
        assert [(one.level, one.detail) for one in check_shared(recipe)] == [("error", sentence)]


def test_two_teachers_of_one_model_may_share_it(models):
    with little_sglang(models["folder"]) as server:
        recipe = recipe_of(models, ("a", [server.url]), ("a", [server.url]))
        assert opened(recipe) == {"sort", "add3"}
        assert check_shared(recipe) == []


def test_one_server_twice_in_one_list(models):
    with little_sglang(models["folder"]) as server, little_sglang(models["folder"]) as other:
        twice = [server.url, server.url.replace("127.0.0.1", "localhost")]
        said = f"{twice[0]} and {twice[1]} lead to one server; give every server once."
        recipe = recipe_of(models, ("a", twice), ("b", [other.url]))
        with pytest.raises(TeacherError, match="give every server once"):
            opened(recipe)
        assert [one.detail for one in check_shared(recipe)] == [f"teachers.sort.urls: {said}"]
        rollout = {"engine": {"type": "sglang", "urls": twice}}
        recipe = recipe_of(models, ("b", [other.url]), ("b", [other.url]), rollout=rollout)
        assert [one.detail for one in check_shared(recipe)] == [f"rollout.engine.urls: {said}"]
        rollout["engine"]["urls"] = [other.url]
        recipe = recipe_of(models, ("b", [other.url]), ("b", [other.url]), rollout=rollout)
        (found,) = check_shared(recipe)
        assert "rollout.engine.urls: " in found.detail
        assert "teachers.sort.urls: " in found.detail
