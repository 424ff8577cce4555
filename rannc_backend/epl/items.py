"""The items of EPL's documents: what each accepts, and the options of this package that it becomes.

In: the value of an item. Out: options by name. No behaviour lives here: what an item asks for is an option or a
function of this package. docs/epl_parity.md has the documented meaning of each item, and what was decided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

Value = bool | int | float | str | None
_MAX_NUMBER = 2**31 - 1
_SCHEDULES = MappingProxyType(
    {
        "preferbackward": "1f1b",
        "preferforward": "fill_drain",
        # Its order is that of PreferBackward; receives that are posted early hide what its one micro-batch more hides.
        "preferbackwardoptimizer": "1f1b",
    }
)
_RECOMPUTE = MappingProxyType({"": "1", "collection": "marked", "auto": "segments"})
_ZERO = MappingProxyType({"": "0", "v0": "1", "v1": "2"})
_OFFLOAD = MappingProxyType({"": "none", "v0": "parameters"})
_AUTOCAST = MappingProxyType({"": "none", "o1": "float16"})
_REDUCE = MappingProxyType({"mean": "mean", "sum": "sum"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Item(ABC):
    """An item; a type for each kind of value. `options`: names of what it becomes in this package. `becomes`: None where
    other items have a say too, see `Config.options`, or where a function reads it.
    """

    python_type: ClassVar[type]
    default: Value
    options: tuple[str, ...]
    becomes: Callable[[Value], object] | None = None

    @property
    @abstractmethod
    def accepts(self) -> str:
        """In words."""

    @property
    def names(self) -> tuple[str, ...]:
        """The texts that it accepts, as EPL's documents spell them."""
        return ()

    @abstractmethod
    def has(self, value: object) -> bool:
        """Whether a value has the type and range of the item."""

    def read(self, text: str) -> object:
        """The value that a text of the environment says; the text where it says none."""
        if self.default is None and text.lower() in ("", "none"):
            return None
        try:
            value: object = TypeAdapter(self.python_type).validate_python(text, strict=False)
        except ValidationError:
            return text
        return value

    def plain(self, value: Value) -> Value:
        """A value that the item has, in one of its spellings."""
        return value

    def given(self, value: Value) -> dict[str, object]:
        """The options that a value becomes by itself."""
        if value is None or self.becomes is None:
            return {}
        return {self.options[0]: self.becomes(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth(Item):
    """True or False."""

    python_type: ClassVar[type] = bool

    @property
    def accepts(self) -> str:
        """See `Item`."""
        return "True or False"

    def has(self, value: object) -> bool:
        """See `Item`."""
        return isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer(Item):
    """An integer from `least`; None too if that is the default."""

    python_type: ClassVar[type] = int
    least: int = 0

    @property
    def accepts(self) -> str:
        """See `Item`."""
        return f"an integer from {self.least} to {_MAX_NUMBER}" + (" or None" if self.default is None else "")

    def has(self, value: object) -> bool:
        """See `Item`."""
        if value is None:
            return self.default is None
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= _MAX_NUMBER


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Item):
    """A scale of the loss: a number, or "dynamic"."""

    python_type: ClassVar[type] = float

    @property
    def accepts(self) -> str:
        """See `Item`."""
        return '"dynamic" or a number above 0'

    def has(self, value: object) -> bool:
        """See `Item`."""
        if isinstance(value, str):
            return value.strip().lower() == "dynamic"
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MAX_NUMBER


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Item):
    """A text. `choices`: those that it accepts, in lower case (EPL reads texts so), with what they become; None: any.
    `spelled`: as EPL's documents write them.
    """

    python_type: ClassVar[type] = str
    choices: Mapping[str, object] | None = None
    spelled: tuple[str, ...] = ()

    @property
    def accepts(self) -> str:
        """See `Item`."""
        return "a string" if self.choices is None else "one of " + ", ".join(map(repr, self.names))

    @property
    def names(self) -> tuple[str, ...]:
        """See `Item`."""
        return self.spelled or tuple(self.choices or ())

    def has(self, value: object) -> bool:
        """See `Item`."""
        return isinstance(value, str) and (self.choices is None or value.strip().lower() in self.choices)

    def plain(self, value: Value) -> Value:
        """See `Item`."""
        return value.strip().lower() if isinstance(value, str) and self.choices is not None else value

    def given(self, value: Value) -> dict[str, object]:
        """See `Item`."""
        if self.choices is None or self.becomes is not None:
            return Item.given(self, value)
        return {self.options[0]: self.choices[str(self.plain(value))]}


def _same(value: Value) -> object:
    return value


def _count(default: Value, option: str, least: int = 1) -> Item:
    return Integer(default=default, options=(option,), least=least, becomes=_same)


def _truth(*options: str, becomes: Callable[[Value], object] | None = None) -> Item:
    return Truth(default=False, options=options, becomes=becomes)


def _text(default: str, option: str, choices: Mapping[str, object], spelled: tuple[str, ...] = ()) -> Item:
    return Text(default=default, options=(option,), choices=choices, spelled=spelled)


ITEMS: Mapping[str, Item] = MappingProxyType(
    {
        "pipeline.num_micro_batch": _count(1, "pipeline_num"),
        "pipeline.num_stages": _count(None, "partition_num"),
        "pipeline.strategy": _text(
            "PreferBackward",
            "schedule",
            _SCHEDULES,
            ("PreferBackward", "PreferForward", "PreferBackwardOptimizer"),
        ),
        "gradient_checkpoint.type": _text("", "recompute", _RECOMPUTE),
        "gradient_checkpoint.end_taskgraph": _count(-1, "recompute_last_stage", least=-1),
        "gradient_checkpoint.check_gradients": _truth("check_gradients", becomes=_same),
        "zero.level": _text("", "zero_stage", _ZERO),
        "offload.level": _text("", "offload", _OFFLOAD),
        "amp.level": _text("", "autocast", _AUTOCAST, ("", "O1")),
        "amp.debug_log": _truth("log_casts", becomes=_same),
        "amp.loss_scale": Scale(default="dynamic", options=()),
        "optimizer.num_apply_group": _count(1, "num_apply_group"),
        "cluster.device_place_prefer_intra_node": Truth(
            default=True,
            options=("placement",),
            becomes=lambda value: "replica_major" if value else "stage_major",
        ),
        "cluster.run_visible_devices": Text(default="", options=("visible_devices",), becomes=_same),
        "cluster.colocate_split_and_replicate": _truth("stages_per_rank", "partition_num"),
        "communication.num_communicators": _count(2, "num_communicators"),
        "communication.sparse_as_dense": _truth(
            "sparse_gradients", becomes=lambda value: "dense" if value else "sparse"
        ),
        "communication.max_splits": _count(5, "max_buckets"),
        "communication.fp16": _truth("gradient_dtype", "gradient_scale"),
        "communication.fp16_scale": Integer(default=128, options=("gradient_scale",), least=-_MAX_NUMBER),
        "communication.clip_after_allreduce": _truth(),
        "communication.gradients_reduce_method": _text("mean", "gradients_reduce_method", _REDUCE),
        "io.slicing": _truth(),
        "io.unbalanced_io_slicing": _truth(),
        "io.drop_last_files": _truth(),
        "auto.auto_parallel": _truth("partition_num", "pipeline_num"),
    }
)
CATEGORIES = tuple(dict.fromkeys(name.partition(".")[0] for name in ITEMS))
