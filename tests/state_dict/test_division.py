"""Division of equal tensors among ranks: all rows, each once, whole tensors by their sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localckpt.state_dict.parts import SharedTensor, divide

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
def test_a_tensor_is_divided_only_where_it_is_larger_than_a_fair_share(
    tensors: list[SharedTensor], parts: int
) -> None:
    divided = divide(tensors, parts)

    share = sum(t.nbytes for t in tensors) / parts
    for tensor in tensors:
        holders = sum(count > 0 for _, count in divided[tensor.key])
        assert holders <= 1 or tensor.nbytes > share


@given(_tensors, st.integers(1, 9))
def test_no_part_is_much_larger_than_another(tensors: list[SharedTensor], parts: int) -> None:
    divided = divide(tensors, parts)

    sizes = [sum(divided[t.key][n][1] * t.row_nbytes for t in tensors) for n in range(parts)]
    # Of tensors that are divided each part has the same number of rows, or one more.
    cut = [t for t in tensors if sum(count > 0 for _, count in divided[t.key]) > 1]
    whole = max((t.nbytes for t in tensors if t not in cut), default=0)
    assert max(sizes) - min(sizes) <= max(whole, sum(t.row_nbytes for t in cut))


@given(_tensors, st.integers(1, 9), st.randoms())
def test_every_rank_computes_the_same_in_whatever_order_its_tensors_are(
    tensors: list[SharedTensor], parts: int, random: object
) -> None:
    shuffled = list(tensors)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    assert divide(shuffled, parts) == divide(tensors, parts)
