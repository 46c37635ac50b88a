"""Late gradients (csrc/late.h): what those of a final state add to those of keys and values."""

import pytest
from support.gpu import needs_gpu
from support.tensors import torch

from linattn import _linattn
from linattn._by_pytorch import MAPS, SLOPES

MAP_NUMBERS = sorted(int(number) for number in MAPS)
EPS = 0.25


def drawn(T=150, K=128, V=128, B=2, H=3, device="cuda", shift=0.0):
    generator = torch.Generator("cpu").manual_seed(T + K + V)

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator).to(device, dtype)

    k, dk = draw(B, T, H, K), draw(B, T, H, K)
    v, dv = draw(B, T, H, V) + shift, draw(B, T, H, V)
    dS = draw(B, H, K, V, dtype=torch.float32)
    dz = draw(B, H, K, dtype=torch.float32) - shift * dS.sum(-1)  # what dS v has of the shift
    return k, v, dk, dv, dS, dz


def exact(map_, k, v, dk, dv, dS, dz):
    k, v, dk, dv, dS, dz = (x.double() for x in (k, v, dk, dv, dS, dz))
    phi = MAPS[float(map_)](k, EPS)
    d_phi = torch.einsum("bhkv,bthv->bthk", dS, v) + dz[:, None]
    d_v = torch.einsum("bhkv,bthk->bthv", dS, phi)
    return dk + SLOPES[float(map_)](k, phi) * d_phi, dv + d_v


def assert_near(found, wanted):
    """Within the rounding of the result, and of phi(k) and dS."""
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < 2**-8, error


class TestOnAGPU:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("map_", MAP_NUMBERS)
    @pytest.mark.parametrize(
        ("K", "V"), [(128, 128), (64, 128), (8, 128), (72, 24), (24, 72), (64, 64), (8, 8)]
    )
    def test_all_maps(self, map_, K, V):
        x = drawn(K=K, V=V)
        wanted = exact(map_, *x)
        assert _linattn.late(map_, EPS, *x)
        for found, want in zip(x[2:4], wanted, strict=True):
            assert_near(found, want)

    @pytest.mark.parametrize("T", [0, 1, 15, 64, 65, 40_000])
    def test_lengths(self, T):
        x = drawn(T=T, B=1)
        wanted = exact(1, *x)
        assert _linattn.late(1, EPS, *x)
        for found, want in zip(x[2:4], wanted, strict=True):
            assert found.shape == want.shape
            if T:
                assert_near(found, want)

    def test_a_small_sum_of_large_numbers(self):
        x = drawn(shift=30.0)
        wanted = exact(1, *x)
        assert _linattn.late(1, EPS, *x)
        assert_near(x[2], wanted[0])

    def test_rows_apart(self):
        k, v, dk, dv, dS, dz = drawn()
        wide = [torch.cat([x, x], 2)[:, 7:, 1:4] for x in (k, v, dk, dv)]
        wanted = exact(2, *wide, dS, dz)
        assert _linattn.late(2, EPS, *wide, dS.mT.contiguous().mT, dz)
        for found, want in zip(wide[2:], wanted, strict=True):
            assert_near(found, want)

    def test_more_heads_than_blocks_at_once(self):
        x = drawn(B=100, H=4, T=70, K=16, V=16)
        wanted = exact(1, *x)
        assert _linattn.late(1, EPS, *x)
        for found, want in zip(x[2:4], wanted, strict=True):
            assert_near(found, want)

    def test_an_infinity_stays_in_its_column(self):
        x = drawn()
        x[4][0, 0, 3, 5] = torch.inf
        wanted = exact(1, *x)
        assert _linattn.late(1, EPS, *x)
        for found, want in zip(x[2:4], wanted, strict=True):
            assert torch.equal(found.isinf(), want.isinf()) and not found.isnan().any()
            there = want.isfinite()
            assert_near(found[there], want[there])

    def test_the_same_bits_twice(self):
        one, two = drawn(), drawn()
        assert _linattn.late(1, EPS, *one) and _linattn.late(1, EPS, *two)
        assert torch.equal(one[2], two[2]) and torch.equal(one[3], two[3])

    @pytest.mark.parametrize("change", ["float16", "K", "no fours"])
    def test_arrays_that_no_kernel_takes_stay(self, change):
        k, v, dk, dv, dS, dz = drawn(K=256 if change == "K" else 128)
        x = [k, v, dk, dv]
        if change == "float16":
            x = [y.half() for y in x]
        if change == "no fours":
            x = [torch.nn.functional.pad(y, (0, 1))[..., :128] for y in x]
        before = [y.clone() for y in x]
        assert not _linattn.late(1, EPS, *x, dS, dz)
        assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))


def test_a_cpu_has_no_kernel():
    x = drawn(T=20, device="cpu")
    before = [y.clone() for y in x]
    assert not _linattn.late(1, EPS, *x)
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))


@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        (1, lambda x: x[:, 1:], r"v: expected \[B,T,HV,V\] = .*, got \(2, 19, 3, 128\)"),
        (2, lambda x: x[..., 1:], r"dk: expected \[B,T,H,K\] = .*, got \(2, 20, 3, 127\)"),
        (4, lambda x: x[0], r"dS: expected \[N,HV,K,V\] = .*, got \(3, 128, 128\)"),
        (5, lambda x: x.mT, r"dz: expected \[N,HV,K\] = .*, got \(2, 128, 3\)"),
        (0, lambda x: x[0], "k: expected"),
    ],
)
def test_shapes_agree(which, change, message):
    x = list(drawn(T=20, device="cpu"))
    x[which] = change(x[which])
    with pytest.raises(ValueError, match=message):
        _linattn.late(1, EPS, *x)
    x = list(drawn(T=20, device="cpu"))
    with pytest.raises(TypeError, match="dz: expected float32, got float64"):
        _linattn.late(1, EPS, *x[:5], x[5].double())


def test_a_map_has_a_number():
    with pytest.raises(ValueError, match="map: expected the number of a feature map, got 9"):
        _linattn.late(9, EPS, *drawn(T=2, device="cpu"))
    with pytest.raises(TypeError, match="late: expected 8 arguments, got 7"):
        _linattn.late(1, EPS, *drawn(T=2, device="cpu")[1:])
