"""Room for a gathered model: counted by rank, or by host where ranks share its memory."""

from __future__ import annotations

import pytest
import torch

from rannc_backend.api.gathering import check_room
from rannc_backend.errors import GatheringError
from rannc_backend.runtime.host_resources import available_bytes

HOSTS = ("a", "a", "b")


def test_ranks_of_a_host_share_its_memory() -> None:
    records = [[600, 1000], [500, 1000], [900, 1000]]
    with pytest.raises(
        GatheringError, match="ranks 0, 1 on host a: .* 1,100 bytes more and 1,000 .* 100 too few"
    ):
        check_room(records, HOSTS, shared=True)
    check_room(records, HOSTS, shared=False)
    check_room([[500, 1000], [500, 1001], [1000, 1000]], HOSTS, shared=True)


def test_devices_are_counted_by_rank() -> None:
    with pytest.raises(GatheringError, match="memory of rank 2: .* 1 too few"):
        check_room([[1, 1], [1, 1], [2, 1]], HOSTS, shared=False)


def test_memory_that_is_not_known_is_enough() -> None:
    check_room([[5, -1], [5, -1], [5, -1]], HOSTS, shared=True)
    check_room([[0, 0], [0, 0], [0, 0]], HOSTS, shared=False)


def test_the_host_has_memory() -> None:
    assert 2**20 < available_bytes(torch.device("cpu")) < 2**50
