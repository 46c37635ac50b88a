"""The problems on a GPU: why each is there, what it must move and compute, its inputs."""

from dataclasses import dataclass

import torch
from cases import K

import linattn

C = 64  # the chunk that the operations floor is counted with
DELTA = ("delta_rule", "gated_delta_rule", "kda")
SCALAR = ("simple_gla", "gated_delta_rule")  # a gate per token and head
PER_KEY = ("gla", "kda")  # a gate per token, head and key
STEPS = ("gated_delta_rule", "kda", "gla", "simple_gla", "linear_attention")
LAYER, LAYERS = 12, 24  # of lightning attention's slopes

SHAPES = (  # every op's forward
    (1, 8192, 96, "heads enough to fill the chip many times over: throughput alone"),
    (1, 32768, 8, "one long prompt, few heads: the chain of chunks is the cost"),
    (4, 2048, 16, "a batch of prompts of ordinary length: one wave of blocks"),
)
WIDE = 256  # keys and values of a head: few heads, as RetNet and fla's gated delta layers have them
GROUPED = (  # heads of q and k, of v: a model's on one, two and eight GPUs
    (1, 32768, 16, 64, "Qwen3-Next's heads, one long prompt"),
    (4, 8192, 16, 64, "Qwen3-Next's heads, a batch"),
    (1, 32768, 8, 32, "half of the heads, one long prompt"),
    (4, 8192, 8, 32, "half of the heads, a batch"),
    (1, 32768, 2, 8, "an eighth of the heads: no parallel work but along the sequence"),
    (1, 2048, 2, 8, "an eighth of the heads, a short prompt: launches are the cost"),
)
BATCHES = (
    (1, "one user: the latency of a launch and of the call"),
    (8, "a few users"),
    (64, "states larger than the cache"),
    (256, "a server's batch: the bytes of the states alone"),
)


@dataclass(frozen=True)
class Case:
    """One problem: q and k have H heads, v has HV."""

    op: str
    face: str  # "forward" | "step"
    B: int
    T: int
    H: int
    HV: int
    why: str
    quick: bool = False
    D: int = K  # keys and values of a head
    dtype: str = "bfloat16"  # of q, k, v and o; tf32: float32, products rounded so or better

    def __str__(self):
        heads = f"H{self.H}" + (f"/{self.HV}" if self.HV != self.H else "")
        length = "" if self.face == "step" else f" T{self.T}"
        wide = f" K{self.D}" if self.D != K else ""
        dtype = f" {self.dtype}" if self.dtype != "bfloat16" else ""
        return f"{self.op} {self.face} B{self.B}{length} {heads}{wide}{dtype}"

    @property
    def bytes(self):
        """Each array moved once; gates and state are float32."""
        tokens, gates = self.B * self.T, (self.op in SCALAR) + self.D * (self.op in PER_KEY)
        each = 2 * self.torch_dtype.itemsize * self.D * (self.H + self.HV)
        each += 4 * self.HV * (gates + (self.op in DELTA))
        return tokens * each + (8 * self.B * self.HV * self.D**2 if self.face == "step" else 0)

    @property
    def torch_dtype(self):
        return torch.float32 if self.dtype == "tf32" else getattr(torch, self.dtype)

    @property
    def flops(self):
        """Of the products of the chunked form; of the recurrence for a step.

        Per token: a q/k head 2 C K for its scores q k', a value head 2 C V to read them and 4 K V
        to read and write the state; with the delta rule another 2 C K for k k', 2 C V to apply the
        triangular inverse and 2 C C / 3 to find it, 2 K V to predict.
        """
        delta, tokens, D = self.op in DELTA, self.B * self.T, self.D
        if self.face == "step":
            return tokens * self.HV * D * D * (4 + 2 * delta)
        return tokens * (self.H * 2 * C * D * (1 + delta) + self.HV * (
            2 * C * D * (1 + delta) + 4 * D * D + delta * (2 * D * D + 2 * C * C / 3)))


def table(tiny=False):
    """Every case, an op's together: what one of them compiles the next may use."""
    if tiny:  # for a machine with no GPU: the same code, no figures
        return [Case(op, face, 2, T, H, HV, "dry run", True) for op in linattn.OPS
                for face, T, H, HV in (("forward", 128, 2, 4 if op == "gated_delta_rule" else 2),
                                       *([("step", 1, 2, 2)] if op in STEPS else []))]
    found = []
    for op in linattn.OPS:
        found += [Case(op, "forward", B, T, H, H, why, quick=B == 4) for B, T, H, why in SHAPES]
        if op == "gated_delta_rule":
            found += [Case(op, "forward", *shape) for shape in GROUPED]
        if op == "kda":
            found.append(Case(op, "forward", 1, 32768, 32, 32, "one long prompt, many heads"))
        found.append(Case(op, "forward", 1, 8192, 24, 24, "K = V = 256", D=WIDE))
        for dtype in ("float16", "tf32"):
            found.append(Case(op, "forward", 1, 8192, 96, 96, dtype, dtype=dtype))
        if op in STEPS:
            found += [Case(op, "step", B, 1, 32, 32, why, quick=B == 1) for B, why in BATCHES]
    return found


def inputs(case, device, seed):
    """A dict of tensors, the same for ours and for every peer: random, never zeros.

    Gates are those of trained models, as benchmarks/cases.py has them: decays from exp(-0.002) to
    exp(-0.3) a token, beta about a half, keys of a delta rule of unit norm. q, k, v are of the
    case's dtype, gates and beta float32, as every peer takes them; a step has its state, float32,
    besides.
    """
    random = torch.Generator(device).manual_seed(seed)
    # a step's have no axis of tokens
    shape = (case.B,) if case.face == "step" else (case.B, case.T)

    def normal(*last):
        return torch.randn(*shape, *last, generator=random, device=device)

    def uniform(low, high, *last):
        return torch.rand(*shape, *last, generator=random, device=device) * (high - low) + low

    D = case.D
    x = {"q": normal(case.H, D), "k": normal(case.H, D), "v": normal(case.HV, D)}
    if case.op in DELTA:
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    x = {name: a.to(case.torch_dtype) for name, a in x.items()}
    if case.op in SCALAR + PER_KEY:
        x["g"] = -(10 ** uniform(-2.7, -0.5, case.HV, *((D,) if case.op in PER_KEY else ())))
    if case.op in DELTA:
        x["beta"] = uniform(0.1, 0.9, case.HV)
    heads = torch.arange(case.HV, device=device, dtype=torch.float32)
    if case.op == "retention":
        x["gamma"] = 1 - 2.0 ** (-5 - heads)
    if case.op == "lightning_attention":
        x["slopes"] = 8 / case.HV * (1 - LAYER / LAYERS) * heads
    if case.face == "step":
        x["state"] = torch.randn(case.B, case.HV, D, D, generator=random, device=device)
    return x


def ours(case, x):
    """A call that does the case once and returns (o, the state after it or None).

    o is written where it was the time before, as a server would have it, and a step's state in
    place. It is NaN at first, so that what is not written shows.
    """
    out = torch.full_like(x["v"], float("nan"))
    more = {"feature_map": "identity", "normalize": False} if case.op == "linear_attention" else {}
    if case.face == "forward":
        op = getattr(linattn, case.op)
        more |= {"allow_tf32": True} if case.dtype == "tf32" else {}
        return lambda: (op(**x, **more, out=out)[0], None)
    step, state = getattr(linattn, f"{case.op}_step"), x["state"]
    return lambda: (step(**x, **more, out=out), state)
