"""A Ray cluster on the loopback interface in processes of its own: `python cluster_process.py CPUS FOLDER`.

Prints its address, then one line of JSON with the process ids, and ends when its standard input closes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

QUIET = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",  # not 15: beside other work on a busy machine actors would starve
}


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster and the processes it consists of."""

    address: str
    pids: dict[str, int]
    process: subprocess.Popen[str]


@contextmanager
def running_cluster(cpus: int, folder: str) -> Iterator[RunningCluster]:
    """A cluster with `cpus` CPUs while the block runs; its files are in `folder`, whose path is short."""
    command = [sys.executable, __file__, str(cpus), folder]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | QUIET,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        lines = (line for line in process.stdout if line.startswith("{"))
        told = json.loads(next(lines))
        yield RunningCluster(told["address"], told["pids"], process)
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def main() -> None:
    import ray
    from ray._private import worker

    context = ray.init(
        num_cpus=int(sys.argv[1]),
        include_dashboard=False,
        _temp_dir=sys.argv[2],
        log_to_driver=False,
        configure_logging=False,
    )
    node = worker._global_node
    pids = {name: found[0].process.pid for name, found in node.all_processes.items()}
    print(json.dumps({"address": context.address_info["gcs_address"], "pids": pids}), flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
