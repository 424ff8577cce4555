"""What options are made of: names of schedules, how much of the activations is kept, names and numbers as text.

In: text of an option. Out: the name or number that the package works with.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

# All schedules: the name, and the module with the description of it (see schedule/description.py), or the name of that
# there. Where two
# are equally fast, the first of them is preferred.
SCHEDULES: Mapping[str, str] = MappingProxyType(
    {
        "1f1b": "rannc_backend.schedule.one_f_one_b",
        "fill_drain": "rannc_backend.schedule.fill_drain",
        "zb_h1": "rannc_backend.schedule.one_f_one_b:ZB_H1",
        "list_scheduled": "rannc_backend.schedule.list_scheduled",
        "interleaved": "rannc_backend.schedule.several_stages:INTERLEAVED",
        "zb_v": "rannc_backend.schedule.several_stages:ZB_V",
        "v_half": "rannc_backend.schedule.several_stages:V_HALF",
    }
)
SCHEDULE_ALIASES: Mapping[str, str] = MappingProxyType({"gpipe": "fill_drain"})

#: The activation budget of a stage that keeps what goes from one segment to the next, and computes one segment at a
#: time again. Not a share of anything: less than any budget that is, more than keeping nothing.
SEGMENTS_BUDGET = 0.001
SEGMENTS = "segments"  # that budget, as option recompute says it
MARKED = "marked"  # that budget with one segment, of which the tensors are kept that the model has marked

# Of a rank alone: a path on a disk of its host, or what its own log says. Nothing that ranks do together
# depends on it.
OWN: JsonDict = {"own": True}
OWN_PATH: JsonDict = {"accepts": "a path, at least 1 character", **OWN}

NAME_PATTERN = r"[^\s,=]+"
NAMES_PATTERN = rf"^({NAME_PATTERN}(,{NAME_PATTERN})*)?$"


class Options(BaseModel):
    """Options by name: frozen, of the types that are written, none that is not defined."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )


def pairs_as_text(value: object) -> object:
    """ "name=item,name=item" of a dict; anything else as it is."""
    return ",".join(f"{name}={item}" for name, item in value.items()) if isinstance(value, Mapping) else value


def check_schedule_name(name: str) -> str:
    """The name, if there is such a schedule. As pydantic says it of a Literal if there is none."""
    if name not in SCHEDULES:
        *others, last = map(repr, SCHEDULES)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
    return name


def activation_budget(recompute: str) -> float | None:
    """The activation budget that option recompute asks for; None for "auto"."""
    if recompute == "auto":
        return None
    return SEGMENTS_BUDGET if recompute in (SEGMENTS, MARKED) else float(recompute)


def names_as_text(value: object) -> object:
    """A list of names as the text that an option is, with commas between; anything else as it is."""
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return ",".join(value) if is_list else value  # type: ignore[arg-type]


def names_in(text: str) -> tuple[str, ...]:
    """The names of such a text, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def number_or_truth(text: str) -> float:
    """The number or truth value that a text says; a whole number is an integer."""
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdigit() else float(text)
