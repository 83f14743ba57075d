"""Ranks whose ring attention is compared with gathered keys and values; run by test_ring_attention.py.

    python ring_ranks.py 0 1 FOLDER

One process that becomes `WORLD` ranks, so that nothing is imported twice. Each rank keeps its part of packed
tokens; the reference gathers all keys and values on every rank, and attends plainly.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from opd.models import tiled_attention
from opd.models.attention import ScoreForm
from opd.models.context_parallel import ContextParallel, Ring, TokenShare

WORLD = 4
HEADS, SHARED, SIZE = 4, 2, 8
BOUNDS = [0, 37, 38, 101, 144]
CASES = {
    "full": ScoreForm(SIZE**-0.5),
    "window": ScoreForm(SIZE**-0.5, window=19),
    "softcap": ScoreForm(SIZE**-0.5, softcap=2.0),
    "sinks": ScoreForm(SIZE**-0.5, sinks=torch.tensor([-2.0, 0.0, 1.0, 3.0])),
}


def gathered(part: Tensor, share: TokenShare, group: dist.ProcessGroup) -> Tensor:
    """[h, T, d]: everybody's `part` [h, t, d] in the order of the packed tokens."""
    world, tokens = dist.get_world_size(group), BOUNDS[-1]
    parts = [torch.empty_like(part) for _ in range(world)]
    places = [torch.empty_like(share.places) for _ in range(world)]
    dist.all_gather(parts, part.contiguous(), group=group)
    dist.all_gather(places, share.places, group=group)
    whole = part.new_zeros(part.shape[0], tokens, part.shape[2])
    for rows, own in zip(parts, places, strict=True):
        there = own < tokens  # the rest is padding
        whole[:, own[there]] = rows[:, there]
    return whole


def plain(query: Tensor, keys: Tensor, values: Tensor, places: Tensor, scores: ScoreForm) -> Tensor:
    """[H, n, d]: softmax attention of the queries at `places` [n] on all packed keys of their sequences."""
    keys, values = (x.repeat_interleave(HEADS // SHARED, dim=0) for x in (keys, values))
    found = query @ keys.transpose(1, 2) * scores.scaling
    if scores.softcap is not None:
        found = torch.tanh(found / scores.softcap) * scores.softcap
    at = torch.arange(keys.shape[1])
    sequence = torch.bucketize(torch.arange(BOUNDS[-1]), torch.tensor(BOUNDS[1:]), right=True)
    visible = (at <= places[:, None]) & (sequence == sequence[places][:, None])
    if scores.window is not None:
        visible &= at > places[:, None] - scores.window
    found = found.masked_fill(~visible, -torch.inf)
    if scores.sinks is not None:
        found = torch.cat([found, scores.sinks[:, None, None].expand(HEADS, len(places), 1)], dim=-1)
    return torch.softmax(found, dim=-1)[..., : keys.shape[1]] @ values


def apart(found: Tensor, expected: Tensor) -> float:
    """How far two are, of the largest entry."""
    return float((found - expected).abs().max() / expected.abs().max())


@contextmanager
def plain_blocks() -> Iterator[None]:
    """No kernel takes anything meanwhile."""
    os.environ["OPD_KERNELS"] = "chunked"
    try:
        yield
    finally:
        del os.environ["OPD_KERNELS"]


def compare(group: dist.ProcessGroup, scores: ScoreForm) -> dict[str, float]:
    """How far ring and reference are on this rank: output, and the gradients in query, key and value; and the
    most of these between the ring by tiles and by plain blocks.
    """
    ranks, tokens = ContextParallel(group), BOUNDS[-1]
    generator = torch.Generator().manual_seed(3)
    shapes = {"query": HEADS, "key": SHARED, "value": SHARED, "slope": HEADS}
    packed = {name: torch.randn(heads, tokens, SIZE, generator=generator) for name, heads in shapes.items()}
    share = ranks.local_share(torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens), BOUNDS)
    there = share.places < tokens
    own = {name: x[:, share.places.clamp(max=tokens - 1)] for name, x in packed.items()}
    own["slope"] = own["slope"] * there[:, None]
    ring, inputs = Ring(ranks, share.segments), (own["query"], own["key"], own["value"])
    output, logsumexp = ring.forward(*inputs, scores)
    gradients = ring.backward(inputs, (output, logsumexp, own["slope"]), scores)
    with plain_blocks():
        blocks = ring.forward(*inputs, scores)
        theirs = ring.backward(inputs, (*blocks, own["slope"]), scores)
    pairs = zip((output, *gradients), (blocks[0], *theirs), strict=True)
    found = {"blocks": max(apart(*pair) for pair in pairs)}

    query = own["query"][:, there].clone().requires_grad_()
    keys, values = (gathered(own[name], share, group).requires_grad_() for name in ("key", "value"))
    expected = plain(query, keys, values, share.places[there], scores)
    expected.backward(own["slope"][:, there])
    found["output"] = apart(output[:, there], expected.detach())
    assert query.grad is not None
    found["query"] = apart(gradients[0][:, there], query.grad)
    for name, whole, gradient in (("key", keys, gradients[1]), ("value", values, gradients[2])):
        assert whole.grad is not None
        dist.all_reduce(whole.grad, group=group)
        found[name] = apart(gradient[:, there], whole.grad[:, share.places[there]])
    return found


def one_rank(rank: int, folder: Path) -> None:
    """Compare in groups of two ranks, of the first three and of all, and write what was found."""
    torch.set_num_threads(1)
    os.environ.pop("OPD_KERNELS", None)
    tiled_attention.CPU = replace(tiled_attention.CPU, side=16)  # several tiles of a rank's part
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=200),
    )
    pairs = [dist.new_group([first, first + 1]) for first in range(0, WORLD, 2)]
    three, whole = dist.new_group([0, 1, 2]), dist.new_group()
    found = {}
    for world, group in ((2, pairs[rank // 2]), (3, three), (WORLD, whole)):
        if world == 3 and rank == 3:
            continue
        assert isinstance(group, dist.ProcessGroup)
        for name, scores in CASES.items():
            found[f"{name}-{world}"] = compare(group, scores)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Become the ranks, and end as the worst of them."""
    folder = Path(sys.argv[3])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=one_rank, args=(rank, folder), daemon=True) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode or 0) for rank in ranks))


if __name__ == "__main__":
    main()
