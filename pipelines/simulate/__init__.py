"""A discrete-event simulation of a cluster that distils. See `pipelines/simulate/README.md`."""

from opd.pipelines.simulate.cluster import Cluster, load_cluster
from opd.pipelines.simulate.run import Simulated, simulate

__all__ = ["Cluster", "Simulated", "load_cluster", "simulate"]
