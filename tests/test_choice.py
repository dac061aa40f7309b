"""What a plain run has of large products: enough, and the same in every process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.choice import drawn

_ROWS = st.sets(st.text(min_size=1), min_size=1, max_size=20)


@given(_ROWS, st.integers(1, 25), st.text())
def test_as_many_rows_are_drawn_as_were_asked_for_whatever_their_order(
    rows: set[str], count: int, draw: str
) -> None:
    chosen = drawn(sorted(rows), count, draw)

    assert chosen <= rows
    assert len(chosen) == min(count, len(rows))
    assert chosen == drawn(sorted(rows, reverse=True), count, draw)
