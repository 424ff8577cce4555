"""Tests that run in `make test-full` alone though their file says nothing of it.

`make test` has ten minutes on two cores. What is here was measured, and costs more than it adds: the same
point on a larger model, over more ranks, or through another door, which another test of the default run
shows. What a test adds decides, not its seconds alone.
"""

from __future__ import annotations

_BY_FILE = {
    "tests/distributed/test_bootstrap.py": (
        "test_mpirun[3]",
        "test_a_group_of_the_user",
    ),
    "tests/distributed/test_buffers.py": (
        "test_buffers_that_a_model_changes[counting-training_first]",
        "test_buffers_that_a_model_changes[counting-without_gradients]",
        "test_buffers_that_a_model_changes[normalized-without_gradients]",
        "test_buffers_that_a_model_changes[averaging-training_first]",
    ),
    "tests/distributed/test_checkpoints.py": ("test_checkpoint[checkpoint-meta-mlp_loss-2]",),
    "tests/distributed/test_contract.py": (
        "test_equals_one_process[written_into_messages]",
        "test_point[sizes_change_inductor]",
        "test_point[shared_sums_late]",
        "test_point[shared_sums_in_a_ring]",
        "test_point[accumulate_tied]",
        "test_equals_one_process[fourteen_padded]",
        "test_dropout_does_not_depend_on_the_plan[random-1-1-1-1]",
        "test_dropout_does_not_depend_on_the_plan[random-2]",
        "test_equals_one_process[three_stages_later]",
        "test_equals_one_process[skip_over_replicas]",
        "test_point[input_gradients_replicas]",
        "test_equals_one_process[one_row_padded]",
        "test_equals_one_process[rows_not_kept]",
        "test_equals_one_process[several_outputs]",
        "test_point[shared_sums_tied]",
        "test_equals_one_process[fill_drain]",
        "test_point[first_batch_of_one]",
    ),
    "tests/distributed/test_deployments.py": (
        "test_memory_is_predicted_not_too_low_and_not_much_too_high[deployment-memory]",
        "test_loaded_and_edited_deployments_train_as_one_process[deployment-tied]",
        "test_measured_steps_are_written_and_change_nothing[deployment-measured-replicas]",
        "test_measured_steps_are_written_and_change_nothing[deployment-measured-fill_drain]",
        "test_measured_steps_are_written_and_change_nothing[deployment-measured-1f1b]",
        "test_measured_steps_are_written_and_change_nothing[deployment-measured-inductor]",
    ),
    "tests/distributed/test_equality.py": (
        "test_equals_one_process[llama-r2-s1-1-m3]",
        "test_equals_one_process[vit-r2-s1-1-m3]",
        "test_equals_one_process[bert-r2-s1-1-m3]",
        "test_equals_one_process[spectral_norm-r4-s1-1-1-1-m3]",
        "test_equals_one_process[mlp_loss-r2-s1-1-m2-recompute0-inductor]",
        "test_equals_one_process[mlp_loss-r4-s1-1-2-m4]",
        "test_equals_one_process[mlp_loss-r2-sauto-m2-measured-stages]",
        "test_equals_one_process[dataclass_output-r4-s3-1-m3]",
        "test_equals_one_process[unused_parameter-r4-s1-1-1-1-m2]",
        "test_equals_one_process[channels_last-r4-s3-1-m2]",
        "test_equals_one_process[resnet-r2-s1-1-m3]",
    ),
    "tests/distributed/test_examples.py": (
        "test_example_in_process[train_bert-resumed]",
        "test_example[train_resnet-2]",
        "test_example[tutorial-torchrun-2]",
    ),
    "tests/distributed/test_failures.py": (
        "test_job_ends_soon_and_says_why[segfault-backward]",
        "test_job_ends_soon_and_says_why[kill-before]",
        "test_job_ends_soon_and_says_why[exception-capture]",
    ),
    "tests/distributed/test_failures_runtime.py": (
        "test_the_start_has_a_limit[loop-before_call-mpirun-rank 1 has not called a compiled model]",
        "test_a_failing_rank[memory-allreduce-RANNC_PIPELINE_NUM]",
        "test_a_failing_rank[os_exit5-after-os._exit(5)]",
        "test_a_failing_rank[term-control-received SIGTERM]",
        "test_a_failing_rank[segfault-allreduce-ended without a word]",
        "test_the_exit_code_of_one_process[save-1]",
        "test_a_rank_that_never_starts[raise]",
        "test_a_rank_that_ends_while_the_others_are_busy[raise-before_lookup]",
        "test_the_launcher_is_told_to_stop[SIGTERM]",
        "test_a_thread_that_fails",
        "test_a_reported_failure",
        "test_rank_0_of_4_fails[kill-ended without a word]",
        "test_a_rank_that_ended_in_order_is_named_once_the_others_wait",
    ),
    "tests/distributed/test_harness.py": (
        "test_a_planted_fault_in_the_runtime_fails_the_comparison[planted-swapped_values]",
        "test_a_planted_fault_in_the_runtime_fails_the_comparison[planted-dropped_gradient]",
    ),
    "tests/distributed/test_memory.py": (
        "test_state_and_clipping[clipping_tied]",
        "test_state_and_clipping[state_dict_tied]",
        "test_memory_of_the_process_falls[large-1,1]",
    ),
    "tests/distributed/test_optimizers.py": (
        "test_optimizers_beside_a_compiled_model[state-tied_embedding-before-False]",
        "test_optimizers_beside_a_compiled_model[state-mlp_loss-after-False]",
        "test_optimizers_beside_a_compiled_model[total_norm-replicas]",
        "test_optimizers_beside_a_compiled_model[state-tied_embedding-after-True]",
    ),
    "tests/unit/kernels/test_triton.py": (
        "test_compiled_kernels_are_lean[newest-sm_90]",
        "test_kernels_give_what_their_references_give[3.6-every-8]",
        "test_the_scaling_kernel_gives_what_its_reference_gives[3.6]",
        "test_kernels_give_what_their_references_give[own-every-2]",
    ),
    "tests/unit/passes/batch/test_split_reductions.py": (
        "test_model_families_are_the_same_in_slices[gpt2_masked]",
    ),
    "tests/unit/rannc_backend/planner/blocks/test_block_partitions.py": (
        "test_peak_is_never_under_estimated_and_not_by_much_over[filters-2-0.25]",
        "test_peak_is_never_under_estimated_and_not_by_much_over[chain-3-1.0]",
    ),
    "tests/unit/rannc_backend/planner/blocks/test_cut_blocks.py": (
        "test_blocks_cover_the_staged_nodes_in_order[gpt2-10]",
        "test_blocks_cover_the_staged_nodes_in_order[gpt2-160]",
    ),
    "tests/unit/rannc_backend/planner/blocks/test_blocks_structures.py": (
        "test_twice_as_many_layers_have_no_more_structures[gpt2]",
        "test_one_structure_is_enough_for_layers_that_are_whole_blocks[gpt2]",
        "test_blocks_of_one_structure_cost_the_same[gpt2-11]",
        "test_blocks_of_one_structure_cost_the_same[gpt2-30]",
        "test_blocks_of_one_structure_cost_the_same[gpt2-160]",
        "test_models_are_not_cut_worse_than_their_line_as_it_is[gpt2]",
    ),
    "tests/unit/rannc_backend/capture/nonstrict/test_meta_model.py": (
        "test_a_model_on_meta_gives_the_graph_of_a_real_call_on_the_cpu[resnet]",
    ),
    "tests/unit/rannc_backend/capture/test_models.py": (
        "test_evaluation_without_gradients_and_a_first_batch_of_one",
        "test_outputs_and_gradients_equal_the_models[hf_gpt2_mask-True]",
        "test_outputs_and_gradients_equal_the_models[hf_t5-True]",
    ),
    "tests/unit/rannc_backend/checkpoint/test_crash.py": ("test_killed_for_real",),
    "tests/unit/rannc_backend/stages/test_compiled_stage.py": (
        "test_recompute_changes_no_number[gpt2-0.5]",
        "test_every_place_can_be_cut[convolutions]",
        "test_no_operator_of_the_two_graphs_changes_its_operands[gpt2]",
        "test_no_batch_size_is_assumed[gpt2]",
        "test_stages_equal_the_uncut_model[perceptron-4]",
        "test_stages_equal_the_uncut_model[tied-2]",
        "test_stages_equal_the_uncut_model[convolutions-2]",
        "test_saved_bytes_are_what_is_saved",
        "test_less_budget_saves_less",
    ),
    "tests/unit/rannc_backend/runtime/job/test_monitor.py": ("test_hooks_leave_the_users_handlers_alone",),
    "tests/unit/rannc_backend/capture/test_odd_models.py": ("test_one_process[fourier]",),
    "tests/unit/rannc_backend/planner/test_planner.py": (
        "test_plans_are_whole_and_can_be_cut[gpt2-1-{}]",
        "test_activations_are_estimated_near_what_the_compiled_stage_saves[gpt2-3-1.4]",
        "test_plans_are_whole_and_can_be_cut[gpt2-4-{'partition_num': 4}]",
    ),
    "tests/unit/rannc_backend/planner/test_plan_model.py": (
        "test_a_model_on_meta_is_planned[gpt2]",
        "test_the_plan_of_a_real_model_is_that_of_its_shapes[True]",
        "test_rules_trace_no_block_and_choose_much_the_same",
    ),
    "tests/unit/rannc_backend/planner/test_projection.py": (
        "test_gpt2_evaluates_without_labels_under_its_training_plan",
    ),
    "tests/unit/rannc_backend/schedule/test_verify.py": (
        "test_verification_takes_twice_as_long_for_twice_as_many_micro_batches",
    ),
    "tests/unit/rannc_backend/planner/blocks/test_traced_stages.py": (
        "test_memory_of_a_stage_is_what_it_takes[gpt2-3-1.0]",
    ),
}
ONLY_IN_FULL = frozenset(f"{path}::{name}" for path, names in _BY_FILE.items() for name in names)
"""As "tests/distributed/test_contract.py::test_point[modes]"."""
