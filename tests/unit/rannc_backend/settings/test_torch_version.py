"""The versions of torch: old ones are refused, tried ones pass silently, newer ones get one line."""

from __future__ import annotations

import logging

import pytest

from rannc_backend.errors import LaunchError
from rannc_backend.log.startup import mention_untried_torch
from rannc_backend.settings.torch_version import refuse_old_torch


@pytest.mark.parametrize("version", ["1.12.1", "2.10.0+cpu"])
def test_old(version: str) -> None:
    with pytest.raises(LaunchError, match=rf"torch {version[:4]}.*too old(.|\n)*2\.11 to 2\.15"):
        refuse_old_torch(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0a0+git1234"])
def test_tried(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="rannc_backend"):
        refuse_old_torch(version)
        mention_untried_torch(version)
    assert caplog.records == []


def test_newer_gets_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("rannc_backend.log.startup"), "filters", [])
    monkeypatch.setattr(logging.getLogger("rannc_backend"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        mention_untried_torch("2.16.0")
        mention_untried_torch("2.16.0")
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "torch 2.16.0 is newer than this backend has been tried on (2.11 to 2.15)"
    ]
