"""Converters between Hugging Face and Megatron-Core: bit for bit, for any shape and any number of ranks."""

import dataclasses

import pytest
import torch
from full import cases
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from opd.config import TrainConfig
from opd.errors import ModelError
from opd.megatron.families import FAMILIES, Latent
from opd.megatron.form import (
    HEAD,
    MegatronForm,
    assemble_tensor,
    check_tensors,
    in_stack,
    one_by_one,
    parts_of,
    rank_parameters,
    read_elements,
    read_from,
)
from opd.megatron.layout import RankLayout


@st.composite
def forms(draw):
    """(form, ranks that can share it)."""
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    family = draw(st.sampled_from(sorted(FAMILIES.keys() - {"mistral"})))
    row, layers, groups = FAMILIES[family], draw(st.integers(1, 3)), ranks * draw(st.integers(1, 2))
    moe, latent = bool(row.expert_width), None
    if row.latent:
        still, turned, value, more = (draw(st.integers(1, 3)) for _ in range(4))
        query = draw(st.sampled_from([None, ranks * more]))
        latent = Latent(query, ranks * more - 2 * turned % ranks, still, 2 * turned, value, 1.0, True)
    width = ranks * draw(st.integers(1, 3))
    form = MegatronForm(
        family=family,
        layers=layers,
        hidden_size=draw(st.integers(1, 7)) * (ranks if row.clamped else 1),
        heads=groups * (1 if latent else draw(st.integers(1, 3))),
        groups=groups,
        head_dim=latent.still + latent.turned if latent else 2 * draw(st.integers(1, 3)),
        ffn=ranks * draw(st.integers(1, 4)),
        vocabulary=draw(st.integers(1, 13)),
        norm_eps=1e-6,
        tied=draw(st.booleans()),
        rope=(1.0,),
        windows=(None,) * layers,
        qkv_bias=draw(st.booleans()) if row.qkv_bias is None else row.qkv_bias,
        qk_norm=row.qk_norm,
        latent=latent,
        out_bias=bool(row.out_bias) and draw(st.booleans()),
        clamp=(1.7, 7.0) if row.clamped else None,
        sigmoid=row.sigmoid,
        shared_ffn=2 * width if row.sigmoid or row.limited or row.gated else 0,
        experts=3 if moe else 0,
        experts_per_token=2 if moe else 0,
        expert_ffn=width if moe else 0,
        moe_layers=tuple(draw(st.integers(0, 1)) for _ in range(layers)) if moe else (),
    )
    return form, ranks


def weights_of(form: MegatronForm) -> dict[str, torch.Tensor]:
    """A model's tensors by Hugging Face's names, written down independently of the converter."""
    width, queries, keys = form.hidden_size, form.heads * form.head_dim, form.groups * form.head_dim
    shapes = {"model.embed_tokens.weight": (form.vocabulary, width), "model.norm.weight": (width,)}
    if not form.tied:
        shapes["lm_head.weight"] = (form.vocabulary, width)
    for layer in range(form.layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        if form.latent is not None:
            shapes |= {f"{at}.self_attn.{name}": shape for name, shape in latent_shapes(form, form.latent)}
        for name, rows in (("q", queries), ("k", keys), ("v", keys)) if form.latent is None else ():
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, width)
            if form.qkv_bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
            if form.qk_norm and name != "v":
                size = rows if form.qk_norm == "all" else form.head_dim
                shapes[f"{at}.self_attn.{name}_norm.weight"] = (size,)
        columns = queries if form.latent is None else form.heads * form.latent.value
        shapes[f"{at}.self_attn.o_proj.weight"] = (width, columns)
        if form.out_bias:
            shapes[f"{at}.self_attn.o_proj.bias"] = (width,)
        if FAMILIES[form.family].sinks:
            shapes[f"{at}.self_attn.sinks"] = (form.heads,)
        if form.moe_layers and form.moe_layers[layer]:
            block = f"{at}.block_sparse_moe" if form.family == "mixtral" else f"{at}.mlp"
            of_block = clamped_shapes(form) if form.clamp else mixture_shapes(form)
            shapes |= {f"{block}.{name}": shape for name, shape in of_block}
        else:
            for name in ("gate", "up"):
                shapes[f"{at}.mlp.{name}_proj.weight"] = (form.ffn, width)
            shapes[f"{at}.mlp.down_proj.weight"] = (width, form.ffn)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def mixture_shapes(form: MegatronForm):
    """Names and shapes of the tensors of a router, its experts and those that every token goes to."""
    width = form.hidden_size
    mixtral = form.family == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    yield "gate.weight", (form.experts, width)
    if form.sigmoid:
        yield "gate.e_score_correction_bias", (form.experts,)
    if form.shared_ffn:
        gated = form.family == "qwen2_moe"
        shared = "shared_expert" if gated else "shared_experts"
        for name in ("gate", "up"):
            yield f"{shared}.{name}_proj.weight", (form.shared_ffn, width)
        yield f"{shared}.down_proj.weight", (width, form.shared_ffn)
        if gated:
            yield "shared_expert_gate.weight", (1, width)
    for expert in range(form.experts):
        for name in (gate, up):
            yield f"experts.{expert}.{name}.weight", (form.expert_ffn, width)
        yield f"experts.{expert}.{down}.weight", (width, form.expert_ffn)


def clamped_shapes(form: MegatronForm):
    """Names and shapes of the tensors of GPT-OSS's router and experts."""
    yield "router.weight", (form.experts, form.hidden_size)
    yield "router.bias", (form.experts,)
    yield "experts.gate_up_proj", (form.experts, form.hidden_size, 2 * form.expert_ffn)
    yield "experts.gate_up_proj_bias", (form.experts, 2 * form.expert_ffn)
    yield "experts.down_proj", (form.experts, form.expert_ffn, form.hidden_size)
    yield "experts.down_proj_bias", (form.experts, form.hidden_size)


def latent_shapes(form: MegatronForm, latent: Latent):
    """Names and shapes of the projections of latent attention but the last."""
    width, queries = form.hidden_size, form.heads * (latent.still + latent.turned)
    if latent.query_rank is None:
        yield "q_proj.weight", (queries, width)
    else:
        yield "q_a_proj.weight", (latent.query_rank, width)
        yield "q_a_layernorm.weight", (latent.query_rank,)
        yield "q_b_proj.weight", (queries, latent.query_rank)
    yield "kv_a_proj_with_mqa.weight", (latent.rank + latent.turned, width)
    yield "kv_a_layernorm.weight", (latent.rank,)
    yield "kv_b_proj.weight", (form.heads * (latent.still + latent.value), latent.rank)


def to_megatron(form, weights, rank=0, ranks=1):
    """A rank's parameters, from tensors in memory."""
    return {
        piece.name: assemble_tensor(piece, form, read_from(weights))
        for piece in rank_parameters(form, rank, ranks)
    }


def by_elements(form, weights, rank, ranks):
    """The same, of which only elements are read."""

    def elements(name, first, into):
        if name not in weights:
            name, expert = in_stack(name)
            first += expert * weights[name][0].numel()
        into.view(-1).copy_(weights[name].view(-1)[first : first + into.numel()])

    shapes = one_by_one(form, {name: tensor.shape for name, tensor in weights.items()})
    read = read_elements(shapes, elements, torch.device("cpu"))
    return {piece.name: assemble_tensor(piece, form, read) for piece in rank_parameters(form, rank, ranks)}


def from_megatron(form, shards):
    """Hugging Face's tensors again, from every rank's parameters."""
    found = {}
    for rank, shard in enumerate(shards):
        for piece in rank_parameters(form, rank, len(shards)):
            for source, (cut, part) in parts_of(piece, shard[piece.name]).items():
                if piece.split or not rank:
                    found.setdefault(source, {})[cut.start] = (cut, part)
    joined = {
        source: torch.cat([part for _, (_, part) in sorted(parts.items())], dim=parts[0][0].axis)
        for source, parts in found.items()
    }
    if form.clamp is None:
        return joined
    stacks = {in_stack(source)[0]: [] for source in joined if ".experts." in source}
    for source in [source for source in joined if ".experts." in source]:  # in the order of experts
        stacks[in_stack(source)[0]].append(joined.pop(source))
    return joined | {name: torch.stack(parts) for name, parts in stacks.items()}


@settings(max_examples=cases(60))
@given(forms())
def test_there_and_back_is_the_same_model(case):
    form, ranks = case
    weights = weights_of(form)
    check_tensors(form, {name: tensor.shape for name, tensor in weights.items()}, "the model")
    shards = [to_megatron(form, weights, rank, ranks) for rank in range(ranks)]
    for rank, shard in enumerate(shards):
        read = by_elements(form, weights, rank, ranks)
        assert all(torch.equal(read[name], tensor) for name, tensor in shard.items())
    back = from_megatron(form, shards)
    assert set(back) == set(weights)
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())
    # Ranks hold the same shapes, and together every number once but for what they share and padding.
    assert len({tuple((name, tuple(t.shape)) for name, t in shard.items()) for shard in shards}) == 1


@given(forms())
def test_ranks_cut_what_one_rank_has(case):
    """A rank's query heads are those of its key-value heads, and its gate those of its up projection."""
    form, ranks = case
    assume(form.latent is None)
    weights = weights_of(form)
    whole = to_megatron(form, weights)
    shards = [to_megatron(form, weights, rank, ranks) for rank in range(ranks)]
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert torch.equal(torch.cat([shard[qkv] for shard in shards]), whole[qkv])
    per_group = (form.heads // form.groups + 2) * form.head_dim
    first = whole[qkv][:per_group]
    queries = weights["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(first[: -2 * form.head_dim], queries[: form.heads // form.groups * form.head_dim])
    back = "decoder.layers.0.self_attention.linear_proj.weight"
    assert torch.equal(torch.cat([shard[back] for shard in shards], 1), whole[back])
    rows = torch.cat([shard[HEAD] for shard in shards])
    assert torch.equal(rows[: form.vocabulary], whole[HEAD])
    assert not rows[form.vocabulary :].any()


FORM = MegatronForm("llama", 1, 4, 2, 2, 2, 6, 5, 1e-6, False, (1.0,), (None,))


def test_weights_that_do_not_fit_are_named():
    weights = weights_of(FORM)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with pytest.raises(ModelError, match=r"has no tensor model\.norm\.weight"):
        check_tensors(FORM, {n: s for n, s in shapes.items() if n != "model.norm.weight"}, "it")
    with pytest.raises(ModelError, match=r"q_proj\.weight of it has shape \[4, 4\].*asks for 8"):
        check_tensors(dataclasses.replace(FORM, heads=4), shapes, "it")
    with pytest.raises(ModelError, match=r"o_proj\.bias of it has no place"):
        check_tensors(FORM, shapes | {"model.layers.0.self_attn.o_proj.bias": (4,)}, "it")
    check_tensors(FORM, shapes | {"model.layers.0.self_attn.rotary_emb.inv_freq": (1,)}, "it")
    ahead = shapes | {"model.layers.1.eh_proj.weight": (4, 8)}  # beside DeepSeek-V3, left out by transformers
    check_tensors(dataclasses.replace(FORM, sigmoid=True), ahead, "it")
    with pytest.raises(ModelError, match=r"eh_proj\.weight of it has no place"):
        check_tensors(FORM, ahead, "it")
    with pytest.raises(ModelError, match=r"no tensor model\.norm\.weight"):
        to_megatron(FORM, {n: t for n, t in weights.items() if n != "model.norm.weight"})


def test_a_parameter_that_does_not_fit_is_refused():
    embedding = rank_parameters(FORM, 0, 1)[0]
    with pytest.raises(ModelError, match=r"embedding\S* has 3 rows, but 5 are needed"):
        parts_of(embedding, torch.zeros(3, 4))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_layers_have_experts_where_those_of_transformers_have(step):
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4}
    counts = {"num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 2}
    config = AutoConfig.for_model(
        "qwen3_moe", **sizes, **counts, decoder_sparse_step=step, mlp_only_layers=[1, 2]
    )
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    assert MegatronForm.from_config(config).moe_layers == tuple(int(hasattr(x.mlp, "gate")) for x in layers)


def test_heads_and_widths_must_be_divisible():
    FORM.check_divisible(2)
    with pytest.raises(ModelError, match="2 key-value heads cannot be cut into 4"):
        FORM.check_divisible(4)
    with pytest.raises(ModelError, match="7 units of an MLP cannot be cut into 2"):
        dataclasses.replace(FORM, ffn=7).check_divisible(2)
    for query, rank, said in ((3, 4, "3 numbers of latent queries"), (None, 3, "5 numbers of latent keys")):
        latent = Latent(query, rank, 2, 2, 2, 1.0, True)
        with pytest.raises(ModelError, match=f"{said} cannot be cut into 2"):
            dataclasses.replace(FORM, latent=latent).check_divisible(2)


MIXTURE = dataclasses.replace(
    FORM, family="qwen3_moe", experts=6, experts_per_token=2, expert_ffn=4, moe_layers=(1,)
)


@pytest.mark.parametrize("sharing", [1, 2, 3, 6])
def test_ranks_that_share_experts_have_those_of_one_rank(sharing):
    weights = weights_of(MIXTURE)
    whole = to_megatron(MIXTURE, weights, 1, 2)
    parts = [
        {
            piece.name: assemble_tensor(piece, MIXTURE, read_from(weights))
            for piece in rank_parameters(MIXTURE, 1, 2, sharing=(index, sharing))
        }
        for index in range(sharing)
    ]
    for name, tensor in whole.items():
        if ".experts." in name:
            assert torch.equal(torch.cat([part[name] for part in parts]), tensor)
        else:
            assert all(torch.equal(part[name], tensor) for part in parts)


@pytest.mark.parametrize(
    ("asked", "copies", "size"), [("auto", 4, 2), ("auto", 5, 1), ("auto", 12, 6), (3, 6, 3), (1, 6, 1)]
)
def test_as_many_ranks_share_experts_as_asked_or_as_can(asked, copies, size):
    assert MIXTURE.sharing_size(asked, copies) == size
    assert FORM.sharing_size("auto", copies) == 1


@pytest.mark.parametrize(("form", "said"), [(MIXTURE, "6 experts a layer"), (FORM, "no experts")])
def test_experts_that_cannot_be_shared_are_refused(form, said):
    with pytest.raises(
        ModelError, match=f"expert_parallel is 4, and a student of .* has {said}, which 4 ranks"
    ):
        form.sharing_size(4, 8)
    with pytest.raises(ModelError, match="4 units of an expert cannot be cut into 8"):
        dataclasses.replace(MIXTURE, groups=8, heads=8).check_student(8, 1)


@pytest.mark.parametrize(
    ("ranks", "said"), [(4, "of 4 ranks 2 have the same slices"), (12, "12 ranks 6 have")]
)
def test_ranks_that_groups_do_not_divide_are_refused(ranks, said):
    train = {"backend": "megatron", "tensor_parallel": 2, "expert_parallel": 4, "ranks": ranks}
    with pytest.raises(ValueError, match=said):
        TrainConfig.model_validate(train)
    assert TrainConfig.model_validate(train | {"ranks": 8}).rank_count_fault(8) is None


@pytest.mark.parametrize("sizes", [(1, 4, 2, 1), (2, 4, 2, 2), (2, 6, 3, 1), (3, 2, 2, 2)])
def test_ranks_share_experts_as_megatron_orders_them(sizes):
    core = pytest.importorskip("megatron.core.parallel_state", exc_type=ImportError)
    tensor, copies, experts, stages = sizes
    layout = RankLayout(0, tensor * copies * stages, tensor, 1, stages, experts)
    theirs = core.RankGenerator(
        tp=tensor, ep=experts, dp=copies // experts, pp=stages, cp=1, order="tp-cp-ep-dp-pp"
    )
    for mine, axis in zip(layout.expert_groups(), ("ep", "dp"), strict=True):
        assert sorted(mine) == sorted(theirs.get_ranks(axis))
    for group in layout.expert_groups()[0]:
        shares = [dataclasses.replace(layout, rank=rank).sharing for rank in group]
        assert shares == [(index, experts) for index in range(experts)]


def test_every_rank_has_every_piece_even_without_tokens():
    form = dataclasses.replace(FORM, vocabulary=1)
    empty = rank_parameters(form, 1, 2)[0]
    assert (empty.cuts, empty.padding) == ((), 1)
