"""Takes out of texts what looks secret, before they go to somebody else.

In: any text, and the environment, whose secret values are known by their names. Out: the text with "(left
out)" in their places. What is taken out too much costs a question; what is left in cannot be taken back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LEFT_OUT = "(left out)"
_SECRET = r"(?:TOKEN|KEY|SECRET|PASS|PWD|CRED|AUTH|COOKIE|SIGNATURE|PRIVATE|BEARER|DSN|WEBHOOK)"
_SECRET_NAME = re.compile(_SECRET, re.IGNORECASE)
_NOT_SECRET = frozenset({"PWD", "OLDPWD"})
_SHORTEST_VALUE = 6  # shorter ones would take parts of words out of every text
_MAX_CHARACTERS = 10**5
_SHAPES = (
    # a private key, whole
    (re.compile(r"-----BEGIN [^-]{0,40}PRIVATE KEY-----.*?(?:-----END [^-]*-----|\Z)", re.DOTALL), LEFT_OUT),
    # who and with which password, in an address
    (re.compile(r"(://)[^\s\"'<>]{0,4000}@"), rf"\1{LEFT_OUT}@"),
    (re.compile(r"\b(Bearer|Basic|Negotiate)\s{1,9}[^\s\"']+", re.IGNORECASE), rf"\1 {LEFT_OUT}"),
    # parameters of an address
    (re.compile(r"([?&][\w.-]{1,64}=)[^&\s\"']+"), rf"\1{LEFT_OUT}"),
    # NAME=value, "name": "value", --name value
    (
        re.compile(
            rf"([\w.-]{{0,64}}{_SECRET}[\w.-]{{0,64}}[\"']?\s{{0,9}}[=:]\s{{0,9}})(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;]+)",
            re.IGNORECASE,
        ),
        rf"\1{LEFT_OUT}",
    ),
    (
        re.compile(rf"(--[\w-]{{0,64}}{_SECRET}[\w-]{{0,64}}\s{{1,9}})[^\s-][^\s]*", re.IGNORECASE),
        rf"\1{LEFT_OUT}",
    ),
    # tokens of well-known services, and signed ones
    (re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|ASIA)[\w-]{8,}"), LEFT_OUT),
    (re.compile(r"\beyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*"), LEFT_OUT),
)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name may hold something secret."""
    return name not in _NOT_SECRET and _SECRET_NAME.search(name) is not None


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """Values of the environment that may stand in no text; the longest first."""
    found = {value for name, value in environ.items() if is_secret_name(name)}
    for value in environ.values():
        for credentials in re.findall(r"://([^\s\"'<>]*)@", value):
            found |= {credentials, *credentials.split(":", 1)[1:]}
    return sorted((value for value in found if len(value) >= _SHORTEST_VALUE), key=len, reverse=True)


def redacted(text: str, values: list[str]) -> str:
    """The end of a text without what looks secret. `values`: as `secret_values` gives them."""
    text = text[-_MAX_CHARACTERS:]
    for value in values:
        text = text.replace(value, LEFT_OUT)
    for pattern, instead in _SHAPES:
        text = pattern.sub(instead, text)
    return text


def redacted_all(content: Any, values: list[str]) -> Any:
    """The same for every text in dicts and lists; what is neither a text nor a number becomes one."""
    if isinstance(content, Mapping):
        return {
            redacted(str(key), values): LEFT_OUT
            if is_secret_name(str(key)) and isinstance(value, str)
            else redacted_all(value, values)
            for key, value in content.items()
        }
    if isinstance(content, list | tuple):
        return [redacted_all(each, values) for each in content]
    if content is None or isinstance(content, bool | int | float):
        return content
    return redacted(str(content), values)
