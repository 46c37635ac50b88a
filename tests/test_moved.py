"""Python that runs while a call reads its arguments may free or resize an array that was read
before: numbers come first, and an array that has moved is refused before anything is written."""

import gc
import threading
import time
import warnings

import numpy as np
import pytest

import linattn

STAY = "expected its memory to stay where it is, got an array whose memory was exchanged"
T, K = 4096, 64  # 1 MiB: memory of its own, which goes back to the system when it is freed


class Late:
    """An array whose export runs code of the test's own first."""

    def __init__(self, array, does):
        self.array, self.does = array, does

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **how):
        self.does()
        return self.array.__dlpack__(**how)


class Number:
    """A number that runs code of the test's own when it is read."""

    def __init__(self, value, does):
        self.value, self.does = value, does

    def __float__(self):
        self.does()
        return float(self.value)

    def __index__(self):
        self.does()
        return int(self.value)


def arrays():
    return [np.ones((T, K), np.float32) for _ in range(3)]


def free(x):
    x.resize((0,), refcheck=False)
    gc.collect()


PLAIN = {"normalize": False, "feature_map": "identity"}


def calls(q, k, v):
    yield lambda **more: linattn.linear_attention(q, k, v, **PLAIN, **more)
    yield lambda **more: linattn.linear_attention_backward(v, q, k, v, **PLAIN, **more)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["scale", "chunk_size"])
def test_numbers_are_read_before_arrays(which, name):
    """The array is already gone, and is refused by its shape at that time."""
    q, k, v = arrays()
    call = list(calls(q, k, v))[which]
    with pytest.raises(ValueError, match=r"^q: expected .*got \(0,\)"):
        call(**{name: Number(16, lambda: free(q))})


@pytest.mark.parametrize("which", [0, 1])
def test_an_array_that_a_later_one_frees(which):
    torch = pytest.importorskip("torch")
    q, k, _ = arrays()
    late = Late(torch.ones(T, K), lambda: free(q))
    with pytest.raises(ValueError, match=f"^q: {STAY}"):
        list(calls(q, k, late))[which]()


@pytest.mark.parametrize("how", ["set_", "resize_", "storage", "data"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_that_a_later_one_frees(which, how):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.ones(T, K) for _ in range(3))
    done = []

    def does():
        if done:  # a backward reads it twice, and the old memory might come back
            return
        done.append(True)
        if how == "set_":
            q.set_(torch.empty(0))
        elif how == "resize_":
            q.resize_(4 * T, K)
        elif how == "storage":
            q.untyped_storage().resize_(0)
        else:
            q.data = torch.zeros(T, K)
        gc.collect()

    late = Late(v, does)
    made = list(calls(q, k, late))[which]
    with pytest.raises(ValueError, match=f"^q: {STAY}"):
        made()


def test_a_tensor_of_a_class_that_runs_python():
    torch = pytest.importorskip("torch")
    q, k = torch.ones(T, K), torch.ones(T, K)

    class Odd(torch.Tensor):
        @property
        def requires_grad(self):
            q.set_(torch.empty(0))
            return False

    v = torch.ones(T, K).as_subclass(Odd)
    with pytest.raises(ValueError, match=f"^q: {STAY}"):
        linattn.linear_attention_backward(k, q, k, v, **PLAIN)


def test_a_steps_query_that_a_later_argument_frees():
    torch = pytest.importorskip("torch")
    q, k, state = np.ones(T, np.float32), np.ones(T, np.float32), np.ones((T, 8), np.float32)
    late = Late(torch.ones(8), lambda: free(q))
    with pytest.raises(ValueError, match=f"^q: {STAY}"):
        linattn.linear_attention_step(q, k, late, state=state, **PLAIN)
    assert (state == 1).all()


def test_a_steps_state_that_a_later_argument_frees():
    torch = pytest.importorskip("torch")
    q, v, state = np.ones(T, np.float32), np.ones(8, np.float32), np.ones((T, 8), np.float32)
    out = Late(torch.ones(8), lambda: free(state))
    with pytest.raises(ValueError, match=f"^state: {STAY}"):
        linattn.linear_attention_step(q, q, v, state=state, out=out, **PLAIN)


def test_a_warning_that_frees_an_array(monkeypatch):
    """The code that shows a warning is Python too."""
    q, k, v = arrays()
    g = np.full(T, 0.1, np.float32)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *_, **__: free(q))
        with pytest.raises(ValueError, match=f"^q: {STAY}"):
            linattn.simple_gla(q, k, v, g)


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_mode_of_pytorch_that_frees_a_tensor(nth):
    """A mode sees every attribute that is read of a plain tensor, and is Python."""
    torch = pytest.importorskip("torch")
    from torch.overrides import TorchFunctionMode

    q, k, v = (torch.ones(T, K) for _ in range(3))

    class Frees(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            if self.seen == nth:
                with torch._C.DisableTorchFunction():
                    q.set_(torch.empty(0))
                    gc.collect()
            return function(*args, **(kwargs or {}))

    try:
        with Frees():
            linattn.linear_attention_backward(v, q, k, v, **PLAIN)
    except ValueError as error:  # before q is read, it is refused as what it is by then
        assert STAY in str(error) or "got (0,)" in str(error)


def test_a_dispatch_mode_that_frees_a_tensor():
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    q, k, v = (torch.ones(T, K) for _ in range(3))

    class Frees(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "empty" in str(function):
                q.untyped_storage().resize_(0)
                gc.collect()
            return function(*args, **(kwargs or {}))

    with Frees(), pytest.raises(ValueError, match=f"^q: {STAY}"):
        linattn.linear_attention_backward(v, q, k, v, **PLAIN)


def test_a_thread_that_gives_a_tensor_other_memory():
    """The call keeps the memory that it was given: the results are those of the old numbers."""
    torch = pytest.importorskip("torch")
    n = 2**19
    q, k, v = (torch.full((n, K), 1 / 64) for _ in range(3))
    beta = torch.full((n,), 0.1)
    expected, _ = linattn.delta_rule(q.clone(), k, v, beta)

    def frees():
        time.sleep(0.05)
        q.set_(torch.empty(0))
        gc.collect()

    thread = threading.Thread(target=frees)
    thread.start()
    o, _ = linattn.delta_rule(q, k, v, beta)
    thread.join()
    assert q.numel() == 0 and torch.equal(o, expected)


def test_numpy_s_own_functions_may_be_replaced(monkeypatch):
    q, _, v = arrays()
    both = np.ones((2 * T, K), np.float32)
    monkeypatch.setattr(np, "shares_memory", lambda *_: free(q))
    with pytest.raises(ValueError, match=f"^q: {STAY}"):
        linattn.retention(q, both[::2], v, out=both[1::2])
