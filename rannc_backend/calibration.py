"""Which cluster a job plans for: a described one, or this machine, measured by all ranks together.

In: the options and the `World`. Out: one `Cluster`, the same on every rank. Terms: *local* is the cluster of the ranks at hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from rannc_backend.config import Config
from rannc_backend.cost.cluster import Cluster, local_cpu
from rannc_backend.cost.cluster_file import LOCAL, load_cluster
from rannc_backend.runtime.world import World


def choose_cluster(
    config: Config, world: World, *, num_devices: int | None = None, devices_per_node: int | None = None
) -> Cluster:
    """The cluster that `config.cluster` names, with the ranks of `world` as its devices. Collective over all ranks.

    Args:
        num_devices, devices_per_node: for a plan for other devices than the ranks at hand, as in a dry run.

    Raises:
        ClusterFileError: no such description, or a wrong one; on all ranks.
    """
    num_devices = world.size if num_devices is None else num_devices
    if config.cluster != LOCAL:
        return load_cluster(config.cluster, num_devices, devices_per_node)
    return local_cpu(num_devices)


def ranks_per_node(hosts: Sequence[str]) -> int:
    """The largest n for which ranks n*i to n*i + n - 1 are on one host, whatever i."""
    runs = [len(list(group)) for _, group in itertools.groupby(hosts)]
    return math.gcd(*runs)
