"""Where options come from: each item's value and source, from four places of which the later wins.

In: the environment and `options={...}` of torch.compile. Out: a `Resolution`. Order: default;
`rannc_conf.toml` in RANNC_CONF_DIR, or in ~/.pyrannc; the variables RANNC_<ITEM>; options. A name that exists
nowhere is an error, wherever it stands. Everything is read from the environment that is passed in, the home
directory too: the same environment gives the same options.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

from pydantic import TypeAdapter, ValidationError

from rannc_backend.errors import ConfigurationFileError, OptionValueError, UnknownOptionError
from rannc_backend.errors.base import error_about, shown
from rannc_backend.settings.accepted import accepted_values, named_values
from rannc_backend.settings.options import ENVIRONMENT_PREFIX, ITEMS_DISAGREE, Config, environment_name
from rannc_backend.settings.rannc_items import RETIRED, retired_notice
from rannc_backend.settings.toml_lines import TomlFile, read_toml
from rannc_backend.settings.user_files import UserFile, kind_of

CONFIG_FILE = "rannc_conf.toml"
CONFIG_DIRECTORY_VARIABLE = "RANNC_CONF_DIR"
ENVIRONMENT_ONLY: Mapping[str, str] = {
    CONFIG_DIRECTORY_VARIABLE: f"Directory of `{CONFIG_FILE}` and `logging.toml`. Default: `~/.pyrannc`.",
    "RANNC_LOG_LEVEL": "Level of the logger `rannc_backend`: debug, info, warning or error. Default: info.",
}
ReadFile = Callable[[Mapping[str, str]], TomlFile | None]
"""Gives the file of options for an environment."""


@runtime_checkable
class GivesOptions(Protocol):
    """A configuration in the words of another system, which torch.compile takes for its options."""

    def options(self) -> Mapping[str, object]:
        """The options of this package that it is."""
        ...

    def notices(self) -> Sequence[str]:
        """Lines for the log about what is not as that system does it."""
        ...


Given = Mapping[str, object] | GivesOptions | None
"""What torch.compile is given as its options."""

_DEFAULT = "default"
# Far beyond any number of things, and still a number that JSON and int64 carry.
_LARGEST_INTEGER = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """`sources`: of each item of `Config`, "default", "<file>, line 3", "environment RANNC_X", "options" or the class
    of what gives options.

    `file`: the file that was read, if there is one. `retired`: the retired items that were given, with their
    sources. `remarks`: lines for the log of a configuration in the words of another system. `given`: the items that
    torch.compile was given. `unread`: `unread_file`.
    """

    config: Config
    sources: Mapping[str, str]
    file: str | None
    retired: Mapping[str, str]
    remarks: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    unread: str = ""

    @property
    def notices(self) -> list[str]:
        """A line for each retired item that was given, the remarks, and one for a file that is not read."""
        retired = (retired_notice(item, source) for item, source in self.retired.items())
        return [*retired, *self.remarks, *([self.unread] if self.unread else [])]

    def is_told(self, item: str) -> bool:
        """Whether torch.compile was given the item."""
        return item in self.given

    def lines(self) -> list[str]:
        """Every item as "pipeline_num = 4 (environment RANNC_PIPELINE_NUM)"."""
        return [
            f"{item} = {getattr(self.config, item)!r} ({source})" for item, source in self.sources.items()
        ]


def plain_options(given: Given) -> Mapping[str, object]:
    """What torch.compile is given, as options by name.

    Raises:
        OptionValueError: it is neither a mapping nor a configuration.
    """
    if isinstance(given, GivesOptions) and not isinstance(given, type):
        return given.options()
    if given is not None and not isinstance(given, Mapping):
        raise OptionValueError(
            "options",
            value=given,
            source="torch.compile",
            expected="as a dict, or as an object whose method options() gives one",
        )
    return given or {}


@dataclass(frozen=True, slots=True)
class Layered:
    """Options over those that a process has told beforehand."""

    below: GivesOptions
    above: Given

    def options(self) -> Mapping[str, object]:
        """Of both; the later wins."""
        return {**self.below.options(), **plain_options(self.above)}

    def notices(self) -> Sequence[str]:
        """Of both, each once."""
        above = self.above.notices() if isinstance(self.above, GivesOptions) else ()
        return list(dict.fromkeys([*self.below.notices(), *above]))


def resolve_config(options: Given, environ: Mapping[str, str]) -> Config:
    """Options over environment over file over defaults, checked. Raises as `resolve`."""
    return resolve(options, environ).config


def resolve(options: Given, environ: Mapping[str, str], read_file: ReadFile | None = None) -> Resolution:
    """As `resolve_config`, with the source of each item. `read_file`: None for `configuration_file`.

    Raises:
        UnknownOptionError: a name that does not exist; says the nearest one that does.
        OptionValueError: a value out of range; says item, source and range.
        ConfigurationFileError: the file cannot be read or is no TOML, or RANNC_CONF_DIR is no directory.
    """
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    file = (read_file or configuration_file)(environ)
    if file is not None:
        for item, value in file.values.items():
            sources[item] = file.place(item)
            values[item] = _known(item, value, sources[item], sources[item])
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in ENVIRONMENT_ONLY:
            continue
        item = variable[len(ENVIRONMENT_PREFIX) :].lower()
        if not is_item(item) or variable != environment_name(item):
            names = [environment_name(name) for name in (*Config.model_fields, *RETIRED)] + list(
                ENVIRONMENT_ONLY
            )
            raise UnknownOptionError(variable, valid=names, source="environment")
        sources[item] = f"environment {variable}"
        values[item] = _from_text(item, text, sources[item])
    told = "options" if isinstance(options, Mapping | Layered | None) else type(options).__name__
    given = plain_options(options)
    for name, value in given.items():
        sources[str(name)] = told
        values[str(name)] = _known(name, value, told, told)
    retired = {item: sources.pop(item) for item in sorted(RETIRED) if item in sources}
    live = {item: value for item, value in values.items() if item not in retired}
    all_sources = {item: sources.get(item, _DEFAULT) for item in Config.model_fields}
    return Resolution(
        config=_checked(live, all_sources),
        sources=all_sources,
        file=None if file is None else file.path,
        retired=retired,
        remarks=tuple(options.notices()) if isinstance(options, GivesOptions) else (),
        given=frozenset(map(str, given)),
        unread=unread_file(environ),
    )


def check_translated(
    options: Mapping[str, object], items_of: Mapping[str, str], given: Mapping[str, object], source: str
) -> None:
    """Raise OptionValueError, in the words of another system, where its items have become options that are refused.

    Args:
        items_of: the item that has become each option. given: values by item.
    """
    try:
        resolve_config(options, {})
    except OptionValueError as error:
        item = items_of.get(error.item)
        if item is None:
            raise
        expected = f"something for which the option {error.item} is {error.expected}"
        raise OptionValueError(item, value=given[item], source=source, expected=expected) from None


def configuration_directory(environ: Mapping[str, str]) -> Path | None:
    """Where the files of options and of logging are looked for; None where there is no such directory.

    Raises:
        ConfigurationFileError: RANNC_CONF_DIR names something that is no directory.
    """
    named = environ.get(CONFIG_DIRECTORY_VARIABLE, "")
    home = environ.get("HOME", "")
    if not named:
        return Path(home, ".pyrannc") if home else None
    cure = f"make it, or unset {CONFIG_DIRECTORY_VARIABLE}; without it, ~/.pyrannc is looked into."
    source = f"environment {CONFIG_DIRECTORY_VARIABLE}"
    error = partial(error_about, ConfigurationFileError, named)
    directory = UserFile(path=named, what="configuration directory", named_by=source, error=error, cure=cure)
    if kind_of(directory) != "a directory":
        raise ConfigurationFileError(shown(named), problem=f"is not a directory (from {source})", cure=cure)
    return Path(named)


def configuration_file(environ: Mapping[str, str]) -> TomlFile | None:
    """The file of options; None if there is none. Raises ConfigurationFileError."""
    directory = configuration_directory(environ)
    return None if directory is None else read_toml(directory / CONFIG_FILE)


def unread_file(environ: Mapping[str, str]) -> str:
    """A line on a file of options in the working directory, where nobody looks for it; "" for none. It would be thought
    to hold.
    """
    here, directory = Path(CONFIG_FILE), configuration_directory(environ)
    if not here.is_file() or (directory is not None and os.path.realpath(directory) == os.path.realpath(".")):
        return ""
    return (
        f"{CONFIG_FILE} in the working directory is not read: {directory or 'no directory'} is looked into; set "
        f"{CONFIG_DIRECTORY_VARIABLE} to the directory of the file that is to hold"
    )


@dataclass(slots=True)
class FileOnce:
    """`configuration_file`, read at the first question: an edit while a job runs is for the next job."""

    _found: dict[Path | None, TomlFile | None] = field(default_factory=dict)

    def __call__(self, environ: Mapping[str, str]) -> TomlFile | None:
        """The file of options; None if there is none. Raises ConfigurationFileError."""
        directory = configuration_directory(environ)
        if directory not in self._found:
            self._found[directory] = configuration_file(environ)
        return self._found[directory]


def is_item(name: str) -> bool:
    """Whether there is an item of that name, retired or not."""
    return name in Config.model_fields or name in RETIRED


def accepted_by(item: str) -> str:
    """What an item, retired or not, accepts in words."""
    return RETIRED[item].accepts if item in RETIRED else accepted_values(item)


def choices_of(item: str) -> list[str]:
    """The names that an item, retired or not, accepts, if it has a number of them."""
    annotation: Any = RETIRED[item].type if item in RETIRED else Config.model_fields[item].annotation
    if annotation is bool:
        return ["true", "false"]
    names = get_args(annotation) if item in RETIRED else named_values(item)
    return [str(choice) for choice in names if isinstance(choice, str)]


def option_from_text(text: str) -> tuple[str, object]:
    """An item and its value, for `resolve_config`, from "pipeline_num=4" as the command line gives it.

    Raises:
        UnknownOptionError, OptionValueError: there is no such item, or its value has another type.
    """
    item, equals, value = text.partition("=")
    item = item.strip()
    if not is_item(item):
        raise UnknownOptionError(item, valid=Config.model_fields, source="command line")
    if not equals:
        raise OptionValueError(
            item, value=text, source="command line", expected=f"{item}=value; the value: {accepted_by(item)}"
        )
    return item, _from_text(item, value, "command line")


def _known(name: object, value: object, place: str, source: str) -> object:
    """The value, if there is an item of that name; of a retired item its type is checked here, as nothing
    else looks at it.
    """
    if not isinstance(name, str) or not is_item(name):
        raise UnknownOptionError(str(name), valid=[*Config.model_fields, *RETIRED], source=place)
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise _bad_value(name, value, source)
    if name in RETIRED and type(value) is not RETIRED[name].type:
        raise _bad_value(name, value, source)
    return value


def _from_text(item: str, text: str, source: str) -> object:
    annotation: Any = RETIRED[item].type if item in RETIRED else Config.model_fields[item].annotation
    try:
        # Lax: "4" is an int, and "1", "true", "on", "yes" are True. Ranges are checked with the whole Config.
        value = TypeAdapter(annotation).validate_python(text.strip(), strict=False)
    except ValidationError:
        raise _bad_value(item, text, source) from None
    return _known(item, value, source, source)


def _checked(values: Mapping[str, object], sources: Mapping[str, str]) -> Config:
    try:
        return Config.model_validate(values)
    except RecursionError:
        raise ConfigurationFileError(
            "the options", problem="are nested too deeply", cure="give numbers and texts."
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["loc"]:
            item = str(first["loc"][0])
            raise _bad_value(item, values[item], sources[item]) from None
        if first["type"] != ITEMS_DISAGREE:
            raise OptionValueError(
                "options", value=dict(values), source="all sources", expected=f"others: {first['msg']}"
            ) from None
        item, other = first["ctx"]["item"], first["ctx"]["other"]
        value, other_value = (values.get(name, Config.model_fields[name].default) for name in (item, other))
        expected = f"{first['ctx']['relation']} {other}, which is {other_value} (from {sources[other]})"
        raise OptionValueError(item, value=value, source=sources[item], expected=expected) from None


def _bad_value(item: str, value: object, source: str) -> OptionValueError:
    return OptionValueError(
        item, value=value, source=source, expected=accepted_by(item), choices=choices_of(item)
    )
