"""Errors about optimizers and gradients beside a compiled model."""

from __future__ import annotations

from collections.abc import Sequence

from rannc_backend.errors.base import RanncError, UserInputError, shorten


class UnsynchronizedGradientError(UserInputError):
    """An optimizer is about to update parameters whose gradients nobody has summed over ranks, beside those
    of a compiled model; or ``has_updated`` them, and they are not the same on all ranks any more.
    """

    def __init__(self, optimizer: str, parameters: Sequence[str], *, has_updated: bool = False) -> None:
        which = f"{len(parameters)} parameter(s) outside of the compiled model ({shorten(parameters)})"
        super().__init__(
            f"{optimizer} has updated {which} by other gradients on each rank: they were the same on all ranks, and no longer are"
            if has_updated
            else f"{optimizer} was about to update {which}, whose gradients are of this rank's rows alone: ranks would go "
            "different ways",
            cure="compile the model that holds all of them; or call rannc_backend.synchronize(module) once "
            "on all ranks for the module outside, whose gradients are then averaged over ranks as DDP does.",
        )


class PlainGradientError(UserInputError):
    """Parameters that several ranks hold have gradients of computations outside of the compiled model that
    are not the same on all.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(
            problem,
            cure="train by calling the compiled model, not the plain one or a part of it; what is computed "
            "from parameters alone (a penalty) must be computed alike on all ranks.",
        )


class CoupledOptimizerError(UserInputError):
    """An optimizer updates a parameter from others too, and some of these are on other ranks."""

    def __init__(self, optimizer: str, *, known: bool) -> None:
        how = (
            "updates parameters from each other"
            if known
            else "may update parameters from each other (it could not be tried on copies)"
        )
        option = "" if known else "If it does not: options={'check_optimizers': False}. "
        super().__init__(
            f"{optimizer} {how}, and each rank updates a part of them only",
            cure=f"{option}Use one that updates each parameter from that parameter alone (SGD, Adam, AdamW, "
            "Adafactor, Muon, Lion), with rannc_backend.clip_grad_norm_ for the norm of all gradients; or "
            "plan one stage (RANNC_PARTITION_NUM=1) with zero_stage=0.",
        )


class GradientsDifferError(RanncError):
    """A backward that computes values again has other gradients than one that keeps them (option check_gradients)."""

    def __init__(
        self,
        what: str,
        *,
        rank: int,
        stage: int,
        micro_batch: int,
        difference: float,
        tolerance: float,
    ) -> None:
        self.rank, self.stage, self.micro_batch, self.difference = rank, stage, micro_batch, difference
        super().__init__(
            f"the gradient of {what} differs by {difference:.3g} of its norm between a backward with recompute and one "
            f"without (tolerance {tolerance:.1g}): rank {rank}, stage {stage}, micro-batch {micro_batch}",
            cure="look for an operation between the stage's inputs and that value which gives other values when it runs "
            "again (a custom operator with a state or random numbers of its own); keep its result with recompute='1', or "
            "train without check_gradients if the difference is known and small.",
        )


class GroupedStepError(UserInputError):
    """An optimizer cannot step its parameters in parts, as `num_apply_group` asks."""

    def __init__(self, optimizer: str, why: str) -> None:
        super().__init__(
            f"{optimizer} was to step its parameters in parts (num_apply_group): {why}",
            cure="set num_apply_group to 1; or use an optimizer that updates each parameter from that parameter alone "
            "(SGD, Adam, AdamW, Adafactor, Muon), and call its step without arguments.",
        )


def _first_of(names: Sequence[str]) -> str:
    """The first of some parameters, and how many there are besides."""
    which = repr(names[0]) if names else "a parameter"
    return f"{which} and {len(names) - 1} more" if len(names) > 1 else which


class StaleParameterError(UserInputError):
    """Some owners of a parameter have changed it outside of an optimizer's step, and others have not: under ZeRO its
    gradient is on one of them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"{_first_of(names)} was changed on some of the ranks that hold it, outside of a step of a torch.optim "
            "optimizer: with zero_stage, the gradient of a parameter is on the rank that updates it alone",
            cure="update parameters by a torch.optim.Optimizer (a subclass of your own, too), change values alike on "
            "all ranks, or set zero_stage to 0.",
        )


class ReplicasDifferError(UserInputError):
    """Replicas of a stage hold different values of a parameter: each updates it for itself, alike."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"replicas hold different values of {_first_of(names)}: they were changed, or their gradients, by other numbers on "
            "each rank",
            cure="change parameters and gradients alike on all ranks: call torch.manual_seed with the same number before "
            "random changes (noise, a layer that is initialized again), or change them on any rank and call "
            "model.load_state_dict(model.state_dict()) on all, which gives all what rank 0 has.",
        )


class ShardingOptimizerError(UserInputError):
    """An optimizer divides its state, or averages parameters, over ranks by itself."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(
            f"{optimizer} divides work or averages parameters over ranks, which have different parameters "
            "under this backend",
            cure="use the optimizer that it wraps: each rank keeps the state of its own stages only.",
        )


class PartialStateError(UserInputError):
    """The state of an optimizer lacks parameters that the optimizer has state for, or that other ranks
    own.
    """

    default_cure = "save and load optimizer states on all ranks, or use save_checkpoint and load_checkpoint."


class VerificationError(RanncError):
    """`rannc verify` could not compare a script: it failed, did not end, or did nothing that could be
    compared.
    """

    def __init__(self, problem: str, *, cure: str, place: str = "", output: str = "") -> None:
        self.output = output
        super().__init__(problem, cure=cure, location=place)
