"""Division of equal tensors among ranks: whole ones, by their sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localckpt.state_dict.parts import deal

_sizes = st.dictionaries(st.text(max_size=4), st.integers(0, 4000), max_size=20)


@given(_sizes, st.integers(1, 9))
def test_each_tensor_has_one_owner_and_no_part_is_much_larger_than_another(
    sizes: dict[str, int], parts: int
) -> None:
    owners = deal(sizes, parts)

    totals = [sum(sizes[key] for key, owner in owners.items() if owner == n) for n in range(parts)]
    assert owners.keys() == sizes.keys()
    assert max(totals) - min(totals) <= max(sizes.values(), default=0)


@given(_sizes, st.integers(1, 9), st.randoms())
def test_every_rank_computes_the_same_in_whatever_order_its_tensors_are(
    sizes: dict[str, int], parts: int, random: object
) -> None:
    shuffled = list(sizes.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    assert deal(dict(shuffled), parts) == deal(sizes, parts)
