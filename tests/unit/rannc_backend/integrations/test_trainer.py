"""Shares of losses, the label smoother over ranks, and settings that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_pt_utils import LabelSmoother

from rannc_backend.errors import UserInputError
from rannc_backend.integrations import trainer

_SMALL = GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)


@pytest.fixture(autouse=True)
def accelerate_begins_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # TrainingArguments write it
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(params=[1, 4])
def num_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(trainer.bootstrap, "start", lambda: SimpleNamespace(size=request.param))
    return int(request.param)


@pytest.mark.parametrize("form", ["output", "tuple", "logits"])
def test_a_loss_of_counted_items_is_given_as_a_share(form: str, num_ranks: int) -> None:
    loss, logits = torch.tensor(6.0), torch.randn(2, 3)
    outputs: dict[str, Any] = {
        "output": CausalLMOutput(loss=loss, logits=logits),
        "tuple": (loss, logits),
        "logits": (logits,),
    }
    given = outputs[form]
    shared = trainer._share_of_loss(nn.Linear(1, 1), (), {"num_items_in_batch": torch.tensor(5)}, given)
    expected = torch.tensor(6.0 / num_ranks)
    if form == "logits":
        assert shared is given
        return
    found, rest = (shared["loss"], shared["logits"]) if form == "output" else shared
    assert torch.equal(found, expected) and rest is logits
    found *= num_ranks  # as the Trainer does, in place: the model's own value stays
    assert loss == 6.0 and found == 6.0


def test_a_model_is_compiled_once_with_shares_of_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []

    def prepare(accelerator: Any, root: nn.Module, options: Any) -> nn.Module:
        compiled.append(torch.compile(root, backend="eager"))
        return compiled[-1]

    monkeypatch.setattr(trainer, "prepare_model", prepare)
    of = SimpleNamespace(_rannc_model=None, accelerator=None, _rannc_options={})
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    wrap: Any = trainer.RanncTrainerMixin._wrap_model
    assert wrap(of, first) is wrap(of, first, training=False) is wrap(of, compiled[0]) is compiled[0]
    assert wrap(of, second) is compiled[1] and len(compiled) == 2
    assert [list(each._forward_hooks.values()) for each in compiled] == [[trainer._share_of_loss]] * 2


def test_a_mean_is_left_alone(num_ranks: int) -> None:
    output = CausalLMOutput(loss=torch.tensor(6.0))
    assert trainer._share_of_loss(nn.Linear(1, 1), (), {}, output) is output
    assert output["loss"] == 6.0


def test_a_loss_that_cannot_be_found_is_refused(num_ranks: int) -> None:
    with pytest.raises(UserInputError, match="gives a Tensor, in which the Trainer's loss is not found"):
        trainer._share_of_loss(nn.Linear(1, 1), (), {"num_items_in_batch": 5}, torch.tensor(6.0))


@pytest.mark.parametrize("is_causal", [False, True])
def test_smoothed_losses_of_ranks_have_the_mean_of_all_rows(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with different numbers of labels, played one after the other."""
    logits, labels = torch.randn(6, 5, 7).double(), torch.randint(7, (6, 5))
    labels[:2, 2:] = -100
    whole = LabelSmoother(epsilon=0.1)({"logits": logits}, labels, shift_labels=is_causal)
    num_items = (labels[:, 1:] if is_causal else labels).ne(-100).sum()
    monkeypatch.setattr(trainer.bootstrap, "start", lambda: SimpleNamespace(size=2))
    counted = []

    def summed(count: torch.Tensor, reduction: str) -> torch.Tensor:
        counted.append(int(count))
        assert reduction == "sum"
        return num_items

    monkeypatch.setattr(trainer, "reduce", summed)
    smoother = trainer.SmootherOverRanks(LabelSmoother(epsilon=0.1), is_causal=is_causal)
    ranks = [smoother({"logits": logits[rows]}, labels[rows]) for rows in (slice(0, 2), slice(2, 6))]
    assert sum(counted) == num_items
    assert float(sum(ranks) / 2) == pytest.approx(float(whole), rel=1e-6)


def test_items_that_the_trainer_has_counted_are_not_counted_again(num_ranks: int) -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    plain = LabelSmoother(epsilon=0.1)
    expected = plain({"logits": logits}, labels, shift_labels=True, num_items_in_batch=20)
    smoother = trainer.SmootherOverRanks(plain, is_causal=True)
    assert torch.equal(smoother({"logits": logits}, labels, num_items_in_batch=20), expected)


def test_models_whose_labels_are_shifted_are_known_by_their_class() -> None:
    small = BertConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    assert trainer._is_causal(GPT2LMHeadModel(_SMALL))
    assert not trainer._is_causal(BertForSequenceClassification(small))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("auto_find_batch_size", True),
        ("save_on_each_node", True),
        ("average_tokens_across_devices", False),
        ("torch_compile_backend", "inductor"),
        ("torch_compile_mode", "max-autotune"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(setting: str, value: object, tmp_path: Path) -> None:
    settings: dict[str, Any] = {setting: value}
    if setting == "torch_compile_mode":
        settings["torch_compile_backend"] = "rannc"
    args = trainer.RanncTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **settings)
    with pytest.raises(UserInputError, match=f"argument {setting}(?s:.*)leave {setting}"):
        trainer.RanncTrainer(GPT2LMHeadModel(_SMALL), args)


def test_the_backend_may_be_named_and_compiled_models_are_refused(
    tmp_path: Path,
) -> None:
    args = trainer.RanncTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], torch_compile_backend="rannc"
    )
    model = GPT2LMHeadModel(_SMALL)
    made = trainer.RanncTrainer(model, args)
    assert made.accelerator.state.dynamo_plugin.backend.value == "NO"
    with pytest.raises(UserInputError, match="calls the plain model"):
        made.compute_loss(model, {})
    with pytest.raises(UserInputError, match="was given a compiled model"):
        trainer.RanncTrainer(torch.compile(model, backend="rannc"), args)
