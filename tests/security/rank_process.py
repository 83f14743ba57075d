"""One rank among several, as torchrun's variables say: prints on which addresses it listens, as JSON."""

import json
import os

import sockets
import torch
import torch.distributed as dist

from opd.ranks import join_ranks

with join_ranks("cpu", 200.0) as ranks:
    dist.all_reduce(torch.ones(1), group=ranks.group)
    other = ranks.new_group("second")
    other.barrier("the second group")
    print(json.dumps(sorted(sockets.listening(os.getpid()))), flush=True)
    ranks.barrier("the end")
