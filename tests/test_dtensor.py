"""DTensor: arrays of which each rank of a mesh has a part. Calls go part by part, without
communication, where rows, heads or channels are apart."""

import pytest
from support.parts import (
    ROOMS,
    layer_by_heads,
    op_by_parts,
    others_by_parts,
    room_by_parts,
)

import linattn


def assert_alike(found):
    for of_outputs, of_gradients, communicated in found:
        assert of_outputs == 0  # every number is computed as in the whole call
        assert of_gradients < 1e-13  # those of what all ranks share are sums over them
        assert communicated == 0


@pytest.mark.parametrize("how", ["rows", "heads"])
@pytest.mark.parametrize("op", linattn.OPS)
def test_ops(op, how, ranks):
    assert_alike(ranks.run(2, op_by_parts, op, how))


@pytest.mark.parametrize("how", ["rows", "channels"])
@pytest.mark.parametrize("room", ROOMS)
def test_scans_and_the_convolution(room, how, ranks):
    assert_alike(ranks.run(2, room_by_parts, room, how))


def test_other_calls(ranks):
    for found in ranks.run(2, others_by_parts):
        assert set(found.values()) == {0.0}, found


@pytest.mark.parametrize(
    "name, options",
    [
        ("GatedDeltaNet", {"num_heads": 2, "head_dim": 8}),
        ("GatedLinearAttention", {"num_heads": 2}),
        ("Retention", {"num_heads": 2}),
    ],
)
def test_layers_by_heads(name, options, ranks):
    for of_outputs, of_gradients, placement in ranks.run(2, layer_by_heads, name, options):
        assert of_outputs < 1e-14 and of_gradients < 1e-12
        assert placement == "P(sum)" or "Partial" in placement
