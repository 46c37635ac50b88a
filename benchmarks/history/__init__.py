"""The suite of `asv`, which keeps figures by commit: asv.conf.json at the checkout's top.

`asv` builds other commits and runs this text with them, so it uses linattn's public functions
alone, and stands in a folder of its own: `asv` imports all that lies beside it.
"""

import numpy as np

import linattn
from linattn.testing import make_inputs

H, D, T = 16, 128, 512  # as in the table of `python -m benchmarks cpu`


class Op:
    """Every op in every pass: float32, B = 1, H = 16, K = V = 128, T = 512, one thread."""

    params = (linattn.OPS, ("forward", "backward", "step"))
    param_names = ("op", "pass")
    number, repeat, warmup_time = 0, (3, 9, 5.0), 0.1

    def setup(self, op, pass_):
        linattn.set_num_threads(1)
        rng = np.random.default_rng(0)
        x = make_inputs(
            op, rng, T=1 if pass_ == "step" else T, H=H, K=D, V=D, dtype=np.float32, normalize=False
        )
        if pass_ == "step":
            x = {name: a[:, 0] if np.ndim(a) > 2 else a for name, a in x.items()}
            x |= {"state": linattn.zeros_state(1, H, D, D), "out": np.empty_like(x["v"])}
        if pass_ == "backward":
            x["do"] = rng.standard_normal(x["v"].shape, np.float32)
        self.x = x
        self.call = getattr(linattn, op + ("" if pass_ == "forward" else f"_{pass_}"))

    def time_call(self, op, pass_):
        self.call(**self.x)
