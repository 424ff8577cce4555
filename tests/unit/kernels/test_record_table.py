"""Records cover every item exactly once, and chunks are no longer than asked."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.kernels.record_table import CopyReport, Span, make_records

spans = st.builds(
    Span,
    address=st.integers(0, 2**47),
    offset=st.integers(0, 2**40),
    count=st.integers(0, 5000),
    kind=st.integers(0, 7),
    address_step=st.sampled_from([1, 2, 4, 8]),
    offset_step=st.sampled_from([1, 2, 4, 8]),
    chunk=st.sampled_from([1024, 4096]),
)


@settings(max_examples=40)
@given(st.lists(spans, max_size=20))
def test_chunks_cover_each_span_in_order(work: list[Span]) -> None:
    records = make_records(work).tolist()
    for span in work:
        done = 0
        while done < span.count:
            address, offset, count, kind = records.pop(0)
            assert (
                address == span.address + done * span.address_step
                and offset == span.offset + done * span.offset_step
            )
            assert 0 < count <= span.chunk and kind == span.kind
            done += count
        assert done == span.count
    assert not records


def test_reports_add_up() -> None:
    assert CopyReport(1, 2, 3) + CopyReport(10, 20, 30) == CopyReport(11, 22, 33)
