import pytest

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
