"""Where the ranks of a job meet: at which address of rank 0, over which interfaces, and in which store.

In: what every rank tells of its host. Out: a `Meeting`, the same address on all ranks, and a store of
torch.distributed behind it. Whatever listens for the job listens at that address alone: the loopback where
all ranks are on one host, else the address of rank 0 that the others reach. What other ranks tell is checked
before it is used, as a store takes what anybody writes into it.

Terms: ranks are on one *host* here if they have one network stack (`network`), whatever the host's name; an
*interface* has a name and addresses, each with the mask of its subnet.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from rannc_backend.errors import LaunchError
from rannc_backend.runtime.processes import space_of_numbers
from rannc_backend.settings import hooks

LOOPBACK = "127.0.0.1"
_NETWORK = "/proc/self/ns/net"
# Which interface gloo and NCCL use; what the user has set stays.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# The same for what MPI libraries listen on: UCX, libfabric, Open MPI. They choose by themselves where there
# are several hosts.
_MPI_VARIABLES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")
# Ranks and ranks on this host, by launcher.
_ONE_HOST = (("PMI_SIZE", "MPI_LOCALNRANKS"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))
_STORE_FILE = "store"
# (interface, address, mask); a plain list because it travels as JSON.
Address = list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks meet.

    Attributes:
        address: of rank 0.
        interface: of this rank, which leads there; "" if unknown.
        is_one_host: all ranks have one network stack.
    """

    address: str
    interface: str
    is_one_host: bool


def network() -> str:
    """The same for processes that share a network stack."""
    space = space_of_numbers()
    try:
        return f"{space.split()[0]} {os.stat(_NETWORK).st_ino}"
    except (OSError, IndexError):
        return socket.gethostname()


def own_addresses() -> list[Address]:
    """Addresses at which this host can be reached: of interfaces that are up, neither the loopback's nor
    those of one cable only.
    """
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses if name in up else ():
            if (
                address.family in (socket.AF_INET, socket.AF_INET6)
                and address.netmask
                and _is_reachable(address.address)
            ):
                found.append([name, address.address, address.netmask])
    return found


def addresses_of_name(name: str) -> list[str]:
    """What this host takes a name for; empty if for nothing."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return []


def find_meeting(
    *,
    rank: int,
    networks: Sequence[str],
    addresses: Sequence[Sequence[Address]],
    known: Sequence[Sequence[str]],
) -> Meeting:
    """Where the ranks meet; the same address on every rank.

    Args:
        networks: of every rank, see `network`.
        addresses: of every rank, see `own_addresses`; rank 0's begin with those of the interface that its
        user has chosen.
        known: for every rank, what it takes the names for that stand for rank 0's host.

    Raises:
        LaunchError: rank 0 has no address that leads to the other hosts.
    """
    if len(set(networks)) == 1:
        return Meeting(address=LOOPBACK, interface=_interface_of(LOOPBACK), is_one_host=True)
    others = [other for other, there in enumerate(networks) if there != networks[0]]
    address = _address_for(
        addresses[0], [known[other] for other in others], [addresses[other] for other in others]
    )
    if networks[rank] == networks[0]:
        interface = next(name for name, own, _ in addresses[0] if own == address)
    else:
        interface = _interface_of(_source_towards(address))
    return Meeting(address=address, interface=interface, is_one_host=False)


def _address_for(
    own: Sequence[Address], known: Sequence[Sequence[str]], others: Sequence[Sequence[Address]]
) -> str:
    """Rank 0's address that every other host knows by name, or can see in a subnet of its own."""
    candidates = [address for _, address, _ in own]
    by_name = [address for address in candidates if all(address in names for names in known)]
    by_subnet = [address for _, address, mask in own if all(_sees(address, mask, there) for there in others)]
    found = next(iter([*by_name, *by_subnet]), None)
    if found is None:
        raise LaunchError(
            f"rank 0's host has the addresses {', '.join(candidates) or 'none'}, and the other hosts know "
            "none of them",
            cure="give rank 0's host a name that all hosts take for one of them (MASTER_ADDR, /etc/hosts), "
            "or name its interface with GLOO_SOCKET_IFNAME.",
        )
    return found


def _sees(address: str, mask: str, others: Sequence[Address]) -> bool:
    return any(
        other_mask == mask and _subnet(other, mask) == _subnet(address, mask)
        for _, other, other_mask in others
    )


def _subnet(address: str, mask: str) -> tuple[int, int]:
    number = ipaddress.ip_address(address)
    return number.version, int(number) & int(ipaddress.ip_address(mask))


def chosen_first(addresses: list[Address], environ: Mapping[str, str]) -> list[Address]:
    """Only the addresses of the interface that the user has named for gloo, if it has any."""
    chosen = [address for address in addresses if address[0] == environ.get(_INTERFACE_VARIABLES[0])]
    return chosen or addresses


def checked_addresses(value: Any) -> list[Address]:
    """Addresses as another rank tells them.

    Raises:
        LaunchError: they are none.
    """
    try:
        for name, address, mask in value:
            _subnet(address, mask)
            if not isinstance(name, str) or not isinstance(address, str) or not isinstance(mask, str):
                raise ValueError(name)
    except (TypeError, ValueError) as error:
        raise LaunchError(
            f"a rank has sent addresses that are none: {str(error)[:100]}", cure=STRANGER_CURE
        ) from None
    return [list(address) for address in value]


_MAX_TOLD_BYTES = 65_536
STRANGER_CURE = "see who else writes into the job's store (MASTER_ADDR, MASTER_PORT); start the job again."


def parsed(data: bytes, key: str) -> Any:
    """A value of a store.

    Raises:
        LaunchError: it is no JSON of a rank.
    """
    try:
        if len(data) > _MAX_TOLD_BYTES:
            raise ValueError(f"{len(data)} bytes")
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LaunchError(
            f"the store's {key!r} is not what a rank would write: {type(error).__name__}", cure=STRANGER_CURE
        ) from None


def checked_texts(value: Any) -> list[str]:
    """A list of texts as another rank tells it.

    Raises:
        LaunchError: it is none.
    """
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise LaunchError(
            f"a rank has sent something other than a list of texts: {str(value)[:100]}", cure=STRANGER_CURE
        )
    return value


def _is_reachable(address: str) -> bool:
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return False  # with a scope
    return not (number.is_loopback or number.is_link_local or number.is_unspecified)


def _source_towards(address: str) -> str:
    """This host's address on the way to another one. Nothing is sent."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def _interface_of(address: str) -> str:
    """Name of the interface with an address; "" if none has it."""
    pairs = (
        (name, found.address) for name, addresses in psutil.net_if_addrs().items() for found in addresses
    )
    return next((name for name, found in pairs if found == address), "")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def use_interface(interface: str, environ: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL listen there, where the user has not chosen."""
    if interface:
        for name in _INTERFACE_VARIABLES:
            if name not in environ:
                hooks.replace_item("interfaces", environ, name, interface)


def keep_mpi_inside(environ: MutableMapping[str, str]) -> None:
    """Before MPI starts: where all ranks are on this host, its library listens on the loopback only, unless
    the user has chosen.
    """
    if any(environ.get(size, "") == environ.get(here) for size, here in _ONE_HOST):
        loopback = _interface_of(LOOPBACK)
        for name in _MPI_VARIABLES if loopback else ():
            if name not in environ:
                hooks.replace_item("interfaces", environ, name, loopback)


def listen_at(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at one address."""
    return socket.create_server((address, port), family=_family(address), backlog=1024)


def store_at(address: str, port: int, *, is_master: bool, size: int, limit: Any) -> Any:
    """A TCPStore: the server at that address alone (port 0: any), or a client of it."""
    arguments: dict[str, Any] = {"timeout": limit, "wait_for_workers": False}
    if not is_master:
        return dist.TCPStore(address, port, size, False, **arguments)
    listening = listen_at(address, port)
    port = listening.getsockname()[1]
    # The store closes it.
    return dist.TCPStore(address, port, size, True, master_listen_fd=listening.detach(), **arguments)


def store_in(folder: str, *, size: int, limit: Any) -> Any:
    """A store in a file of a folder that only this user can enter."""
    store = dist.FileStore(str(Path(folder) / _STORE_FILE), size)
    store.set_timeout(limit)
    return store


def identity_of(folder: str) -> list[int]:
    """What tells a folder from another one of its name on another host or in another container; empty if it
    is not private.
    """
    try:
        status = os.lstat(folder)
    except OSError:
        return []
    if status.st_uid != os.geteuid() or status.st_mode & 0o777 != 0o700:
        return []
    return [status.st_dev, status.st_ino]


def store_of_environment(environ: Mapping[str, str], *, size: int, limit: Any) -> Any | None:
    """Rank 0's store at MASTER_ADDR and MASTER_PORT, listening there alone.

    None where it cannot be made so: the store is torchrun's, or one of the user's in this process;
    MASTER_ADDR is an address of another host (one for several hosts, one that is translated), or a name that
    stands for the loopback here and for something else elsewhere.
    """
    name, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if (
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        or not port.isdecimal()
        or not 0 < int(port) < 2**16
    ):
        return None
    is_one_host = environ.get("LOCAL_WORLD_SIZE", "") == environ.get("WORLD_SIZE")
    for address in addresses_of_name(name):
        if _is_reachable(address) or is_one_host or name in (address, "localhost"):
            with contextlib.suppress(OSError):
                return store_at(address, int(port), is_master=True, size=size, limit=limit)
    return None


def store_of_agent(environ: Mapping[str, str], *, rank: int, size: int, limit: Any) -> Any | None:
    """The store that torchrun has made; None where there is none, as one made here would take the port that
    the job's own needs.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=limit)))
    return store
