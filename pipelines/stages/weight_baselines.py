"""Merge by arithmetic on weights, with coefficients chosen fairly.

A model is a mapping of tensors. A folder's tensors are read when they are accessed. All methods take the base
and its fine-tuned experts with equal names and shapes. They compute in float32 and return tensors in the
base's dtype, each when it is accessed, so one tensor of every model is in memory. Other than floating-point
tensors are copied from the base.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.config import Recipe
from opd.errors import ModelError, add_path_note
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_folder import check_folder
from opd.models.sharded import StoredWeights, put_in_file, width_of
from opd.pipelines.evaluation.measure import EvaluationEngines, prompt_accuracy
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.student import load_model, tokenizer_of, ways_of
from opd.pipelines.stages.teachers import whole_teacher
from opd.progress import set_activity
from opd.teachers.schedule import Router

Weights = Mapping[str, Tensor]
SCALED = ("task_arithmetic", "ties", "dare", "della")
"""Merges with a scaling coefficient."""


class FolderWeights(Mapping[str, Tensor]):
    """The weights of a Hugging Face folder in the recipe's dtype, each read when it is accessed. The complete
    model is read if its files use other names (experts one by one).
    """

    def __init__(self, recipe: Recipe, path: Path) -> None:
        model = load_model(recipe, path, empty=True)
        self._tensors = dict(model.weights())
        self._unread = model.unread
        self._stored = None if model.unread is None else StoredWeights(model.unread)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._tensors[name].shape)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if self._unread is None or self._stored is None or not tensor.is_meta:
            return tensor
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._unread.device)
        self._stored.read([name], width_of(tensor.shape), 0, buffer)
        return buffer

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def merge_weights(context: StageContext, method: str) -> dict[str, Any]:
    """Merge the teachers' weights by `method`, write the model, and return the result numbers.

    Scaling coefficients are chosen by sampled accuracy on *training* prompts, never on held-out ones, by the
    recipe's engine. Ranks share the prompts, and the first writes the model.
    """
    started = time.perf_counter()
    recipe, config, ranks = context.recipe, context.recipe.baselines, context.ranks
    base_path, names = context.start_model(), Router.from_recipe(recipe).teacher_names
    tokenizer = tokenizer_of(recipe, base_path)
    ranks.main_first(lambda: [whole_teacher(context, name) for name in names], "the teachers' models")
    folders = [base_path, *(whole_teacher(context, name) for name in names)]
    with set_activity("comparing the models with their digests"):
        mine = folders if ranks.is_main else []
        ranks.run_on_ranks(lambda: [check_folder(path) for path in mine], "the models to merge")
    base, *experts = (FolderWeights(recipe, path) for path in folders)
    merges: dict[str, Callable[[float], Weights]] = {
        "average": lambda scale: average_weights(experts),
        "task_arithmetic": lambda scale: task_arithmetic(base, experts, scale),
        "ties": lambda scale: merge_ties(base, experts, config.density, scale),
        "dare": lambda scale: merge_dare(base, experts, config.density, scale, recipe.seed),
        "della": lambda scale: merge_della(base, experts, config.density, scale, recipe.seed),
        "sce": lambda scale: merge_sce(base, experts, config.density),
        "slerp": lambda scale: merge_slerp(experts),
        "model_stock": lambda scale: merge_model_stock(base, experts),
        "ram": lambda scale: merge_ram(base, experts),
        "ram_plus": lambda scale: merge_ram(base, experts, rescale=0.1),
    }
    scales = config.scales if method in SCALED else [1.0]
    scores: dict[float, float] = {}
    if len(scales) > 1:
        data = DomainSet.open(recipe, tokenizer)
        engines = EvaluationEngines(context, tokenizer, base_path)
        for number, scale in enumerate(scales, start=1):
            scores[scale] = _training_accuracy(context, engines, data, merges[method](scale))
            context.progress(number, len(scales), f"scale {scale:g}: {scores[scale]:.1%} on training prompts")
    best = max(scores, key=lambda scale: scores[scale]) if scores else scales[0]
    settings = {"scale": best} if method in SCALED else {}
    if method in ("ties", "dare", "della", "sce"):
        settings["density"] = config.density
    digest = ""
    if ranks.is_main:
        model, out = load_model(recipe, base_path, empty=True), context.model_path(method)
        if model.unread is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with add_path_note(out):
                put_in_file(model, out.parent)
        model.load_weights(merges[method](best).items())
        save_checkpoint(model, tokenizer, out, context.stage_card({"settings": settings}))
        digest = model.digest()
    return {
        "steps": 0,
        "student_tokens": 0,
        "seconds": time.perf_counter() - started,
        "phases": {},
        "counters": {},
        "settings": settings,
        "training_accuracy": {f"{scale:g}": accuracy for scale, accuracy in scores.items()},
        "digest": digest,
    }


def _training_accuracy(
    context: StageContext, engines: EvaluationEngines, data: DomainSet, weights: Weights
) -> float:
    """Return the mean sampled accuracy of `weights` over the domains, on training prompts."""
    recipe, engine = context.recipe, engines.engine_with(weights.items())
    accuracies, ways = [], ways_of(recipe, data.tokenizer)
    for domain in recipe.domains:
        prompts = data.next_prompts(domain, 0, recipe.baselines.tuning_prompts, f"tune-{context.stage}")
        accuracy = prompt_accuracy(engine, data, prompts, ways[domain], seed=recipe.seed, ranks=context.ranks)
        accuracies.append(accuracy.accuracy)
    return sum(accuracies) / len(accuracies)


def average_weights(models: Sequence[Weights]) -> Weights:
    """Return the mean of `models` (model soup: Wortsman et al. 2022, 2203.05482)."""
    if not models:
        raise ModelError("no models to average; give at least one")
    first = models[0]
    return MergedWeights(first, models, lambda _, deltas: deltas.mean(0))


def task_arithmetic(base: Weights, experts: Sequence[Weights], scale: float) -> Weights:
    """Return `base + scale * sum_i (expert_i - base)` (Ilharco et al. 2023, 2212.04089)."""
    return MergedWeights(base, experts, lambda _, deltas: scale * deltas.sum(0))


def merge_ties(base: Weights, experts: Sequence[Weights], density: float, scale: float) -> Weights:
    """Trim, elect sign, merge (Yadav et al. 2023, 2306.01708, section 3 and algorithm 1).

    1. Of each task vector `expert - base`, over all tensors, retain the share `density` of largest magnitude.
    2. Each parameter takes the sign with the larger total magnitude. 3. Average the retained values of that
    sign, and return `base + scale * average`. A parameter whose retained values cancel exactly stays at the
    base.
    """
    _check_density(density)
    _check_alike(base, experts)
    thresholds = torch.tensor([_trim_threshold(base, expert, density) for expert in experts])

    def merge_deltas(_: str, deltas: Tensor) -> Tensor:
        per_expert = thresholds.to(deltas.device).reshape(-1, *([1] * (deltas.dim() - 1)))
        retained = torch.where(deltas.abs() >= per_expert, deltas, 0.0)
        agrees = (retained.sign() == retained.sum(0).sign()) & (retained != 0)
        return scale * torch.where(agrees, retained, 0.0).sum(0) / agrees.sum(0).clamp(min=1)

    return MergedWeights(base, experts, merge_deltas)


def merge_dare(base: Weights, experts: Sequence[Weights], density: float, scale: float, seed: int) -> Weights:
    """Drop and rescale, then task arithmetic (DARE: Yu et al. 2024, 2311.03099, section 3.2).

    Each element of a task vector survives with probability `density` and is divided by it. So the expectation
    is that of `task_arithmetic`. The draw depends only on (seed, expert's index, tensor name), not on the
    order of the tensors or on the other ones.
    """
    _check_density(density)

    def merge_deltas(name: str, deltas: Tensor) -> Tensor:
        total = torch.zeros_like(deltas[0])
        for index, delta in enumerate(deltas):
            total += delta * (_uniform_draws(seed, index, name, delta) < density)
        return (scale / density) * total

    return MergedWeights(base, experts, merge_deltas)


def _uniform_draws(seed: int, index: int, name: str, delta: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), shaped as `delta`: the stream of (seed, expert, tensor name)."""
    digest = hashlib.blake2b(f"{index}:{name}".encode(), digest_size=8).digest()
    key = np.array([seed, int.from_bytes(digest, "little")], dtype=np.uint64)
    draws = np.random.Generator(np.random.Philox(key=key)).random(delta.numel(), dtype=np.float32)
    return torch.from_numpy(draws).reshape(delta.shape).to(delta.device)


SPREAD = 0.2
"""Between DELLA's largest and smallest probability to drop an element of a row."""


def merge_della(
    base: Weights, experts: Sequence[Weights], density: float, scale: float, seed: int
) -> Weights:
    """Drop by magnitude and rescale, elect, fuse (DELLA: Deep et al. 2024, 2406.11617, MAGPRUNE).

    1. In each row (last dimension, n elements) the element of rank r by magnitude, from 0 for the largest, is
    dropped with probability `p = 1 - density - spread / 2 + r spread / n`, else divided by 1 - p. The spread
    is `SPREAD`, or as much as leaves every p in [0, 1). 2. Each parameter takes the sign of the sum of what
    is left. 3. Average the values of that sign, and return `base + scale * average`. The draws are those of
    `merge_dare`.
    """
    _check_density(density)
    spread = min(SPREAD, 2 * (1 - density), density)

    def merge_deltas(name: str, deltas: Tensor) -> Tensor:
        rows = deltas if deltas.dim() > 1 else deltas[:, None]
        ranks = rows.abs().argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        keeps = (density + spread / 2 - ranks * (spread / rows.shape[-1])).reshape(deltas.shape)
        draws = torch.stack([_uniform_draws(seed, i, name, delta) for i, delta in enumerate(deltas)])
        left = torch.where(draws < keeps, deltas / keeps, 0.0)
        agrees = (left.sign() == left.sum(0).sign()) & (left != 0)
        return scale * torch.where(agrees, left, 0.0).sum(0) / agrees.sum(0).clamp(min=1)

    return MergedWeights(base, experts, merge_deltas)


def merge_sce(base: Weights, experts: Sequence[Weights], density: float) -> Weights:
    """Select, calculate, erase, of each tensor (SCE: Wan et al. 2024, 2408.07990, section 3.3).

    1. Select the share `density` of the positions, those whose task vectors vary most between the experts.
    2. An expert's coefficient is its share of the squares of what is selected. 3. Erase the values against
    the sign of the sum. Return `base +` the sum of the rest, each times its expert's coefficient.
    """
    _check_density(density)

    def merge_deltas(_: str, deltas: Tensor) -> Tensor:
        flat = deltas.reshape(len(deltas), -1)
        count = max(round(density * flat.shape[1]), 1)
        chosen = torch.zeros(flat.shape[1], dtype=torch.bool, device=flat.device)
        chosen[flat.var(0, correction=0).argsort(descending=True, stable=True)[:count]] = True
        selected = torch.where(chosen, flat, 0.0)
        squares = selected.square().sum(1, keepdim=True)
        shares = squares / squares.sum().clamp(min=torch.finfo(squares.dtype).tiny)
        kept = torch.where(selected.sign() == selected.sum(0).sign(), selected, 0.0)
        return (shares * kept).sum(0).reshape(deltas.shape[1:])

    return MergedWeights(base, experts, merge_deltas)


def merge_slerp(models: Sequence[Weights]) -> Weights:
    """Return the middle of two models on the arc between them (Shoemake 1985), of each tensor as one vector.

    Where the two have almost one direction, opposite ones, or one is 0, it is their mean. Raises `ModelError`
    for another number of models.
    """
    if len(models) != 2:
        raise ModelError(f"slerp interpolates between two models, and there are {len(models)}; give two")

    def merge_deltas(name: str, deltas: Tensor) -> Tensor:
        first = models[0][name].detach().float()
        second = first + deltas[1]
        norms = first.norm() * second.norm()
        cosine = (first * second).sum() / norms.clamp(min=torch.finfo(norms.dtype).tiny)
        # sin(t a) / sin(a) at t = 1/2 is 1 / (2 cos(a / 2)), which is 1/2 where the angle a is 0.
        half = ((1 + cosine.clamp(-1, 1)) / 2).sqrt()
        factor = torch.where((norms > 0) & (half > 1e-3), 0.5 / half.clamp(min=1e-3), 0.5)
        return factor * (first + second) - first

    return MergedWeights(models[0], models, merge_deltas)


def merge_model_stock(base: Weights, experts: Sequence[Weights]) -> Weights:
    """Interpolate between base and average by the experts' angle (Jang et al. 2024, 2403.19522).

    Of each tensor: `base + t * mean`, with `t = N c / (1 + (N - 1) c)` and `c` the mean cosine of pairs of
    the N task vectors. A negative one counts as 0, at which the base stays.
    """

    def merge_deltas(_: str, deltas: Tensor) -> Tensor:
        count = len(deltas)
        units = torch.nn.functional.normalize(deltas.reshape(count, -1), dim=1, eps=1e-30)
        pairs = (units @ units.T).triu(1).sum() / max(count * (count - 1) / 2, 1)
        cosine = pairs.clamp(0, 1) if count > 1 else torch.ones(())
        return count * cosine / (1 + (count - 1) * cosine) * deltas.mean(0)

    return MergedWeights(base, experts, merge_deltas)


CHANGED = 1e-5
"""Least change of a parameter that counts for RAM."""
MOST_OVERLAP = 0.2
"""Largest ratio of shared to unique parameters that counts for RAM+."""


def merge_ram(base: Weights, experts: Sequence[Weights], rescale: float = 0.0) -> Weights:
    """Merge specialists of reinforcement learning (RAM and RAM+: Yuan et al. 2026, 2601.13572).

    An expert has changed a parameter if its task vector is above `CHANGED` there. Return `base +` the mean
    over those that changed it where several did, and the only one's change, times
    `1 + rescale * min(rho, MOST_OVERLAP)`, where one did. `rho` is that expert's number of shared changes by
    that of its unique ones, over all tensors. RAM rescales by 0, RAM+ by 0.1.
    """
    _check_alike(base, experts)
    counts = torch.zeros(2, len(experts), dtype=torch.float64)  # shared and unique
    for name, tensor in base.items() if rescale else ():
        if tensor.is_floating_point():
            start = tensor.detach().float()
            changed = torch.stack([(one[name].detach().float() - start).abs() > CHANGED for one in experts])
            several = changed.sum(0) > 1
            for row, where in enumerate((several, ~several)):
                counts[row] += (changed & where).flatten(1).sum(1).cpu()
    factors = 1 + rescale * (counts[0] / counts[1].clamp(min=1e-9)).clamp(max=MOST_OVERLAP).float()

    def merge_deltas(_: str, deltas: Tensor) -> Tensor:
        changed = deltas.abs() > CHANGED
        several = changed.sum(0)
        scaled = deltas * factors.to(deltas.device).reshape(-1, *([1] * (deltas.dim() - 1)))
        used = torch.where(several > 1, deltas / several.clamp(min=1), scaled)
        return torch.where(changed, used, 0.0).sum(0)

    return MergedWeights(base, experts, merge_deltas)


class MergedWeights(Mapping[str, Tensor]):
    """`base + merge(name, deltas [E, ...])` for every floating-point tensor, on access."""

    def __init__(
        self, base: Weights, experts: Sequence[Weights], merge: Callable[[str, Tensor], Tensor]
    ) -> None:
        _check_alike(base, experts)
        self._base, self._experts, self._merge = base, experts, merge

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._base[name].detach()
        if not tensor.is_floating_point():
            return tensor.clone()
        start = tensor.float()
        deltas = torch.stack([expert[name].detach().float() - start for expert in self._experts])
        return (start + self._merge(name, deltas)).to(tensor.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


_HALF = 1 << 16


def _trim_threshold(base: Weights, expert: Weights, density: float) -> float:
    """Return the smallest magnitude among the `density` largest of the complete task vector.

    Nonnegative floats are in the order of their bits, so two counts find it exactly. The first is over the
    upper half of the bits, the second over the lower half within the right upper half. One tensor of each
    model is in memory.
    """
    high = torch.zeros(_HALF, dtype=torch.int64)
    for bits in _magnitude_bits(base, expert):
        high += torch.bincount(bits >> 16, minlength=_HALF).cpu()
    count = int(high.sum())
    smaller = count - max(round(density * count), 1)  # the number of smaller ones
    upper, smaller = _bin_of(high, smaller)
    low = torch.zeros(_HALF, dtype=torch.int64)
    for bits in _magnitude_bits(base, expert):
        low += torch.bincount(bits[bits >> 16 == upper] & (_HALF - 1), minlength=_HALF).cpu()
    lower, _ = _bin_of(low, smaller)
    return float(torch.tensor([upper << 16 | lower], dtype=torch.int32).view(torch.float32))


def _magnitude_bits(base: Weights, expert: Weights) -> Iterator[Tensor]:
    """Yield int32 bits of the magnitudes of the task vector, tensor by tensor."""
    for name, tensor in base.items():
        if tensor.is_floating_point():
            delta = expert[name].detach().float() - tensor.detach().float()
            yield delta.abs().flatten().view(torch.int32)


def _bin_of(counts: Tensor, rank: int) -> tuple[int, int]:
    """Return the bin with number `rank`, from 0, and its number there."""
    index = int(torch.searchsorted(counts.cumsum(0), rank, right=True))
    return index, rank - int(counts[:index].sum())


def _check_alike(base: Weights, experts: Sequence[Weights]) -> None:
    if not experts:
        raise ModelError("no experts to merge; give at least one")
    for index, expert in enumerate(experts):
        if different := set(base) ^ set(expert):
            raise ModelError(
                f"expert {index} and the base do not have the same tensors (first difference:"
                f" {min(different)}); merge models of one architecture"
            )
        for name in base:
            theirs, ours = (
                one.tensor_shape(name) if isinstance(one, FolderWeights) else tuple(one[name].shape)
                for one in (expert, base)
            )
            if theirs != ours:
                raise ModelError(
                    f"tensor {name} is {list(theirs)} in expert {index} and {list(ours)} in the base; merge"
                    " models of one architecture and vocabulary"
                )


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ModelError(f"density is {density}; give a share in (0, 1]")
