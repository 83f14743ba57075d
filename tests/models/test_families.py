"""Every family: packed against one by one through the family's own eager attention, head, gradients."""

import copy
from collections.abc import Callable

import pytest
import tiny
import tiny_types
import torch

from opd.errors import ModelError
from opd.models.attention import AttentionCall, PackedAttention
from opd.models.causal_lm import CausalLM, check_attention, check_head
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_folder import layer_windows, positions_of
from opd.models.sharded import open_empty

LENGTHS = [3, 11, 1, 7, 40]


def packed(lengths: list[int], vocab: int, seed: int = 0):
    """(input_ids [T], position_ids [T], cu_seqlens [B + 1])."""
    ids = torch.randint(2, vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return ids, positions, torch.tensor([0, *lengths]).cumsum(0)


def eager_twin(model: CausalLM):
    """The same module on the family's own eager attention."""
    module = copy.deepcopy(model.module)
    module.set_attn_implementation("eager")
    return module


@pytest.mark.parametrize("lengths", [LENGTHS, [9, 9, 9]], ids=["ragged", "equal"])
def test_packed_equals_one_by_one(family: CausalLM, lengths: list[int]):
    ids, positions, bounds = packed(lengths, family.vocab_size)
    twin = eager_twin(family)
    with torch.no_grad():
        hidden = family.hidden(ids, positions, bounds)
        logits = family.head().logits(hidden)
        alone = torch.cat(
            [twin(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths)]
        )
    assert hidden.shape == (sum(lengths), family.config.hidden_size)
    torch.testing.assert_close(logits, alone, atol=1e-5 * float(alone.abs().max().clamp(min=1)), rtol=1e-5)


def test_a_configuration_tells_how_far_each_layer_sees(family: CausalLM):
    ids, positions, ends = packed([5], family.vocab_size)
    attend, seen = PackedAttention(ends.tolist()), []

    def noted(call: AttentionCall) -> torch.Tensor:
        seen.append(call.sliding_window)
        return attend(call)

    with torch.no_grad():
        family.run(ids, positions, noted)
    assert list(layer_windows(family.module.config)) == seen


@pytest.mark.some(1)
def test_a_model_without_weights_has_the_buffers_of_one_with_them(family: CausalLM, tmp_path):
    folder = save_checkpoint(family, tiny.tokenizer(), tmp_path / "m", {})
    for dtype in ("float32", "bfloat16"):
        empty, whole = open_empty(folder, dtype=dtype), CausalLM.from_pretrained(folder, dtype=dtype)
        buffers = dict(empty.module.named_buffers())
        for name, theirs in whole.module.named_buffers():
            assert torch.equal(buffers.pop(name), theirs), name
        assert not buffers
        parameters = dict(empty.module.named_parameters())
        for name, theirs in whole.module.named_parameters():
            mine = parameters.pop(name)
            assert (mine.dtype, mine.shape, mine.is_meta) == (theirs.dtype, theirs.shape, True), name
        assert not parameters


def test_gradients_equal_one_by_one(family: CausalLM):
    ids, positions, bounds = packed(LENGTHS, family.vocab_size)
    twin = eager_twin(family)
    family.module.zero_grad()
    logits = family.head().logits(family.hidden(ids, positions, bounds))
    torch.nn.functional.cross_entropy(logits, ids.roll(-1), reduction="sum").backward()
    for part, target in zip(ids.split(LENGTHS), ids.roll(-1).split(LENGTHS), strict=True):
        own = twin(input_ids=part[None], use_cache=False).logits[0]
        torch.nn.functional.cross_entropy(own, target, reduction="sum").backward()
    reached = 0
    for (name, mine), (_, theirs) in zip(
        family.module.named_parameters(), twin.named_parameters(), strict=True
    ):
        if theirs.grad is None:
            assert mine.grad is None, name
            continue
        scale = float(theirs.grad.abs().max().clamp(min=1))
        torch.testing.assert_close(mine.grad, theirs.grad, atol=2e-5 * scale, rtol=1e-3, msg=name)
        reached += 1
    family.module.zero_grad()
    assert reached >= 10


def test_no_attention_across_boundaries_is_exact(family: CausalLM):
    ids, positions, bounds = packed(LENGTHS, family.vocab_size)
    other = ids.clone()
    changed = slice(int(bounds[1]), int(bounds[2]))
    other[changed] = 2 + (ids[changed] - 1) % (family.vocab_size - 2)
    with torch.no_grad():
        before = family.hidden(ids, positions, bounds)
        after = family.hidden(other, positions, bounds)
    untouched = torch.ones(len(ids), dtype=torch.bool)
    untouched[changed] = False
    assert not torch.equal(before[changed], after[changed])
    if family.config.model_type in ("deepseek_v3", "gpt_oss"):
        # Experts multiply all their tokens at once, so another token may change the rounding.
        torch.testing.assert_close(before[untouched], after[untouched], atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(before[untouched], after[untouched])


def test_head_is_the_models_own(family: CausalLM):
    ids, positions, bounds = packed([8], family.vocab_size)
    twin = eager_twin(family)
    with torch.no_grad():
        own = twin(input_ids=ids[None], use_cache=False).logits[0]
        hidden = family.hidden(ids, positions, bounds)
        sliced = family.head(5).logits(hidden)
    head = family.head()
    torch.testing.assert_close(head.logits(hidden).detach(), own, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(sliced, own[:, :5], atol=3e-5, rtol=1e-5)
    assert head.weight is family.module.get_output_embeddings().weight


def changed_logits(model: CausalLM, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let the model do more with its logits than its configuration says."""
    model.module.lm_head.register_forward_hook(lambda module, given, logits: change(logits))


def test_a_head_with_more_rows_than_the_tokenizer_has_tokens_is_checked_whole():
    model = tiny.model()
    model.vocabulary = model.vocab_size - 3
    model.check()
    changed_logits(model, lambda logits: 1.5 * logits)
    with pytest.raises(ModelError, match=r"not of a known form"):
        model.check()


def test_an_unknown_scale_is_refused():
    model = tiny.model()
    changed_logits(model, lambda logits: 1.5 * logits)
    with pytest.raises(ModelError, match=r"not of a known form"):
        check_head(model)


def test_an_unknown_softcap_is_refused_even_at_random_weights():
    model = tiny.model()
    changed_logits(model, lambda logits: 30.0 * torch.tanh(logits / 30.0))
    with pytest.raises(ModelError, match=r"not of a known form"):
        check_head(model)


def test_a_head_that_is_not_linear_is_refused():
    model = tiny.model()
    model.module.lm_head = torch.nn.Sequential(model.module.lm_head)
    with pytest.raises(ModelError, match="no linear output head"):
        model.head()


def test_a_head_smaller_than_the_tokenizer_is_refused():
    with pytest.raises(ModelError, match="fewer than the 99 tokens"):
        tiny.model().head(99)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}, "MambaMixer"),
        ({"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4}, "BloomAttention"),
        (
            tiny.LLAMA | {"model_type": "diffllama"},
            "attends more than once",
        ),  # a cache keeps one call a layer
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_architectures_that_mix_tokens_elsewhere_are_refused(config, reason):
    with pytest.raises(ModelError, match=reason):
        CausalLM.from_config(config, tokenizer=tiny.tokenizer())


def test_a_declared_window_that_is_not_passed_on_is_refused():
    model = tiny.model()
    model.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ModelError, match=r"layer 0 .* of kind 'sliding_attention'"):
        check_attention(model)


def test_angles_that_depend_on_the_company_bound_a_sequence():
    """Beyond its first length "longrope" turns everything that is computed together by other angles."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    first, decided = {"original_max_position_embeddings": 16}, {"initializer_range": 0.3}
    model = tiny.model(
        model_type="phi3", rope_parameters=rope | first | {"rope_theta": 1e4}, **first, **decided
    )
    assert model.config.max_position_embeddings == 64
    limit = positions_of(model.config)
    assert limit == 16
    assert positions_of(tiny.model().config) == 64
    tiny_types.assert_angles_change_behind(model, limit)
