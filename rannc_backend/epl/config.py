"""`Config`: a configuration in EPL's words, as options of this package.

In: a dict and the variables EPL_<CATEGORY>_<ITEM>. Out: `Config.options`, what ``options=`` of torch.compile takes, and
`Config.notices`, what differs. The dict overrides a variable. Terms: an item is *given* where the dict or a variable
has it; what is not given is at EPL's default, and becomes no option.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from rannc_backend.epl.items import CATEGORIES, ITEMS, Value
from rannc_backend.errors import OptionValueError, UnknownOptionError
from rannc_backend.errors.base import nearest
from rannc_backend.settings.sources import check_translated

PREFIX = "EPL_"
_PAGE = "docs/epl_parity.md has every item."
_NO_SCALE = 1.0
_ALMOST = 0.85


class Config:
    """A configuration; it does not change once it is made.

    Give it to ``torch.compile(model, backend="rannc", options=config)``, or to `init`.

    Args:
        param_dict: values by item, as ``{"pipeline.num_micro_batch": 4}``; texts in capitals or not.

    Raises:
        UnknownOptionError: an item that does not exist, in the dict or the environment; says the nearest ones.
        OptionValueError: a value of another type, or one that the item does not accept; items that disagree.
    """

    __slots__ = ("_given",)

    def __init__(self, param_dict: Mapping[str, object] | None = None) -> None:
        if param_dict is not None and not isinstance(param_dict, Mapping):
            raise OptionValueError(
                "param_dict", value=param_dict, source="epl.Config", expected="a dict of values by item"
            )
        given = _from_environment(os.environ)
        for name, value in (param_dict or {}).items():
            known = _known(name)
            given[known] = _checked(known, value, "epl.Config")
        self._given = MappingProxyType(given)
        _check_agreement(given)
        items_of = {option: name for name in given for option in ITEMS[name].options}
        check_translated(self.options(), items_of, given, "epl.Config")

    @property
    def given(self) -> Mapping[str, Value]:
        """The values of the items that are given."""
        return self._given

    def __getitem__(self, name: str) -> Value:
        return self._given.get(_known(name), ITEMS[name].default)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and dict(self._given) == dict(other._given)

    def __hash__(self) -> int:
        return hash(frozenset(self._given.items()))

    def __repr__(self) -> str:
        return f"Config({dict(self._given)!r})"

    def options(self) -> dict[str, object]:
        """What the given items are as options of this package, by name."""
        result: dict[str, object] = {}
        if self._given.get("auto.auto_parallel") is False:
            # Nothing is searched: EPL's defaults count, where nothing else is given.
            result |= {"partition_num": 1, "pipeline_num": 1}
        for name, value in self._given.items():
            result |= ITEMS[name].given(value)
        if self["cluster.colocate_split_and_replicate"]:
            result["stages_per_rank"] = self._given.get("pipeline.num_stages") or 1
            result["partition_num"] = result["stages_per_rank"]
        return result | self._of_wire_format()

    def notices(self) -> list[str]:
        """A line for each given item of which this package does not do what EPL did."""
        lines = []
        if self._given.get("communication.clip_after_allreduce") is False:
            lines.append(
                "communication.clip_after_allreduce=False: gradients are clipped after they have been summed over "
                "replicas all the same, by the norm over all stages; clipping each replica's own before the sum would "
                "give other numbers than one process"
            )
        if self._given.get("communication.gradients_reduce_method") == "sum":
            lines.append(
                "communication.gradients_reduce_method=sum: gradients are summed over ranks where the loss is outside of "
                "the compiled model; with the loss in the model they are those of the loss of the whole batch, as in one "
                "process"
            )
        return lines

    def _of_wire_format(self) -> dict[str, object]:
        """Options of communication.fp16 and fp16_scale, which belong together."""
        if "communication.fp16" not in self._given:
            return {}
        if not self["communication.fp16"]:
            return {"gradient_dtype": "same"}
        scale = self["communication.fp16_scale"]
        assert isinstance(scale, int), "checked when it was given"
        return {"gradient_dtype": "fp16", "gradient_scale": float(scale) if scale > 0 else _NO_SCALE}


def environment_name(name: str) -> str:
    """The variable of an item: "pipeline.num_stages" gives "EPL_PIPELINE_NUM_STAGES"."""
    return PREFIX + name.replace(".", "_").upper()


def _from_environment(environ: Mapping[str, str]) -> dict[str, Value]:
    item_of = {environment_name(name): name for name in ITEMS}
    given: dict[str, Value] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX):
            continue
        name = item_of.get(variable)
        if name is None:
            # Other programs have variables of this prefix too; one of a category, or almost an item, is meant for us.
            is_ours = any(variable.startswith(environment_name(f"{category}.")) for category in CATEGORIES)
            if is_ours or nearest(variable, item_of, cutoff=_ALMOST):
                raise UnknownOptionError(variable, valid=item_of, source="environment", listed=_PAGE)
            continue
        given[name] = _checked(name, ITEMS[name].read(text.strip()), f"environment {variable}")
    return given


def _known(name: object) -> str:
    if not isinstance(name, str) or name not in ITEMS:
        raise UnknownOptionError(str(name), valid=ITEMS, source="epl.Config", listed=_PAGE)
    return name


def _checked(name: str, value: object, source: str) -> Value:
    item = ITEMS[name]
    if not item.has(value):
        raise OptionValueError(name, value=value, source=source, expected=item.accepts, choices=item.names)
    return item.plain(value)  # type: ignore[arg-type]  # of a type that the item has


def _check_agreement(given: Mapping[str, Value]) -> None:
    if given.get("io.unbalanced_io_slicing") and given.get("io.drop_last_files"):
        raise OptionValueError(
            "io.drop_last_files",
            value=True,
            source="epl.Config",
            expected="False with io.unbalanced_io_slicing, which keeps the files that this drops",
        )
