"""Brings this rank into the job: finds the others, starts torch.distributed, and makes the `World`.

In: the environment, or a torch.distributed that the user has initialised. Out: one `World` per process.
Terms: a rank's *record* is where it runs: host name, the devices it can see, how many, what it shares with
others, its addresses. Looked for in this order: torch.distributed already initialised (used as it is); MPI
(mpirun, srun); torchrun's environment; else a single process, for which torch.distributed is not started at
all. Nothing happens on import of this file.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rannc_backend.errors import CommunicationError, LaunchError, RanncError
from rannc_backend.errors.base import clip, restore, shown
from rannc_backend.runtime.comm.control import SingleControl, WireControl, poll
from rannc_backend.runtime.comm.control_mpi import MpiWire, load_mpi
from rannc_backend.runtime.comm.device_connections import set_connections, set_visible_devices
from rannc_backend.runtime.comm.gloo import UNLIMITED, GroupWire, SingleTransport
from rannc_backend.runtime.host_resources import mask_of, take_share
from rannc_backend.runtime.job import meeting as meetings
from rannc_backend.runtime.job.exit_hooks import ExitHooks
from rannc_backend.runtime.job.interpreter_exit import InterpreterExit
from rannc_backend.runtime.job.last_words import EarlyWords
from rannc_backend.runtime.job.make_transport import (
    RankRecord,
    checked_rank_record,
    make_transport,
    number_on_host,
    own_rank_record,
    set_nccl_environment,
    uses_nccl,
)
from rannc_backend.runtime.job.meeting import Meeting
from rannc_backend.runtime.job.monitor import LinkMonitor, SingleMonitor
from rannc_backend.runtime.job.monitor_link import SupervisorAddress, join_supervisor, start_supervisor
from rannc_backend.runtime.job.start_watch import StartWatch, find_variables
from rannc_backend.runtime.launch import Launch, find_launch
from rannc_backend.runtime.step_counts import StepCounts
from rannc_backend.runtime.world import StartOptions, World
from rannc_backend.settings.options import Config
from rannc_backend.settings.sources import resolve_config

_LOG = logging.getLogger(__name__)


class _Holder:
    """The process's world. The one piece of module-level state of the runtime: a process can be in one job
    only.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.world: World | None = None
        self.exits = InterpreterExit()
        self.device_problem = ""  # of CUDA's settings
        self.watch = StartWatch(lambda: self.exits.code)
        self.counts = StepCounts()
        self.words = EarlyWords(lambda: self.world is not None, lambda: self.watch.stop())


_HOLDER = _Holder()


# What a user exports by hand where srun or mpirun starts the ranks and there is no mpi4py.
_BY_HAND = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Lets tests run several ranks on one GPU; see StartOptions.share_devices. No option: it shows that things
# work, slowly.
SHARE_VARIABLE = "TEST_RANNC_SHARE_GPU"
_SHARE_CHOICES = ("", "gloo", "nccl")


def watch_others() -> None:
    """From now on until `start` has returned: end this rank if another rank of this host ends with an error.

    `start` does so by itself; called earlier, this rank need not come to it to learn of the other's end.
    """
    if find_variables(os.environ) is not None:
        _HOLDER.exits.watch()
        _HOLDER.words.install(os.environ)
    _HOLDER.watch.begin(os.environ)


def start(options: StartOptions | None = None) -> World:
    """Join the job, once per process: later calls return the same World, whatever their options.

    Collective: every rank must call it.

    Raises:
        LaunchError: the environment contradicts itself, MPI cannot be used, or a rank has no device.
        CommunicationError: not all ranks have started within `start_limit_seconds`.
        OptionValueError: other devices are asked for than CUDA sees, which has started.
    """
    with _HOLDER.lock:
        chosen = options
        if chosen is None and _HOLDER.world is None:
            chosen = options_of(resolve_config(None, os.environ))
        if chosen is not None:
            show_devices(chosen.visible_devices)
        if _HOLDER.world is None:
            assert chosen is not None, "options are there"
            watch_others()
            with _HOLDER.watch.limit(chosen.start_limit_seconds) as watch:
                try:
                    _HOLDER.world = _make_world(_with_sharing(chosen, os.environ))
                except CommunicationError as error:
                    raise _with_names(error, watch.note_missing()) from None
        return _HOLDER.world


def options_of(config: Config) -> StartOptions:
    """How a job with these options is brought up."""
    return StartOptions(
        limit_seconds=config.step_timeout_seconds,
        start_limit_seconds=config.start_timeout_seconds,
        visible_devices=config.visible_devices,
    )


def show_devices(devices: str) -> None:
    """Let CUDA see these devices alone in this process; "": as it is. Raises OptionValueError once it has started."""
    set_visible_devices(devices, os.environ, context_exists=torch.cuda.is_initialized())


def _with_names(error: CommunicationError, missing: str) -> RanncError:
    """The error of a start that others have not come to, with what is known of them."""
    return restore(type(error), f"{error}\n  Missing: {missing}", dict(error.__dict__)) if missing else error


def started() -> World | None:
    """The World that `start` has made; None before."""
    return _HOLDER.world


def counts() -> StepCounts:
    """What this process has done so far with compiled models, before it joined the job, too."""
    return _HOLDER.counts


def is_alone() -> bool:
    """Whether this process is the only one of its job; False where the environment cannot tell."""
    if _HOLDER.world is not None:
        return _HOLDER.world.size == 1
    try:
        return _find_launch().size == 1
    except LaunchError:
        return False


def _with_sharing(options: StartOptions, environ: MutableMapping[str, str]) -> StartOptions:
    choice = environ.get(SHARE_VARIABLE, options.share_devices)
    if choice not in _SHARE_CHOICES:
        raise LaunchError(
            f"{SHARE_VARIABLE} is {choice!r}",
            cure=f"set it to one of {', '.join(map(repr, _SHARE_CHOICES))}.",
        )
    return replace(options, share_devices=choice)


def leads() -> bool:
    """Whether this is rank 0, or alone, as far as the launcher tells; asked before anything has started."""
    try:
        return _find_launch().rank == 0
    except LaunchError:
        return False


def _find_launch() -> Launch:
    if dist.is_available() and dist.is_initialized():
        return Launch(launcher="user", rank=dist.get_rank(), size=dist.get_world_size())
    return find_launch(os.environ)


def _make_world(options: StartOptions) -> World:
    """Dispatch on who started this process."""
    launch = _find_launch()
    if launch.size == 1:
        return _single_world(options)
    if launch.launcher == "user":
        return _user_world(options, launch)
    if launch.launcher == "torchrun":
        return _torchrun_world(options, launch)
    meetings.keep_mpi_inside(os.environ)
    try:
        mpi = load_mpi(launch)
    except LaunchError as error:
        by_hand = find_launch({name: value for name, value in os.environ.items() if name in _BY_HAND})
        if by_hand.size == 1:
            raise
        _LOG.info("MPI cannot be used, RANK and WORLD_SIZE are trusted instead: %s", error)
        return _torchrun_world(options, by_hand)
    return _mpi_world(options, MpiWire(mpi))


def _single_world(options: StartOptions) -> World:
    rank_record = own_rank_record()
    device = _choose_device(options, [rank_record], rank=0)
    return World(
        rank=0,
        size=1,
        local_rank=0,
        hosts=(rank_record[0],),
        device=device,
        launcher="single",
        control=SingleControl(),
        transport=SingleTransport(device),
        monitor=SingleMonitor(),
        runs_behind=device.type == "cuda",
        counts=_HOLDER.counts,
        device_problem=_HOLDER.device_problem,
    )


def _mpi_world(options: StartOptions, wire: MpiWire) -> World:
    """MPI for control; torch.distributed for tensors, over a store whose address MPI carries."""
    launch = Launch(launcher="mpi", rank=wire.rank, size=wire.size)
    control = WireControl(wire, rank=wire.rank, size=wire.size, limit_seconds=options.limit_seconds)
    rank_records = control.allgather(
        own_rank_record(), what="start of all ranks", limit_seconds=options.start_limit_seconds
    )
    device = _choose_device(options, rank_records, rank=launch.rank)
    meeting = _find_meeting(launch, rank_records, control.allgather)
    monitor, supervisor = _join_monitor(launch, rank_records, meeting, control, options)
    try:
        _init_default_group(options, launch, device, _mpi_store(launch, meeting, supervisor, control))
    except BaseException as error:
        # The hooks that tell the others come later, as torch puts its own in their place here.
        monitor.report_error(error)
        raise
    return _finish(options, launch, device, rank_records, wire.local_rank(), control, monitor)


def _mpi_store(launch: Launch, meeting: Meeting, supervisor: SupervisorAddress, control: WireControl) -> Any:
    """On one host a file in the job's private folder; else, or where not all ranks see that, a port that the
    system chooses.
    """
    if meeting.is_one_host:
        found = control.allgather(meetings.identity_of(supervisor.folder), what="folder of the job")
        if found[0] and all(identity == found[0] for identity in found):
            return meetings.store_in(supervisor.folder, size=launch.size, limit=UNLIMITED)
    is_master, store = launch.rank == 0, None
    if is_master:
        # Rank 0 tells the port: no race for a number that was free a moment ago.
        store = meetings.store_at(meeting.address, 0, is_master=True, size=launch.size, limit=UNLIMITED)
    port = control.broadcast(None if store is None else store.port, what="store address")
    return store or meetings.store_at(
        meeting.address, port, is_master=False, size=launch.size, limit=UNLIMITED
    )


def _torchrun_world(options: StartOptions, launch: Launch) -> World:
    """torch.distributed for everything, over torchrun's store."""
    limit = datetime.timedelta(seconds=options.start_limit_seconds)
    try:
        store = (
            meetings.store_of_environment(os.environ, size=launch.size, limit=limit)
            if launch.rank == 0
            else None
        )
        if store is None:
            store, _, _ = next(iter(dist.rendezvous("env://", launch.rank, launch.size, timeout=limit)))
    except (RuntimeError, ValueError, OverflowError) as error:  # a port may be no number, or none that fits
        place = shown(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
        raise LaunchError(
            f"rank {launch.rank} cannot meet the others at {place}: {clip(str(error))}",
            cure="see whether all ranks were started and whether MASTER_ADDR and MASTER_PORT are rank 0's.",
        ) from error
    records = _gather_json(store, launch, "rank record", own_rank_record(), options.start_limit_seconds)
    rank_records = [checked_rank_record(rank_record) for rank_record in records]
    device = _choose_device(options, rank_records, rank=launch.rank)

    def gather(names: list[str], **_: Any) -> list[Any]:
        return _gather_json(store, launch, "names", names, options.start_limit_seconds)

    meeting = _find_meeting(launch, rank_records, gather)
    _init_default_group(options, launch, device, store)
    control = _group_control(options, launch)
    monitor, _ = _join_monitor(launch, rank_records, meeting, control, options)
    return _finish(
        options, launch, device, rank_records, number_on_host(rank_records, launch.rank), control, monitor
    )


def _user_world(options: StartOptions, launch: Launch) -> World:
    """torch.distributed as the user has initialised it, with groups of our own in it."""
    control = _group_control(options, launch)
    rank_records = control.allgather(
        own_rank_record(), what="start of all ranks", limit_seconds=options.start_limit_seconds
    )
    device = _choose_device(options, rank_records, rank=launch.rank)
    meeting = _find_meeting(launch, rank_records, control.allgather)
    monitor, _ = _join_monitor(launch, rank_records, meeting, control, options)
    return _finish(
        options, launch, device, rank_records, number_on_host(rank_records, launch.rank), control, monitor
    )


def _finish(
    options: StartOptions,
    launch: Launch,
    device: torch.device,
    rank_records: list[RankRecord],
    local_rank: int,
    control: WireControl,
    monitor: LinkMonitor,
) -> World:
    """Make the parts that stand on torch.distributed, control and the monitor, which sees them fail."""
    _share_cores(launch, rank_records)
    transport = make_transport(options, launch, device, rank_records, monitor)

    def on_good_end() -> None:
        control.close()
        transport.close()

    ExitHooks(monitor, on_good_end, _HOLDER.exits).install()
    control.attach(monitor)
    control.barrier(what="start of all ranks", limit_seconds=options.start_limit_seconds)
    return World(
        rank=launch.rank,
        size=launch.size,
        local_rank=local_rank,
        hosts=tuple(rank_record[0] for rank_record in rank_records),
        device=device,
        launcher=launch.launcher,
        control=control,
        transport=transport,
        monitor=monitor,
        runs_behind=device.type == "cuda",
        counts=_HOLDER.counts,
        device_problem=_HOLDER.device_problem,
    )


def _share_cores(launch: Launch, rank_records: Sequence[RankRecord]) -> None:
    own = rank_records[launch.rank]
    words = take_share(
        [mask_of(rank_record[6]) for rank_record in rank_records if rank_record[0] == own[0]],
        mask_of(own[6]),
        os.environ,
    )
    if words and launch.rank == 0:
        _LOG.info("%s", words)


def _find_meeting(
    launch: Launch, rank_records: Sequence[RankRecord], gather: Callable[..., list[Any]]
) -> Meeting:
    """Where the ranks meet; gloo and NCCL are told to listen there alone."""
    networks = [rank_record[4] for rank_record in rank_records]
    known: list[list[str]] = [[] for _ in rank_records]
    if len(set(networks)) > 1:
        names = [rank_records[0][0], *([os.environ["MASTER_ADDR"]] if launch.launcher == "torchrun" else [])]
        own = [address for name in names for address in meetings.addresses_of_name(name)]
        known = [meetings.checked_texts(texts) for texts in gather(own, what="addresses of rank 0's host")]
    meeting = meetings.find_meeting(
        rank=launch.rank,
        networks=networks,
        addresses=[rank_record[5] for rank_record in rank_records],
        known=known,
    )
    # Over several hosts, groups that are the user's show that theirs work.
    if launch.launcher != "user" or meeting.is_one_host:
        meetings.use_interface(meeting.interface, os.environ)
    return meeting


def _join_monitor(
    launch: Launch,
    rank_records: Sequence[RankRecord],
    meeting: Meeting,
    control: WireControl,
    options: StartOptions,
) -> tuple[LinkMonitor, SupervisorAddress]:
    # MPICH's mpirun kills the others when one ends, and then reports their end instead of the exit code of
    # the first.
    failed_first = "PMI_RANK" not in os.environ
    # torchrun and users bring a store; the folder is for ours.
    folder_in = tempfile.gettempdir() if launch.launcher == "mpi" and meeting.is_one_host else ""
    supervisor = None
    if launch.rank == 0:
        supervisor = start_supervisor(
            size=len(rank_records), bind=meeting.address, failed_first=failed_first, folder_in=folder_in
        )
    told = [supervisor.port, supervisor.token, supervisor.folder] if supervisor is not None else None
    port, token, folder = control.broadcast(
        told, what="monitor address", limit_seconds=options.start_limit_seconds
    )
    address = SupervisorAddress(host=meeting.address, port=port, token=token, folder=folder)
    limits = {"limit_seconds": options.start_limit_seconds, "silence_seconds": options.limit_seconds}
    monitor = join_supervisor(address, rank=launch.rank, own_host=rank_records[launch.rank][0], **limits)
    return monitor, address


def _init_default_group(options: StartOptions, launch: Launch, device: torch.device, store: Any) -> None:
    nccl = uses_nccl(options, device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=dist.PrefixStore("rannc", store),
        rank=launch.rank,
        world_size=launch.size,
        # No device_id: NCCL would make a communicator of this group at once, which nobody uses, and its
        # memory stays.
        timeout=datetime.timedelta(seconds=max(options.limit_seconds, options.start_limit_seconds)),
    )


def _group_control(options: StartOptions, launch: Launch) -> WireControl:
    wire = GroupWire(dist.new_group(backend="gloo", timeout=UNLIMITED), size=launch.size)
    return WireControl(wire, rank=launch.rank, size=launch.size, limit_seconds=options.limit_seconds)


def _gather_json(store: Any, launch: Launch, what: str, value: Any, limit_seconds: float) -> list[Any]:
    """The values of all ranks, by way of a store, which knows who has not come. To be checked: anybody may write
    into a store.

    Raises:
        CommunicationError: naming the ranks that have not started within `limit_seconds`.
    """
    keys = [f"rannc/{what}/{rank}" for rank in range(launch.size)]
    store.set(keys[launch.rank], json.dumps(value))
    if not poll(lambda: bool(store.check(keys)), limit_seconds):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(str(rank) for rank in missing)
        raise CommunicationError(
            f"start of all ranks: rank(s) {names} have not started the compiled model",
            rank=launch.rank,
            peer=missing[0] if missing else None,
            limit_seconds=limit_seconds,
        )
    return [meetings.parsed(store.get(key), key) for key in keys]


def _choose_device(options: StartOptions, rank_records: Sequence[RankRecord], *, rank: int) -> torch.device:
    """One device per rank.

    Ranks of a host that see the same devices share them out in order of rank; where the launcher shows each
    rank a device of its own, each takes its first.

    Raises:
        LaunchError: there are fewer devices than ranks, or none, or only some ranks see any.
    """
    num_devices = rank_records[rank][2]
    without = [str(other) for other, rank_record in enumerate(rank_records) if rank_record[2] == 0]
    if options.device == "auto" and 0 < len(without) < len(rank_records):
        raise LaunchError(
            f"rank(s) {', '.join(without)} see no CUDA device and the others do",
            cure="see whether CUDA_VISIBLE_DEVICES and the driver are the same for all ranks.",
        )
    if options.device == "cpu" or (options.device == "auto" and num_devices == 0):
        return torch.device("cpu")
    alike = [
        other for other, rank_record in enumerate(rank_records) if rank_record[:2] == rank_records[rank][:2]
    ]
    number = alike.index(rank)
    shared = bool(options.share_devices) and 0 < num_devices < len(alike)
    if shared:
        number %= num_devices
    if number >= num_devices:
        raise LaunchError(
            f"{len(alike)} ranks on host {rank_records[rank][0]} but {num_devices} CUDA device(s)",
            cure="start one rank per device, or compute on the CPU with CUDA_VISIBLE_DEVICES= in the "
            "environment.",
        )
    _HOLDER.device_problem = set_connections(os.environ, context_exists=torch.cuda.is_initialized())
    set_nccl_environment(os.environ, rank=rank, shared=shared and options.share_devices == "nccl")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
