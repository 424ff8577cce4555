"""The plan as text: what is written reads back equal, and no text whatsoever gives anything but a plan or a
PlanError.
"""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rannc_backend.errors import PlanError
from rannc_backend.ir.plan import (
    SCHEMA_VERSION,
    Alternative,
    BlockPlan,
    ClusterAssumption,
    DtypeRate,
    Plan,
    RowCost,
    StageCost,
    StagePlan,
    WhatIf,
)
from rannc_backend.ir.plan_checks import check_against
from rannc_backend.ir.plan_text import MAX_PLAN_CHARACTERS

AMOUNTS = st.floats(min_value=0, max_value=1e30, allow_nan=False, allow_infinity=False)
COUNTS = st.integers(min_value=0, max_value=2**63 - 1)
SECONDS_OF_STAGE = [name for name in StageCost.model_fields if name.endswith("_seconds")]
BYTES_OF_STAGE = [
    name
    for name in StageCost.model_fields
    if name.endswith("_bytes") and name not in ("peak_bytes", "elsewhere_bytes", "host_bytes", "update_bytes")
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def costs(draw: st.DrawFn) -> StageCost:
    parts = {name: draw(st.integers(0, 2**60)) for name in BYTES_OF_STAGE}
    return StageCost(
        **{name: draw(AMOUNTS) for name in SECONDS_OF_STAGE},
        **parts,
        peak_bytes=sum(parts.values()),
        host_bytes=draw(COUNTS),
        update_bytes=draw(COUNTS),
        idle_share=draw(st.floats(0, 1)),
    )


@st.composite
def costs_at_rows(draw: st.DrawFn) -> tuple[RowCost, ...]:
    numbers = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=3)))
    return tuple(
        RowCost(
            rows=rows,
            forward_seconds=draw(AMOUNTS),
            backward_seconds=draw(AMOUNTS),
            activation_bytes=draw(COUNTS),
            workspace_bytes=draw(COUNTS),
        )
        for rows in numbers
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_blocks = draw(st.integers(1, 5))
    blocks = []
    for index in range(num_blocks):
        nodes = tuple(f"n{index}_{position}" for position in range(draw(st.integers(1, 3))))
        parameters = draw(st.lists(st.sampled_from(["tied", f"w{index}", f"b{index}"]), unique=True))
        counts = {
            name: draw(COUNTS) for name in BlockPlan.model_fields if name.endswith(("_flops", "_bytes"))
        }
        blocks.append(
            BlockPlan(
                index=index,
                structure="s",
                nodes=nodes,
                modules=(draw(TEXTS),),
                parameters=tuple(parameters),
                **counts,
            )
        )
    cuts = sorted(draw(st.sets(st.integers(1, num_blocks - 1)))) if num_blocks > 1 else []
    bounds = [0, *cuts, num_blocks]
    stages, first_rank = [], 0
    for index, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        own = blocks[begin:end]
        num_replicas = draw(st.integers(1, 3))
        stages.append(
            StagePlan(
                index=index,
                blocks=tuple(range(begin, end)),
                nodes=tuple(name for block in own for name in block.nodes),
                modules=(draw(TEXTS),),
                parameters=tuple({name for block in own for name in block.parameters}),
                updated_buffers=(),
                ranks=tuple(range(first_rank, first_rank + num_replicas)),
                recompute=draw(st.floats(0, 1)),
                predicted=draw(costs()),
                at_rows=draw(costs_at_rows()),
                received_bytes_per_row=draw(AMOUNTS),
                gradient_bytes_per_row=draw(AMOUNTS),
                num_buckets=draw(st.integers(1, 4)),
            )
        )
        first_rank += num_replicas
    alternative = Alternative(
        num_stages=1,
        stage_replicas=(1,),
        num_micro_batches=2,
        schedule=draw(st.sampled_from(["1f1b", "fill_drain"])),
        recompute=(draw(st.floats(0, 1)),),
        predicted_step_seconds=draw(st.none() | AMOUNTS),
        reason=draw(TEXTS),
    )
    what_if = WhatIf(
        change=draw(TEXTS),
        predicted_step_seconds=draw(st.none() | AMOUNTS),
        num_stages=2,
        stage_replicas=(1, 3),
    )
    return Plan(
        schema_version=SCHEMA_VERSION,
        fingerprint="f" * 64,
        model_name=draw(TEXTS),
        cluster=make_cluster(draw(AMOUNTS)),
        world_size=first_rank + draw(st.integers(0, 1)),
        batch_rows=draw(st.integers(1, 1000)),
        num_micro_batches=draw(st.integers(1, 9)),
        schedule=draw(st.sampled_from(["1f1b", "fill_drain"])),
        memory_limit_bytes=draw(COUNTS),
        blocks=tuple(blocks),
        stages=tuple(stages),
        predicted_step_seconds=draw(AMOUNTS),
        equal_split_seconds=draw(st.none() | AMOUNTS),
        proven_gap=draw(st.floats(0, 1)),
        costs_from=draw(TEXTS),
        binding=draw(TEXTS),
        alternatives=draw(st.sampled_from([(), (alternative,)])),
        what_if=draw(st.sampled_from([(), (what_if,)])),
    )


def make_cluster(launch_seconds: float = 1e-6) -> ClusterAssumption:
    return ClusterAssumption(
        name="test",
        num_devices=4,
        devices_per_node=4,
        device_name="cpu",
        device_memory_bytes=10**9,
        peak_flops=(DtypeRate(dtype="float32", flops_per_second=1e10),),
        memory_bytes_per_second=1e10,
        launch_seconds=launch_seconds,
        intra_node_latency_seconds=1e-5,
        intra_node_bytes_per_second=1e9,
        inter_node_latency_seconds=1e-5,
        inter_node_bytes_per_second=1e9,
    )


def make_plan() -> Plan:
    """Two stages on three ranks; block 1 and 2 share the parameter `tied`."""
    seconds, sizes = dict.fromkeys(SECONDS_OF_STAGE, 1.0), dict.fromkeys(BYTES_OF_STAGE, 10)
    cost = StageCost(**seconds, **sizes, peak_bytes=60, idle_share=0.25)
    at_rows = tuple(
        RowCost(
            rows=rows,
            forward_seconds=rows / 2,
            backward_seconds=rows / 2,
            activation_bytes=5 * rows,
            workspace_bytes=10,
        )
        for rows in (1, 2)
    )
    traffic = {"received_bytes_per_row": 4.0, "gradient_bytes_per_row": 4.0, "num_buckets": 1}
    counts = {name: 5 for name in BlockPlan.model_fields if name.endswith(("_flops", "_bytes"))}
    blocks = tuple(
        BlockPlan(
            index=index,
            structure="s",
            nodes=(f"node{index}",),
            modules=("layer",),
            parameters=names,
            **counts,
        )
        for index, names in enumerate([("w0",), ("tied",), ("tied", "w2")])
    )
    stages = (
        StagePlan(
            index=0, blocks=(0, 1), nodes=("node0", "node1"), modules=("layer",), parameters=("tied", "w0"),
            updated_buffers=(), ranks=(0,), recompute=1.0, predicted=cost, at_rows=at_rows, **traffic,
        ),
        StagePlan(
            index=1, blocks=(2,), nodes=("node2",), modules=("layer",), parameters=("tied", "w2"),
            updated_buffers=(), ranks=(1, 2), recompute=1.0, predicted=cost, at_rows=at_rows, **traffic,
        ),
    )  # fmt: skip
    return Plan(
        schema_version=SCHEMA_VERSION, fingerprint="f" * 64, model_name="Net", cluster=make_cluster(), world_size=3,
        batch_rows=8, num_micro_batches=4, schedule="1f1b", memory_limit_bytes=10**9, blocks=blocks, stages=stages,
        predicted_step_seconds=1 / 3, equal_split_seconds=0.5, proven_gap=0.0, costs_from="analytic",
        binding="compute of stage 0",
        alternatives=(
            Alternative(
                num_stages=1, stage_replicas=(3,), num_micro_batches=2, schedule="1f1b", recompute=(1.0,),
                predicted_step_seconds=None, reason="does not fit",
            ),
        ),
        what_if=(WhatIf(change="twice the memory", predicted_step_seconds=0.3, num_stages=1, stage_replicas=(3,)),),
    )  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans())
def test_text_reads_back_as_the_same_plan_and_the_same_bytes(plan: Plan) -> None:
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert text.endswith("}\n") and text.isascii()


def test_floats_are_kept_to_six_digits_from_the_start() -> None:
    assert make_plan().predicted_step_seconds == 0.333333


def test_order_of_names_that_form_a_set_does_not_change_the_text() -> None:
    data = json.loads(make_plan().to_json())
    data["stages"][1]["parameters"].reverse()
    data = dict(reversed(data.items()))
    assert Plan.from_json(json.dumps(data)).to_json() == make_plan().to_json()


def test_ownership() -> None:
    plan = make_plan()
    assert plan.owners("tied") == (0, 1, 2)
    assert plan.owners("w2") == (1, 2)
    assert plan.owners("nothing") == ()
    assert [plan.stages_of_rank(rank) for rank in range(4)] == [(0,), (1,), (1,), ()]
    assert plan.lanes == ((0,), (1,)) and plan.num_working_ranks == 3
    assert plan.stage_replicas == (1, 2)


def test_ranks_may_have_several_stages() -> None:
    plan = Plan.from_json(edited(["stages", 1, "ranks"], [0]))
    assert plan.lanes == ((0, 1),) and plan.num_working_ranks == 1
    assert plan.stages_of_rank(0) == (0, 1) and plan.stages_of_rank(1) == ()
    assert plan.owners("tied") == (0,)
    assert plan.lane_peak_bytes(0) == plan.lane_peak_bytes(1) == 110  # one workspace of 10 serves both
    assert make_plan().lane_peak_bytes(1) == 60
    fits = {"fingerprint": "f" * 64, "world_size": 3}
    check_against(plan, **fits, device_memory_bytes=110)
    with pytest.raises(PlanError, match="stages 0 and 1 of the plan need 110 bytes"):
        check_against(plan, **fits, device_memory_bytes=109)


def edited(path: list, value: object) -> str:
    data = json.loads(make_plan().to_json())
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return json.dumps(data)


WRONG_EDITS = [
    (["stages", 1, "ranks"], [0, 1], "rank 0 is twice in a stage, or in two that do not have the same ranks"),
    (["stages", 1, "ranks"], [1, 1], "rank 1 is twice in a stage"),
    (["stages", 1, "ranks"], [], "stages[1].ranks"),
    (["stages", 1, "ranks"], [1, 3], "rank 3 is in a stage, but the plan is for ranks 0 to 2"),
    (["stages", 1, "ranks"], [1, -2], "stages[1].ranks[1]"),
    (["stages", 1, "ranks"], [1, True], "stages[1].ranks[1]"),
    (["stages", 1, "blocks"], [1, 2], "block 1 is in two stages"),
    (["stages", 1, "blocks"], [7], "block 7 is in a stage, but there are only 3 blocks"),
    (["stages", 0, "blocks"], [0], "block 1 is in no stage"),
    (["stages", 0, "nodes"], ["node0"], "stages[0] lacks node 'node1'"),
    (["stages", 0, "nodes"], ["node0", "node1", "node2"], "node 'node2' is in two stages"),
    (["stages", 0, "nodes"], ["node0", "node1", "ghost"], "lists node 'ghost'"),
    (["stages", 0, "parameters"], ["w0"], "stages[0] lacks parameter 'tied'"),
    (["stages", 0, "parameters"], ["w0", "w0", "tied"], "'w0' is listed twice"),
    (["stages", 0, "parameters"], ["w0", "tied", "alien"], "lists parameter 'alien'"),
    (["stages", 0, "index"], 1, "stages[0].index is 1"),
    (["blocks", 2, "index"], 0, "blocks[2].index is 0"),
    (["blocks", 2, "nodes"], ["node1"], "node 'node1' is in two blocks"),
    (["schedule"], "magic", "schedule"),
    (["stages", 0, "predicted", "peak_bytes"], 61, "peak_bytes is 61, and its parts sum up to 60"),
    (["stages", 0, "predicted", "idle_share"], 1.5, "stages[0].predicted.idle_share"),
    (["stages", 1, "recompute"], -0.1, "stages[1].recompute"),
    (["stages", 1, "at_rows"], [], "stages[1].at_rows"),
    (["stages", 1, "at_rows", 0, "rows"], 0, "stages[1].at_rows[0].rows"),
    (["stages", 1, "at_rows", 0, "rows"], 2, "stages[1].at_rows must be ascending"),
    (["stages", 1, "at_rows", 0, "forward_seconds"], "fast", "stages[1].at_rows[0].forward_seconds"),
    (["stages", 0, "num_buckets"], 0, "stages[0].num_buckets"),
    (
        ["alternatives", 0, "stage_replicas"],
        [2, 1],
        "alternatives[0]: stage_replicas has 2 entries for 1 stages",
    ),
    (["alternatives", 0, "recompute"], [], "alternatives[0].recompute"),
    (["alternatives", 0, "recompute"], [1.0, 0.5], "alternatives[0]: recompute has 2 entries for 1 stages"),
    (["what_if", 0, "stage_replicas"], [2, 1], "what_if[0]: stage_replicas has 2 entries for 1 stages"),
    (["proven_gap"], 2.0, "proven_gap"),
    (["schema_version"], 1, "schema version 1; this release reads version 2"),
    (["schema_version"], True, "schema version True"),
    (["predicted_step_seconds"], -1.0, "predicted_step_seconds"),
    (["predicted_step_seconds"], 1e31, "predicted_step_seconds"),
    (["predicted_step_seconds"], "1", "predicted_step_seconds"),
    (["world_size"], 3.5, "world_size"),
    (["num_micro_batches"], 0, "num_micro_batches"),
    (["surprise"], 1, "surprise"),
    (["blocks"], {}, "blocks"),
    (["stages"], [], "stages"),
    (["batch_rows"], 10**400, "batch_rows"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG_EDITS, ids=lambda item: str(item)[:30])
def test_hand_edits_that_do_not_agree_are_named(path: list, value: object, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(edited(path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON: line 1"),
        ("[]", "a JSON object, not list"),
        ("null", "not NoneType"),
        ("[" * 100_000, "nested deeper"),
        ('{"a":' * 100_000, "nested deeper"),
        ('{"a": 1, "a": 2}', "key 'a' is given twice"),
        ('{"schema_version": NaN}', "NaN"),
        ('{"schema_version": ' + "9" * 10_000 + "}", "not valid"),
        (" " * (MAX_PLAN_CHARACTERS + 1), "characters"),
        ('{"schema_version": 2, "model_name": "\\ud800"}', "not valid"),
    ],
    ids=lambda item: item[:20],
)  # fmt: skip
def test_texts_that_are_no_plans(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    assert message in str(caught.value)


def test_missing_parts_are_named() -> None:
    data = json.loads(make_plan().to_json())
    later = {
        "formats",
        "stage_compiler",
        "zero_stage",
        "zero_ngroups",
        "offload",
        "outputs",
        "outputs_left_out",
        "proven_for",
        "told_recompute",
        "plan_name",
        "measured_step_seconds",
    }  # which plans of before do not have
    for key in data.keys() - later:
        less = copy.copy(data)
        del less[key]
        with pytest.raises(PlanError, match=key if key != "schema_version" else "schema version None"):
            Plan.from_json(json.dumps(less))


def test_plans_of_before_do_without_what_came_later() -> None:
    data = json.loads(make_plan().to_json())
    later = ("stage_compiler", "zero_stage", "zero_ngroups", "outputs", "outputs_left_out", "proven_for")
    for key in (*later, "told_recompute", "plan_name", "formats", "measured_step_seconds"):
        del data[key]
    del data["offload"], data["cluster"]["host_bytes_per_second"]
    for stage in data["stages"]:
        for name in ("offload_seconds", "host_bytes", "update_bytes"):
            del stage["predicted"][name]
    plan = Plan.from_json(json.dumps(data))
    assert plan.told_recompute == plan.plan_name == ""
    assert (plan.stage_compiler, plan.zero_stage, plan.zero_ngroups) == ("inductor", 0, 1)
    assert (plan.offload, plan.offload_seconds, plan.stages[0].predicted.host_bytes) == ("none", 0, 0)
    assert (plan.outputs, plan.outputs_left_out) == ((), "")


SAMPLE = make_plan().to_json()


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_corrupted_text_gives_a_checked_plan_or_a_plan_error(data: st.DataObject) -> None:
    text = SAMPLE
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(begin, min(len(text), begin + 40)))
        junk = data.draw(
            st.text(max_size=5) | st.sampled_from(['"', "[", "{", "0", "-", "1e999", "null", "\\u0000", ","])
        )
        text = text[:begin] + junk + text[end:]
    check_outcome(text)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_plan_with_one_value_swapped_gives_a_checked_plan_or_a_plan_error(data: st.DataObject) -> None:
    tree = json.loads(SAMPLE)
    place, key = None, None
    node = tree
    while isinstance(node, dict | list) and node and (place is None or data.draw(st.integers(0, 4))):
        place = node
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node = place[key]
    scalars = st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=4)
    place[key] = data.draw(st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=4))
    check_outcome(json.dumps(tree))


def check_outcome(text: str) -> None:
    try:
        plan = Plan.from_json(text)
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan


def test_check_against_names_the_difference() -> None:
    plan = make_plan()
    same = {"fingerprint": "f" * 64, "world_size": 3}
    check_against(plan, **same, parameters=["tied", "w0", "w2"], device_memory_bytes=60)
    for change, message in [
        ({"world_size": 4}, "for 3 ranks and this run has 4"),
        ({"fingerprint": "e" * 64}, "another graph"),
        ({"parameters": ["tied", "w0"]}, "'w2', which the model does not use"),
        ({"parameters": ["tied", "w0", "w2", "w3"]}, "'w3' on no stage"),
        ({"device_memory_bytes": 59}, "needs 60 bytes"),
    ]:
        with pytest.raises(PlanError) as caught:
            check_against(plan, **{**same, **change})
        assert message in str(caught.value)


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(Exception, match="frozen"):
        make_plan().stages[0].index = 3


def test_the_fullest_rank_has_all_of_its_stages() -> None:
    assert make_plan().peak_bytes == 60
    assert Plan.from_json(edited(["stages", 1, "ranks"], [0])).peak_bytes == 110
