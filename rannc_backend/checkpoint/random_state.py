"""States of a rank's random generators: torch on the CPU and on this rank's device, Python's `random`,
NumPy's.

In: the rank's device. Out: plain values for a checkpoint; and back into the generators.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rannc_backend.checkpoint.plain_values import decode, encode
from rannc_backend.errors import CheckpointFileError


def capture(device: torch.device) -> dict[str, Any]:
    """The generators' states, JSON-able."""
    states = {
        "torch": _text_of(torch.get_rng_state()),
        "python": encode(random.getstate(), "the state of random"),
    }
    if device.type == "cuda":
        states["cuda"] = _text_of(torch.cuda.get_rng_state(device))
    if numpy := sys.modules.get("numpy"):
        name, key, *rest = numpy.random.get_state()
        states["numpy"] = encode([name, [int(number) for number in key], *rest], "the state of numpy.random")
    return states


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators back; those that were not saved stay as they are.

    Raises:
        CheckpointFileError: a state is not one of its generator's.
    """
    setters: dict[str, Callable[[Any], None]] = {
        "torch": lambda text: torch.set_rng_state(_bytes_of(text)),
        "python": lambda state: random.setstate(decode(state, "the state of random")),
    }
    if device.type == "cuda":
        setters["cuda"] = lambda text: torch.cuda.set_rng_state(_bytes_of(text), device)
    if numpy := sys.modules.get("numpy"):
        setters["numpy"] = lambda state: numpy.random.set_state(
            tuple(decode(state, "the state of numpy.random"))
        )
    for name, put in setters.items():
        if name in states:
            try:
                put(states[name])
            except (ValueError, TypeError, RuntimeError, OverflowError, IndexError) as error:
                if isinstance(error, CheckpointFileError):
                    raise
                raise CheckpointFileError(
                    f"the checkpoint's state of the random generator {name!r} is none: {error}",
                    cure="load with random_state=False.",
                ) from None


def _text_of(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode("ascii")


def _bytes_of(text: Any) -> torch.Tensor:
    if not isinstance(text, str):
        raise TypeError(f"a text was expected, not {type(text).__name__}")
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
