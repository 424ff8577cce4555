"""What Accelerate is told of the job, and what `prepare` refuses."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SkipBatchSampler
from torch import nn
from torch.utils.data import BatchSampler

from rannc_backend.capture import refusals
from rannc_backend.errors import LaunchError, UserInputError
from rannc_backend.integrations import accelerate as adapter
from rannc_backend.integrations import tried_versions


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables of a rank of two hosts, of which the second has ranks 1 and 2."""
    variables: dict[str, str] = {"LOCAL_RANK": "7"}
    world = SimpleNamespace(size=3, rank=2, local_rank=1, hosts=("a", "b", "b"), device=torch.device("cpu"))
    monkeypatch.setattr(adapter.os, "environ", variables)
    monkeypatch.setattr(adapter.bootstrap, "start", lambda: world)
    monkeypatch.setitem(refusals.sys.modules, "accelerate.state", None)
    return variables


def test_accelerate_is_told_of_the_job_where_nothing_else_has(environment: dict[str, str]) -> None:
    assert adapter.join_job().rank == 2
    environment.pop("PYTEST_CURRENT_TEST", None)  # pytest writes it into whatever the environment is
    assert environment == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "7",  # as the launcher said
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "ACCELERATE_USE_CPU": "true",
    }


@pytest.mark.parametrize("splits", [False, True])
def test_loaders_that_leave_out_batches_know_how_many_rows_those_of_all_ranks_have(
    splits: bool, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SkipBatchSampler, "__init__", adapter._INIT_OF_SKIPPING)  # others have joined
    adapter.join_job()
    for drops in (False, True):
        all_rows = BatchSampler(range(17), 12 if splits else 4, drop_last=drops)
        own = BatchSamplerShard(all_rows, num_processes=3, process_index=1, split_batches=splits)
        loader = SimpleNamespace(sampler=None, batch_sampler=SkipBatchSampler(own, 1))
        asked: Any = DataLoaderShard.total_batch_size
        if drops:  # Accelerate takes the last batch for a whole one then
            with pytest.raises(AttributeError):
                asked.fget(loader)
        else:
            assert asked.fget(loader) == 12
        assert list(loader.batch_sampler) == list(own)[1:]


def test_ranks_on_gpus_are_not_sent_to_cpus(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = adapter.bootstrap.start()
    world.device = torch.device("cuda", 0)
    adapter.join_job()
    assert "ACCELERATE_USE_CPU" not in environment


def test_an_accelerator_that_has_started_alone_is_refused(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(PartialState=SimpleNamespace(_shared_state={"num_processes": 1}))
    monkeypatch.setitem(refusals.sys.modules, "accelerate.state", state)
    with pytest.raises(LaunchError, match=r"sees 1 process\(es\), the job has 3 ranks(?s:.*)join_job"):
        adapter.join_job()


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_accelerators_that_divide_models_are_refused(kind: str) -> None:
    accelerator = SimpleNamespace(distributed_type=kind)
    with pytest.raises(UserInputError, match=f"set up for {kind}"):
        adapter.prepare(accelerator, nn.Linear(2, 2))


def test_compiled_models_are_refused() -> None:
    accelerator = SimpleNamespace(distributed_type="NO")
    model = torch.compile(nn.Linear(2, 2), backend="rannc")
    with pytest.raises(UserInputError, match="compiled already"):
        adapter.prepare(accelerator, model)


def test_objects_come_back_in_their_order_and_models_without_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = []

    def prepare_model(model: nn.Module, *, evaluation_mode: bool) -> nn.Module:
        modes.append(evaluation_mode)
        return model

    accelerator = SimpleNamespace(
        distributed_type="NO", prepare=lambda each: ("prepared", each), prepare_model=prepare_model
    )
    monkeypatch.setattr(adapter, "join_job", lambda: None)
    plain = nn.Linear(2, 2)
    first, model, last = adapter.prepare(accelerator, "loader", plain, "optimizer")
    assert (first, last) == (("prepared", "loader"), ("prepared", "optimizer"))
    assert model._orig_mod is plain and adapter.is_compiled(model) and modes == [True]
    assert adapter.prepare(accelerator, "loader") == ("prepared", "loader")


@pytest.mark.parametrize(("num_processes", "splits", "count"), [(2, False, 1), (2, True, 0), (1, False, 0)])
def test_steps_of_prepared_schedulers_are_mentioned_once(
    num_processes: int, splits: bool, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    of: Any = SimpleNamespace(num_processes=num_processes, split_batches=splits, prepare=lambda each: each)
    adapter.logger.filters.clear()
    with caplog.at_level(logging.WARNING, logger=adapter.logger.name):
        for _ in range(2):
            assert adapter.prepare(of, optimizer, scheduler) == (optimizer, scheduler)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == count and all("2 times for each update" in line for line in lines)


def test_versions_that_were_not_tried_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    newer = SimpleNamespace(__name__="trl", __version__="99.0.0")
    tried = SimpleNamespace(__name__="trl", __version__=tried_versions.TRIED["trl"] + ".7")
    with caplog.at_level(logging.WARNING, logger=tried_versions.logger.name):
        for module in (tried, newer, newer):
            tried_versions.mention_untried(module)
    assert [
        record.getMessage() for record in caplog.records if record.name == tried_versions.logger.name
    ] == [f"trl 99.0.0 has not been tried with this adapter, {tried_versions.TRIED['trl']} has"]
