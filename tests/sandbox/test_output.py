from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taskmill.sandbox.output import Output

pieces = st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)), max_size=30)
limits = st.integers(2, 200)


@given(pieces, limits)
def test_what_is_kept_is_the_head_and_the_tail_and_the_rest_is_counted(pieces, limit):
    output = Output(limit)
    for piece in pieces:
        output.add(piece)
    whole = b"".join(pieces)
    text, dropped = output.text()
    assert output.total == len(whole)
    if len(whole) <= limit:
        assert (text, dropped) == (whole.decode("utf-8", "replace"), 0)
        assert output.take() == whole
        return
    head, _, tail = text.partition(f"\n[... {dropped:,} bytes dropped ...]\n")
    assert len(whole) - limit <= dropped <= len(whole) - limit + 6
    assert whole.decode("utf-8", "replace").startswith(head)
    assert whole.endswith(tail.encode()) or "\ufffd" in tail
    text.encode()


@given(st.text(max_size=300), limits, st.data())
def test_text_that_is_pulled_as_it_comes_is_whole(text, limit, data):
    """Cut into pieces anywhere, even within characters, and read after each."""
    raw = text.encode()
    output, seen = Output(1000), ""
    while raw:
        size = data.draw(st.integers(1, len(raw)))
        output.add(raw[:size])
        seen += output.pull()
        raw = raw[size:]
    assert seen + output.text()[0] == text


@given(st.binary(max_size=300), st.text("abc/ü", max_size=20), st.binary(max_size=30), limits)
def test_a_report_is_cut_out_wherever_it_stands(before, report, after, limit):
    limit += 100  # the report itself is never longer than the half that is kept of the end
    line = b"\nTOKEN" + report.encode() + b"\n"
    output = Output(limit)
    for piece in (before, line, after):
        output.add(piece)
    expected = Output(limit)
    expected.add(before)
    expected.add(after)
    assert output.cut(b"\nTOKEN") == (report or None)
    assert output.total == expected.total
    if len(before) + len(line) + len(after) <= limit:
        assert output.text() == expected.text()
    assert output.cut(b"\nTOKEN") is None
