"""attention_mask of linattn.nn's layers: a row's real tokens alone, wherever the padding lies."""

import pytest
from support.blocks import BLOCKS, D, nn, stirred, torch

tree_leaves = torch.utils._pytree.tree_leaves
tree_map_only = torch.utils._pytree.tree_map_only
MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [0] * 7 + [1]],
    "right": [[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8, [1, 1, 1, 1, 1, 0, 0, 0]],
    "anywhere": [[1, 0, 1, 1, 0, 0, 1, 0], [0] * 8, [0, 1, 0, 1, 0, 1, 0, 1]],
}
every = pytest.mark.parametrize("name", BLOCKS)
of_masks = pytest.mark.parametrize("where", MASKS)


def made(name):
    torch.manual_seed(0)
    return BLOCKS[name]().double()


def rows(where):
    """Rows whose padding is large numbers, and their mask."""
    mask = torch.tensor(MASKS[where])
    x = torch.randn(*mask.shape, D, dtype=torch.float64)
    return torch.where(mask[..., None] == 0, 1e3, x), mask


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def leaves(state):
    return [x for x in tree_leaves(tuple(state)) if isinstance(x, torch.Tensor)]


@of_masks
@every
def test_padding_is_as_if_it_were_not_there(name, where):
    layer = made(name)
    x, mask = rows(where)
    _, before = layer(torch.randn(3, 4, D, dtype=torch.float64))
    y, after = layer(x, before, attention_mask=mask)
    assert not y[mask == 0].any()
    for n, real in enumerate(mask == 1):
        if not real.any():
            continue
        start = tree_map_only(torch.Tensor, lambda s, n=n: s[n : n + 1], before)
        alone, state = layer(x[n : n + 1, real], start)
        near(y[n, real], alone[0])
        for found, wanted in zip(leaves(after), leaves(state), strict=True):
            near(found[n : n + 1], wanted)


@every
def test_a_row_of_padding_keeps_its_state(name):
    layer = made(name)
    x, mask = rows("anywhere")
    _, before = layer(torch.randn(3, 4, D, dtype=torch.float64))
    _, after = layer(x, before, attention_mask=mask.bool())
    for found, wanted in zip(leaves(after), leaves(before), strict=True):
        near(found[1], wanted[1])


@every
def test_padding_has_no_gradient(name):
    layer = made(name)
    x, mask = rows("left")
    x.requires_grad_()
    y, _ = layer(x, attention_mask=mask)
    y.square().sum().backward()
    assert not x.grad[mask == 0].any() and x.grad[mask == 1].all()


@pytest.mark.parametrize("causal", [True, False])
@of_masks
def test_the_plain_layer(where, causal):
    torch.manual_seed(0)
    layer = nn.LinearAttention(D, 8, 6).double()
    x, mask = rows(where)
    y = layer(x, causal, attention_mask=mask)
    assert not y[mask == 0].any()
    for n, real in enumerate(mask == 1):
        if real.any():
            near(y[n, real], layer(x[n : n + 1, real], causal)[0])


def test_later_layers_of_rwkv7_get_their_values():
    torch.manual_seed(0)
    layer = stirred(nn.RWKV7(D, head_dim=6, layer_idx=1, num_layers=2)).double()
    x, mask = rows("left")
    v_first = torch.randn(*mask.shape, D, dtype=torch.float64)
    y, _, v = layer(x, None, None, v_first, True, attention_mask=mask)
    real = mask[0] == 1
    alone, _ = layer(x[:1, real], None, None, v_first[:1, real])
    near(y[0, real], alone[0])
    assert torch.equal(v[mask == 1], v_first[mask == 1])


@pytest.mark.parametrize(
    ("error", "text", "given"),
    [
        (TypeError, "attention_mask: expected a torch.Tensor, got list", {"mask": [[1]]}),
        (
            ValueError,
            r"attention_mask: expected \[B,T\] = \(1, 8\), got \(1, 7\)",
            {"mask": torch.ones(1, 7)},
        ),
        (
            ValueError,
            "attention_mask: expected None with cu_seqlens, got a mask",
            {"mask": torch.ones(1, 8), "cu_seqlens": torch.tensor([0, 8])},
        ),
    ],
)
def test_masks_that_do_not_fit(error, text, given):
    x = torch.randn(1, 8, D, dtype=torch.float64)
    with pytest.raises(error, match=text):
        made("DeltaNet")(x, cu_seqlens=given.get("cu_seqlens"), attention_mask=given["mask"])


@pytest.mark.parametrize("make", [BLOCKS["DeltaNet"], lambda: nn.LinearAttention(D, 8, 6)])
def test_ranks_take_no_mask(make):
    layer = make()
    layer.process_group = object()
    with pytest.raises(ValueError, match="attention_mask: expected None in a layer with a process"):
        layer(torch.randn(1, 8, D), attention_mask=torch.ones(1, 8))
