"""The ops of each kind, from linattn.VARIANTS: no test types such a list (test_house.py).

Every list has the table's order.
"""

from linattn import VARIANTS


def ops_with(**kind):
    """The ops whose row of the table has these fields."""
    return tuple(
        op
        for op, row in VARIANTS.items()
        if all(getattr(row, field) == value for field, value in kind.items())
    )


NO_DECAY, HEAD_DECAY, TOKEN_DECAY, KEY_DECAY, PAIR_DECAY = (
    ops_with(decay=decay) for decay in ("none", "head", "token", "key", "pair")
)
# these take g, or alpha
GATED = tuple(op for op in VARIANTS if op in TOKEN_DECAY + KEY_DECAY + PAIR_DECAY)
DELTA, NORMALISED = ops_with(rule="delta"), ops_with(normaliser=True)
PREDICTS = tuple(op for op in DELTA if op not in PAIR_DECAY)  # these take x
# a GPU takes 256 keys at most of these
RARE = (*ops_with(rule="dplr"), *ops_with(rule="bonus"), *PAIR_DECAY)
BY_TOKEN = PAIR_DECAY  # a GPU has no kernels in chunks for these

# For tests that would take too long with all ops: the plainest op, and the delta rules with a gate.
# Together they have everything that a kernel can have except a decay per head.
FEW = (NO_DECAY[0], *(op for op in DELTA if op in GATED))
EVERY_DECAY = (FEW[0], HEAD_DECAY[0], *FEW[1:])


def with_decay(op, decay):
    """The op of the same rule with another decay."""
    return next(other for other in ops_with(decay=decay, rule=VARIANTS[op].rule))


def having(ops, decay):
    """Those of the ops that are one of the same rule with this decay, if their decays are so."""
    one_state = [op for op in ops if op not in PAIR_DECAY]
    return tuple(op for op in one_state if ops_with(decay=decay, rule=VARIANTS[op].rule))
