"""State of schedulers, scalers and users as JSON, and back exactly; nothing but plain values, and no code on
either way.

In: None, bools, numbers, texts, lists, tuples, dicts, Counters and tensors of one element, nested. Out:
JSON-able values. What JSON has no form for becomes an object of one key that begins with "$". Anything else
is refused, with its place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rannc_backend.errors import CheckpointFileError, CheckpointStateError

_MAX_DEPTH = 24
_KEYS = (str, int, float, bool, type(None))
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
} | {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}


def encode(value: Any, place: str) -> Any:
    """A JSON-able form of ``value``. ``place`` says in words where it is, for errors.

    Raises:
        CheckpointStateError: a part of it is no plain value; names the part.
    """
    return _encode(value, place, 0)


def decode(value: Any, place: str) -> Any:
    """What `encode` was given.

    Raises:
        CheckpointFileError: `encode` does not write this.
    """
    return _decode(value, place, 0)


def _encode(value: Any, place: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise _unsaved(place, f"is nested deeper than {_MAX_DEPTH} levels")
    if value is None or type(value) in (bool, str):
        return value
    # Subclasses too: numpy.float64 is a float, an IntEnum an int. They come back as the plain number.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, place, depth)
    if isinstance(value, torch.Tensor):
        return _encode_scalar(value, place)
    raise _unsaved(place, f"is a {type(value).__name__}")


def _encode_mapping(value: Mapping[Any, Any], place: str, depth: int) -> Any:
    if odd := [key for key in value if type(key) not in _KEYS]:
        raise _unsaved(place, f"has a key of type {type(odd[0]).__name__}")
    items = [(key, _encode(item, f"{place}[{key!r}]", depth + 1)) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [[_encode(key, place, depth + 1), item] for key, item in items]}
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
        return dict(items)
    return {"$dict": [[_encode(key, place, depth + 1), item] for key, item in items]}


def _encode_scalar(value: torch.Tensor, place: str) -> Any:
    name = str(value.dtype).removeprefix("torch.")
    if value.numel() != 1 or name not in _DTYPES:
        raise _unsaved(place, f"is a tensor of shape {list(value.shape)} and dtype {name}")
    return {"$tensor": [name, list(value.shape), _encode(value.item(), place, 0)]}


def _unsaved(place: str, what: str) -> CheckpointStateError:
    return CheckpointStateError(
        f"{place} {what}, which a checkpoint cannot hold",
        cure="save plain values only: numbers, texts, lists, tuples, dicts and tensors of one element; make "
        "the rest again when loading.",
    )


def _decode(value: Any, place: str, depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise _unread(place, "it is nested too deep")
    if isinstance(value, list):
        return [_decode(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _decode(item, f"{place}[{key!r}]", depth + 1) for key, item in value.items()}
    key, item = next(iter(value.items()))
    if len(value) != 1 or key not in _DECODERS:
        raise _unread(place, f"{sorted(value)} is no kind of value")
    decoded = _decode(item, place, depth + 1)
    try:
        return _DECODERS[key](decoded)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise _unread(place, f"no {key[1:]} can be made of it") from None


def _unread(place: str, what: str) -> CheckpointFileError:
    return CheckpointFileError(f"{place}: {what}", cure="load another checkpoint.")


def _float(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(text)
    return float(text)


def _tuple(items: Any) -> tuple[Any, ...]:
    if not isinstance(items, list):
        raise TypeError(items)
    return tuple(items)


def _pairs(items: Any) -> Iterable[tuple[Any, Any]]:
    return ((key, value) for key, value in _tuple(items))


def _counter(items: Any) -> Counter[Any]:
    counts = dict(_pairs(items))
    if not all(isinstance(number, int) for number in counts.values()):
        raise TypeError(counts)
    return Counter(counts)


def _tensor(parts: Any) -> torch.Tensor:
    name, shape, number = _tuple(parts)
    if (
        name not in _DTYPES
        or not isinstance(shape, list)
        or any(type(size) is not int or size != 1 for size in shape)
        or len(shape) > 8
    ):
        raise ValueError(name)
    if not isinstance(number, int | float):
        raise TypeError(number)
    return torch.tensor(number, dtype=_DTYPES[name]).reshape(shape)


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "$float": _float,
    "$tuple": _tuple,
    "$dict": lambda items: dict(_pairs(items)),
    "$counter": _counter,
    "$tensor": _tensor,
}
