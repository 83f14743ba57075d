"""What SGLang imports from its kernel library on a CPU, for which no wheel is published.

Only the first function is called when a plain decoder is served; the others belong to speculative decoding
and to copies of its cache, and say so if they are ever reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """Write each request's new cache slots, which lie end to end in `slots`, into its row of `table`."""
    del width
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def _absent(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{name} has no CPU version here; serve without the feature that needs it")

    return call


build_draft_decode_metadata_cpu = _absent("build_draft_decode_metadata_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
