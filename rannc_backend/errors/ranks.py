"""Errors of ranks with each other: the start, messages, and ranks that do different things."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from rannc_backend.errors.base import (
    RanncError,
    UserInputError,
    class_named,
    clip,
    parts_in,
    ranks_text,
    restore,
)


class RanksDifferError(UserInputError):
    """Ranks called with different models or different options."""

    def __init__(self, what: str, *, value_by_rank: Sequence[str], cure: str = "") -> None:
        groups: dict[str, list[int]] = {}
        for rank, value in enumerate(value_by_rank):
            groups.setdefault(value, []).append(rank)
        ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
        parts = [f"{ranks_text(ranks)}: {clip(value)}" for value, ranks in ordered]
        self.odd_ranks = tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks))
        super().__init__(
            f"ranks have different {what} ({'; '.join(parts)})",
            cure=cure
            or f"make {ranks_text(self.odd_ranks)} build the same model with the same options, versions and "
            "environment as the others.",
        )


class CallsDifferError(RanksDifferError):
    """Ranks are in different calls, each of which all ranks must make together."""

    def __init__(self, *, value_by_rank: Sequence[str]) -> None:
        super().__init__(
            "calls at the same time",
            value_by_rank=value_by_rank,
            cure="make these calls on all ranks, in the same order: the compiled model, backward, state_dict "
            "and load_state_dict of the model and of its optimizer, clipping of gradients, checkpoints. What "
            "only one rank is to do with a result (`if rank == 0:`) comes after the call.",
        )


class OutOfStepError(RanksDifferError):
    """Ranks have made different numbers of calls, backwards or optimizer steps; or ``settings`` of an optimizer differ."""

    def __init__(self, *, value_by_rank: Sequence[str], settings: bool = False) -> None:
        super().__init__(
            "settings of an optimizer" if settings else "numbers of steps behind them",
            value_by_rank=value_by_rank,
            cure="give all ranks the same settings. A schedule that follows a loss or a metric has to get the same number on "
            "all of them: the loss that the model computes, or torch.distributed.all_reduce of the metric."
            if settings
            else "let every rank make the same calls, backwards and optimizer steps. A rank that skips a bad "
            "batch, or catches an exception and goes on, has to agree with the others on that "
            "(torch.distributed.all_reduce of a flag).",
        )


class LaunchError(RanncError):
    """The ranks could not find each other, or the launcher's environment contradicts itself."""

    default_cure = "run `rannc doctor` on the hosts of the job, and start the script with mpirun or torchrun as README.md shows."


class CommunicationError(RanncError):
    """A message or a collective did not arrive in time, or its connection broke."""

    default_cure = (
        "see what the other rank printed before, and whether it still runs; run `rannc doctor --launch ...` "
        "over the same hosts; if it only needs longer, set step_timeout_seconds (RANNC_STEP_TIMEOUT_SECONDS) "
        "to more."
    )

    def __init__(
        self,
        problem: str,
        *,
        rank: int,
        peer: int | None = None,
        stage: int | None = None,
        micro_batch: int | None = None,
        limit_seconds: float | None = None,
        cure: str = "",
    ) -> None:
        self.rank = rank
        self.peer = peer
        self.stage = stage
        self.micro_batch = micro_batch
        place = _place(rank, stage, micro_batch)
        with_peer = "" if peer is None else f", with rank {peer}"
        limit = "" if limit_seconds is None else f" (limit {limit_seconds:g} s)"
        super().__init__(f"{problem}{limit}", cure=cure, location=f"{place}{with_peer}")


class RankFailedError(RanncError):
    """Another rank has ended, and so this one ends too."""

    default_cure = "mend what that rank says of itself; its last lines are above."

    def __init__(
        self, *, rank: int, cause: str, stage: int | None = None, micro_batch: int | None = None
    ) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} failed: {cause}", location=_place(rank, stage, micro_batch))


def failure_of_rank(rank: int, class_name: str, text: str) -> RanncError:
    """The error that this rank raises because a call failed on another one: of the same class, where that is
    ours or Python's own.

    Its ``failed_rank`` tells the rank.
    """
    named = (
        f"rank {rank} failed in this call: {text if text.startswith(class_name) else f'{class_name}: {text}'}"
    )
    parts = parts_in(named)
    members = {**parts, "place": parts["place"] or f"rank {rank}", "failed_rank": rank}
    if (own := class_named(class_name)) is not None:
        return restore(own, named, members)
    cls = getattr(builtins, class_name, None)
    if isinstance(cls, type) and issubclass(cls, Exception):
        try:
            both = type(
                class_name,
                (RankFailedError, cls),
                {"__module__": "builtins", "__str__": RuntimeError.__str__},
            )
            return restore(both, named, members)
        except TypeError:
            pass  # Python cannot combine the two
    return restore(RankFailedError, named, members)


def _place(rank: int, stage: int | None, micro_batch: int | None) -> str:
    parts = [f"rank {rank}"]
    if stage is not None:
        parts.append(f"stage {stage}")
    if micro_batch is not None:
        parts.append(f"micro-batch {micro_batch}")
    return ", ".join(parts)
