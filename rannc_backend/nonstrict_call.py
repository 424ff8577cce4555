"""Calls of one compiled module whose forward is captured without Dynamo.

In: a module, and how a call of it becomes a capture and a callable over the capture's tensors. Out: what
serves the calls of the module, once Dynamo has refused it or the user has chosen so.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from rannc_backend.capture.dynamo import marked_sizes
from rannc_backend.capture.first_trace import SeenSizes
from rannc_backend.capture.nonstrict.arguments import BatchDims, Call, Changing, Ranks, call_of
from rannc_backend.capture.nonstrict.captures import Capture, find_capture
from rannc_backend.capture.nonstrict.kept_modules import WHOLE_MODEL
from rannc_backend.capture.nonstrict.swapping import hide
from rannc_backend.capture.nonstrict.trace import Recorded
from rannc_backend.errors import (
    BatchSizeTestError,
    InternalError,
    ModelDevicesError,
    ModelError,
    RanncError,
    extended,
)
from rannc_backend.runtime.absent_tensors import is_absent, strides_of
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.job import bootstrap
from rannc_backend.settings.options import Config

logger = logging.getLogger(__name__)

Run = Callable[..., Sequence[Any]]
Way = Literal["auto", "dynamo", "nonstrict"]


@dataclass(slots=True, kw_only=True)
class NonstrictCalls:
    """See the module docstring; a `compiled_call.SecondWay`. ``way`` gives option ``capture``; ``dynamic``: whether
    sizes that change become lengths; ``leads``: whether this rank tells the user.
    """

    module: weakref.ref[nn.Module]
    batch_dims: Callable[[], BatchDims]
    way: Callable[[], Way]
    dynamic: bool
    prepare: Callable[[nn.Module, Call, Changing], tuple[Capture, Run]]
    ranks: Callable[[], Ranks]
    leads: Callable[[], bool]
    _refused: ModelError | None = None  # by Dynamo
    _asked: Way | None = None
    _runs: list[tuple[Capture, Run]] = field(default_factory=list)
    _seen: SeenSizes = field(default_factory=SeenSizes)

    def is_chosen(self) -> bool:
        """See `SecondWay`."""
        if self._asked is None:
            try:
                self._asked = self.way()
            except RanncError:
                self._asked = "dynamo"  # an option is wrong: the call says so where all options are read
        return self._asked == "nonstrict" or self._refused is not None

    def choose(self, error: ModelError) -> bool:
        """See `SecondWay`. Parameters on several devices are refused whatever captures them, and an error of
        this package is no reason.
        """
        if self._asked == "dynamo" or isinstance(error, ModelDevicesError | InternalError):
            return False
        self._refused = error
        return True

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call.

        Raises:
            ModelError: Dynamo's, where this way does not take the model either, with this way's as its cause.
        """
        module = self.module()
        assert module is not None, "the model is gone"
        first = not self._runs
        try:
            call = call_of(module, args, kwargs, self.batch_dims())
            capture = self._known(call, [capture for capture, _ in self._runs])
            capture = capture or self._captured(module, call)
        except ModelError as error:
            if self._refused is None or not first:
                raise
            refused, self._refused = self._refused, None
            cause = str(error.__cause__ or "")
            if cause and cause in refused.problem:
                raise refused from error  # both ways meet the same, an argument that does not fit
            where = f" at {error.location}" if error.location else ""
            more = f"nor can it be captured by one run of its forward: {error.problem}{where}"
            # Dynamo's is about what this way takes.
            raise extended(refused, more, cure=error.cure) from error
        if first and self.leads():
            self._say(module, capture.recorded)
        try:
            return self._served(capture, call)
        except BatchSizeTestError as error:
            # On all ranks: they have agreed on the batch. Another path, which may have been captured before.
            others = [known for known, _ in self._runs if known.recorded.takes(error.num_rows)]
            return self._served(self._known(call, others) or self._captured(module, call), call)

    def _known(self, call: Call, captures: Sequence[Capture]) -> Capture | None:
        return find_capture(captures, call, self.ranks()) if captures else None

    def _captured(self, module: nn.Module, call: Call) -> Capture:
        if self._runs:
            call = self._runs[-1][0].seen(call)
        changed = self._seen.changed(module, dict(enumerate(call.tensors))) if self.dynamic else {}
        changing = {(index, dim) for index, dims in changed.items() for dim in dims}
        if self.dynamic:
            marked = ((index, marked_sizes(tensor)) for index, tensor in enumerate(call.given))
            places = {(index, call.dim_of_tensor(index, dim)) for index, dims in marked for dim in dims}
            changing |= {place for place in places if place[1] > 0}
        self._runs.append(self.prepare(module, call, changing))
        if changing and not self._runs[-1][0].recorded.lengths.hints:
            self._seen.give_up(weakref.ref(module))
        return self._runs[-1][0]

    def _served(self, capture: Capture, call: Call) -> Any:
        run = next(run for known, run in self._runs if known is capture)
        if not bootstrap.is_alone():
            hide(capture.recorded.kept_attributes)  # ranks that run these modules set them
        return capture.recorded.result(run(*capture.tensors(call)), call)

    def _say(self, module: nn.Module, recorded: Recorded) -> None:
        reason = (
            "as option capture says"
            if self._refused is None
            else f"Dynamo refuses it: {self._refused.problem}"
        )
        logger.info(
            "%s is captured by one run of its forward on fakes (%s); it is captured again when attributes, "
            "globals or closures that its code names change, which files, C extensions and objects deep in "
            "others are not; options={'capture': 'dynamo'} refuses this",
            type(module).__name__,
            reason,
        )
        if recorded.unchecked:
            logger.warning(
                "the graph makes no checks of values that only raise (%s): such a batch is computed as if it "
                "had passed",
                "; ".join(recorded.unchecked),
            )
        if recorded.kept_modules:
            logger.info(
                "%s run as written, and once more for their gradients, since their code decides by values or by the "
                "batch size, or has a backward of its own that no graph can hold; steps have one micro-batch, unless "
                "rannc_backend.row_wise declares that their class computes each row by itself",
                ", ".join(f"{path} ({name})" for path, name in recorded.kept_modules.items()),
            )
        if WHOLE_MODEL in recorded.kept_modules:
            logger.warning(
                "all of the model is one operator, which one rank computes (%s): to have stages, move the lines that use "
                "values or the batch size as numbers into a submodule, or compute with all rows at once",
                recorded.why_kept,
            )
        if recorded.decisions:
            logger.info(
                "its path is chosen by values (%s): every call reads them, for the batch of all ranks, and "
                "another answer captures another path",
                "; ".join(dict.fromkeys(decision.location for decision in recorded.decisions)),
            )


def ranks_of_job(config: Config, device: torch.device | None = None) -> Ranks:
    """What a capture without Dynamo asks of the job. ``device``: as of `Ranks`."""

    def exchange(payload: Any) -> list[Any]:
        world = bootstrap.start(bootstrap.options_of(config))
        answers = agree(
            world,
            "a value that the model's code reads",
            payload,
            limit_seconds=config.compile_timeout_seconds,
        )
        if config.gather_inputs:
            return answers
        return [next((answer for answer in answers if answer is not None), None)]

    return Ranks(
        strides_of=strides_of,
        global_rows=lambda local_rows: sum(exchange(local_rows)),
        exchange=exchange,
        is_absent=is_absent,
        device=device,
    )
