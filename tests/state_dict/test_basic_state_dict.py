"""The interface of TensorAwareStateDict, and that a wrapper never changes what it was given."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch

from localckpt import BasicTensorAwareStateDict, TensorAwareStateDict
from localckpt.errors import CheckpointingException, MismatchError
from localckpt.state_dict.basic import PlainState
from localckpt.state_dict.containers import named_tensors
from tests.state_dict.states import FrozenSettings, Point, Settings, assert_same, round_trip


def nested() -> dict[str, Any]:
    return {
        "dict": {"a": torch.rand(2, 3), "b": 5},
        "ordered": collections.OrderedDict([("z", torch.ones(1)), ("a", torch.zeros(0))]),
        "default": collections.defaultdict(list, {"k": [torch.ones(2)]}),
        "list": [torch.arange(3), None, ("text", torch.tensor(1.5))],
        "point": Point(torch.ones(4), Point(1, torch.zeros(2))),
        "dataclass": Settings(torch.ones(3)),
        "frozen": FrozenSettings([torch.ones(5)]),
        "size": torch.Size([1, 2]),
    }


def identities(value: Any) -> list[Any]:
    """Which objects stand where, all the way down."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [identities(v) for v in value.values()]
    elif isinstance(value, list | tuple):
        inner = [identities(v) for v in value]
    elif dataclasses.is_dataclass(value):
        inner = [identities(v) for v in vars(value).values()]
    return [id(value), inner]


@pytest.mark.parametrize("kind", [BasicTensorAwareStateDict, PlainState])
def test_pop_and_insert_are_inverse_and_change_no_container_that_was_given(
    kind: type[BasicTensorAwareStateDict],
) -> None:
    given = nested()
    before = identities(given)
    state = kind(given)
    seen = list(state.tensors)

    popped = state.pop_tensors()

    assert [id(t) for t in popped] == [id(t) for t in seen]
    assert state.is_hollow
    assert not any(isinstance(t, torch.Tensor) for _, t in named_tensors(state.state_dict))
    state.insert_tensors(popped)
    assert not state.is_hollow
    assert_same(state.to_state_dict(), given)
    assert [id(t) for t in state.tensors] == [id(t) for t in seen]
    state.copy_tensors_to_cpu()
    state.insert_tensors([t + 1 for t in state.pop_tensors()])
    state.restore_tensor_device()
    assert identities(given) == before
    assert state.state_dict is not given


def test_a_hollow_state_refuses_what_needs_tensors_and_a_wrong_number_and_a_full_one_others() -> (
    None
):
    state = BasicTensorAwareStateDict(nested())
    popped = state.pop_tensors()

    for action in (
        lambda: state.tensors,
        state.pop_tensors,
        state.copy_tensors_to_cpu,
        state.restore_tensor_device,
    ):
        with pytest.raises(CheckpointingException, match="hollow"):
            action()
    for wrong in (popped[:-1], [*popped, popped[0]], []):
        with pytest.raises(MismatchError, match=f"for {len(popped)} places"):
            state.insert_tensors(wrong)
    assert state.is_hollow
    state.insert_tensors(iter(popped))
    assert_same(list(state.tensors), popped)
    state.pop_tensors()
    state.init_tensors()
    for action in (lambda: state.insert_tensors([]), state.init_tensors):
        with pytest.raises(CheckpointingException, match="pop_tensors"):
            action()


@pytest.mark.parametrize("kind", [BasicTensorAwareStateDict, PlainState])
@pytest.mark.parametrize("hollow", [False, True])
def test_a_wrapper_is_saved_and_loaded_as_it_is(
    kind: type[BasicTensorAwareStateDict], hollow: bool
) -> None:
    state = kind({"weight": torch.rand(2), "step": 3})
    popped = state.pop_tensors() if hollow else []

    loaded = round_trip(state)

    assert type(loaded) is kind
    assert loaded.is_hollow == hollow
    if hollow:
        loaded.insert_tensors(popped)
        state.insert_tensors(popped)
    assert_same(loaded.to_state_dict(), state.to_state_dict())


def _nothing(*_: Any, **__: Any) -> tuple[()]:
    return ()


class OnlyWhatMustBe(TensorAwareStateDict):
    """Keeps tensors in attributes of its own, and its methods do nothing."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.extra = (torch.arange(3), "x")

    tensors = property(_nothing)
    is_hollow = property(lambda _: False)
    pop_tensors = insert_tensors = init_tensors = _nothing
    copy_tensors_to_cpu = restore_tensor_device = _nothing


def test_a_users_own_class_is_saved_whole_whatever_its_methods_do() -> None:
    state = OnlyWhatMustBe(weight=torch.rand(3), step=5)

    loaded = round_trip(state)

    assert type(loaded) is OnlyWhatMustBe
    assert_same(loaded.values, state.values)
    assert_same(loaded.extra, state.extra)
