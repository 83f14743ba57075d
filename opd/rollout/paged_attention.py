"""Decode attention over pages: PyTorch's flash attention, which reads only each request's own tokens.

The kernel is given no splits of a request's keys, so a token's result does not depend on the other requests.
It takes 16 bits and no softcap. `trusted` tests it once on this machine.

Shapes: `B` requests, `H` query heads, `Hkv` key-value heads, `d` head size, `S` slots, `W` pages of a slot,
`P` pages of the pool, `N` tokens of a page.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from opd.kernels import triton_rows, verification
from opd.models.attention import ScoreForm
from opd.models.causal_lm import CausalLM
from opd.models.fused_attention import EXACT, HALVES
from opd.rollout.forward import CachedAttention, supports_model
from opd.rollout.kv_cache import LayerCache
from opd.rollout.pages import PAGE, PagedCache

log = logging.getLogger(__name__)

DTYPES = HALVES
"""Data types of the kernel."""
_KNOWS_PAGES = "block_table" in signature(varlen_attn).parameters


@lru_cache(maxsize=1)
def _say_missing() -> None:
    log.info("this PyTorch has no attention over pages: requests have slots of one length (PyTorch 2.13 has)")


@dataclass(frozen=True, slots=True)
class UsedPages:
    """Pool location of the tokens of `B` slots, in the kernel's form: int32, on the device."""

    table: Tensor
    """[B, W]: pages of each slot."""
    tokens: Tensor
    """[B]: number of tokens in each slot."""
    ends: tuple[Tensor, Tensor]
    """[B + 1] each: bounds of the queries, one a slot, and of the tokens as if concatenated."""

    @classmethod
    def from_table(cls, table: Tensor, tokens: Tensor) -> UsedPages:
        ends = torch.arange(len(table) + 1, dtype=torch.int32, device=table.device)
        return cls(table, tokens, (ends, functional.pad(tokens.cumsum(0, dtype=torch.int32), (1, 0))))


class PagedAttention(CachedAttention):
    """One new token for each of the first `B` slots: write its key and value, attend to all of the slot."""

    def __init__(self, cache: PagedCache, positions: Tensor) -> None:
        """`positions` [B] int64, on the device: of the new tokens. Slot `b` then holds `positions[b] + 1`."""
        super().__init__(cache, positions)
        table = cache.table[: len(positions)]
        pages = table.gather(1, (positions // PAGE)[:, None])[:, 0]
        self._places = (pages * PAGE + positions % PAGE)[None]
        self._used = UsedPages.from_table(table, (positions + 1).int())

    def attend(self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
        """`query` [B, H, d], `key` and `value` [B, Hkv, d] of the new tokens -> [B, H, d]."""
        cache.put(self._places, key, value)
        return attend_pages(query, cache.keys, cache.values, self._used, form)


def attend_pages(query: Tensor, keys: Tensor, values: Tensor, used: UsedPages, form: ScoreForm) -> Tensor:
    """Attention of one query per slot, `query` [B, H, d], to the `used` tokens of a pool, `keys` and `values`
    [P, N, Hkv, d] -> [B, H, d].
    """
    output = varlen_attn(
        query,
        keys,
        values,
        *used.ends,
        1,
        used.table.shape[1] * keys.shape[1],
        scale=form.scaling,
        window_size=(-1, -1) if form.window is None else (form.window - 1, 0),
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=used.tokens,
        block_table=used.table,
        num_splits=1,
    )
    assert isinstance(output, Tensor)
    return output


@dataclass(frozen=True, slots=True)
class PagesForm:
    """The properties that decide whether the kernel may be trusted."""

    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int]
    """`H` and `Hkv`."""
    size: int
    """Head size."""
    scaling: float
    windowed: bool

    @classmethod
    def from_model(cls, model: CausalLM) -> PagesForm | None:
        """Read the form of all layers. Returns None if the kernel does not support them, or is not wanted."""
        if (
            os.environ.get("OPD_KERNELS", "auto") not in ("auto", "triton")
            or triton_rows.missing() is not None
        ):
            return None
        if not _KNOWS_PAGES:
            return _say_missing()
        if not supports_model(model.config, model.layers) or model.dtype not in DTYPES:
            return None
        attention: Any = model.layers[0].self_attn
        size, config = int(attention.head_dim), model.config
        heads = attention.q_proj.out_features // size, attention.k_proj.out_features // size
        if size % 8 or size > 256:
            return None
        windowed = getattr(config, "sliding_window", None) is not None
        return cls(model.device, model.dtype, heads, size, float(attention.scaling), windowed)


LENGTHS = (1, 700, 40, PAGE, 2 * PAGE + 1, 7)
"""Lengths of the requests in the kernel's test."""
WINDOW = 300


@lru_cache(maxsize=64)
def is_trusted(form: PagesForm) -> bool:
    """Return True if the kernel equals plain products in float64 on this GPU. It must also give the same bits
    twice, and the same with other requests. Tested once for each form. A kernel that fails is not used, with
    a warning.
    """
    subject = f"flash attention over pages of {form.dtype} with heads of {form.size}"
    where = f"on {torch.cuda.get_device_name(form.device)}"
    return verification.accept_kernel(
        subject, kernel_fault(form), where, "slots of one length and products of PyTorch's are"
    )


@torch.inference_mode()
def kernel_fault(form: PagesForm) -> str | None:
    """Return the kernel's fault, as the end of a sentence, or None if it has none."""
    generator = torch.Generator().manual_seed(0)
    (heads, shared), width = form.heads, -(-max(LENGTHS) // PAGE)
    pages = len(LENGTHS) * width

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, form.size, generator=generator).to(form.device, form.dtype)

    query = random_tensor(len(LENGTHS), heads) * (form.size**-0.5 / form.scaling)
    keys, values = random_tensor(pages, PAGE, shared), random_tensor(pages, PAGE, shared)
    table = torch.arange(pages, device=form.device).flip(0).view(-1, width).int()
    used = UsedPages.from_table(table, torch.tensor(LENGTHS, dtype=torch.int32, device=form.device))
    scores = ScoreForm(form.scaling, window=WINDOW if form.windowed else None)
    try:
        output, again = (attend_pages(query, keys, values, used, scores) for _ in range(2))
        parts = (slice(row, row + 1) for row in range(len(LENGTHS)))
        alone = [
            attend_pages(
                query[part], keys, values, UsedPages.from_table(table[part], used.tokens[part]), scores
            )
            for part in parts
        ]
    except Exception as error:  # errors of builds have no common class
        return f"cannot be launched ({error!r})"
    if not torch.equal(output, again):
        return "gives other bits the second time"
    if not torch.equal(output, torch.cat(alone)):
        return "gives other bits in other company"
    for row, length in enumerate(LENGTHS):
        first = max(0, length - WINDOW) if form.windowed else 0
        k, v = (x[table[row]].flatten(0, 1)[first:length].double().transpose(0, 1) for x in (keys, values))
        q = query[row].double().unflatten(0, (shared, -1))
        exact = (form.scaling * q @ k.transpose(1, 2)).softmax(-1) @ v
        off = (output[row].double() - exact.flatten(0, 1)).norm(dim=-1)
        if not bool((off <= EXACT[form.dtype] * exact.norm(dim=-1).mean()).all()):
            return "gives another result than float64"
    return None
