import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from opd.config import Recipe
from opd.config.base import Config
from opd.config.load import dump_recipe, load_recipe
from opd.config.schema import annotation_below, config_models, describe_fields, fields_listing, key_paths

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.slow
def test_every_example_recipe_parses_and_survives_a_dump(tmp_path):
    recipes = sorted(EXAMPLES.rglob("recipe*.yaml"))
    assert recipes, f"no recipe*.yaml below {EXAMPLES}"
    for path in recipes:
        recipe = load_recipe([path])
        (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
        assert load_recipe([tmp_path / "dumped.yaml"]) == recipe, path


def test_every_variant_parses_on_top_of_its_recipe():
    variants = sorted(EXAMPLES.rglob("variants/*.yaml"))
    assert variants
    for path in variants:
        base = path.parents[1] / "recipe.yaml"
        assert load_recipe([base, path]) != load_recipe([base]), path


def test_every_piece_of_a_recipe_in_the_documentation_parses():
    """On top of the least that a recipe is: what a page prints can be copied."""
    least = {"name": "x", "model": {"path": "/m"}, "domains": {"sort": {"source": "procedural:sort"}}}
    pieces = 0
    for page in [
        ROOT / "README.md",
        *sorted(ROOT.glob("docs/**/*.md")),
        *sorted(EXAMPLES.glob("*/README.md")),
    ]:
        for piece in re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            Recipe.model_validate(least | yaml.safe_load(piece))
            pieces += 1
    assert pieces > 10


def test_every_field_has_a_sentence_or_a_model_that_says_what_it_is():
    """`opd run --help` and the documentation show them."""

    def without(model: type[Config], path: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            inside = [
                *config_models(field.annotation),
                *config_models(annotation_below(field.annotation, "NAME")),
            ]
            if not (field.description or inside or name == "type"):
                yield path + name
            for one in inside:
                yield from without(one, f"{path}{name}.")
            assert all(one.__doc__ for one in inside), path + name

    assert list(without(Recipe, "")) == []


def test_every_field_is_listed_with_type_default_and_sentence():
    found = {one.key: one for one in describe_fields()}
    keys = [".".join(path) for path in key_paths(Recipe, {}) if path[-1] != "type"]
    assert set(keys) <= set(found)
    assert all(one.kind and one.sentence for one in found.values())
    lines = fields_listing().splitlines()
    assert "  --base.optim.lr  float [0.003]" in lines, "the default of this place, not of the model"
    assert "  --runtime.threads  int or null [null]" in lines
    assert "  --rollout.engine  one of torch, sglang, vllm" in lines
    assert "  --distill.loss.type  k1" in lines
    assert "  --teachers.NAME.urls  list of str (with type sglang) [[]]" in lines
    assert "distill.teachers.path" not in found, "it is refused"
    assert "  --distill.loss.coef  float (with type k1) [1.0]" in lines
    assert "  --domains.NAME.source  str, has to be given" in lines
    assert "Undefined" not in fields_listing()
