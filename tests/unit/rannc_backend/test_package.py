"""The front of the package: public names load when used, and nothing else is promised."""

from __future__ import annotations

import pytest

import rannc_backend


@pytest.mark.parametrize("name", rannc_backend.__all__)
def test_public_names_exist_and_are_listed(name: str) -> None:
    assert getattr(rannc_backend, name) is not None
    assert name in dir(rannc_backend)


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'clip_grad_norm'"):
        _ = rannc_backend.clip_grad_norm
