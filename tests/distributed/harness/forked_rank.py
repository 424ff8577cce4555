"""A rank that mpirun starts, run in a copy of a process that has imported everything: `python -I -S
forked_rank.py SOCKETS SCRIPT [...]`.

In: sockets of templates (template.py), separated by commas; the script and its arguments. Out: the script's
exit code or the signal that ended it. Importing torch, Dynamo and transformers takes seconds per rank; here
that is done once per template. What the launcher gave this process goes along: environment, arguments,
working directory, standard streams and the descriptor of MPI's process manager.

Standard library only, and little of it: a rank should start at once.
"""

import json
import os
import signal
import socket
import sys

_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
# MPICH talks to its process manager through a descriptor that it inherits.
DESCRIPTOR_VARIABLE = "PMI_FD"
_NUMBER_BYTES = 8


def rank_of_environment() -> int:
    """This process's rank as the launcher gave it; 0 without a launcher."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)


def send_number(connection: socket.socket, number: int) -> None:
    """What `receive_number` reads."""
    connection.sendall(number.to_bytes(_NUMBER_BYTES, "big"))


def receive_number(connection: socket.socket) -> int | None:
    """A number; None when the other side has closed the connection."""
    parts = connection.recv(_NUMBER_BYTES, socket.MSG_WAITALL)
    return int.from_bytes(parts, "big") if len(parts) == _NUMBER_BYTES else None


def send_job(connection: socket.socket, arguments: list[str]) -> None:
    """What template.py reads."""
    descriptors = [
        0,
        1,
        2,
        *([int(os.environ[DESCRIPTOR_VARIABLE])] if DESCRIPTOR_VARIABLE in os.environ else []),
    ]
    text = json.dumps(
        {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    ).encode()
    socket.send_fds(connection, [len(text).to_bytes(_NUMBER_BYTES, "big")], descriptors)
    connection.sendall(text)


def receive_job(connection: socket.socket) -> tuple[dict, list[int]]:
    """What `send_job` sent: its members, and the descriptors as they are called here."""
    begin, descriptors, *_ = socket.recv_fds(connection, _NUMBER_BYTES, 4)
    return json.loads(connection.recv(int.from_bytes(begin, "big"), socket.MSG_WAITALL)), descriptors


def main() -> None:
    """Hand the job over, and end as it ends."""
    rank = rank_of_environment()
    sockets = sys.argv[1].split(",")
    with socket.socket(socket.AF_UNIX) as connection:
        # Ranks of different templates order their sets differently, as separate processes do.
        connection.connect(sockets[rank % len(sockets)])
        send_job(connection, sys.argv[2:])
        child = receive_number(connection)
        if child is None:
            sys.exit("the template of this rank has ended")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(child, number))
        status = receive_number(connection)
    # Without a status the template has been ended, and its children with it.
    number = signal.SIGKILL if status is None else os.WTERMSIG(status)
    if number:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
