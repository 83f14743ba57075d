"""Choices of experts, recorded and replayed, over families of transformers that choose in different ways."""

from functools import cache

import pytest
import tiny_types
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING
from watched import own_bytes

from opd.errors import ModelError
from opd.models.architecture import empty_model
from opd.models.attention import ATTENTION_NAME, PackedAttention
from opd.models.causal_lm import CausalLM
from opd.models.long_sequence import WHOLE, LayerMemory
from opd.models.routing import ExpertRouting, RoutedTokens, empty_routing_fault, find_routing

DEEP = {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3}
FAMILIES = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3},
    "mixtral": {},
    "olmoe": {},
    "deepseek_v3": DEEP,  # sigmoid scores in groups, a correction, a dense layer first
    "glm4_moe": DEEP,
    "granitemoe": {},  # a softmax over the chosen scores, by the method `topk`
}
BOUNDS = [0, 7, 12]
IDS = torch.arange(12) * 7 % 13
POSITIONS = torch.cat([torch.arange(7), torch.arange(5)])
MEMORIES = {"whole": WHOLE, "recomputed": LayerMemory(recompute=True), "in pieces": LayerMemory(chunk=4)}


@cache
def family_model(name: str) -> CausalLM:
    module = tiny_types.tiny_model(name, **FAMILIES[name])
    module.set_attn_implementation(ATTENTION_NAME)
    return CausalLM(module)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> CausalLM:
    return family_model(request.param)


def routing_of(model: CausalLM) -> ExpertRouting:
    assert model.routing is not None, model.unroutable
    return model.routing


def hidden(model: CausalLM, memory: LayerMemory = WHOLE) -> Tensor:
    return model.hidden(IDS, POSITIONS, BOUNDS, memory)


@torch.no_grad()
def recorded(model: CausalLM, memory: LayerMemory = WHOLE) -> Tensor:
    routing = routing_of(model)
    with routing.record(routing.new_choices(len(IDS))) as choices:
        hidden(model, memory)
    return choices


def drawn(model: CausalLM, seed: int = 0) -> Tensor:
    """Choices that no router made: K of E experts for every token and block."""
    routing = routing_of(model)
    numbers = torch.rand(
        len(IDS), routing.layers, routing.experts, generator=torch.Generator().manual_seed(seed)
    )
    return numbers.argsort(-1)[..., : routing.per_token].to(torch.int16)


def gradients(model: CausalLM, choices: Tensor | None, memory: LayerMemory, inside: bool) -> list[Tensor]:
    """Hidden states, and gradients of their sum of squares; the backward `inside` the replay or after it."""
    model.module.zero_grad()
    if choices is None:
        output = hidden(model, memory)
        output.square().sum().backward()
    else:
        with routing_of(model).replay(RoutedTokens(choices)):
            output = hidden(model, memory)
            if inside:
                output.square().sum().backward()
        if not inside:
            output.square().sum().backward()
    return [output.detach(), *(one.grad.clone() for one in model.module.parameters() if one.grad is not None)]


def test_a_dense_model_has_no_routing():
    module = tiny_types.tiny_model("qwen3")
    module.set_attn_implementation(ATTENTION_NAME)
    model = CausalLM(module)
    assert model.routing is None
    assert model.unroutable is None


def test_recorded_choices_are_those_the_experts_got(model: CausalLM):
    routing, got = routing_of(model), []
    for part in model.module.modules():
        if type(part).__name__.endswith("Experts"):
            part.register_forward_pre_hook(lambda part, inputs: got.append(inputs[1]))
    choices = recorded(model)
    assert choices.shape == (12, routing.layers, routing.per_token)
    assert torch.equal(choices.long(), torch.stack(got, 1))
    assert int(choices.min()) >= 0
    assert int(choices.max()) < routing.experts


def test_choices_in_pieces_are_those_of_the_whole(model: CausalLM):
    assert torch.equal(recorded(model, MEMORIES["in pieces"]), recorded(model))


def test_recording_changes_no_bit(model: CausalLM):
    with torch.no_grad():
        plain, routing = hidden(model), routing_of(model)
        with routing.record(routing.new_choices(len(IDS))):
            assert torch.equal(hidden(model), plain)
        assert torch.equal(hidden(model), plain)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_replay_of_its_own_choices_changes_no_bit(model: CausalLM, memory: LayerMemory, inside: bool):
    choices = recorded(model, memory)
    plain = gradients(model, None, memory, inside)
    replayed = gradients(model, choices, memory, inside)
    assert len(plain) == len(replayed) > 10
    assert all(map(torch.equal, plain, replayed))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("memory", [*MEMORIES][1:])
def test_replay_holds_where_layers_are_computed_again(model: CausalLM, memory: str, inside: bool):
    choices = drawn(model)
    choices[3] = choices[11] = -1
    whole = gradients(model, choices, WHOLE, inside=False)
    again = gradients(model, choices, MEMORIES[memory], inside)
    plain = gradients(model, None, WHOLE, inside)
    assert float((whole[0] - plain[0]).abs().max()) > 1e-3  # other experts are other numbers
    for ours, expected in zip(again, whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-5 * float(expected.abs().max()))


def test_rows_of_minus_one_are_left_to_the_model(model: CausalLM):
    routing, choices = routing_of(model), drawn(model)
    choices[5] = -1
    with torch.no_grad(), routing.replay(RoutedTokens(choices)):
        replayed = hidden(model)
    with torch.no_grad(), routing.replay(RoutedTokens(routing.new_choices(len(IDS)))):
        free = hidden(model)
    with torch.no_grad():
        plain = hidden(model)
    assert torch.equal(free, plain)
    assert not torch.allclose(replayed[0], plain[0])


def test_a_router_learns_from_replayed_choices():
    """The weights of replayed experts come from the trainer's own scores: its router has a gradient, that of
    differences. The family computes scores in float32, so the step is wide.
    """
    module = tiny_types.tiny_model("qwen3_moe", **FAMILIES["qwen3_moe"]).double()
    module.set_attn_implementation(ATTENTION_NAME)
    module.set_experts_implementation("eager")  # the others multiply no float64
    model = CausalLM(module)
    choices = drawn(model)
    gate = next(weight for name, weight in module.named_parameters() if name.endswith("mlp.gate.weight"))

    def loss() -> Tensor:
        with routing_of(model).replay(RoutedTokens(choices)):
            return model.run(IDS, POSITIONS, PackedAttention(BOUNDS)).square().sum()

    loss().backward()
    assert gate.grad is not None
    step, direction = 1e-3, torch.randn(gate.shape, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        gate += step * direction
        upper = loss()
        gate -= 2 * step * direction
        lower = loss()
    torch.testing.assert_close((upper - lower) / (2 * step), (gate.grad * direction).sum(), rtol=5e-3, atol=0)


def test_families_that_choose_in_another_way_are_refused():
    module = tiny_types.tiny_model("phimoe")
    module.set_attn_implementation(ATTENTION_NAME)
    model = CausalLM(module)
    assert model.routing is None
    assert (
        model.unroutable == "chooses the experts of layer 0 in another way than by one topk of their scores"
    )


def test_choices_of_another_form_are_refused():
    model = family_model("mixtral")
    routing = routing_of(model)
    with (
        pytest.raises(ModelError, match=r"shape \[12, 2, 5\].* 2 routed layers .* 2 experts each"),
        routing.replay(RoutedTokens(torch.zeros(12, 2, 5))),
    ):
        pass
    short = RoutedTokens(drawn(model)[:11])
    with pytest.raises(ModelError, match="for 11 tokens, and 12 tokens"), routing.replay(short):
        hidden(model)
    with (
        pytest.raises(ModelError, match="more tokens were run than the 11"),
        torch.no_grad(),
        routing.record(routing.new_choices(11)),
    ):
        hidden(model)
    with (
        routing.replay(RoutedTokens(drawn(model))),
        pytest.raises(ModelError, match="once at a time"),
        routing.record(routing.new_choices(12)),
    ):
        pass


PUBLISHED: list[tuple[str, dict, str | None]] = [
    ("deepseek_v3", {"num_hidden_layers": 4}, None),
    ("qwen2_moe", {"hidden_size": 3584, "shared_expert_intermediate_size": 20480}, None),
    ("qwen3_moe", {"hidden_size": 4096}, None),
    ("deepseek_v2", {"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}, "no"),
]


@pytest.mark.parametrize(("family", "sizes", "words"), PUBLISHED)
def test_what_cannot_be_replayed_shows_without_weights(family, sizes, words):
    """At published widths, where shared experts would take gigabytes and large scores make weights of 0."""
    groups = {"topk_method": "group_limited_greedy"} if words else {}
    config = CONFIG_MAPPING[family](**{"num_hidden_layers": 2, **sizes, **groups})
    module = empty_model(config, family)
    routing = find_routing(module)
    assert isinstance(routing, ExpertRouting)
    before = own_bytes()
    fault = empty_routing_fault(module, routing)
    assert (fault is None) == (words is None)
    assert fault is None or fault.endswith("no weight where it would not choose them")
    assert own_bytes() - before < 200 << 20


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_replays_is_found_without_weights(family):
    module = empty_model(tiny_types.tiny_config(family, **FAMILIES[family]), family)
    routing = find_routing(module)
    assert isinstance(routing, ExpertRouting)
    assert empty_routing_fault(module, routing) is None
