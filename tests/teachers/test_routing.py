import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.teachers.schedule import Router


def test_one_teacher_needs_no_draw():
    route = Router({"math": {"m": 1.0}}, "one_hot").route_group("math", "anything")
    assert (route.name, route.teachers, route.weights) == ("m", ("m",), (1.0,))


def test_one_hot_draws_groups_with_the_weights_and_repeats_itself():
    router = Router({"math": {"a": 0.8, "b": 0.2}}, "one_hot")
    names = [router.route_group("math", f"g{i}").name for i in range(4000)]
    assert names == [router.route_group("math", f"g{i}").name for i in range(4000)]
    assert names.count("a") / 4000 == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("mixture", ["geometric", "arithmetic"])
def test_a_mixture_is_one_route_of_several_teachers(mixture):
    router = Router({"math": {"a": 0.8, "b": 0.2}, "code": {"b": 1.0}}, mixture)
    route = router.route_group("math", "g")
    assert (route.name, route.teachers, route.weights) == ("a+b", ("a", "b"), (0.8, 0.2))
    assert router.teacher_names == ["a", "b"]


def test_domains_that_weigh_the_same_teachers_in_other_ways_have_routes_of_their_own():
    alike = {"a": 0.8, "b": 0.2}
    one, two = {"math": alike, "code": {"a": 0.1, "b": 0.9}}, {"math": alike, "code": dict(alike), "chat": {}}
    for weights, names in ((one, ["a+b@math", "a+b@code"]), (two, ["a+b", "a+b", ""])):
        router = Router(weights, "geometric")
        routes = [router.route_group(domain, "g") for domain in weights]
        assert [route.name for route in routes] == names
        assert [dict(zip(r.teachers, r.weights, strict=True)) for r in routes] == [*weights.values()]


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.floats(1e-3, 10)), min_size=1, max_size=5, unique_by=lambda p: p[0]
    ),
    st.floats(1e-3, 10),
    st.integers(0, 50),
)
def test_weights_by_step_are_linear_between_their_points_and_sum_to_one(points, other, step):
    points = sorted(points)
    router = Router({"math": {"a": points, "b": other}, "code": {"a": 0.25, "b": 0.75}}, "geometric")
    router.set_step(step)
    after = [p for p in points if p[0] >= step][:1] or points[-1:]
    before = [p for p in points if p[0] <= step][-1:] or points[:1]
    (x0, y0), (x1, y1) = before[0], after[0]
    weight = y0 if x0 == x1 else y0 + (y1 - y0) * (min(max(step, x0), x1) - x0) / (x1 - x0)
    route = router.route_group("math", "g")
    assert route.weights == pytest.approx((weight / (weight + other), other / (weight + other)), rel=1e-9)
    assert route.name == "a+b@math"
    assert router.route_group("code", "g").weights == (0.25, 0.75)
    keys = {"teacher_weight/math/a": route.weights[0], "teacher_weight/math/b": route.weights[1]}
    assert router.moving_weights == keys


def test_one_hot_draws_move_from_one_teacher_to_the_other():
    router, drawn = (
        Router({"math": {"a": [(0, 1.0), (10, 0.25)], "b": [(0, 0.25), (10, 1.0)]}}, "one_hot"),
        [],
    )
    for step in (0, 5, 10, 99):
        router.set_step(step)
        drawn.append([router.route_group("math", f"g{i}").name for i in range(4000)])
    assert [names.count("a") / 4000 for names in drawn] == pytest.approx([0.8, 0.5, 0.2, 0.2], abs=0.03)
    assert drawn[2] == drawn[3]
    assert all(now == "b" for was, now in zip(drawn[0], drawn[1], strict=True) if was == "b"), (
        "a group moves once"
    )
