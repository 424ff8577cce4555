"""Finds and calls the user's function that makes a model to plan.

In: "MODULE_OR_FILE:FACTORY", as "models/bert.py:large" or "my_package.models:large". Out: ``(model, args,
kwargs)`` as the factory gives them, on "meta" where the factory does not name another device. This runs the
user's code, in this process.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rannc_backend.errors import FactoryError
from rannc_backend.errors.base import did_you_mean, nearest
from rannc_backend.settings import hooks
from rannc_backend.settings.user_files import UserFile, kind_of, require_file

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
_FORM = "(model, args, kwargs): an nn.Module, a tuple or list, and a dict"


def call_factory(path: str) -> Example:
    """Import, call under ``torch.device("meta")``, and check what comes back.

    Raises:
        FactoryError: says what is wrong with the path, with the user's code (and on which line), or with what
        it returned.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise FactoryError(
            f"{path!r} does not name a factory",
            cure='write MODULE_OR_FILE:FACTORY, as "models/bert.py:large".',
        )
    factory = _function_of(_import(place), name, place)
    try:
        with torch.device("meta"):
            result = factory()
    except Exception as error:
        raise FactoryError(
            f"the factory {name} raised {type(error).__name__}: {error}",
            location=_user_line(error),
            cure='see whether it runs under `with torch.device("meta"):`, where tensors have shapes but no '
            "values.",
        ) from error
    return _checked(result, name)


def _import(place: str) -> ModuleType:
    file = Path(place)
    # As with `python file.py` and `python -m module`: what lies beside the file, or in the working directory,
    # can be imported.
    cure = "give the path of a Python file, or the dotted name of a module."
    named = UserFile(path=place, what="factory", error=FactoryError, cure=cure)
    is_file = file.suffix == ".py" or kind_of(named) not in ("", "a directory")
    if is_file and not kind_of(named):
        raise FactoryError(f"there is no file {place!r}", cure=cure)
    if is_file:
        require_file(named)
    folder = str(file.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _import_file(file) if is_file else importlib.import_module(place)
    except ModuleNotFoundError as error:
        if not is_file and error.name is not None and f"{place}.".startswith(f"{error.name}."):
            raise FactoryError(
                f"there is no module {place!r}",
                cure="give its dotted name, or the path of a Python file that ends with .py.",
            ) from None
        raise _import_error(place, error) from error
    except (Exception, SystemExit) as error:
        raise _import_error(place, error) from error


def _import_file(file: Path) -> ModuleType:
    # Not the file's own name: a file called random.py must not stand in for the library's module.
    name = f"_rannc_plan_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise FactoryError(
            f"{str(file)!r} is not a Python file", cure="give a Python file that ends with .py."
        )
    module = importlib.util.module_from_spec(spec)
    # Classes of the file look their module up by name.
    undo = hooks.replace_item("model file", sys.modules, name, module)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        undo()
        raise
    return module


def _import_error(place: str, error: BaseException) -> FactoryError:
    if isinstance(error, FactoryError):
        return error
    location = _user_line(error)
    if isinstance(error, SyntaxError):
        location = f"{error.filename}:{error.lineno}"
    return FactoryError(f"importing {place} raised {type(error).__name__}: {error}", location=location)


def _function_of(module: ModuleType, name: str, place: str) -> Callable[[], object]:
    factory = getattr(module, name, None)
    if callable(factory):
        return factory
    if factory is not None:
        raise FactoryError(
            f"{name} in {place} is no function but a {type(factory).__name__}",
            cure=f"give a function: {_FORM}.",
        )
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = nearest(name, functions)
    known = did_you_mean(near) or f"its functions: {', '.join(sorted(functions)[:10]) or 'none'}."
    raise FactoryError(f"{place} has no function {name!r}", cure=known.strip())


def _checked(result: object, name: str) -> Example:
    if not isinstance(result, tuple | list) or len(result) != 3:
        what = f"{len(result)} values" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
        raise FactoryError(f"the factory {name} returned {what}", cure=f"return {_FORM}.")
    model, args, kwargs = result
    if not isinstance(model, nn.Module):
        raise FactoryError(
            f"the factory {name} returned a {type(model).__name__} as its model", cure=f"return {_FORM}."
        )
    if not isinstance(args, tuple | list):
        raise FactoryError(
            f"the factory {name} returned a {type(args).__name__} as args",
            cure=f"return {_FORM}; no arguments: ().",
        )
    if not isinstance(kwargs, Mapping):
        raise FactoryError(
            f"the factory {name} returned a {type(kwargs).__name__} as kwargs", cure=f"return {_FORM}."
        )
    return model, tuple(args), dict(kwargs)


def _user_line(error: BaseException) -> str:
    """The innermost line that is neither in torch nor in this file: "model.py:12, in large"."""
    frames = traceback.extract_tb(error.__traceback__)
    skipped = (*torch.__path__, __file__, "<frozen importlib")
    own = [frame for frame in frames if not frame.filename.startswith(skipped)]
    if not own:
        return ""
    last = own[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: {last.line}"
