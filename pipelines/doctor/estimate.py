"""How much memory and disk a run will take, from the shapes of its models."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from opd.config import Recipe
from opd.pipelines.doctor.checks import Finding, existing_parent
from opd.pipelines.doctor.models import Models, Shape

_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOMENTS = 8
"""Bytes AdamW keeps per parameter: two float32 moments."""
_ACTIVATIONS = 17
"""Values a decoder layer keeps per token and hidden unit for its backward pass, with fused attention
(Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4: 34 bytes in half precision)."""
_TIGHT = 0.8
_MIB = 1 << 20


def memory_parts(recipe: Recipe, student: Shape, teachers: dict[str, Shape]) -> dict[str, int]:
    """Bytes of each part of the merge, the stage that holds the most at once."""
    width, rollout, batch = _WIDTH[recipe.model.dtype], recipe.rollout, recipe.distill.batch
    weights = student.parameters * width
    trained = len(
        {name for domain in recipe.domains for name in recipe.teacher_weights(domain)} - set(teachers)
    )
    whole = trained * weights + sum(shape.parameters * width for shape in teachers.values())
    # Streamed: what is read ahead, and two heads, the one in use and the next.
    largest = max(shape.vocabulary * shape.hidden_size for shape in (student, *teachers.values()))
    layers = recipe.storage.prefetch_mb * _MIB + 2 * largest * width
    length = min(rollout.max_sequence, 2 * rollout.max_new_tokens)
    return {
        "weights": weights,
        "gradients": weights,
        "AdamW": student.parameters * _MOMENTS,
        "engine copy": weights,
        "teachers": min(whole, layers) if recipe.distill.teachers == "streamed" else whole,
        "KV cache": rollout.max_running * length * student.layers * student.kv_width * 2 * width,
        "activations": batch.max_tokens * student.layers * student.hidden_size * _ACTIVATIONS * width,
        "logits of a chunk": 3 * batch.kl_chunk * student.vocabulary * 4,
    }


def memory_needed(recipe: Recipe, parts: dict[str, int]) -> int:
    """Bytes of the merge, or of the specialists that train side by side if that is more."""
    total = sum(parts.values())
    alone = total - parts["teachers"] - parts["logits of a chunk"]
    side_by_side = min(recipe.runtime.workers, max(1, len(recipe.specialist_domains())))
    return max(total, side_by_side * alone)


def disk_needed(recipe: Recipe, student: Shape) -> int:
    """Bytes of every model folder and every kept checkpoint of a whole run."""
    weights = student.parameters * _WIDTH[recipe.model.dtype]
    specialists = len(recipe.specialist_domains())
    methods = recipe.baselines.methods
    trained = specialists + 1 + (recipe.base is not None)
    trained += sum(method in ("mixed_grpo", "off_policy") for method in methods)
    trained += recipe.baselines.mixed_grpo_all_tokens
    folders = specialists + 2 + len(methods) + recipe.baselines.mixed_grpo_all_tokens
    checkpoint = weights + student.parameters * _MOMENTS
    streamed = 0
    if recipe.distill.teachers == "streamed":
        published = specialists * weights if recipe.storage.published is None else 0
        streamed = published + recipe.storage.cache_mb * _MIB
    return folders * weights + trained * recipe.runtime.keep_checkpoints * checkpoint + streamed


def check_resources(recipe: Recipe, models: Models, run_dir: Path) -> list[Finding]:
    """Compares the estimates with what the machine has left."""
    if models.student is None:
        return []
    parts = memory_parts(recipe, models.student, models.teachers)
    listed = ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)
    disk = shutil.disk_usage(existing_parent(run_dir)).free
    return [
        _compare("memory", memory_needed(recipe, parts), available_memory(recipe.model.device), listed),
        _compare("disk", disk_needed(recipe, models.student), disk, "model folders and kept checkpoints"),
    ]


def available_memory(device: str) -> int:
    """Bytes free on the device the recipe trains on; on a CPU, within the limit of the process's group."""
    import torch

    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return torch.cuda.mem_get_info(None if device in ("auto", "cuda") else torch.device(device))[0]
    free = _meminfo()
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return min(free, max(0, limit - int((group / "memory.current").read_text())))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return free


def _meminfo() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _compare(title: str, needed: int, free: int, listed: str) -> Finding:
    text = f"about {readable(needed)} of {readable(free)} free ({listed})"
    if needed > free:
        return Finding(
            "error", title, f"{text}; this does not fit, use a smaller model or batch, or free some"
        )
    return Finding("warning" if needed > _TIGHT * free else "ok", title, text)


def readable(size: float) -> str:
    """`1536` is `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
