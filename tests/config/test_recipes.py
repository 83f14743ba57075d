from pathlib import Path

from opd.config.load import dump_recipe, load_recipe

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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
