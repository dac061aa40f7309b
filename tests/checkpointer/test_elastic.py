"""The front door goes on from the nodes with another number of ranks, one node lost or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from localckpt import Every
from tests.checkpointer.loops import full_weights, stores, train
from tests.ranks import run_ranks

_S = 120.0


@pytest.mark.fault("world-size")
def test_another_number_of_ranks_goes_on_from_the_nodes_with_one_of_them_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes, options = stores(tmp_path, 4), {"every": Every(steps=2)}
    run_ranks(train, 4, "fsdp2", 10, options, store_per_node=nodes, timeout_s=_S)

    as_saved = run_ranks(full_weights, 4, options, store_per_node=nodes, timeout_s=_S)
    refused = run_ranks(full_weights, 3, options, store_per_node=nodes[1:], timeout_s=_S)
    dropping = {**options, "on_resize": "drop"}
    found = run_ranks(full_weights, 3, dropping, store_per_node=nodes[1:], timeout_s=_S)

    for text in refused:
        assert "'loader.order', 'loader.generator' is a place in the data" in text
        assert "on_resize='drop'" in text
    assert found == [as_saved[0]] * 3
    assert "which differ in 'loader': dropped" in capfd.readouterr().out
    assert found[0].startswith("10 ")
