"""Finding and calling the user's factory: each thing that can be wrong with it is said, with the user's line
where it is in the code.
"""

from __future__ import annotations

import sys

import pytest
import torch

from rannc_backend.cli.model_factory import call_factory
from rannc_backend.errors import FactoryError

MODEL = """
import torch
from torch import nn
import beside

NUMBER = 3

def good():
    return nn.Linear(beside.WIDTH, 3), [torch.zeros(2, 4)], {}

def bad():
    layer = nn.Linear(4, 4)
    return int(layer.weight.sum())

def two():
    return nn.Linear(4, 4), ()

def number():
    return 3

def no_model():
    return torch.zeros(3), (), {}

def no_tuple():
    return nn.Linear(4, 4), torch.zeros(2, 4), {}

def no_dict():
    return nn.Linear(4, 4), (), None
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside.py").write_text("WIDTH = 4\n")
    (tmp_path / "random.py").write_text(MODEL)
    yield tmp_path / "random.py"
    for name in ("beside", "_rannc_plan_random", "user_models_for_this_test"):
        sys.modules.pop(name, None)


def test_a_file_and_what_lies_beside_it(file):
    import random

    model, args, kwargs = call_factory(f"{file}:good")
    assert model.weight.device.type == "meta" and model.weight.shape == (3, 4)
    assert isinstance(args, tuple) and args[0].device.type == "meta" and kwargs == {}
    assert sys.modules["random"] is random


def test_a_module_in_the_working_directory(file, monkeypatch):
    file.rename(file.with_name("user_models_for_this_test.py"))
    monkeypatch.chdir(file.parent)
    assert call_factory("user_models_for_this_test:good")[0].out_features == 3
    with pytest.raises(FactoryError, match="no module 'user_models_for_this_test.large'"):
        call_factory("user_models_for_this_test.large:good")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("goodd", "has no function 'goodd'(?s:.)*good"),
        ("nothing_like_it", "(?s:.)*its functions: bad, good, no_dict"),
        ("NUMBER", "NUMBER in .* is no function but a int"),
        ("bad", r"bad raised .*(?s:.)*random.py:13, in bad: return int\(layer.weight.sum\(\)\)(?s:.)*meta"),
        ("two", "two returned 2 values"),
        ("number", "number returned a int"),
        ("no_model", "returned a Tensor as its model"),
        ("no_tuple", "returned a Tensor as args"),
        ("no_dict", "returned a NoneType as kwargs"),
    ],
)
def test_what_is_wrong_with_the_factory_is_said(file, name, text):
    with pytest.raises(FactoryError, match=text):
        call_factory(f"{file}:{name}")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("models.py", "does not name a factory"),
        (":large", "does not name a factory"),
        ("models.py:", "does not name a factory"),
        ("no_such_file.py:large", "there is no file 'no_such_file.py'"),
        ("no_such_module:large", "there is no module 'no_such_module'"),
    ],
)
def test_what_is_wrong_with_the_path_is_said(path, text):
    with pytest.raises(FactoryError, match=text):
        call_factory(path)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "import nothing_of_that_name",
            "raised ModuleNotFoundError(?s:.)*random.py:1, in <module>: import nothing_of_that_name",
        ),
        ("x = 1\nx +\n", "raised SyntaxError(?s:.)*random.py:2"),
        ("import sys\nsys.exit(3)", "raised SystemExit"),
    ],
)
def test_code_that_cannot_be_imported(file, source, text):
    file.write_text(source)
    with pytest.raises(FactoryError, match=text):
        call_factory(f"{file}:good")
    assert "_rannc_plan_random" not in sys.modules


def test_the_device_is_meta_only_inside(file):
    call_factory(f"{file}:good")
    assert torch.zeros(1).device.type == "cpu"
