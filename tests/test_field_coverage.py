"""Every kind of fault that was met in the field is held by a test or a case, by its id.

Groups A (the declaration), B (routing and substitution), C (ranks and stages), D (names and
layouts), E (config fields and plans) and F (files, headers, index). A test is named by file and
function, a case by its id, an id of ``test_field_cases.py`` by itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_field_cases import CASES

ROOT = Path(__file__).resolve().parent.parent

HELD_BY: dict[str, tuple[str, ...]] = {
    "A01": ("A01", "test_inspect.py::test_a01_other_dialects_are_named"),
    "A02": ("A02", "explicit/approx-form-beside-differing"),
    "A03": ("A03",),
    "A04": ("A04",),
    "A06": ("A06",),
    "A07": ("A07",),
    "A08": ("A08",),
    "A10": (
        "test_loading.py::test_a_shared_constant_is_loaded_and_updated_in_every_place",
        "test_explicit.py::test_names_are_those_declared_and_may_be_shared",
        "outputs/olmoe-explicit-shared",
        "test_convert.py::test_a10_a_shared_constant_becomes_one_per_expert",
    ),
    "A11": (
        "test_explicit.py::test_a_wrong_member_is_refused_where_it_stands",
        "explicit/version-true",
        "explicit/semantics-number",
        "explicit/count-too-small",
    ),
    "A12": (
        "test_explicit.py::test_a_path_that_names_no_experts_is_refused",
        "test_explicit.py::test_another_spelling_of_a_path_is_understood_and_noted",
        "explicit/target-twice",
    ),
    "A13": ("A13",),
    "A15": (
        "A15",
        "test_loading.py::test_leftover_projections_of_a_substituted_expert_change_nothing",
    ),
    "A16": ("A16", "test_inspect.py::test_a16_an_expert_without_a_projection"),
    "A17": (
        "A17",
        "test_refusals.py::test_fused_experts_under_a_list_are_refused_with_what_is_expected",
        "test_rewrite_blueprint.py::test_f21_fused_experts_are_taken_apart_as_byte_ranges",
    ),
    "A19": (
        "test_explicit.py::test_a_path_binds_only_to_the_layer_it_names",
        "format/unbuilt-layer-with-constant",
        "load/mtp-constants-unlisted",
    ),
    "A20": (
        "test_loading.py::test_loading_twice_answers_bit_for_bit",
        "test_loading.py::test_an_update_changes_its_constant_and_no_other_tensor",
        "test_loading.py::test_a_reload_is_refused_and_the_old_weights_answer_identically",
        "update/reload-keeps-weights",
    ),
    "A21": (
        "A21",
        "test_convert.py::test_constants_that_change_are_refused_and_so_is_an_unknown_custom_class",
    ),
    "A23": (
        "test_loading.py::"
        "test_every_retained_expert_stands_in_its_ascending_row_and_no_other_is_allocated",
        "test_dense_layers.py::test_rows_belong_to_layers_with_experts",
        "rows/olmoe-one-retained",
        "test_plan.py::test_a23_ties_go_to_the_lowest_id",
        "test_plan.py::test_a23_ranking_all_layers_is_uneven_and_empties_none",
        "test_inspect.py::test_a23_retained_experts_per_layer",
    ),
    "A24": (
        "A24",
        "test_explicit.py::test_compressed_tensors_beside_the_explicit_form",
        "test_explicit.py::test_siblings_of_the_declaration_are_not_ours",
        "test_rewrite_blueprint.py::test_a24_quantised_experts_beside_constants_are_a_warning",
        "test_convert.py::test_a24_compressed_tensors_beside_the_approx_form_stays_out_of_the_explicit",
        "test_convert.py::test_the_rest_of_the_config_keeps_its_order_and_place",
    ),
    "A25": (
        "test_backend_reference.py::test_one_message_has_every_reason_and_nothing_is_read_before",
    ),
    "B01": (
        "test_two_tokens.py::test_route_rewriting",
        "test_two_tokens.py::test_an_id_outside_the_layer_adds_nothing_whatever_its_weight",
        "test_two_tokens.py::test_no_tokens",
    ),
    "B02": ("test_two_tokens.py::test_cancelling_constants", "layer/sum-that-cancels"),
    "B03": ("test_two_tokens.py::test_weights_are_never_renormalised",),
    "B04": (
        "test_config_features.py::test_what_absent_keys_mean",
        "test_config.py::test_list_of_an_unknown_family_is_still_read",
    ),
    "B05": ("test_routing_vectors.py::test_routing",),
    "B06": (
        "test_routing_vectors.py::test_the_factor_reaches_constants_once",
        "test_routing_vectors.py::test_the_factor_never_reaches_shared_experts",
    ),
    "B07": ("test_routing_vectors.py::test_routing", "outputs/minimax-approx"),
    "B09": (
        "test_two_tokens.py::test_routing_in_float32_selects_the_same_experts",
        "test_two_tokens.py::test_the_near_tie_is_a_tie_in_bfloat16",
    ),
    "B10": ("test_routing.py::test_ties_go_to_the_lower_id_every_time",),
    "B11": (
        "test_config_features.py::test_bad_routers",
        "test_config_features.py::test_a_group_may_be_substituted_whole",
        "test_rewrite_blueprint.py::test_b11_groups_are_filled_evenly",
    ),
    "B12": (
        "test_field_semantics.py::test_b12_a_token_without_a_retained_route_gets_constants_alone",
        "layer/row-0-is-large",
    ),
    "B14": ("test_routing.py::test_a_nan_row_stays_distinct_and_alone",),
    "B15": ("test_field_semantics.py::test_b15_every_vector_is_paid_by_its_route",),
    "B16": (
        "B16",
        "test_refusals.py::"
        "test_an_architecture_without_this_substitution_is_refused_with_its_reason",
        "unsupported/router-weight-on-input",
    ),
    "B17": (
        "test_field_semantics.py::test_b17_every_element_of_a_constant_arrives",
        "layer/sum-of-hidden-300",
        "layer/output-of-hidden-257",
    ),
    "B19": ("B19", "test_field_semantics.py::test_b19_a_masked_row_wins_the_routing"),
    "B20": (
        "test_field_semantics.py::test_b20_and_its_shared_expert_once_and_unweighted",
        "unsupported/fused-shared-experts",
    ),
    "B21": (
        "test_validate.py::test_a_constant_must_stay_finite_in_the_parameter_dtype",
        "test_config_features.py::test_dense_layers",
        "load/constant-overflows-float16",
    ),
    "C01": (
        "test_parallel.py::test_a_constant_is_there_once_by_hand",
        "layer/ranks-constants",
        "parallel/tensor-parallel",
    ),
    "C02": (
        "layer/ranks-reduced",
        "test_parallel_distributed.py::test_every_rank_ends_with_the_same_bits",
        "test_parallel_distributed.py::test_collectives_keep_the_order_of_ranks_and_one_rank_adds",
    ),
    "C03": (
        "test_parallel.py::test_ranks_answer_as_one_device",
        "parallel/tensor-parallel-shared-experts",
    ),
    "C05": (
        "test_parallel.py::test_what_stages_load_adds_up_to_the_checkpoint",
        "test_parallel.py::test_a_constant_missing_on_any_stage_fails_the_whole_load",
        "parallel/pipeline-parallel",
        "parallel/pipeline-stage-without-list",
    ),
    "C07": (
        "test_parallel.py::"
        "test_a_size_that_does_not_divide_is_told_with_both_numbers_and_those_that_work",
        "test_parallel.py::test_every_size_that_does_not_divide_is_told_before_anything_is_read",
        "test_parallel_distributed.py::test_the_command_refuses_with_one_message",
    ),
    "C08": (
        "test_parallel.py::test_slices_of_ranks_are_the_source_bit_for_bit",
        "unsupported/expert-parallel",
    ),
    "D01": (
        "D01",
        "test_field_cases.py::test_the_messages_of_misnamed_models_show_what_was_found",
        "test_inspect.py::test_d01_routers_have_many_names",
        "test_rewritten_models.py::test_a_router_under_a_documented_name_that_is_not_the_stored_one_would_show",
    ),
    "D02": (
        "D02",
        "test_inspect.py::test_d02_shared_experts_are_not_routed",
        "test_rewrite_blueprint.py::test_prune_compacts_ids_and_cuts_the_router",
    ),
    "D03": ("D03", "test_rewrite_blueprint.py::test_d03_other_gates_are_no_routers"),
    "D06": (
        "D06",
        "test_inspect.py::test_d06_the_layout_is_told_per_layer",
        "test_inspect.py::test_d06_both_layouts_in_one_layer_are_an_error",
    ),
    "D07": (
        "test_refusals.py::test_fused_experts_are_never_guessed_at",
        "test_rewrite_blueprint.py::test_d07_other_orientations_are_refused",
    ),
    "D09": (
        "test_refusals.py::test_what_no_config_declares_is_refused_by_its_tensors",
        "test_cli_validate.py::test_json_holds_everything",
        "test_inspect.py::test_d09_fused_names_have_no_weight_ending",
    ),
    "D10": (
        "D10",
        "load/missing-expert",
        "test_inspect.py::test_d10_no_expert_recognised_is_an_error",
    ),
    "D11": (
        "D11",
        "test_config_features.py::test_names_have_the_outer_prefix",
        "test_inspect.py::test_d11_any_outer_prefix",
    ),
    "D13": (
        "D13",
        "load/experts-one-level-deeper",
        "test_inspect.py::test_d13_unknown_nesting_is_reported",
    ),
    "E01": (
        "E01",
        "test_inspect.py::test_e01_e02_counts_and_top_k_must_agree",
        "test_inspect.py::test_e01_e02_other_names_are_read",
        "test_rewrite_blueprint.py::test_e01_e03_w7_counts_in_every_holder",
    ),
    "E02": (
        "E02",
        "test_inspect.py::test_e01_e02_counts_and_top_k_must_agree",
        "test_inspect.py::test_e01_e02_other_names_are_read",
    ),
    "E03": (
        "E03",
        "test_rewrite_blueprint.py::test_e01_e03_w7_counts_in_every_holder",
    ),
    "E05": (
        "test_rewrite_blueprint.py::test_w3_every_plan_error_has_a_place",
        "test_rewrite_blueprint.py::test_w4_a23_layers_may_differ_where_the_format_can_say_so",
    ),
    "E06": (
        "E06",
        "test_inspect.py::test_e06_the_config_of_a_known_family_says_which_layers_have_experts",
    ),
    "E08": (
        "E08",
        "test_rewrite_blueprint.py::test_w3_every_plan_error_has_a_place",
        "test_rewrite_blueprint.py::test_b11_groups_are_filled_evenly",
        "outputs/olmoe-one-retained",
    ),
    "E09": (
        "test_plan.py::test_e09_plans_that_do_not_fit_are_not_written",
        "test_plan.py::test_e09_scores_that_are_all_equal_are_flagged",
        "test_rewrite_blueprint.py::test_w3_every_plan_error_has_a_place",
    ),
    "E10": (
        "E10",
        "test_rewrite_blueprint.py::test_e10_w2_every_bias_is_cut_with_the_router",
        "test_rewrite_blueprint.py::test_a_tensor_with_an_expert_axis_that_is_not_cut_stops_a_prune",
    ),
    "E12": (
        "E12",
        "test_rewrite_blueprint.py::test_e12_what_is_stored_is_copied_whatever_tying_says",
    ),
    "F01": (
        "F01",
        "test_rewrite_blueprint.py::test_f01_f10_w8_w12_shards_index_and_metadata",
        "test_rewritten_models.py::test_every_shard_says_format_pt",
    ),
    "F02": (
        "F02",
        "test_checkpoint.py::test_a_fault_in_a_file_gives_one_finding",
    ),
    "F03": (
        "F03",
        "test_inspect.py::test_f03_f23_broken_files_come_first",
    ),
    "F04": ("F04",),
    "F07": (
        "F07",
        "test_rewrite_blueprint.py::test_f07_what_is_copied_and_what_is_not",
    ),
    "F08": (
        "test_rewrite_failures.py::test_a_place_where_no_output_may_appear",
        "test_rewrite_blueprint.py::test_w8_a_single_file_stays_one_without_an_index",
        "test_convert.py::test_the_command_writes_once_and_its_output_is_proven",
    ),
    "F10": (
        "F10",
        "test_rewrite_blueprint.py::test_f01_f10_w8_w12_shards_index_and_metadata",
    ),
    "F11": (
        "F11",
        "test_checkpoint.py::test_a_name_that_leaves_the_directory_is_refused_before_anything_is_opened",
        "test_checkpoint.py::test_the_cache_of_the_hugging_face_hub_is_followed",
    ),
    "F13": (
        "F13",
        "test_rewrite_blueprint.py::test_f13_a_header_is_split_before_it_gets_too_long",
    ),
    "F14": (
        "F14",
        "test_checkpoint.py::test_a_fault_in_a_file_gives_one_finding",
    ),
    "F16": (
        "F16",
        "test_rewrite_blueprint.py::test_f16_wide_types_come_first",
        "test_rewrite_files.py::test_a_shard_byte_for_byte",
    ),
    "F17": (
        "F17",
        "test_checkpoint.py::test_a_zero_size_tensor_reads_as_nothing",
        "test_rewrite_fixtures.py::test_f17_a_tensor_without_bytes_is_written_and_proven",
    ),
    "F19": (
        "F19",
        "test_rewrite_blueprint.py::test_f19_f25_any_dtype_passes_with_its_companions",
    ),
    "F20": (
        "test_rewrite_blueprint.py::test_f20_bytes_are_never_decoded",
        "test_convert.py::test_every_constant_and_every_other_byte_arrives",
        "test_verify.py::test_an_intact_output_is_proven",
    ),
    "F21": ("test_rewrite_blueprint.py::test_f21_fused_experts_are_taken_apart_as_byte_ranges",),
    "F23": (
        "test_field_cases.py::test_f23_folders_are_no_weight_files",
        "test_inspect.py::test_f03_f23_broken_files_come_first",
        "test_checkpoint.py::test_a_pipe_is_not_waited_for",
    ),
    "F24": (
        "test_field_cases.py::test_f24_a_scan_finds_every_value_that_is_no_number",
        "test_field_cases.py::test_f24_constants_and_routers_are_always_read_and_reported_once",
        "test_rewrite_blueprint.py::test_r8_constants_are_scanned_where_something_will_be_written",
    ),
    "F25": (
        "F25",
        "test_rewrite_blueprint.py::test_f19_f25_any_dtype_passes_with_its_companions",
        "test_inspect.py::test_f25_companions_and_correction_bias",
    ),
    "F26": (
        "test_rewrite_files.py::test_memory_does_not_grow_with_the_tensor",
        "test_cli_rewrite.py::test_w11_f26_only_headers_are_read",
        "test_checkpoint.py::test_opening_reads_headers_only",
    ),
}


def holds(place: str) -> bool:
    """Whether a test, a case or an id exists."""
    if "::" in place:
        file, _, function = place.partition("::")
        return f"\ndef {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
    if "/" in place:
        return (ROOT / "conformance" / "cases" / f"{place}.yaml").is_file()
    return any(case == place for case, _ in CASES)


@pytest.mark.parametrize("case", HELD_BY)
def test_every_id_is_held(case: str) -> None:
    assert [place for place in HELD_BY[case] if not holds(place)] == []


def test_a_place_that_is_not_there_is_seen() -> None:
    assert not any(map(holds, ("A99", "load/nothing", "test_routing.py::test_nothing")))
