"""A header is read at one pass only where a close look would find nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mone_ref.checkpoint import header, ordinary
from mone_ref.checkpoint.entry import TensorEntry

GOOD = {
    "__metadata__": {"format": "pt", "by": "hand"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "c": {"dtype": "U8", "shape": [0, 7], "data_offsets": [26, 26]},
}
BYTES = 26


def read(text: bytes, size: int | None = None) -> tuple[ordinary.Found | None, header.Header]:
    begin = 8 + len(text)
    size = begin + BYTES if size is None else size
    found = ordinary.read(text, "f", begin, size)
    return found, header.explained(text, "f", begin, size)


def text_of(**changes: object) -> bytes:
    return padded(json.dumps({**GOOD, **changes}).encode())


def padded(text: bytes) -> bytes:
    """As writers pad a header, so that the tensors behind it are aligned."""
    return text + b" " * (-len(text) % 8)


def test_a_header_without_a_fault_is_read_at_one_pass():
    text = text_of()
    begin = 8 + len(text)
    found, close = read(text)
    assert found == (
        (
            TensorEntry("a", "f", "F32", (2, 3), begin, begin + 24),
            TensorEntry("b", "f", "BF16", (), begin + 24, begin + 26),
            TensorEntry("c", "f", "U8", (0, 7), begin + 26, begin + 26),
        ),
        {"format": "pt", "by": "hand"},
    )
    assert (close.entries, close.metadata, close.problems) == (*found, ())


@pytest.mark.parametrize(
    "text",
    [
        text_of(a=None),
        text_of(a=[]),
        text_of(a="dtype"),
        text_of(a={**GOOD["a"], "dtype": ["F32"]}),
        text_of(a={**GOOD["a"], "shape": [True, 6]}),
        text_of(a={**GOOD["a"], "shape": [2.0, 3]}),
        text_of(a={**GOOD["a"], "shape": [-2, -3]}),
        text_of(a={**GOOD["a"], "shape": [2, 4]}),
        text_of(a={**GOOD["a"], "shape": "23"}),
        text_of(a={**GOOD["a"], "data_offsets": [False, 24]}),
        text_of(a={**GOOD["a"], "data_offsets": [0, 24.0]}),
        text_of(a={**GOOD["a"], "data_offsets": [0, 24, 24]}),
        text_of(a={**GOOD["a"], "data_offsets": {"0": 0, "24": 24}}),
        text_of(a={**GOOD["a"], "data_offsets": [24, 0]}),
        text_of(a={**GOOD["a"], "more": 1}),
        text_of(a={"dtype": "F32", "shape": [2, 3]}),
        text_of(b={**GOOD["b"], "data_offsets": [22, 24]}),
        text_of(c={**GOOD["c"], "shape": [0, 2**63]}),
        text_of(c={**GOOD["c"], "dtype": "F32"}),
        text_of(c={**GOOD["c"], "data_offsets": [27, 27]}),
        text_of(__metadata__=None),
        text_of(__metadata__={"format": "np"}),
        text_of(__metadata__={"format": "pt", "n": 1}),
        b"        " + text_of(),
        b"[" + text_of() + b"]",
        text_of().replace(b'"shape": []', b'"shape": [1], "shape": []'),
        text_of().replace(b'"by": "hand"', b'"by": "hand", "by": "hand"'),
        text_of().rstrip()[:-1] + b', "a": ' + json.dumps(GOOD["a"]).encode() + b"}",
        text_of().rstrip()[:-1] + b', "__metadata__": {"format": "pt", "by": "hand"}}',
        text_of().replace(b'"a"', b'"\xff"'),
        text_of() + b"}",
    ],
)
def test_a_fault_gets_a_close_look(text):
    found, close = read(text)
    assert found is None
    assert close.problems


@pytest.mark.parametrize("length", [-1, 1])
def test_a_file_of_another_length_gets_a_close_look(length):
    text = text_of()
    found, close = read(text, 8 + len(text) + BYTES + length)
    assert found is None
    assert close.problems


@pytest.mark.parametrize(
    "text",
    [
        padded(text_of().rstrip().replace(b'"a"', b'"\\u0061"')),
        text_of(a={**GOOD["a"], "dtype": "Q7"}),
        text_of(d={**GOOD["c"], "shape": [0] * 9}),
        padded(json.dumps(dict(reversed(GOOD.items()))).encode()),
    ],
)
def test_a_rare_header_gets_a_close_look_and_has_no_fault(text):
    found, close = read(text)
    assert found is None
    assert not close.problems


numbers = st.one_of(
    st.integers(-2, 30), st.sampled_from([2**63, 1.0, True, None, "1", [], {}, float("nan")])
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "Q7", 1, None, []]),
        "shape": st.lists(numbers, max_size=3),
        "data_offsets": st.lists(numbers, max_size=3),
        "more": st.none(),
    },
)
metadata = st.sampled_from([{"format": "pt"}, {"format": "pt", "x": "y"}, {"format": 1}, {}, None])


@given(metadata, st.dictionaries(st.sampled_from("abcé"), entries, max_size=3), st.data())
def test_one_pass_never_says_more_than_a_close_look(said, listed, data):
    """Any header, also one whose entries follow one another, and any change of one byte."""
    at = 0
    for fields in listed.values():
        if data.draw(st.booleans()):
            shape = data.draw(st.lists(st.integers(0, 3), max_size=2))
            length = 4
            for axis in shape:
                length *= axis
            fields.update(dtype="F32", shape=shape, data_offsets=[at, at + length])
            fields.pop("more", None)
            at += length
    text = padded(json.dumps({"__metadata__": said, **listed}, ensure_ascii=False).encode())
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(text) - 1))
        text = text[:place] + bytes([data.draw(st.integers(0, 255))]) + text[place + 1 :]
    found, close = read(text, 8 + len(text) + at)
    if found is not None:
        assert (close.entries, close.metadata, close.problems) == (*found, ())
