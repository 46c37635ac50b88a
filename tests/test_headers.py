"""Headers of arrays that say what no array can be: each is refused, and an interrupt stays one."""

import numpy as np
import pytest

import linattn

ONES = np.ones((2, 2), np.float32)


class Interface:
    def __init__(self, **more):
        self.__cuda_array_interface__ = {
            "shape": (2, 2),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
            **more,
        }


class WithDlpack(Interface):
    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **how):
        return ONES.__dlpack__()


def test_a_version_that_is_no_number():
    for kind in (Interface, WithDlpack):
        with pytest.raises(TypeError, match=r"^q: .*str"):
            linattn.retention(kind(version="x"), ONES, ONES)


@pytest.mark.parametrize("name", ["__cuda_array_interface__", "__dlpack__", "__dlpack_device__"])
def test_an_interrupt_while_an_attribute_is_read(name):
    def interrupted(self):
        raise KeyboardInterrupt

    odd = type("Odd", (WithDlpack,), {name: property(interrupted, lambda self, value: None)})
    with pytest.raises(KeyboardInterrupt):
        linattn.retention(odd(), ONES, ONES)


@pytest.mark.parametrize("device", [(2**32 + 1, 0), (1, 2**32), (2**70, 0)])
def test_a_device_of_more_than_32_bits(device):
    class Far:
        def __dlpack_device__(self):
            return device

        def __dlpack__(self, **how):
            return ONES.__dlpack__()

    with pytest.raises(ValueError, match=r"^q: "):
        linattn.retention(Far(), ONES, ONES)
