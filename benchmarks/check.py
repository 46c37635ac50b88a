"""Whatever is timed is right first: against linattn.reference in float64, on a shorter problem."""

from dataclasses import replace

import numpy as np
from cases import gradient, inputs, ours

from linattn import reference, testing

T, HEADS, STEPS = 192, 2, 3  # three of the peers' chunks; tokens in a row for a step
# rms(out - ref) / rms(ref) of a peer; ours go by the acceptance rule of linattn.testing
PEER_BOUND = {"float32": 1e-5, "bfloat16": 2e-2}


class WrongResult(Exception):
    """Something did not compute what it is timed for."""


def shortened(case):
    return replace(case, T=1 if case.face == "step" else T, heads=HEADS)


def expected(case, x, dtype, form):
    """What the shortened case should return: (o,) or (o, gradients ...), computed at dtype."""
    if case.face == "step":  # one token, again and again
        x = {name: np.repeat(a, STEPS, 1) if np.ndim(a) > 1 else a for name, a in x.items()}
    o = getattr(reference, case.op)(**x, dtype=dtype, **form)[0]
    if case.face == "forward":
        return (o,)
    if case.face == "step":
        return (o[:, -1],)
    grads = reference.backward(case.op, gradient(case), **x, dtype=dtype, **form)
    wanted = [d for d in grads[:5] if d is not None]
    return (o, *wanted)


class Checker:
    """Checks calls against references that are computed once per case."""

    def __init__(self):
        self.known = {}

    def problem(self, case):
        case = shortened(case)
        if case not in self.known:
            x = inputs(case)
            self.known[case] = x, expected(case, x, np.float64, {})
        return case, *self.known[case]

    def ours(self, case):
        case, x, wanted = self.problem(case)
        form = {"form": "chunk", "chunk_size": 16} if case.face != "step" else {}
        naive = expected(case, x, x["v"].dtype, form)
        got = result(case, ours(case, x), np.asarray)
        for i, (out, ref, other) in enumerate(zip(got, wanted, naive, strict=False)):
            if out.size < 1000:  # a decay's gradient per head: too few numbers for a maximum
                self.bounded("linattn", case, i, out, ref)
                continue
            try:
                testing.assert_accurate(out, ref, other, dtype=case.dtype if i else x["v"].dtype,
                                        gradient=i > 0, name=f"{case}, output {i}")
            except AssertionError as error:
                raise WrongResult(f"linattn: {error}") from None

    def peer(self, peer, case):
        """False where the peer has no such op."""
        case, x, wanted = self.problem(case)
        call = peer.make(case, x)
        if call is None:
            return False
        got = result(case, call, peer.numpy)
        for i, (out, ref) in enumerate(zip(got, wanted, strict=True)):
            self.bounded(peer.name, case, i, out, ref)
        return True

    def bounded(self, who, case, i, out, ref):
        off = np.sqrt(np.mean((out - ref) ** 2) / np.mean(ref**2))
        if out.shape != ref.shape or not off < PEER_BOUND[case.dtype] * (2 if i else 1):
            raise WrongResult(f"{who}: {case}, output {i}: rms error {off:.1e}")


def result(case, call, to_numpy):
    """The outputs of a call; of a step, those after the same token STEPS times."""
    for _ in range(STEPS if case.face == "step" else 1):
        got = call()
    return [to_numpy(a) for a in (got if isinstance(got, tuple) else (got,))]
