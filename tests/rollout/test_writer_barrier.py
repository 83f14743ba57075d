"""Ranks that wait for each other's responses: none waits for one that has stopped, or for ever."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from opd.errors import RanksError
from opd.ranks import Ranks
from opd.rollout.shared_groups import WriterBarrier

SECONDS = 240
RANK = """
import sys
from datetime import timedelta
from opd.errors import RanksError
from opd.ranks import join_ranks
from opd.rollout.shared_groups import WriterBarrier

with join_ranks("cpu", 120.0) as ranks:
    barrier = WriterBarrier(ranks)
    barrier.wait_for_ranks()
    ranks.barrier("the test")
    ranks.group_store().set_timeout(timedelta(seconds=1 if sys.argv[1] == "hangs" else 120))
    if ranks.rank:
        if sys.argv[1] == "stops":
            barrier.exit_barrier()
        input()
    else:
        try:
            barrier.wait_for_ranks()
        except RanksError as error:
            print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("stops", "another rank has stopped writing, and its responses are missing"),
        ("hangs", "rank 1 did not come to the responses of a batch"),
    ],
)
def test_nobody_waits_for_a_rank_that_does_not_come(other, sentence):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    settings |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, other],
            env=os.environ | settings | {"RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, errors = ranks[0].communicate("\n", SECONDS)
        assert sentence in said, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_batches_of_several_threads_meet_in_their_order():
    barrier, met = WriterBarrier(Ranks()), []
    barrier.order_from(3)

    def meet(batch: int) -> None:
        with barrier.meet(batch):
            met.append(batch)

    threads = [threading.Thread(target=meet, args=(batch,), daemon=True) for batch in (6, 4, 5)]
    for thread in threads:
        thread.start()
    meet(3)
    meet(3)  # more prompts of the same batch
    for thread in threads:
        thread.join(SECONDS)
    assert met == [3, 3, 4, 5, 6]


def test_a_batch_that_fails_lets_no_later_one_wait():
    barrier = WriterBarrier(Ranks())
    barrier.order_from(0)
    ended = threading.Event()

    def meet_later() -> None:
        with barrier.meet(1):
            ended.set()

    later = threading.Thread(target=meet_later, daemon=True)
    later.start()
    with pytest.raises(ValueError, match="broken"), barrier.meet(0):
        raise ValueError("broken")
    assert ended.wait(SECONDS)


def test_two_threads_of_a_rank_that_stops_are_not_taken_for_two_ranks(tmp_path):
    """The other thread waits already, and the decision to stop is not in the store yet."""
    store = dist.FileStore(str(tmp_path / "store"), 2)  # pyright: ignore[reportPrivateImportUsage]
    ranks: Any = SimpleNamespace(
        group_store=lambda: store, size=2, timeout=SECONDS, collective=lambda label: nullcontext()
    )
    barrier = WriterBarrier(ranks)
    store.add("here/0", 1)
    barrier._off = True
    with pytest.raises(RanksError, match="another rank has stopped writing"):
        barrier.wait_for_ranks()
    assert store.get("decided/0") == b"stop"
