"""Quantised weights are refused wherever a config declares them (CAP-8, FMT-12)."""

from __future__ import annotations

from mone_ref import explicit
from mone_ref.errors import Code, show
from mone_ref.fields import Fields, Found
from mone_ref.strict_json import child

COMPRESSED_TENSORS = "compressed-tensors"


def check(fields: Fields) -> None:
    """Report every quantisation, once each.

    Beside the explicit form, compressed-tensors has a clause of its own: its schema for
    ``transform_config`` does not know ``expert_substitution``.
    """
    substitutes = bool(explicit.find(fields))
    for found in declared(fields):
        if substitutes and is_compressed_tensors(found):
            expected = f"no {COMPRESSED_TENSORS} beside the explicit form"
            clause = "FMT-12"
        else:
            expected, clause = "null: quantised weights are not supported", "CAP-8"
        fields.report(Code.MODEL_FEATURE, found.path, show(found.value), expected, clause)


def declared(fields: Fields) -> list[Found]:
    """Quantisation by its own key, or inside ``compression_config``."""
    places = fields.find("quantization_config")
    for found in fields.find("compression_config"):
        if isinstance(found.value, dict):
            places += [
                Found(child(found.path, key), found.value[key])
                for key in ("quant_method", "config_groups")
                if found.value.get(key)
            ]
    return places


def is_compressed_tensors(found: Found) -> bool:
    """Whether a declared quantisation is by compressed-tensors."""
    value = found.value.get("quant_method") if isinstance(found.value, dict) else found.value
    return isinstance(value, str) and COMPRESSED_TENSORS in value
