"""Ranks that share a host take its cores once, all together; what the user has chosen stays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.runtime import host_resources as host_threads
from rannc_backend.runtime.host_resources import mask_of, num_cores_of, own_mask, share_of, take_share

ALL = (1 << 16) - 1


@given(
    masks=st.lists(st.integers(1, (1 << 64) - 1), min_size=1, max_size=16), siblings=st.sampled_from([1, 2])
)
def test_no_core_is_taken_twice(masks: list[int], siblings: int) -> None:
    """Beyond the one thread that every rank needs."""
    shares = [share_of(masks, mask, num_cores=max(1, mask.bit_count() // siblings)) for mask in masks]
    union = 0
    for mask in masks:
        union |= mask
    assert all(share.num_threads >= 1 and share.num_compilers >= 1 for share in shares)
    assert sum(share.num_compilers for share in shares if share.num_compilers > 2) <= union.bit_count()
    assert all(share.num_threads <= max(1, mask.bit_count()) for share, mask in zip(shares, masks))


@pytest.mark.parametrize(
    ("masks", "threads", "quota"),
    [
        ([ALL] * 4, 4, None),  # not bound: divided
        ([ALL] * 3, 5, None),
        ([ALL] * 32, 1, None),
        ([0xF, 0xF0, 0xF00, 0xF000], 4, None),  # bound by the launcher: each has its own
        ([0xFF, 0xFF, 0xFF00, 0xFF00], 4, None),
        ([ALL] * 4, 1, 4.0),  # a container with four CPUs of the 16 that it sees
    ],
)
def test_shares(masks: list[int], threads: int, quota: float | None) -> None:
    for mask in masks:
        assert share_of(masks, mask, num_cores=mask.bit_count(), quota_cpus=quota).num_threads == threads


def test_siblings_count_once() -> None:
    share = share_of([ALL] * 2, ALL, num_cores=8)
    assert (share.num_threads, share.num_compilers, share.num_ranks) == (4, 8, 2)


@pytest.mark.parametrize("text", ["", "no mask", "-", "f" * 5000])
def test_what_is_no_mask_is_none(text: str) -> None:
    assert mask_of(text) == 0
    assert share_of([0, 0], 0, num_cores=0).num_threads == 1


def test_this_process() -> None:
    assert mask_of(own_mask()) > 0
    assert 1 <= num_cores_of(mask_of(own_mask())) <= mask_of(own_mask()).bit_count()


class _Torch:
    def __init__(self, number: int) -> None:
        self.number = number

    def get_num_threads(self) -> int:
        return self.number

    def set_num_threads(self, number: int) -> None:
        self.number = number


def _take(
    monkeypatch: pytest.MonkeyPatch,
    *,
    number: int,
    environ: dict[str, str],
    num_ranks: int = 4,
    compilers: int = 16,
) -> tuple[_Torch, str, int]:
    torch, config = _Torch(number), SimpleNamespace(compile_threads=compilers)
    monkeypatch.setattr(host_threads, "torch", torch)
    monkeypatch.setattr(host_threads, "num_cores_of", lambda mask: mask.bit_count())
    monkeypatch.setattr(host_threads, "quota_cores", lambda: None)
    monkeypatch.setattr(host_threads.os, "cpu_count", lambda: 16)
    monkeypatch.setitem(host_threads.sys.modules, "torch._inductor.config", config)
    return torch, take_share([ALL] * num_ranks, ALL, environ), config.compile_threads


def test_what_nobody_chose_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    torch, words, compilers = _take(monkeypatch, number=16, environ=environ)
    assert (torch.number, compilers) == (4, 4)
    assert environ == {"OMP_NUM_THREADS": "4", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    assert "4 thread(s) per rank instead of 16: 4 ranks share 16 cores" in words


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_variable_stays(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    environ = {variable: "16", "TORCHINDUCTOR_COMPILE_THREADS": "9"}
    torch, words, compilers = _take(monkeypatch, number=16, environ=environ)
    assert (torch.number, compilers, words) == (16, 16, "")
    assert environ == {variable: "16", "TORCHINDUCTOR_COMPILE_THREADS": "9"}


def test_a_number_that_the_script_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    torch, words, compilers = _take(monkeypatch, number=7, environ=environ, compilers=5)
    assert (torch.number, words, compilers) == (7, "", 5)
    assert "OMP_NUM_THREADS" not in environ


def test_a_rank_alone_on_its_host_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    torch, words, _ = _take(monkeypatch, number=16, environ=environ, num_ranks=1)
    assert (torch.number, words, environ) == (16, "", {})
