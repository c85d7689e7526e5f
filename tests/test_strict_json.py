"""Bytes that are not strictly JSON are refused, and repeated keys are located."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mone_ref.strict_json import MAX_DEPTH, StrictJsonError, child, parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "line 1 column 1: Expecting value"),
        (b'{"a": 1', "line 1 column 8: Expecting ',' delimiter"),
        (b"{} {}", "line 1 column 4: Extra data"),
        (b"\xef\xbb\xbf{}", "line 1 column 1: Unexpected UTF-8 BOM (decode using utf-8-sig)"),
        (b'"\xff"', "byte 1 is not UTF-8 (invalid start byte)"),
        ('{"a": 1}'.encode("utf-16-le"), "line 1 column 2: Expecting property name"),
        (b"NaN", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"1e999", "a number is beyond the range of float64"),
        (b"-1e999", "a number is beyond the range of float64"),
        (b"1" * 5000, "an integer has too many digits"),
        (b'"\n"', "line 1 column 2: Invalid control character at"),
        (b"{'a': 1}", "line 1 column 2: Expecting property name enclosed in double quotes"),
        (b"[1,]", "line 1 column 4: Expecting value"),
    ],
)
def test_not_json(data: bytes, message: str) -> None:
    with pytest.raises(StrictJsonError) as caught:
        parse(data)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_is_bounded(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"

    def nested(depth: int) -> bytes:
        return opening * depth + b"0" + closing * depth

    assert parse(nested(MAX_DEPTH)).duplicates == ()
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(StrictJsonError, match=f"nested deeper than {MAX_DEPTH} levels"):
            parse(nested(depth))


@pytest.mark.parametrize(
    ("data", "value", "paths"),
    [
        (b'{"a": 1, "b": 2}', {"a": 1, "b": 2}, ()),
        (b'{"a": 1, "a": 2}', {"a": 2}, ("$.a",)),
        (b'{"a": 1, "a": 2, "a": 3}', {"a": 3}, ("$.a",)),
        (b'[{}, {"x y": {"1": 0, "1": 0}}]', [{}, {"x y": {"1": 0}}], ('$[1]["x y"]["1"]',)),
        (b'{"a": {"c": 0, "c": 1}, "b": 0, "b": 1}', {"a": {"c": 1}, "b": 1}, ("$.b", "$.a.c")),
        # What a later equal key replaced is gone, and so are the paths inside it.
        (b'{"a": {"c": 0, "c": 1}, "a": 0}', {"a": 0}, ("$.a",)),
        (b'{"\\u0061": 1, "a": 2}', {"a": 2}, ("$.a",)),
    ],
)
def test_repeated_keys(data: bytes, value: object, paths: tuple[str, ...]) -> None:
    parsed = parse(data)
    assert parsed.value == value
    assert parsed.duplicates == paths


def test_paths_are_safe_to_print() -> None:
    assert child("$", "\ud800\n") == '$["\\ud800\\n"]'
    assert child("$", 'a"b') == '$["a\\"b"]'
    assert child("$", "x" * 61) == f'$["{"x" * 60}..."]'
    assert child("$", "x" * 60) == f"$.{'x' * 60}"


@given(JSON)
def test_reads_what_json_writes(value: object) -> None:
    parsed = parse(json.dumps(value).encode())
    assert parsed.value == value
    assert parsed.duplicates == ()


@given(st.binary() | st.text(alphabet='{}[]",:0123456789.eE-+ \\untrfalsbNI').map(str.encode))
def test_any_bytes(data: bytes) -> None:
    """Whatever is accepted is JSON to the standard reader as well, without NaN or infinity."""
    try:
        value = parse(data).value
    except StrictJsonError:
        return
    again = json.loads(data)
    assert again == value
    json.dumps(value, allow_nan=False)
