"""Starts a Ray cluster as `launch: ray` does; prints where its processes listen, as JSON."""

import json
import os

import sockets

from opd.config.train import RayLaunch
from opd.pipelines.launch.ray.cluster import BundleLayout, open_cluster
from opd.rollout.preemption import Preemption


def main() -> None:
    launch = RayLaunch(type="ray")
    with open_cluster(launch, BundleLayout.from_launch(launch), Preemption(5.0)) as cluster:

        class Actor:
            def ping(self) -> int:
                return os.getpid()

        actor = cluster.ray.remote(Actor).remote()
        cluster.ray.get(actor.ping.remote())
        processes = sockets.descendants(os.getpid())
        found = {"processes": len(processes), "addresses": sorted(sockets.listening(*processes))}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
