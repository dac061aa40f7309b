"""Each line that is broken on purpose is there, once, and its tests are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import MUTANTS, Mutant

_ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.module)
def test_a_mutant_breaks_one_place_of_the_product_and_names_its_tests(mutant: Mutant) -> None:
    text = (_ROOT / "localckpt" / mutant.module).read_text()

    assert text.count(mutant.line) == 1
    assert all((_ROOT / path).exists() for path in mutant.tests.split())
