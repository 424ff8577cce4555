"""Shares of losses, the label smoother over ranks, and settings that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_pt_utils import LabelSmoother

from rannc_backend.errors import UserInputError
from rannc_backend.integrations import trainer
from rannc_backend.integrations.trl import RanncSFTTrainer

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


def _rows_of_a_rank(rank: int, remainder: int, monkeypatch: pytest.MonkeyPatch, **members: Any) -> Any:
    """The last batch of one of three ranks, of four rows for each."""
    monkeypatch.setattr(trainer.bootstrap, "start", lambda: SimpleNamespace(size=3, rank=rank))
    state = SimpleNamespace(end_of_dataloader=members.pop("ends", True), remainder=remainder)
    of: Any = type("Played", (trainer.RanncTrainerMixin,), members.pop("methods", {}))
    played = object.__new__(of)
    played.accelerator = SimpleNamespace(gradient_state=state, even_batches=True)
    played.label_names = ["labels"]
    rows = torch.arange(4)[:, None].repeat(1, 3)
    inputs = {"input_ids": rows, "labels": rows, "scale": torch.ones(1)}
    return played._without_repeated(inputs, **members)


@pytest.mark.parametrize(
    ("remainder", "counts"), [(3, [3, 0, 0]), (6, [4, 2, 0]), (9, [4, 4, 1]), (0, [4, 4, 4])]
)
def test_rows_that_fill_a_last_batch_up_are_left_out(
    remainder: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, count in enumerate(counts):
        found = _rows_of_a_rank(rank, remainder, monkeypatch)
        assert found["input_ids"].tolist() == [[row] * 3 for row in range(count)]
        assert len(found["labels"]) == count and len(found["scale"]) == 1


def test_fewer_rows_than_ranks_and_rows_of_a_generation_stay_without_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for members in ({"remainder": 2}, {"remainder": 6, "keeps_rows": True}):
        own = members["remainder"] - 4 if members["remainder"] > 4 else 0
        rank = 1
        found = _rows_of_a_rank(rank, monkeypatch=monkeypatch, **members)
        assert len(found["input_ids"]) == 4
        assert found["labels"][:, 0].tolist() == [*range(own), *[-100] * (4 - own)]


def test_ranks_may_have_no_row_where_no_stage_has_more_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_most_replicas", lambda model, num_ranks: 2)
    for rank, count in enumerate([2, 0, 0]):
        assert len(_rows_of_a_rank(rank, 2, monkeypatch)["labels"]) == count
    assert len(_rows_of_a_rank(1, 1, monkeypatch)["labels"]) == 4  # one row, for two replicas


def test_rows_stay_before_the_last_batch_and_for_a_loss_of_the_script(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def own_loss(self: Any, *args: Any) -> None:
        raise AssertionError

    for members in ({"ends": False}, {"methods": {"compute_loss": own_loss}}):
        assert not caplog.records
        assert len(_rows_of_a_rank(2, 6, monkeypatch, **members)["input_ids"]) == 4
    assert "count twice in its loss, since it is for a loss of the script's own" in caplog.text


def test_losses_of_other_libraries_are_known() -> None:
    class Other(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    class OnRanks(trainer.RanncTrainerMixin, Other):
        pass

    kinds = {OnRanks: False, trainer.RanncTrainer: True, RanncSFTTrainer: True}
    assert {kind: trainer._is_ours(object.__new__(kind)) for kind in kinds} == kinds


def test_a_trainer_whose_settings_come_third_gets_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class Third:
        label_smoother = compute_loss_func = args = None

        def __init__(self, model: Any, other: Any = None, args: Any = None) -> None:
            self.given = model, other, args

    class OnRanks(trainer.RanncTrainerMixin, Third):  # type: ignore[misc]
        pass

    seen: list[Any] = []
    for name in ("join_job", "mention_untried"):
        monkeypatch.setattr(trainer, name, lambda *given: None)
    monkeypatch.setattr(trainer, "_refuse_settings", seen.append)
    settings = object.__new__(transformers.TrainingArguments)
    assert OnRanks("model", args=settings).given == ("model", None, settings)
    assert OnRanks("model", "other", settings, rannc_options={"verbose": True}).given == (
        "model",
        "other",
        settings,
    )
    assert [each is settings for each in seen] == [True, False] * 2


def test_results_of_the_rows_that_are_left_have_the_places_of_all() -> None:
    logits = torch.ones(2, 3)
    filled = trainer._with_rows((logits, {"hidden": logits, "weights": torch.ones(5)}), 2, 4)
    assert filled[0].tolist() == filled[1]["hidden"].tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2
    assert len(filled[1]["weights"]) == 5 and trainer._with_rows(None, 2, 4) is None
    (whole,) = trainer._with_rows((logits,), len(logits), len(logits))
    assert whole is logits


def test_a_loss_function_must_divide_by_the_items_of_all_ranks(num_ranks: int) -> None:
    def summed(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
        return outputs.sum() / num_items_in_batch

    def mean(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
        return outputs.mean()

    outputs, num_items = torch.tensor([2.0, 4.0]), torch.tensor(8)
    assert trainer.LossOverRanks(summed)(outputs, None, num_items_in_batch=num_items) == 0.75
    assert trainer.LossOverRanks(mean)(outputs, None) == 3.0  # an evaluation without items
    function = trainer.LossOverRanks(mean)
    if num_ranks == 1:
        assert function(outputs, None, num_items_in_batch=num_items) == 3.0
        return
    with pytest.raises(UserInputError, match="does not use num_items_in_batch"):
        function(outputs, None, num_items_in_batch=num_items)


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


@pytest.mark.parametrize("is_gathered", [False, True])
def test_one_rank_alone_reads_the_states_that_it_has(
    is_gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    with trainer._states_of_this_rank(model):  # not planned yet
        assert model.state_dict()
    table = SimpleNamespace(is_gathered=is_gathered)
    sessions = {model: SimpleNamespace(table=table)}
    monkeypatch.setattr(trainer, "REGISTRY", SimpleNamespace(sessions=sessions))
    with trainer._states_of_this_rank(model):
        assert table.is_gathered
    assert table.is_gathered is is_gathered
