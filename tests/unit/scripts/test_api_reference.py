"""The API reference: up to date, complete, and every public function says what its parameters are."""

from __future__ import annotations

import inspect
import re

import pytest

import rannc_backend
from scripts.api_reference import PAGE, WITHOUT_SIGNATURE, markdown, reference, signature

NAMES = [name for name in rannc_backend.__all__ if name != "__version__"]


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_every_public_name_is_in_the_page_once() -> None:
    assert sorted(re.findall(r"^### (\w+)$", reference(), re.MULTILINE)) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_is_complete(name: str) -> None:
    item = getattr(rannc_backend, name)
    text = inspect.getdoc(item) or ""
    first = text.split("\n\n")[0]
    assert first.replace("\n", " ").rstrip().endswith((".", ")``.")), name
    if name in WITHOUT_SIGNATURE:
        return
    documented = {
        word
        for line in re.findall(r"^    (\w+(?:, \w+)*): ", text, re.MULTILINE)
        for word in line.split(", ")
    }
    assert not set(inspect.signature(item).parameters) - documented, name
    returns = inspect.signature(item).return_annotation
    if inspect.isfunction(item) and returns not in ("None", "int", inspect.Signature.empty):
        assert "\nReturns:\n" in text or first.startswith("This rank's"), name


def example(a: int, *, key: str = "x", longer_name_of_a_parameter: float | None = None) -> list[int]:
    raise NotImplementedError


def test_signatures() -> None:
    line = "example(a: int, *, key: str = 'x', longer_name_of_a_parameter: float | None = None) -> list[int]"
    assert signature("example", example, most=200) == line
    assert signature("example", example).splitlines()[:4] == [
        "example(",
        "    a: int,",
        "    *,",
        "    key: str = 'x',",
    ]


def test_sections_become_lists() -> None:
    docstring = """Does ``it``.

    More.

    Args:
        one, two: What they are:
            and more of it.

    Returns:
        A tensor: the result.

    Raises:
        ValueError: It is wrong.
    """
    assert markdown(inspect.cleandoc(docstring)) == (
        "Does `it`.\n\nMore.\n\n**Args**\n\n- `one`, `two`: What they are:\n  and more of it.\n\n"
        "**Returns**\n\nA tensor: the result.\n\n**Raises**\n\n- `ValueError`: It is wrong.\n"
    )
