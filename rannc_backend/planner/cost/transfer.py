"""What communication takes: seconds of one message and of an all-reduce over ranks that may lie on several nodes;
memory of messages and communicators; numbers of replicas that differ in it; copies between host and device.

In: a `Link` or `Cluster`, bytes, ranks (numbers or numpy arrays). Out: seconds, bytes. Terms: the *terms* of an
all-reduce are its latency and its seconds per byte, which depend on where its ranks are and not on what is
reduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.planner.cluster.cluster import Cluster, Link
from rannc_backend.settings.options import Config

Numbers = float | NDArray[np.float64]
Ints = NDArray[np.int64]


def message_seconds(link: Link, num_bytes: Numbers) -> Numbers:
    """One message; no bytes, no message."""
    return np.where(
        np.asarray(num_bytes) > 0, link.latency_seconds + np.asarray(num_bytes) / link.bytes_per_second, 0.0
    )


def allreduce_seconds(link: Link, num_bytes: Numbers, num_ranks: int) -> Numbers:
    """Ring all-reduce of `num_bytes` over `num_ranks`: 2 (n - 1) steps, each with 1 / n of the bytes."""
    assert num_ranks >= 1, f"an all-reduce over {num_ranks} ranks"
    latency, per_byte = ring_terms(link, num_ranks)
    return np.where(np.asarray(num_bytes) > 0, latency + np.asarray(num_bytes) * per_byte, 0.0)


def ring_terms(link: Link, num_ranks: int) -> tuple[float, float]:
    """Latency in seconds and seconds per byte of a ring all-reduce; both 0 for one rank."""
    num_steps = 2 * (num_ranks - 1)
    return num_steps * link.latency_seconds, num_steps / num_ranks / (
        link.bytes_per_second * link.allreduce_share
    )


def allreduce_terms(cluster: Cluster, ranks: Sequence[int]) -> tuple[float, float]:
    """Latency in seconds and seconds per byte of an all-reduce over `ranks`.

    Within a node it is a ring. Over nodes it is a ring over the slow link; where every node has equally many
    of the ranks, each of these can instead reduce its part between the nodes, between two halves of a ring
    within the node. The faster of the two, for large amounts, counts.
    """
    per_node = Counter(rank // cluster.devices_per_node for rank in ranks)
    if len(per_node) <= 1:
        return ring_terms(cluster.intra_node, len(ranks))
    best = ring_terms(cluster.inter_node, len(ranks))
    counts = set(per_node.values())
    if len(counts) == 1:
        share = counts.pop()
        near, far = ring_terms(cluster.intra_node, share), ring_terms(cluster.inter_node, len(per_node))
        hierarchical = near[0] + far[0], near[1] + far[1] / share
        if hierarchical[1] < best[1]:
            best = hierarchical
    return best


def shared_allreduce_terms(cluster: Cluster, ranks: Sequence[int]) -> tuple[float, float]:
    """Terms of the all-reduce of what another stage reads too: a ring over twice as many ranks.

    Who the others are is not known while a stage is priced; they are taken to be as many, and as near as the
    stage's own are.
    """
    is_near = len({rank // cluster.devices_per_node for rank in ranks}) <= 1
    return ring_terms(cluster.intra_node if is_near else cluster.inter_node, 2 * len(ranks))


def useful_replicas(
    cluster: Cluster, most: int, rows_of: Callable[[int], int], chosen_anyway: Iterable[int]
) -> Ints:
    """Numbers of replicas worth trying, ascending: of those whose replicas get equally many rows the fewest, and the
    fewest that fill nodes.

    Args:
        most: of replicas.
        rows_of: rows of a replica of so many.
        chosen_anyway: numbers that are tried if there may be so many.
    """
    chosen = {count for count in chosen_anyway if count <= most}
    seen: set[int] = set()
    for count in range(1, most + 1):
        rows = rows_of(count)
        fills = count > cluster.devices_per_node and count % cluster.devices_per_node == 0
        if rows not in seen:
            chosen.add(count)
            seen.add(rows)
            rate = allreduce_terms(cluster, range(count))[1]
        elif fills and count not in chosen and allreduce_terms(cluster, range(count))[1] < rate:
            chosen.add(count)
            rate = allreduce_terms(cluster, range(count))[1]
    return np.array(sorted(chosen), dtype=np.int64)


def offload_seconds(
    cluster: Cluster, parameter_bytes: NDArray[np.float64], gradient_bytes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Of a step whose parameters lie on the host: they come to the device once, and their gradients go back. Counted as
    if nothing ran beside it.
    """
    return (parameter_bytes + gradient_bytes) / cluster.device.host_bytes_per_second


def bucket_bytes(graph: BlockGraph, config: Config) -> float:
    """Of what replicas reduce, so many bytes are a bucket; buckets are filled by the sums before they are rounded."""
    in_buckets = [use for use in graph.parameters if not use.is_in_rows]
    sums, reduced = (
        (
            sum(sizes)
            for sizes in zip(*((use.sum_bytes, use.reduced_bytes) for use in in_buckets), strict=True)
        )
        if in_buckets
        else (0, 0)
    )
    if config.max_buckets:
        return max(1.0, reduced / config.max_buckets)
    return config.bucket_mb * 2**20 * (reduced / sums if sums else 1.0)


def message_memory(
    cluster: Cluster, num_micro_batches: int, sent: Any, awaited: Any, ahead: Any, returned: Any
) -> Any:
    """Bytes of messages on their way: the end of a send is waited for when the next but one begins.

    Receives are posted one micro-batch ahead: one of values (`ahead`), beside those in flight, and one of
    gradients (`awaited`).
    """
    if cluster.num_devices == 1:
        return 0.0 * sent
    return 2 * (sent + returned) + awaited + ahead if num_micro_batches > 1 else sent + returned


def communicator_memory(
    cluster: Cluster,
    num_blocks: int,
    begins: Ints,
    ends: Ints,
    replicas: Ints,
    num_of_replicas: int = 1,
    divisor: Ints | int = 1,
) -> Any:
    """Bytes of communicators: two of all ranks (rows and parameters, sums), one for the stage on each
    side, `num_of_replicas` for replicas, and one for those that divide updates, where `divisor` of them do and others
    do it beside them.

    Stages that a value skips to are not known here; each would be one more.
    """
    has_group = (replicas > 1) & (replicas < cluster.num_devices)
    in_groups = (np.asarray(divisor) > 1) & (divisor < replicas)
    number = 2.0 + (begins > 0) + (ends < num_blocks) + num_of_replicas * has_group + in_groups
    return cluster.device.communicator_bytes * number * (cluster.num_devices > 1)


@lru_cache(maxsize=65536)
def reduction_terms(
    cluster: Cluster, replicas: int, place: int, stride: int
) -> tuple[float, float, float, float]:
    """`allreduce_terms` of what only the replicas read, and `shared_allreduce_terms`."""
    ranks = range(place, place + stride * replicas, stride)
    return (*allreduce_terms(cluster, ranks), *shared_allreduce_terms(cluster, ranks))
