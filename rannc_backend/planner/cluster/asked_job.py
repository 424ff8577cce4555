"""What the options say of the job itself: its ranks, its nodes, the rows of its batches, the memory of a device.

In: a `Config`, the `Cluster` to plan for, rows of a step. Out: the cluster and options to plan with, or a `JobSizeError`
that does the sum.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from rannc_backend.errors import BYTES_PER_GB, JobSizeError
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.settings.options import Config

logger = logging.getLogger(__name__)

# More than any device has; plans say it as a number of bytes.
NO_LIMIT_BYTES = float(2**62)


def check_ranks(config: Config, num_ranks: int) -> None:
    """Raise `JobSizeError` where the options mesh and num_ranks are of a job with another number of ranks."""
    asked = asked_ranks(config)
    if not asked or asked == num_ranks:
        return
    if config.num_ranks:
        item, sum_text = "num_ranks", f"{asked}"
    else:
        item, sum_text = "mesh", f"{config.mesh.replace('x', ' x ')} = {asked}"
    raise JobSizeError(
        f"option {item!r} asks for {sum_text} ranks, and there {'is' if num_ranks == 1 else 'are'} {num_ranks}",
        cure=f"plan for or start {asked} ranks (mpirun -np {asked}), or set {item} to what there is.",
        place=f"option {item!r}",
    )


def asked_ranks(config: Config) -> int:
    """How many ranks the options say that there are; 0 where they do not."""
    if config.num_ranks:
        return config.num_ranks
    nodes, per_node = config.mesh_shape or (0, 0)
    return nodes * per_node


def on_mesh(config: Config, cluster: Cluster) -> Cluster:
    """The cluster, with nodes as option mesh says."""
    return replace(cluster, devices_per_node=config.mesh_shape[1]) if config.mesh_shape else cluster


def with_micro_batches(config: Config, batch_rows: int) -> Config:
    """The options with the number of micro-batches that option micro_batch_rows gives for such a batch.

    Raises `JobSizeError` where the batch has other rows than the options say.
    """
    rows, number = config.micro_batch_rows, config.pipeline_num
    if not rows:
        return config
    if number and rows * number != batch_rows:
        raise JobSizeError(
            f"option 'micro_batch_rows' is {rows} and pipeline_num is {number}, so that a step has {rows} x {number} = "
            f"{rows * number} rows of all ranks together, and the batch has {batch_rows}",
            cure=f"give batches of {rows * number} rows over all ranks, or change one of the two options.",
            place="option 'micro_batch_rows'",
        )
    if batch_rows % rows:
        raise JobSizeError(
            f"option 'micro_batch_rows' is {rows}, and a batch of {batch_rows} rows of all ranks together is "
            f"{batch_rows // rows} x {rows} + {batch_rows % rows}",
            cure=f"give batches of a multiple of {rows} rows, or change the option.",
            place="option 'micro_batch_rows'",
        )
    return config.model_copy(update={"pipeline_num": batch_rows // rows})


def memory_limit(config: Config, device_bytes: float) -> float:
    """Bytes of a device that plans may use, without the margin taken off."""
    if config.ignore_memory:
        return NO_LIMIT_BYTES
    return config.mem_limit_gb * BYTES_PER_GB or device_bytes


def of_whole_batch(config: Config, fixed: tuple[int, ...] | None) -> Config:
    """The options for a graph whose rows meet: as many stages as asked for, each once, and one micro-batch."""
    asked = [name for name in ("pipeline_num", "replica_num") if getattr(config, name) > 1]
    asked += ["stage_replicas"] if fixed and max(fixed) > 1 else []
    asked += ["min_pipeline"] if config.min_pipeline > 1 else []
    if asked:
        logger.warning(
            "samples of a batch meet in this model, so that a step runs as one micro-batch on one replica per "
            "stage: %s cannot be had",
            ", ".join(asked),
        )
    return config.model_copy(
        update={
            "pipeline_num": 1,
            "replica_num": 1,
            "stage_replicas": "",
            "partition_num": len(fixed) if fixed else config.partition_num,
        }
    )
