"""One rank of a job that measures its cluster; ends with a line "ok <rank>" when all held.

usage: calibration_worker.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from rannc_backend.errors import ClusterFileError
from rannc_backend.planner.cluster import this_machine as calibration
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cluster.cluster_file import cluster_toml, load_cluster
from rannc_backend.planner.cluster.this_machine import choose_cluster
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.world import StartOptions, World
from rannc_backend.settings.options import Config


class Counter:
    """Counts the measurements of this rank."""

    def __init__(self) -> None:
        self.count = 0
        self._measure = calibration.measure_device

    def __call__(self, *arguments: object) -> object:
        self.count += 1
        return self._measure(*arguments)


def chosen(world: World, config: Config) -> Cluster:
    """The cluster, which must be the same one on all ranks."""
    cluster = choose_cluster(config, world)
    texts = world.control.allgather(cluster_toml(cluster))
    assert len(set(texts)) == 1, texts
    return cluster


def main(directory: Path) -> None:
    world = bootstrap.start(StartOptions(start_limit_seconds=60, limit_seconds=60))
    counter = calibration.measure_device = Counter()
    # Each rank looks into a directory of its own: only rank 0's counts.
    config = Config(cache_dir=str(directory / f"rank{world.rank}"))
    first = chosen(world, config)
    assert counter.count == 1
    assert first.num_devices == first.devices_per_node == world.size
    generic = load_cluster("generic-cpu", world.size)
    assert first.intra_node != generic.intra_node and first.inter_node == generic.inter_node
    assert first.intra_node.latency_seconds < 0.5 and 1e6 < first.intra_node.bytes_per_second < 1e12
    assert first.device.rate("float32") > 1e8 and first.device.memory_rate() > 1e7

    assert chosen(world, config) == first and counter.count == 1, (
        "ranks without a file know what rank 0 knows"
    )
    files = list((directory / f"rank{world.rank}").rglob("*.toml"))
    assert len(files) == (1 if world.rank == 0 else 0), files

    world.control.barrier()
    if world.rank == 0:
        files[0].write_text("damaged")
    else:
        (directory / f"rank{world.rank}" / "clusters").mkdir(parents=True)
        (directory / f"rank{world.rank}" / "clusters" / "damaged.toml").write_text("damaged")
    world.control.barrier()
    again = chosen(world, config)
    assert counter.count == 2 and again.num_devices == world.size, "all ranks measure where rank 0 has to"

    try:
        choose_cluster(Config(cluster="nowhere.toml"), world)
    except ClusterFileError as error:
        assert "nowhere.toml" in str(error)
    else:
        raise AssertionError("a description that is not there was taken")
    described = directory / "described.toml"
    if world.rank == 0:
        described.write_text(cluster_toml(load_cluster("v100-32gb", 1)))
    assert chosen(world, Config(cluster=str(described))) == load_cluster("v100-32gb", world.size)
    sys.stdout.write(f"ok {world.rank}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
