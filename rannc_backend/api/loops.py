"""What loops do around a model: the start of the job, ranks with unequal numbers of batches, norms by name.

In: the user's loader or model. Out: the same on all ranks where that is promised. All functions are collective.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from rannc_backend.capture.nonstrict.arguments import BatchDims
from rannc_backend.errors import RanksDifferError, UserInputError
from rannc_backend.runtime.agreement import agree, exchanging, failing_together
from rannc_backend.runtime.gradients.sparse_rows import numbers_of
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import root_of, taken_apart
from rannc_backend.session_registry import REGISTRY

Batch = TypeVar("Batch")

_ENDS = ("empty", "stop")


def init() -> None:
    """Joins the job now. Collective.

    Everything else joins by itself at the first call of a compiled model. Call it where something before that call asks
    torch.distributed for this rank: ``DistributedSampler(dataset)``.

    Raises:
        LaunchError: The launcher's variables contradict themselves, or a rank has no device.
        CommunicationError: Not all ranks have started in time.
    """
    bootstrap.start()


def join(
    loader: Iterable[Batch], *, at_end: Literal["empty", "stop"] = "empty", batch_dim: int = 0
) -> Iterator[Batch]:
    """The batches of a loader, as many on every rank, whatever each rank's loader has. Collective.

    Before each batch the ranks agree whether there is another one. All ranks must leave the loop at the same batch.

    Args:
        loader: Anything that gives batches: tensors in tuples, lists, dictionaries.
        at_end: What a rank gets that has no batch where others still have one: "empty", a batch without rows, in which
            every tensor has none whose size along ``batch_dim`` is that of the first one; "stop": the loop ends on all
            ranks, and batches that others have left are not used.
        batch_dim: The dimension of samples, as option batch_dim has it: that of tensors with fewer dimensions is their
            last one.

    Returns:
        Batches. One without rows takes part in a call of a compiled model as any other. The mean of no rows is NaN, so
        a loss that is computed outside of the model from one must not be read.

    Raises:
        UserInputError: ``at_end`` is something else.
        RanksDifferError: ``at_end`` differs between ranks.
        RanncError: The loader failed on another rank.
    """
    if at_end not in _ENDS:
        raise UserInputError(f"join(at_end={at_end!r})", cure=f"give one of {', '.join(map(repr, _ENDS))}.")
    world, iterator = bootstrap.start(), iter(loader)
    empty: Any = None
    has_empty = False
    while True:
        with failing_together(world, "join"):
            found: list[Any] = [batch for batch in (next(iterator, _End),) if batch is not _End]
            flags = agree(world, "the next batch of join", [len(found), has_empty, at_end])
            if len({each[2] for each in flags}) > 1:
                raise RanksDifferError("at_end of join", value_by_rank=[each[2] for each in flags])
            having = [rank for rank, each in enumerate(flags) if each[0]]
            if not having or (at_end == "stop" and len(having) < world.size):
                return
            if found and not has_empty:
                empty, has_empty = _without_rows(found[0], batch_dim), True
            if any(not (has or knows) for has, knows, _ in flags):
                # A rank that never had a batch learns from another what they look like.
                own = _as_text(empty) if world.rank == having[0] else ""
                texts = agree(world, "the form of a batch of join", own)
                if not has_empty:
                    empty, has_empty = _of_text(texts[having[0]]), True
        yield found[0] if found else empty


class _End:
    """No batch."""


def _without_rows(batch: Any, batch_dim: int) -> Any:
    leaves, put_together = taken_apart(batch)
    dims = {
        index: BatchDims(otherwise=batch_dim).of("", leaf)
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    }
    sizes = {index: leaves[index].shape[dim] for index, dim in dims.items()}
    if not sizes:
        raise UserInputError(
            "join was given a batch without a tensor that has rows",
            cure="join a loader of tensors, in tuples, lists or dictionaries.",
        )
    return put_together(
        [
            leaf.narrow(dims[index], 0, 0).clone() if sizes.get(index) == next(iter(sizes.values())) else leaf
            for index, leaf in enumerate(leaves)
        ]
    )


def _as_text(empty: Any) -> str:
    """A batch without rows, for ranks that never had one. It is read without running code, so not every object fits."""
    buffer = io.BytesIO()
    try:
        torch.save(empty, buffer)
        content = buffer.getvalue()
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # noqa: BLE001 - whatever an object makes torch.save or torch.load raise
        raise UserInputError(
            f"a rank has no batch at all, and a batch of another rank, a {type(empty).__name__}, cannot be sent to it "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__})",
            cure="give batches of tensors in tuples, lists or dictionaries, or give each rank one batch at least.",
        ) from None
    return base64.b64encode(content).decode()


def _of_text(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


def named_gradient_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, float]:
    """The norm of each parameter's gradient, by the parameter's name, the same on all ranks. Collective.

    Args:
        model: The model, compiled or not.
        norm_type: Order of the norm; ``inf`` for the largest absolute value.

    Returns:
        Norms in the order of ``model.named_parameters()``; parameters without a gradient are left out.

    Raises:
        UserInputError: The all-reduce of gradients is still deferred.
    """
    root, session = root_of(model), REGISTRY.of(model)
    table = None if session is None else session.table
    if table is not None:
        table.require_reduced_gradients("norms of gradients were asked for")
    names = [name for name, _ in root.named_parameters()]
    # By parameter: whether there is a gradient, and its norm.
    values = torch.zeros(len(names), 2, dtype=torch.float64)
    for index, parameter in enumerate(root.parameters()):
        counts = table is None or table.answers_for(parameter)
        if counts and parameter.grad is not None:
            norm = torch.linalg.vector_norm(numbers_of(parameter.grad), norm_type)
            values[index] = torch.tensor([1.0, float(norm)], dtype=torch.float64)
    if table is not None and table.world.size > 1:
        world = table.world
        agree(world, "named_gradient_norms", [norm_type, len(names)])
        values = values.to(world.device)
        with exchanging(world):
            world.transport.allreduce(values, table.everyone).wait()
        values = values.cpu()
    return {name: float(norm) for name, (has, norm) in zip(names, values, strict=True) if has}
