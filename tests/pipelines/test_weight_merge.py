"""Merging in weight space against small worked examples and a plain reference of TIES."""

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipes import tiny_recipe
from test_sharded import adapter_of

from opd.errors import ModelError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.stages.weight_baselines import (
    FolderWeights,
    _trim_threshold,
    _uniform_draws,
    average_weights,
    merge_dare,
    merge_della,
    merge_model_stock,
    merge_ram,
    merge_sce,
    merge_slerp,
    merge_ties,
    task_arithmetic,
)


def models(seed, experts=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (5, 4), "b.weight": (3,), "c.weight": (2, 3, 2)}
    base, *others = (
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        for _ in range(experts + 1)
    )
    return base, others


def flat(model):
    return torch.cat([tensor.double().flatten() for tensor in model.values()]).numpy()


def plain_ties(base, experts, density, scale):
    """Yadav et al. 2023, algorithm 1, on flat float64 vectors."""
    tasks = np.stack([flat(expert) - flat(base) for expert in experts])
    keep = max(round(density * tasks.shape[1]), 1)
    trimmed = np.zeros_like(tasks)
    for row, task in zip(trimmed, tasks, strict=True):
        largest = np.argsort(-np.abs(task))[:keep]
        row[largest] = task[largest]
    elected = np.sign(trimmed.sum(0))
    merged = np.zeros(tasks.shape[1])
    for column in range(tasks.shape[1]):
        chosen = [v for v in trimmed[:, column] if v != 0 and np.sign(v) == elected[column]]
        merged[column] = np.mean(chosen) if chosen else 0.0
    return flat(base) + scale * merged


seeds = st.integers(0, 2**32 - 1)
densities = st.sampled_from([0.05, 0.2, 0.5, 0.8, 1.0])


@given(seeds, st.floats(0.0, 2.0))
def test_average_and_task_arithmetic(seed, scale):
    base, experts = models(seed)
    vectors = np.stack([flat(expert) for expert in experts])
    np.testing.assert_allclose(flat(average_weights(experts)), vectors.mean(0), atol=1e-5)
    expected = flat(base) + scale * (vectors - flat(base)).sum(0)
    np.testing.assert_allclose(flat(task_arithmetic(base, experts, scale)), expected, atol=1e-5)
    mean_of_tasks = task_arithmetic(base, experts, 1 / 3)
    np.testing.assert_allclose(flat(mean_of_tasks), vectors.mean(0), atol=1e-5)


@given(seeds, densities, st.floats(0.1, 2.0))
def test_ties_is_the_papers_algorithm(seed, density, scale):
    base, experts = models(seed)
    found = flat(merge_ties(base, experts, density, scale))
    np.testing.assert_allclose(found, plain_ties(base, experts, density, scale), atol=1e-5)


@given(seeds, densities)
def test_one_expert_at_full_scale_comes_back_and_equal_models_stay(seed, density):
    base, experts = models(seed, experts=1)
    for merged in (
        average_weights(experts),
        task_arithmetic(base, experts, 1.0),
        merge_ties(base, experts, 1.0, 1.0),
        merge_dare(base, experts, 1.0, 1.0, seed=0),
    ):
        np.testing.assert_allclose(flat(merged), flat(experts[0]), atol=1e-6)
    same = [base, base]
    for merged in (merge_ties(base, same, density, 0.7), merge_dare(base, same, density, 0.7, seed=0)):
        np.testing.assert_array_equal(flat(merged), flat(base))


def test_ties_resolves_a_conflict_by_total_magnitude():
    base = {"w": torch.zeros(4)}
    experts = [
        {"w": torch.tensor(v)} for v in ([3.0, 1.0, 1.0, 0.1], [-1.0, 1.0, -1.0, 0.1], [-1.0, 4.0, 0.0, 0.1])
    ]
    assert merge_ties(base, experts, 1.0, 1.0)["w"].tolist() == pytest.approx([3.0, 2.0, 0.0, 0.1])
    trimmed = merge_ties(base, experts, 0.5, 1.0)["w"]
    assert trimmed[3] == 0.0


def test_dare_is_task_arithmetic_in_expectation_and_drops_the_asked_share():
    base = {"w": torch.zeros(20_000)}
    expert = {"w": torch.ones(20_000)}
    merged = merge_dare(base, [expert], 0.3, 0.5, seed=4)["w"]
    values = sorted(set(merged.tolist()))
    assert values == pytest.approx([0.0, 0.5 / 0.3])
    assert (merged != 0).float().mean().item() == pytest.approx(0.3, abs=0.015)
    assert merged.mean().item() == pytest.approx(0.5, abs=0.03)
    both = merge_dare(base, [expert, expert], 0.3, 0.5, seed=4)["w"]  # each expert has draws of its own
    assert (both == 0).float().mean().item() == pytest.approx(0.7**2, abs=0.015)


def test_dare_draws_depend_on_seed_expert_and_tensor_name_only():
    base, experts = models(0)
    whole = merge_dare(base, experts, 0.5, 1.0, seed=1)
    part = merge_dare(
        {"b.weight": base["b.weight"]}, [{"b.weight": e["b.weight"]} for e in experts], 0.5, 1.0, seed=1
    )
    assert torch.equal(whole["b.weight"], part["b.weight"])
    backwards = [dict(reversed(model.items())) for model in (base, *experts)]
    turned = merge_dare(backwards[0], backwards[1:], 0.5, 1.0, seed=1)
    assert all(torch.equal(whole[name], turned[name]) for name in whole)
    assert not torch.equal(flat_tensor(whole), flat_tensor(merge_dare(base, experts, 0.5, 1.0, seed=2)))
    one = {"x": torch.ones(64), "y": torch.ones(64)}
    drawn = merge_dare({name: torch.zeros(64) for name in one}, [one], 0.5, 1.0, seed=0)
    assert not torch.equal(drawn["x"], drawn["y"])


def flat_tensor(model):
    return torch.from_numpy(flat(model))


def test_results_keep_the_bases_dtype_and_do_not_touch_the_inputs():
    base, experts = models(0, dtype=torch.bfloat16)
    base["steps"] = torch.tensor([3])
    for expert in experts:
        expert["steps"] = torch.tensor([9])
    before = {name: tensor.clone() for name, tensor in base.items()}
    for merged in (
        average_weights([base, *experts]),
        merge_ties(base, experts, 0.5, 1.0),
        merge_dare(base, experts, 0.5, 1.0, 0),
    ):
        assert merged["a.weight"].dtype == torch.bfloat16
        assert merged["steps"].tolist() == [3]
        assert merged["steps"] is not base["steps"]
    assert all(torch.equal(before[name], base[name]) for name in base)


def test_parameters_are_merged_without_a_graph():
    base = {"w": torch.zeros(3, requires_grad=True)}
    merged = task_arithmetic(base, [{"w": torch.ones(3, requires_grad=True)}], 0.5)
    assert not merged["w"].requires_grad


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5])
def test_wrong_density(density):
    base, experts = models(0)
    with pytest.raises(ModelError, match="density"):
        merge_ties(base, experts, density, 1.0)
    with pytest.raises(ModelError, match="density"):
        merge_dare(base, experts, density, 1.0, 0)


def test_models_that_do_not_fit_are_named():
    base, experts = models(0)
    with pytest.raises(ModelError, match=r"expert 1 and .*first difference: b.weight"):
        task_arithmetic(base, [experts[0], {k: v for k, v in experts[1].items() if k != "b.weight"}], 1.0)
    with pytest.raises(ModelError, match=r"tensor b.weight is \[4\] in expert 0 and \[3\]"):
        merge_ties(base, [experts[0] | {"b.weight": torch.zeros(4)}], 0.5, 1.0)
    with pytest.raises(ModelError, match="no experts"):
        task_arithmetic(base, [], 1.0)
    with pytest.raises(ModelError, match="no models"):
        average_weights([])


@given(seeds, st.sampled_from([1e-4, 0.03, 0.5, 0.999, 1.0]))
def test_the_threshold_is_the_one_that_sorting_finds(seed, density):
    base, [expert] = models(seed, experts=1)
    if seed % 2:  # many that are equal
        expert = {name: base[name] + (tensor * 2).round() / 4 for name, tensor in expert.items()}
    magnitudes = torch.cat([(expert[n] - t).abs().flatten() for n, t in base.items()]).sort().values
    kept = max(round(density * len(magnitudes)), 1)
    assert _trim_threshold(base, expert, density) == float(magnitudes[-kept])


@pytest.mark.parametrize("kind", ["plain", "adapter"])
def test_a_folder_is_read_tensor_by_tensor(tmp_path, kind):
    path = save_checkpoint(tiny.model(seed=3), tiny.tokenizer(), tmp_path / "plain", {})
    if kind == "adapter":
        adapter_of(path, tmp_path / "adapter")
        path = tmp_path / "adapter"
    recipe = tiny_recipe(base=None, model={"path": str(tmp_path / "plain"), "device": "cpu"})
    found, whole = FolderWeights(recipe, path), dict(CausalLM.from_pretrained(path).weights())
    assert list(found) == list(whole)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert [found.tensor_shape(name) for name in found] == [tuple(tensor.shape) for tensor in whole.values()]
    assert sum(tensor.is_meta for tensor in found._tensors.values()) > 10


def plain_della(base, experts, density, scale, seed):
    """Deep et al. 2024: MAGPRUNE row by row, elect, fuse, in float64."""
    merged = {}
    for name, start in base.items():
        deltas = np.stack([(e[name].double() - start.double()).numpy() for e in experts])
        width, spread = start.shape[-1], min(0.2, 2 * (1 - density), density)
        left = np.zeros_like(deltas)
        for index, delta in enumerate(deltas):
            draws = _uniform_draws(seed, index, name, torch.from_numpy(delta)).numpy()
            for place in np.ndindex(delta.shape):
                row = np.abs(delta[place[:-1]])
                rank = int((row > row[place[-1]]).sum())  # 0: the largest
                dropped = 1 - density - spread / 2 + rank * spread / width
                if draws[place] < 1 - dropped:
                    left[(index, *place)] = delta[place] / (1 - dropped)
        agrees = (np.sign(left) == np.sign(left.sum(0))) & (left != 0)
        mean = np.where(agrees, left, 0).sum(0) / np.maximum(agrees.sum(0), 1)
        merged[name] = start.double() + scale * torch.from_numpy(mean)
    return merged


def plain_sce(base, experts, density):
    """Wan et al. 2024: variance, squares, signs, in float64."""
    merged = {}
    for name, start in base.items():
        deltas = np.stack([(e[name].double() - start.double()).numpy().ravel() for e in experts])
        varied = np.mean((deltas - deltas.mean(0)) ** 2, axis=0)
        kept = np.argsort(-varied)[: max(round(density * len(varied)), 1)]
        selected = np.zeros_like(deltas)
        selected[:, kept] = deltas[:, kept]
        shares = (selected**2).sum(1) / (selected**2).sum()
        total = np.zeros(deltas.shape[1])
        for share, delta in zip(shares, selected, strict=True):
            total += share * np.where(np.sign(delta) == np.sign(selected.sum(0)), delta, 0)
        merged[name] = start.double() + torch.from_numpy(total).reshape(start.shape)
    return merged


def plain_slerp(first, second, at=0.5):
    """Shoemake 1985, by sines, in float64."""
    merged = {}
    for name in first:
        a, b = (one[name].double().flatten() for one in (first, second))
        angle = torch.arccos((a @ b / (a.norm() * b.norm())).clamp(-1, 1))
        arc = (torch.sin((1 - at) * angle) * a + torch.sin(at * angle) * b) / torch.sin(angle)
        merged[name] = arc.reshape(first[name].shape)
    return merged


def plain_model_stock(base, experts):
    """Jang et al. 2024, equation for N models, in float64."""
    merged, count = {}, len(experts)
    for name, start in base.items():
        deltas = [(e[name].double() - start.double()).flatten() for e in experts]
        cosines = [
            float(a @ b / (a.norm() * b.norm())) for i, a in enumerate(deltas) for b in deltas[i + 1 :]
        ]
        cosine = max(float(np.mean(cosines)), 0.0)
        ratio = count * cosine / ((count - 1) * cosine + 1)
        average = sum(e[name].double() for e in experts) / count
        merged[name] = ratio * average + (1 - ratio) * start.double()
    return merged


def plain_ram(base, experts, rescale):
    """Yuan et al. 2026, element by element, in float64."""
    tasks = np.stack([flat(expert) - flat(base) for expert in experts])
    changed = np.abs(tasks) > 1e-5
    factors = []
    for mine in changed:
        shared = sum(bool(m) and changed[:, i].sum() > 1 for i, m in enumerate(mine))
        unique = sum(bool(m) and changed[:, i].sum() == 1 for i, m in enumerate(mine))
        factors.append(1 + rescale * (min(shared / unique, 0.2) if unique else 0.2 * (shared > 0)))
    merged = np.zeros(tasks.shape[1])
    for i in range(tasks.shape[1]):
        who = [e for e in range(len(experts)) if changed[e, i]]
        if len(who) == 1:
            merged[i] = factors[who[0]] * tasks[who[0], i]
        elif who:
            merged[i] = np.mean([tasks[e, i] for e in who])
    return flat(base) + merged


def sparse_models(seed):
    """Experts that each changed some parameters, as reinforcement learning leaves them."""
    base, experts = models(seed)
    generator = torch.Generator().manual_seed(seed)
    for expert in experts:
        for name, tensor in expert.items():
            mine = torch.rand(tensor.shape, generator=generator) < 0.4
            expert[name] = torch.where(mine, tensor, base[name])
    return base, experts


@given(seeds, densities, st.floats(0.1, 2.0))
def test_merges_are_their_papers_formulas(seed, density, scale):
    base, experts = models(seed)
    for found, wanted in (
        (merge_della(base, experts, density, scale, 3), plain_della(base, experts, density, scale, 3)),
        (merge_sce(base, experts, density), plain_sce(base, experts, density)),
        (merge_slerp(experts[:2]), plain_slerp(*experts[:2])),
        (merge_model_stock(base, experts), plain_model_stock(base, experts)),
    ):
        np.testing.assert_allclose(flat(found), flat(wanted), atol=1e-4)
    base, experts = sparse_models(seed)
    for rescale in (0.0, 0.1):
        wanted = plain_ram(base, experts, rescale)
        np.testing.assert_allclose(flat(merge_ram(base, experts, rescale)), wanted, atol=1e-5)


def test_merges_of_equal_or_opposite_models_have_numbers():
    base, experts = models(0)
    same = [base, base]
    opposite = [base, {name: -tensor for name, tensor in base.items()}]
    zero = {name: torch.zeros_like(tensor) for name, tensor in base.items()}
    for merged in (
        merge_della(base, same, 0.5, 1.0, 0),
        merge_sce(base, same, 0.5),
        merge_slerp(same),
        merge_model_stock(base, same),
        merge_ram(base, same, 0.1),
    ):
        np.testing.assert_allclose(flat(merged), flat(base), atol=1e-6)
    np.testing.assert_allclose(flat(merge_slerp(opposite)), 0, atol=1e-6)
    np.testing.assert_allclose(flat(merge_slerp([base, zero])), flat(base) / 2, atol=1e-6)
    twice = merge_model_stock(base, [experts[0], experts[0]])
    np.testing.assert_allclose(flat(twice), flat(experts[0]), atol=1e-5)
    with pytest.raises(ModelError, match="slerp interpolates between two models, and there are 3; give two"):
        merge_slerp(experts)


def test_della_drops_the_asked_share_and_more_of_what_is_small():
    base = {"w": torch.zeros(1, 20_000)}
    expert = {"w": torch.linspace(0.001, 1, 20_000)[None]}
    kept = merge_della(base, [expert], 0.5, 1.0, seed=4)["w"][0] != 0
    assert kept.float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert kept[:2000].float().mean().item() == pytest.approx(0.41, abs=0.03)
    assert kept[-2000:].float().mean().item() == pytest.approx(0.59, abs=0.03)
    again = merge_della(base, [expert], 0.5, 1.0, seed=4)["w"][0] != 0
    assert torch.equal(kept, again)
