"""The three types that every program uses: a problem, a way to compute it, its figures."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from linattn import VARIANTS, flops, memory

CHUNK = 64  # tokens: the chunk of the peers, and the one that `products` is counted with
BESIDE = "softmax"  # the section of what stands beside the op and its peers: softmax attention


class WrongResult(Exception):
    """A call did not compute its case."""


@dataclass(frozen=True)
class System:
    """A composed op: arithmetic around `base`, an op of the table. Asked is at most `within` times
    the base's own time."""

    base: str
    within: float


SYSTEMS = {
    "ssd": System("simple_gla", 1.05),
    "comba": System("gated_delta_rule", 1.08),
    "precond_gated_delta_rule": System("gated_delta_rule", 1.08),
    "gdn2": System("kda", 1.08),
}


@dataclass(frozen=True)
class Case:
    """One problem: q and k have H heads, v has HV; a head has D keys, and D values or V.

    `op` is of the table or in SYSTEMS.

    The defaults are a layer of a model of about 2e9 parameters and one prompt.
    """

    op: str
    pass_: str = "forward"  # "forward" | "forward+backward" | "step"
    B: int = 1
    T: int = 512
    H: int = 16
    HV: int = 16
    D: int = 128
    V: int | None = None
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
            + (f" V{self.V}" if self.V is not None else "")
            + (f" {self.dtype}" if self.dtype not in ("bfloat16", "float32") else "")
        )

    @property
    def values(self):
        return self.D if self.V is None else self.V

    @property
    def system(self):
        """None for an op of the table."""
        return SYSTEMS.get(self.op)

    @property
    def base(self):
        """The same problem of the table's op: of that which a composed op is made of."""
        return replace(self, op=self.system.base) if self.system else self

    @property
    def variant(self):
        return VARIANTS[self.base.op]

    @property
    def delta(self):
        return self.variant.rule == "delta"

    @property
    def ordinary(self):
        """Is it an op of the table with a rule that most libraries with linear attention have? One
        state; it is read after its decay and the write, and a prediction, if any, is of the key
        that is written."""
        rule, decay = self.variant.rule, self.variant.decay
        return not self.system and rule in ("additive", "delta") and decay != "pair"

    @property
    def flops(self):
        """Multiplies and adds that the recurrence needs. More work than that earns nothing. Of a
        composed op they are its base's: the arithmetic around it earns nothing either."""
        passes, elements = 3 if self.pass_ == "forward+backward" else 1, self.D * self.values
        return passes * per_element(self.base.op) * elements * self.B * self.T * self.HV

    @property
    def products(self):
        """Multiplies and adds of the chunked form's products; of the recurrence's for a step.

        Per token: a q/k head 2 C D for its scores q k', a value head 2 C V to read them and 4 D V
        to read and write the state; with the delta rule another 2 C D for k k', 2 C V to apply the
        triangular inverse and 2 C C / 3 to find it, 2 D V to predict. Where two rows are written,
        y beside k, there are two of each score, read and write. A memory and its momentum are two
        states in a chunk; a step reads one.
        """
        C, D, V, tokens, rule = CHUNK, self.D, self.values, self.B * self.T, self.variant.rule
        predicts, writes = rule in ("delta", "dplr"), 1 + (rule == "dplr")
        of_state, inside = 2 * D * V * (1 + writes + predicts), 2 * C * writes * (1 + predicts)
        if self.pass_ == "step":
            return tokens * self.HV * of_state
        states = 1 + (self.variant.decay == "pair")
        solve = predicts * 2 * C * C / 3
        return tokens * (self.H * inside * D + self.HV * (inside * V + states * of_state + solve))

    @property
    def itemsize(self):
        return 4 if self.dtype in ("float32", "tf32") else 2

    @property
    def bytes(self):
        """Each array moved once; gates and state are float32."""
        how = {"B": self.B, "H": self.H, "HV": self.HV, "itemsize": self.itemsize}
        found = memory(self.op, self.T, self.D, self.values, **how, normalize=self.normalised)
        return found.arrays + (2 * found.kept if self.pass_ == "step" else 0)


def per_element(op):
    """Multiplies and adds of an op for a token and an element [K,V] of its state: the factor of K V
    in linattn.flops.

    A write and a read are 2 each, a decay 1, a prediction 2; a momentum's decay and its addition 2.
    """

    def of_token(K, V):
        return flops(op, 1, K, V, mode="recurrent")

    return of_token(1, 1) - of_token(1, 0) - of_token(0, 1) + of_token(0, 0)


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
