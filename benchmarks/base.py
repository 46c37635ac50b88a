"""The three types that every program uses: a problem, a way to compute it, its figures."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from linattn import VARIANTS

CHUNK = 64  # tokens: the chunk of the peers, and the one that `products` is counted with
BESIDE = "softmax"  # the section of what stands beside the op and its peers: softmax attention


class WrongResult(Exception):
    """A call did not compute its case."""


@dataclass(frozen=True)
class Case:
    """One problem: q and k have H heads, v has HV; a head has D keys and D values.

    The defaults are a layer of a model of about 2e9 parameters and one prompt.
    """

    op: str
    pass_: str = "forward"  # "forward" | "forward+backward" | "step"
    B: int = 1
    T: int = 512
    H: int = 16
    HV: int = 16
    D: int = 128
    dtype: str = "float32"  # of q, k, v and o; tf32: float32, products rounded so or better
    normalised: bool = False  # linear attention's outputs divided by the sum of their weights
    why: str = field(default="", compare=False)
    quick: bool = field(default=False, compare=False)  # belongs to a short run

    def __str__(self):
        return f"{self.name} {self.pass_} {self.shape}"

    @property
    def name(self):
        return self.op + ", normalised" * self.normalised

    @property
    def shape(self):
        heads = f"H{self.H}" + (f"/{self.HV}" if self.HV != self.H else "")
        return (
            f"B{self.B}"
            + (f" T{self.T}" if self.pass_ != "step" else "")
            + f" {heads}"
            + (f" K{self.D}" if self.D != 128 else "")
            + (f" {self.dtype}" if self.dtype not in ("bfloat16", "float32") else "")
        )

    @property
    def variant(self):
        return VARIANTS[self.op]

    @property
    def delta(self):
        return self.variant.rule == "delta"

    @property
    def flops(self):
        """Multiplies and adds that the recurrence needs. More work than that earns nothing."""
        passes = 3 if self.pass_ == "forward+backward" else 1
        return passes * per_element(self.op) * self.D**2 * self.B * self.T * self.HV

    @property
    def products(self):
        """Multiplies and adds of the chunked form's products; of the recurrence's for a step.

        Per token: a q/k head 2 C D for its scores q k', a value head 2 C D to read them and 4 D D
        to read and write the state; with the delta rule another 2 C D for k k', 2 C D to apply the
        triangular inverse and 2 C C / 3 to find it, 2 D D to predict.
        """
        C, D, delta, tokens = CHUNK, self.D, self.delta, self.B * self.T
        if self.pass_ == "step":
            return tokens * self.HV * D * D * (4 + 2 * delta)
        return tokens * (
            self.H * 2 * C * D * (1 + delta)
            + self.HV * (2 * C * D * (1 + delta) + 4 * D * D + delta * (2 * D * D + 2 * C * C / 3))
        )

    @property
    def itemsize(self):
        return 4 if self.dtype in ("float32", "tf32") else 2

    @property
    def bytes(self):
        """Each array moved once; gates and state are float32."""
        gates = {"token": 1, "key": self.D}.get(self.variant.decay, 0) + self.delta
        each = 2 * self.itemsize * self.D * (self.H + self.HV) + 4 * self.HV * gates
        state = 8 * self.B * self.HV * self.D**2 if self.pass_ == "step" else 0
        return self.B * self.T * each + state


def per_element(op):
    """Multiplies and adds of an op for a token and an element of its state.

    A write and a read are 2 each, a decay 1, a prediction 2.
    """
    variant = VARIANTS[op]
    return 4 + (variant.decay != "none") + 2 * (variant.rule == "delta")


@dataclass(frozen=True)
class Peer:
    """One way to compute the cases that it `has`.

    `make(case, x)` prepares all that can be prepared once, and returns the call to time. A call
    returns a tuple: o, then the gradients or the new state, if there are any. `numpy` turns one of
    these into a NumPy array. `computes(case, x)` gives the inputs as the peer rounds them; its
    results are checked against those of these inputs. `instead(x)` is there for a peer that
    computes another function of the case's inputs: it yields what is right, as `check.chunks` does.
    """

    name: str
    version: str
    make: Callable
    has: Callable = lambda case: True
    numpy: Callable = lambda array: array
    computes: Callable = lambda case, x: x
    instead: Callable | None = None

    def section(self, section):
        """The section of its results: one that computes another function is not among the peers."""
        return BESIDE if self.instead else section


@dataclass
class Result:
    """The figures of one case computed by one peer; `seconds` has samples by kind of time."""

    case: Case | None  # None: not a call of an op
    peer: str  # its name, "linattn" for ours
    section: str = "table"
    threads: int = 1
    seconds: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""
    note: str = ""
    rms: float | None = None  # relative error, of all
    rms_chunk: float | None = None  # and of the worst 64 tokens of a head
    copies: int = 1  # of the inputs, taken in turn
    calls: int | None = None  # in one sample
    memory: int | None = None  # bytes at the peak
    run: int = 0

    def add(self, kind, seconds):
        self.seconds.setdefault(kind, []).append(seconds)

    def median(self, kind="call"):
        return statistics.median(self.seconds[kind]) if kind in self.seconds else None

    def least(self, kind="call"):
        return min(self.seconds[kind]) if kind in self.seconds else None

    def has(self, **wanted):
        """Whether its fields, or those of its case, are these."""
        return all(
            getattr(self if name in vars(self) else self.case, name) == value
            for name, value in wanted.items()
        )
