"""Division of equal tensors among ranks: all rows, each once, in parts of nearly equal size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localckpt.state_dict.division import SharedTensor, divide

_tensors = st.lists(
    st.builds(SharedTensor, st.text(max_size=4), st.integers(0, 40), st.integers(0, 99)),
    max_size=20,
    unique_by=lambda tensor: tensor.key,
)


@given(_tensors, st.integers(1, 9))
def test_the_parts_are_all_rows_each_once(tensors: list[SharedTensor], parts: int) -> None:
    divided = divide(tensors, parts)

    assert divided.keys() == {tensor.key for tensor in tensors}
    for key, rows, _ in tensors:
        end = 0
        for start, count in divided[key]:
            assert start == end
            assert count >= 0
            end += count
        assert end == rows


@given(_tensors, st.integers(1, 9))
def test_each_part_is_within_a_row_of_its_share_on_each_side(
    tensors: list[SharedTensor], parts: int
) -> None:
    divided = divide(tensors, parts)

    share = sum(t.rows * t.row_nbytes for t in tensors) / parts
    largest = max((t.row_nbytes for t in tensors if t.rows), default=0)
    for part in range(parts):
        nbytes = sum(divided[t.key][part][1] * t.row_nbytes for t in tensors)
        assert abs(nbytes - share) <= largest + 1


@given(_tensors, st.integers(1, 9), st.randoms())
def test_every_rank_computes_the_same_in_whatever_order_its_tensors_are(
    tensors: list[SharedTensor], parts: int, random: object
) -> None:
    shuffled = list(tensors)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    assert divide(shuffled, parts) == divide(tensors, parts)
