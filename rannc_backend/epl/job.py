"""What a script calls beside `Config`: `init`, and what stands in for things that EPL did within its session.

In: a configuration. Out: options of all models that are compiled from then on; the scaler and the files that the
configuration asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from rannc_backend.api.data_slices import slice_files as slice_over_ranks
from rannc_backend.epl.config import Config
from rannc_backend.errors import UserInputError
from rannc_backend.runtime.job import bootstrap
from rannc_backend.session_registry import REGISTRY

File = TypeVar("File")

# Of EPL's dynamic scale: its first value, and after how many steps without an infinity it doubles.
_FIRST_SCALE = 2.0**15
_STEPS_TO_GROWTH = 2000


def init(config: Config | None = None) -> Config:
    """Takes a configuration for every model that is compiled from now on, in place of that of an earlier call.

    Options that ``torch.compile(..., options={...})`` is given count over it; models that are compiled already keep theirs.

    Args:
        config: None: what the environment has (EPL_<CATEGORY>_<ITEM>), and nothing else.

    Returns:
        The configuration.

    Raises:
        UserInputError: ``config`` is no `Config`.
        OptionValueError: cluster.run_visible_devices is given, and CUDA has started with other devices.
    """
    if config is not None and not isinstance(config, Config):
        raise UserInputError(
            f"epl.init was given a {type(config).__name__}",
            cure='give epl.Config({"pipeline.num_micro_batch": 4}).',
        )
    config = Config() if config is None else config
    bootstrap.show_devices(str(config.options().get("visible_devices", "")))
    REGISTRY.defaults = config
    return config


def scaler(config: Config | None = None) -> torch.amp.GradScaler:
    """The scaler of the loss for amp.level and amp.loss_scale, which the script calls as torch.amp.GradScaler.

    Write ``scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()``. An infinity in any rank's gradients
    makes all ranks skip the step. Without amp.level it does nothing. Collective where it is the first call in a process,
    which joins the job.

    Args:
        config: None: that of `init`.
    """
    config = _current(config)
    device_type, enabled = bootstrap.start().device.type, config["amp.level"] == "o1"
    scale = config["amp.loss_scale"]
    if isinstance(scale, str):
        return torch.amp.GradScaler(
            device_type, init_scale=_FIRST_SCALE, growth_interval=_STEPS_TO_GROWTH, enabled=enabled
        )
    assert scale is not None, "an item without None"
    return FixedScaler(device_type, init_scale=float(scale), enabled=enabled)


class FixedScaler(torch.amp.GradScaler):
    """A scaler whose scale stays; steps with an infinity are skipped."""

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Get ready for the next step."""
        super().update(self.get_scale() if new_scale is None else new_scale)


def slice_files(files: Sequence[File], config: Config | None = None) -> list[File]:
    """The files that this rank reads: all without io.slicing, else its part.

    See `rannc_backend.slice_files`. Collective where it is the first call in a process, which joins the job.

    Args:
        files: the same on all ranks, in the same order.
        config: None: that of `init`.

    Raises:
        UserInputError: the files do not go round, and neither io.unbalanced_io_slicing nor io.drop_last_files is True.
    """
    config = _current(config)
    if not config["io.slicing"]:
        return list(files)
    return slice_over_ranks(
        files, uneven=bool(config["io.unbalanced_io_slicing"]), drop_last=bool(config["io.drop_last_files"])
    )


def _current(config: Config | None) -> Config:
    if config is not None:
        return config
    return REGISTRY.defaults if isinstance(REGISTRY.defaults, Config) else Config()
