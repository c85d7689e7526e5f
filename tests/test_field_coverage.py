"""Every kind of fault that was met in the field is held by a test or a case, by its id.

Groups A (the declaration), B (routing and substitution) and D (names and layouts); those of
the checkpoint tools stand with the tools. A test is named by file and function, a case by its
id, an id of ``test_field_cases.py`` by itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_field_cases import CASES

ROOT = Path(__file__).resolve().parent.parent

HELD_BY: dict[str, tuple[str, ...]] = {
    "A01": ("A01",),
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
    "A16": ("A16",),
    "A17": (
        "A17",
        "test_refusals.py::test_fused_experts_under_a_list_are_refused_with_what_is_expected",
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
    "A21": ("A21",),
    "A23": (
        "test_loading.py::"
        "test_every_retained_expert_stands_in_its_ascending_row_and_no_other_is_allocated",
        "test_dense_layers.py::test_rows_belong_to_layers_with_experts",
        "rows/olmoe-one-retained",
    ),
    "A24": (
        "A24",
        "test_explicit.py::test_compressed_tensors_beside_the_explicit_form",
        "test_explicit.py::test_siblings_of_the_declaration_are_not_ours",
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
    "D01": ("D01", "test_field_cases.py::test_the_messages_of_misnamed_models_show_what_was_found"),
    "D02": ("D02",),
    "D03": ("D03",),
    "D06": ("D06",),
    "D07": ("test_refusals.py::test_fused_experts_are_never_guessed_at",),
    "D09": (
        "test_refusals.py::test_what_no_config_declares_is_refused_by_its_tensors",
        "test_cli_validate.py::test_json_holds_everything",
    ),
    "D10": ("D10", "load/missing-expert"),
    "D11": ("D11", "test_config_features.py::test_names_have_the_outer_prefix"),
    "D13": ("D13", "load/experts-one-level-deeper"),
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
