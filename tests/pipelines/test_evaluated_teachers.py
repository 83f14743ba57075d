"""Which teachers an evaluation measures, what they are called, and on which domains they count."""

from recipes import tiny_recipe

from opd.pipelines.evaluation.evaluate import (
    _mean_accuracy,
    _select_answers,
    best_teachers,
    domains_of,
    teacher_model,
)

GIVEN = {"sort": {"path": "/models/sort"}}
DOMAINS = {
    "sort": {"source": "procedural:sort"},
    "add3": {"source": "procedural:add3"},
    "both": {"source": "procedural:reverse", "teacher": {"sort": 0.5, "add3": 0.5}},
}


def rows(*shares: float) -> dict:
    return {d: {"sampled": {"accuracy": s}} for d, s in zip(DOMAINS, shares, strict=True)}


def test_a_teacher_has_its_own_name_and_the_best_of_several_counts() -> None:
    recipe = tiny_recipe(domains=DOMAINS, teachers=GIVEN)
    names = [teacher_model(recipe, teacher) for teacher in recipe.teacher_domains()]
    assert names == ["teacher:sort", "specialist:add3"]
    measured = {"teacher:sort": rows(0.9, 0.1, 0.2), "specialist:add3": rows(0.1, 0.8, 0.3)}
    assert best_teachers(recipe, measured) == {
        "sort": "teacher:sort",
        "add3": "specialist:add3",
        "both": "specialist:add3",
    }
    assert best_teachers(recipe, {"teacher:sort": measured["teacher:sort"]})["both"] == "teacher:sort"


def test_a_teacher_is_told_and_kept_on_its_own_domains() -> None:
    recipe = tiny_recipe(domains=DOMAINS, teachers=GIVEN)
    assert domains_of(recipe, "teacher:sort") == ["sort", "both"]
    assert domains_of(recipe, "merged") == domains_of(recipe, "average") == list(DOMAINS)
    assert round(_mean_accuracy(recipe, "teacher:sort", rows(0.9, 0.0, 0.7)), 6) == 0.8
    assert round(_mean_accuracy(recipe, "base", rows(0.9, 0.0, 0.6)), 6) == 0.5
    answers = {domain: [domain] for domain in DOMAINS}
    assert list(_select_answers(recipe, "specialist:add3", answers)) == ["add3", "both"]
    assert list(_select_answers(recipe, "merged", answers)) == list(DOMAINS)
    assert _select_answers(recipe, "average", answers) == {}
