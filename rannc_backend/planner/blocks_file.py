"""A model as far as planning asks about it: small enough for a file, from which plans for other clusters are
made in seconds.

In: blocks and how each is partitioned. Out: `PlannableModel`, and its text as JSON. Reading checks everything
and runs nothing. Terms. Sizes (ir/size.py) are written once where they are equal, and stand for themselves by
number.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rannc_backend.errors import BlocksFileError
from rannc_backend.ir.block_graph import Block, BlockGraph
from rannc_backend.ir.plan import DeviceKind
from rannc_backend.ir.size import Size
from rannc_backend.planner.cost.formula import Formula
from rannc_backend.planner.cost.pricing import BlockPartition, Partitions
from rannc_backend.schedule.orders import ScheduleName, schedule_names
from rannc_backend.settings import user_files
from rannc_backend.settings.options import Config
from rannc_backend.settings.user_files import UserFile

logger = logging.getLogger(__name__)

FORMAT = "rannc blocks 7"
_BEGINNING = b'{"format":"rannc blocks'
_MAX_CHARACTERS = 400_000_000
#: Options that decide which blocks there are.
_BLOCK_OPTIONS = (
    "max_partition_num",
    "min_partition_num",
    "coarsen_by_time",
    "stage_starts",
    "stage_pivots",
    "keep_together",
    "stage_pins",
    "stage_compiler",
    "recompute",
    "recompute_modules",
    "checkpointing",
    "costs",
    "whole_batch",
    "batch_norm",
    "gradient_accumulation_dtype",
    "small_tensor_elements",
    "sparse_gradients",
    "training",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannableModel:
    """`schedules`: those that give exact results. `partition_of[block][i]`: index into `partitions` at the
    i-th of `budgets`, or -1.

    `options`: (item, value) of the options that the blocks depend on. Prices blocks as
    `cost.pricing.Partitions`.
    """

    fingerprint: str
    model_name: str
    schedules: tuple[ScheduleName, ...]
    options: tuple[tuple[str, str], ...]
    graph: BlockGraph
    budgets: tuple[float, ...]
    partitions: tuple[BlockPartition, ...]
    partition_of: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        graph: BlockGraph,
        partitions: Partitions,
        *,
        fingerprint: str,
        model_name: str,
        schedules: Sequence[ScheduleName],
        config: Config,
    ) -> PlannableModel:
        """Ask for the partition of every block at every budget."""
        budgets = tuple(partitions.budgets)
        numbers: dict[BlockPartition, int] = {}
        rows = []
        for block in graph.blocks:
            found = [partitions.partition(block, budget) for budget in budgets]
            rows.append(
                tuple(-1 if item is None else numbers.setdefault(item, len(numbers)) for item in found)
            )
        return cls(
            fingerprint=fingerprint,
            model_name=model_name,
            schedules=tuple(schedules),
            options=_block_options(config),
            graph=graph,
            budgets=budgets,
            partitions=tuple(numbers),
            partition_of=tuple(rows),
        )

    def partition(self, block: Block, budget: float) -> BlockPartition | None:
        """See `cost.pricing.Partitions`."""
        index = self.partition_of[block.index][self.budgets.index(budget)]
        return None if index < 0 else self.partitions[index]

    def searched_schedules(self, config: Config) -> tuple[ScheduleName, ...]:
        """Those that a plan may choose from under these options, with a warning where the one that is asked for is none."""
        asked = tuple(name for name in self.schedules if name == config.schedule)
        if not asked and config.schedule in schedule_names():
            logger.warning(
                "schedule %s is not possible with these blocks (the model returns no loss that is a linear function of sums "
                "over samples, or another version made them); the plan is for one of %s",
                config.schedule,
                ", ".join(self.schedules),
            )
        return asked or self.schedules

    def settled(self, config: Config, kind: DeviceKind) -> Config:
        """The options with the compiler of stages that the blocks were made for, where that is left open and
        GPUs do not want another.
        """
        made_for = "inductor" if kind == "cuda" else dict(self.options)["stage_compiler"]
        return (
            config.model_copy(update={"stage_compiler": made_for})
            if config.stage_compiler == "auto"
            else config
        )

    def check_options(self, config: Config) -> None:
        """Raise BlocksFileError if the blocks were made under options that are other ones now."""
        for (item, then), (_, now) in zip(self.options, _block_options(config), strict=True):
            if then != now:
                raise BlocksFileError(
                    f"the blocks were made with {item}={then!r}, and now it is {now!r}",
                    cure="plan from the model again, or give that option as it was.",
                )

    def to_json(self) -> str:
        """One line of JSON; the same model gives the same text."""
        writer = _Writer()
        content = writer.encode(self)
        return (
            json.dumps(
                {"format": FORMAT, "expressions": list(writer.texts), **content}, separators=(",", ":")
            )
            + "\n"
        )

    @classmethod
    def read(cls, path: str) -> PlannableModel:
        """`from_json` of a file's text."""
        return cls.from_json(user_files.read_text(_blocks_file(path), _MAX_CHARACTERS))

    @classmethod
    def from_json(cls, text: str) -> PlannableModel:
        """Read it back. BlocksFileError: where the text is not what `to_json` writes."""
        if len(text) > _MAX_CHARACTERS:
            raise _invalid(f"it has {len(text)} characters; at most {_MAX_CHARACTERS} are read")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            raise _invalid("it is not JSON") from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise _invalid(f"it is not of the format {FORMAT!r}")
        texts = content.pop("expressions", None)
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise _invalid("expressions: not a list of texts")
        kind: Any = cls  # a key of a cache, for which mypy does not take a class
        try:
            sizes = tuple(map(Formula.of_text, texts))
        except ValueError as error:
            raise _invalid(str(error)) from None
        try:
            model = _reader(kind)(content, sizes)
        except _Wrong as error:
            raise _invalid(f"model{''.join(reversed(error.places))}: {error}") from None
        _check(model)
        return model


def is_blocks_file(path: str) -> bool:
    """Whether there is a file of that name which claims to be of this kind."""
    try:
        return user_files.read_beginning(_blocks_file(path), len(_BEGINNING)) == _BEGINNING
    except BlocksFileError:
        return False


def _blocks_file(path: str) -> UserFile:
    return UserFile(
        path=path, what="blocks", error=BlocksFileError, cure="give the path of a file of blocks."
    )


def _block_options(config: Config) -> tuple[tuple[str, str], ...]:
    # The other kinds of costs start from the same partitions.
    costs = "rules" if config.prices_by_rules else "analytic"
    return tuple((item, costs if item == "costs" else str(getattr(config, item))) for item in _BLOCK_OPTIONS)


def _check(model: PlannableModel) -> None:
    blocks = model.graph.blocks
    if [block.index for block in blocks] != list(range(len(blocks))):
        raise _invalid("the blocks are not numbered 0, 1, 2, ...")
    if len(model.partition_of) != len(blocks) or any(
        len(row) != len(model.budgets) for row in model.partition_of
    ):
        raise _invalid("partition_of has not one row per block and one number per budget")
    if any(not -1 <= index < len(model.partitions) for row in model.partition_of for index in row):
        raise _invalid("partition_of names a partition that is not there")
    if any(not 0 <= output.block < len(blocks) for output in model.graph.outputs):
        raise _invalid("an output names a block that is not there")
    if any(not -1 <= flow.producer or flow.consumers[-1] >= len(blocks) for flow in model.graph.flows):
        raise _invalid("a flow names a block that is not there")
    known = {use.name for use in model.graph.parameters}
    if missing := {name for block in blocks for name in block.parameters} - known:
        raise _invalid(f"parameter {min(missing)!r} of a block is not described")
    if (
        model.budgets[:1] != (1.0,)
        or list(model.budgets) != sorted(set(model.budgets), reverse=True)
        or model.budgets[-1] < 0
    ):
        raise _invalid(f"budgets {model.budgets} do not go down from 1")
    if tuple(item for item, _ in model.options) != _BLOCK_OPTIONS or not model.schedules:
        raise _invalid("its options or schedules are missing")
    if unknown := [name for name in model.schedules if name not in schedule_names()]:
        raise _invalid(f"its schedule {unknown[0]!r} is none of {schedule_names()}")


def _invalid(problem: str) -> BlocksFileError:
    return BlocksFileError(
        f"the file of blocks is not valid: {problem}", cure="write it again with `rannc plan --save-blocks`."
    )


class _Writer:
    """Dataclasses as dicts, tuples as lists, sizes as numbers of `texts`."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self._numbers: dict[Any, int] = {}

    def encode(self, value: Any, hint: Any = None) -> Any:
        if hint is Size:
            if value not in self._numbers:
                self._numbers[value] = self.texts.setdefault(_text_of(value), len(self.texts))
            return self._numbers[value]
        if dataclasses.is_dataclass(value):
            kind: Any = type(value)
            return {name: self.encode(getattr(value, name), hint) for name, hint in _hints(kind).items()}
        if isinstance(value, tuple):
            hints = typing.get_args(hint)
            several = hints[:1] * len(value) if hints[1:] == (Ellipsis,) else hints
            return [self.encode(item, hint) for item, hint in zip(value, several, strict=True)]
        return value


def _text_of(size: Any) -> str:
    if isinstance(size, Formula | int):
        return str(size) if isinstance(size, int) else size.text
    # Sympy takes longer to import than a plan from a file takes to make.
    from rannc_backend.planner.cost.expression_text import expression_text

    return expression_text(size)


class _Wrong(ValueError):
    """A value is not what its type declares. `places`: where it is, the innermost first; built only then, as
    files hold many values.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.places: list[str] = []


_Read = Callable[[Any, tuple[Formula, ...]], Any]


@functools.cache
def _reader(hint: Any) -> _Read:
    """What makes a value of a type that a dataclass declares from JSON and the sizes of the file, or raises
    _Wrong.
    """
    if hint is Size:
        return _read_size
    if dataclasses.is_dataclass(hint):
        return _record_reader(hint)
    if typing.get_origin(hint) is tuple:
        return _tuple_reader(typing.get_args(hint))
    is_literal = typing.get_origin(hint) is Literal
    assert is_literal or hint in (str, int, float, bool), f"a {hint} cannot be read"
    known = typing.get_args(hint)

    def read(value: Any, sizes: tuple[Formula, ...]) -> Any:
        if is_literal and value not in known:
            raise _Wrong(f"{value!r} is none of {known}")
        if not is_literal and type(value) is not hint:
            raise _Wrong(f"{value!r} is no {hint.__name__}")
        return value

    return read


def _read_size(value: Any, sizes: tuple[Formula, ...]) -> Formula:
    if type(value) is not int or not 0 <= value < len(sizes):
        raise _Wrong(f"{value!r} is not the number of an expression")
    return sizes[value]


def _record_reader(kind: Any) -> _Read:
    readers = {name: _reader(hint) for name, hint in _hints(kind).items()}

    def read(value: Any, sizes: tuple[Formula, ...]) -> Any:
        if not isinstance(value, dict) or value.keys() != readers.keys():
            raise _Wrong(f"not an object with {', '.join(readers)}")
        members = {}
        for name, read_member in readers.items():
            try:
                members[name] = read_member(value[name], sizes)
            except _Wrong as error:
                error.places.append(f".{name}")
                raise
        try:
            return kind(**members)
        except AssertionError as error:
            raise _Wrong(str(error)) from None

    return read


def _tuple_reader(hints: tuple[Any, ...]) -> _Read:
    is_any_length = len(hints) == 2 and hints[1] is Ellipsis
    readers = tuple(_reader(hint) for hint in hints if hint is not Ellipsis)

    def read(value: Any, sizes: tuple[Formula, ...]) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Wrong("not a list")
        if not is_any_length and len(value) != len(readers):
            raise _Wrong(f"{len(value)} values, not {len(readers)}")
        items = []
        for item, read_item in zip(value, itertools.cycle(readers)):
            try:
                items.append(read_item(item, sizes))
            except _Wrong as error:
                error.places.append(f"[{len(items)}]")
                raise
        return tuple(items)

    return read


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
