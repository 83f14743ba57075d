"""A discrete-event simulation of a cluster that distils. See `pipelines/plan/simulate/README.md`."""

from opd.pipelines.plan.simulate.cluster import Cluster, load_cluster
from opd.pipelines.plan.simulate.run import Simulated, simulate

__all__ = ["Cluster", "Simulated", "load_cluster", "simulate"]
