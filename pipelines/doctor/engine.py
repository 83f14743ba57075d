"""What the embedded engine holds beside its model: keys and values, weights as decode wants them, and on CUDA
what captured steps read and write.
"""

from __future__ import annotations

from opd.config import Recipe
from opd.pipelines.doctor.models import ModelShape
from opd.pipelines.stages.precision import WIDTH, model_dtype

_DRAWN = 28
"""Bytes of a logit while a token is drawn, about: the logits, their logarithms, probabilities, what is sorted
for a cut with its order, and sums in float64."""
_LAYER = 24
"""Numbers of a layer of a captured step per hidden unit and request, about."""
_SCORE = 8
"""Bytes of a score, its weight and its mask, about."""


def on_cuda(device: str) -> bool:
    """Whether `model.device` means CUDA here."""
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def engine_parts(recipe: Recipe, student: ModelShape) -> dict[str, int]:
    """Bytes by what they are for."""
    from opd.rollout.kv_cache import LEAST_WINDOW, WINDOW_PARTS, bucket

    rollout, cuda = recipe.rollout, on_cuda(recipe.model.device)
    length = min(rollout.max_sequence, 2 * recipe.longest_response())
    width, limit = WIDTH[model_dtype(recipe)], _limit(recipe, cuda)
    read = bucket(length, LEAST_WINDOW, WINDOW_PARTS) if cuda else length
    token = token_bytes(recipe, student)
    cache = rollout.max_running * read * token
    parts = {"KV cache": cache if limit is None else min(cache, limit)}
    parts["weights laid out for decode"] = _laid_out(recipe, student, cuda)
    if cuda:
        fitting = rollout.max_running if limit is None else max(1, limit // (length * token))
        rows = min(rollout.max_running, fitting)
        heads = -(-student.hidden_size // 64)
        layer = student.hidden_size * _LAYER * width + heads * read * _SCORE
        parts["decode buffers and graphs"] = rows * (
            student.hidden_size * width + 9 * 8 + max(layer, student.vocabulary * _DRAWN)
        )
    return parts


def token_bytes(recipe: Recipe, student: ModelShape) -> int:
    """Bytes of a token's keys and values."""
    return student.layers * student.kv_width * 2 * WIDTH[model_dtype(recipe)]


def _limit(recipe: Recipe, cuda: bool) -> int | None:
    """Bytes that keys and values may take; `None` where they depend on a device that is elsewhere."""
    import torch

    from opd.rollout.kv_cache import kv_budget

    own = recipe.runtime.decode.kv_cache_mb
    name = "cpu" if not cuda else "cuda" if recipe.model.device == "auto" else recipe.model.device
    device = torch.device(name)
    if own is None and cuda and (device.index or 0) >= torch.cuda.device_count():
        return None
    return kv_budget(own, device)


def _laid_out(recipe: Recipe, student: ModelShape, cuda: bool) -> int:
    """Bytes of the copies that decode makes of weights: of those that are multiplied as one, and on a CPU of
    others where another layout or float32 is faster.
    """
    from opd.kernels.projection import onednn_packs, widens
    from opd.models.causal_lm import torch_dtype

    dtype = model_dtype(recipe)
    width, head = WIDTH[dtype], student.vocabulary * student.hidden_size
    if cuda:
        return student.fused * width
    if dtype == "float32":
        return (student.fused + student.linear * onednn_packs()) * width
    if widens(torch_dtype(dtype)):
        return (student.fused + student.linear + head) * 4
    return student.fused * width + head * 4
