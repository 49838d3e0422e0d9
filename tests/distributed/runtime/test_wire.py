from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr_am.distributed.runtime.wire import (
    DTYPES,
    MAX_TENSORS,
    SIZE,
    Kind,
    Malformed,
    WireHeader,
    check_tag,
    decode,
    encode,
)

HEADER = WireHeader(Kind.CHUNK, bytes(range(16)), 3, 1, -7, "weights", 12, 2, 4, (5, 0, 6), 2, torch.bfloat16)


@st.composite
def headers(draw: st.DrawFn) -> WireHeader:
    u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
    lengths = tuple(draw(st.lists(st.integers(0, 2**36), max_size=MAX_TENSORS)))
    tag = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=16)
    return WireHeader(
        draw(st.sampled_from(Kind)), draw(st.binary(min_size=16, max_size=16)), draw(u32), draw(u32),
        draw(st.integers(-(2**63), 2**63 - 1)), draw(tag), draw(u64), draw(u32),
        draw(st.integers(0, sum(lengths) // 2)), lengths, draw(st.integers(0, (1 << len(lengths)) - 1)),
        draw(st.sampled_from(DTYPES)),
    )  # fmt: skip


@given(headers())
def test_a_header_is_read_as_it_was_written(header: WireHeader) -> None:
    data = encode(header)
    assert len(data) == SIZE and decode(data) == header


@given(st.binary(max_size=2 * SIZE))
def test_arbitrary_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode(data)


@given(st.integers(0, SIZE - 1), st.integers(0, 255))
def test_a_damaged_header_is_read_or_malformed(place: int, value: int) -> None:
    data = bytearray(encode(HEADER))
    data[place] = value
    try:
        header = decode(bytes(data))
    except Malformed:
        return
    assert encode(header) == bytes(data)


@pytest.mark.parametrize(
    "damage",
    [{0: 0}, {4: 2}, {5: 9}, {6: 3}, {7: MAX_TENSORS + 1}, {7: 2}, {8: 8}, {41: 200}, {41: 10}],
    ids=[
        "magic",
        "version",
        "kind",
        "type",
        "too many tensors",
        "length unused",
        "bit of no tensor",
        "tag",
        "tag unprintable",
    ],
)
def test_every_field_that_cannot_be_is_malformed(damage: dict[int, int]) -> None:
    data = bytearray(encode(HEADER))
    for place, value in damage.items():
        data[place] = value
    with pytest.raises(Malformed):
        decode(bytes(data))


def test_an_offset_past_the_end_is_malformed() -> None:
    with pytest.raises(Malformed, match="offset 12"):
        decode(encode(replace(HEADER, offset=12)))


@pytest.mark.parametrize("tag", ["", "a" * 17, "grün", "a\n"])
def test_a_tag_that_does_not_fit_is_rejected_at_the_sender(tag: str) -> None:
    with pytest.raises(ValueError, match="tag"):
        check_tag(tag)
