"""Runs a command with a Ray cluster of two nodes, all on this machine, and ends the cluster after it.

python examples/ray_cluster/cluster.py COMMAND [ARGUMENT ...]

Each node has processes of its own, as it would on a machine of its own; they listen on the loopback interface
alone. Only processes that were started here are ended, by their ids. RAY_ADDRESS tells the command where the
cluster is; its exit status is the command's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opd.pipelines.launch.ray.cluster import descendant_processes, end_left_over

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # off, Ray binds the loopback interface alone
    "RAY_AUTH_MODE": "disabled",  # nobody else reaches the loopback interface of a machine of one's own
}
CPUS_PER_NODE = 4
NODES = 2


@contextmanager
def cluster() -> Iterator[str]:
    """The address of a cluster while the block runs."""
    # Sockets lie in this folder, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="opd-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        # Ray notes the newest cluster's address for all on the machine, in a folder that it does not make:
        # this one is there, and nobody else's cluster is forgotten.
        Path(folder, "ray").mkdir()
        os.environ.update(ENVIRONMENT, RAY_TMPDIR=folder)  # Ray reads them when it is imported
        from ray.cluster_utils import Cluster

        nodes = Cluster()
        try:
            for number in range(NODES):
                first = {"temp_dir": folder, "include_dashboard": False} if number == 0 else {}
                nodes.add_node(num_cpus=CPUS_PER_NODE, **first)
            yield nodes.address
        finally:
            family = descendant_processes(os.getpid())
            nodes.shutdown()
            end_left_over(family, 5.0)


def main(command: list[str]) -> int:
    """Start the cluster, run `command`, end the cluster."""
    if not command:
        raise SystemExit(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with cluster() as address:
        print(f"a Ray cluster of {NODES} nodes at {address}", flush=True)
        environment = {name: value for name, value in os.environ.items() if name != "RAY_TMPDIR"}
        child = subprocess.Popen(command, env=environment | {"RAY_ADDRESS": address})
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
