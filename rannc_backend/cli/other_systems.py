"""`rannc config --from SYSTEM FILE`: the configuration of another system as options of this package.

In: a file of that system's items, as TOML or JSON, in tables or with dots in their names. Out: options, as lines of
`rannc_conf.toml`. Nothing in the file is run, and no longer file is read than one of options may be.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rannc_backend.errors import ConfigurationFileError, OptionValueError
from rannc_backend.errors.base import error_about
from rannc_backend.settings import user_files
from rannc_backend.settings.sources import plain_options, resolve_config
from rannc_backend.settings.toml_lines import MAX_FILE_BYTES, parse_toml
from rannc_backend.settings.user_files import UserFile

# By system, the class whose objects give options, and whether it takes the items as one dict or by name.
SYSTEMS: Mapping[str, tuple[str, str, bool]] = MappingProxyType(
    {
        "autodist": ("rannc_backend.autodist", "AutoDistConfig", False),
        "epl": ("rannc_backend.epl", "Config", True),
    }
)


def translated(system: str | None, file: Path | None) -> Mapping[str, object]:
    """The options that the items in the file stand for.

    Raises:
        OptionValueError: there is no such system, or no file, or an item has a bad value.
        ConfigurationFileError: the file cannot be read, or is neither TOML nor JSON.
    """
    if system is None or system not in SYSTEMS:
        expected = "before FILE: one of " + ", ".join(SYSTEMS)
        raise OptionValueError(
            "--from", value=system, source="command line", expected=expected, choices=SYSTEMS
        )
    if file is None:
        raise OptionValueError(
            "--from", value=system, source="command line", expected=f"{system} and the path of a file"
        )
    module, name, takes_dict = SYSTEMS[system]
    items = dict(_flat(_items(file)))
    make = getattr(importlib.import_module(module), name)
    options = plain_options(make(items) if takes_dict else make(**items))
    resolve_config(options, {})
    return options


def as_toml(options: Mapping[str, object]) -> str:
    """Options as lines of `rannc_conf.toml`."""
    return "\n".join(f"{name} = {_toml(value)}" for name, value in options.items())


def _items(file: Path) -> Mapping[str, Any]:
    error = partial(error_about, ConfigurationFileError, str(file))
    source = UserFile(
        path=file, what="configuration", named_by="command line", error=error, cure="name a text file."
    )
    text = user_files.read_text(source, MAX_FILE_BYTES)
    if not text.lstrip().startswith("{"):
        return parse_toml(text, path=str(file)).values
    try:
        items = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as problem:
        reason = "it is nested too deeply" if isinstance(problem, RecursionError) else str(problem)
        raise ConfigurationFileError(
            str(file), problem=f"is not JSON: {reason}", cure="write an object of items, or TOML."
        ) from None
    assert isinstance(items, dict), "a text that begins so is an object"
    return items


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _flat(items: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Items of tables by names with dots between."""
    for name, value in items.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _toml(value: object) -> str:
    # TOML has neither halves of characters nor this control character as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
