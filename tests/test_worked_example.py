"""The worked example of docs/math.md, "the cat sat on the mat": five tokens, exact fractions.

First the definitions in fractions.Fraction, then the float64 reference, then linattn's own ops.
"""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from linattn import reference

GOLDEN = json.loads((Path(__file__).parent / "golden" / "cat_sat.json").read_text())


def exact(x):
    """Nested lists of "3/4" as an object array of Fractions."""
    return np.vectorize(Fraction, otypes=[object])(np.array(x, dtype=object))


def floats(x):
    return exact(x).astype(np.float64)


Q, K, V = (exact(GOLDEN[name]) for name in "QKV")
q, k, v = (x.astype(np.float64) for x in (Q, K, V))

# name -> phi on these numbers, none of which is negative, and linattn's name for it
NORMALISED = {
    "seed_elu1": (lambda x: x + 1, "elu+1"),
    "derived_relu_eps_1e3": (lambda x: x + Fraction(1, 1000), "relu+eps"),
}

# name -> decay and beta; beta None is the additive rule
UNNORMALISED = {
    "derived_identity_causal_unnormalised": (1, None),
    "derived_scalar_decay_09": (Fraction(9, 10), None),
    "derived_delta_beta1": (1, 1),
    "derived_delta_beta_half": (1, Fraction(1, 2)),
    "derived_gdn_alpha09_beta_half": (Fraction(9, 10), Fraction(1, 2)),
    "derived_gdn_alpha09_beta1": (Fraction(9, 10), 1),
}

# the table of docs/math.md: o of cat, sat, on and mat; o of The is 0
# fmt: off
PRINTED = {
    "derived_identity_causal_unnormalised": "3 0 0 0 | 1 2 2 0 | 1 1 0 2 | 7/4 7/4 7/4 7/4",
    "derived_scalar_decay_09": "2.7 0 0 0 | .81 1.8 2 0 | .729 .81 0 2 | 1.4061 1.479 1.56 1.65",
    "derived_delta_beta1": "3 0 0 0 | -1 0 2 0 | -1 -1 0 2 | 2 .5 .25 .25",
    "derived_delta_beta_half": "1.5 0 0 0 | 0 .5 1 0 | 0 0 0 1 | .5625 .1875 .5 .5",
    "derived_gdn_alpha09_beta_half":
        "1.35 0 0 0 | 0 .45 1 0 | 0 0 0 1 | .49801875 .2383125 .47625 .4875",
}
# fmt: on
WRONG_ORDER = "1.35 0 0 0 | -.045 .4 1 0 | -.0405 -.045 0 1 | .5056125 .216375 .4425 .45"
PRINTED_NORMALISED = {
    "out": "51/182 59/182 55/182 55/182 | 67/206 55/206 63/206 59/206 | 61/210 13/42 13/42 61/210"
    " | 3/10 3/10 5/18 29/90 | 55/182 55/182 55/182 55/182",
    "causal_out": "1 0 0 0 | 4/7 3/7 0 0 | 5/16 11/32 11/32 0 | 1/4 1/4 2/9 5/18"
    " | 55/182 55/182 55/182 55/182",
}


def table(text):
    return exact([row.split() for row in text.split("|")])


def tokens(a, beta, wrong_order=False):
    """The recurrence in Fractions, scale 1, no feature map: o [5,4] and S [4,4]."""
    S = Q[:4] * 0
    o = []
    for q_t, k_t, v_t in zip(Q, K, V, strict=True):
        undecayed, S = S, a * S
        p = k_t @ (undecayed if wrong_order else S)
        u = v_t if beta is None else beta * (v_t - p)
        S = S + np.outer(k_t, u)
        o.append(q_t @ S)
    return np.array(o), S


# ---- the definitions, exactly


@pytest.mark.parametrize("name", NORMALISED)
def test_normalised_by_the_definition(name):
    golden = {what: exact(x) for what, x in GOLDEN[name].items()}
    phi_q, phi_k = (NORMALISED[name][0](x) for x in (Q, K))
    raw = phi_q @ phi_k.T
    causal = np.where(np.tri(5, dtype=bool), raw, Fraction(0))
    expected = {
        "phi_q": phi_q,
        "phi_k": phi_k,
        "KV": phi_k.T @ V,
        "key_sum": phi_k.sum(0),
        "num": phi_q @ (phi_k.T @ V),
        "den": phi_q @ phi_k.sum(0),
        "out": raw @ V / raw.sum(1)[:, None],
        "raw": raw,
        "weights": raw / raw.sum(1)[:, None],
        "causal_num": causal @ V,
        "causal_den": causal.sum(1),
        "causal_out": causal @ V / causal.sum(1)[:, None],
    }
    assert golden.keys() == expected.keys()
    for what, x in expected.items():
        np.testing.assert_array_equal(golden[what], x, err_msg=what)
    np.testing.assert_array_equal(golden["num"] / golden["den"][:, None], golden["out"])


@pytest.mark.parametrize("name", UNNORMALISED)
def test_unnormalised_by_the_definition(name):
    o, S = tokens(*UNNORMALISED[name])
    np.testing.assert_array_equal(o, exact(GOLDEN[name]["o"]))
    np.testing.assert_array_equal(S, exact(GOLDEN[name]["S"]))


@pytest.mark.parametrize("name", PRINTED)
def test_the_printed_table(name):
    o = exact(GOLDEN[name]["o"])
    assert not o[0].any()
    np.testing.assert_array_equal(o[1:], table(PRINTED[name]))


@pytest.mark.parametrize("what", PRINTED_NORMALISED)
def test_the_printed_table_of_the_normalised_op(what):
    np.testing.assert_array_equal(exact(GOLDEN["seed_elu1"][what]), table(PRINTED_NORMALISED[what]))


def test_the_wrong_order_is_another_table():
    """Predicting from the undecayed state gives the other row: close enough to be overlooked."""
    a, beta = UNNORMALISED["derived_gdn_alpha09_beta_half"]
    o, _ = tokens(a, beta, wrong_order=True)
    right, _ = tokens(a, beta)
    np.testing.assert_array_equal(o[1:], table(WRONG_ORDER))
    np.testing.assert_array_equal(o[1], right[1])  # nothing is predicted before the second write
    assert (o[2:] != right[2:]).any(axis=1).all()


# ---- the reference and the public ops. Both take these, as float64 and with scale 1.


def one_head(x):
    return x[None, :, None]


def per_token(x):
    return np.full(5, float(x))


def calls(name):
    """All pairs (op, gates) that must give this row of the table."""
    a, beta = UNNORMALISED[name]
    log_a = np.log(float(a))
    g, g_key = np.full(5, log_a), np.full((5, 4), log_a)
    if beta is not None:
        yield "gated_delta_rule", {"g": g, "beta": per_token(beta)}
        yield "gated_delta_rule", {"alpha": per_token(a), "beta": per_token(beta)}
        yield "kda", {"g": g_key, "beta": per_token(beta)}
        if a == 1:
            yield "delta_rule", {"beta": per_token(beta)}
        return
    yield "simple_gla", {"g": g}
    yield "gla", {"g": g_key}
    yield "gla", {"alpha": np.full((5, 4), float(a))}
    yield "retention", {"gamma": np.array([float(a)])}
    yield "lightning_attention", {"slopes": np.array([-log_a])}
    if a == 1:
        yield "linear_attention", {"feature_map": "identity", "normalize": False}


def batched(gates):
    """One head's gates as [B,T,HV,...]. Gates per head stay as they are."""
    return {name: one_head(x) if name in ("g", "alpha", "beta") else x for name, x in gates.items()}


ROWS = [(name, op, gates) for name in UNNORMALISED for op, gates in calls(name)]
ROW_NAMES = [f"{name}: {op}({', '.join(gates)})" for name, op, gates in ROWS]


def close(x, y, message=""):
    np.testing.assert_allclose(x, y, rtol=1e-14, atol=1e-14, err_msg=message)


@pytest.mark.parametrize(("name", "op", "gates"), ROWS, ids=ROW_NAMES)
@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunk"])
def test_reference_rows(name, op, gates, form):
    o, S = getattr(reference, op)(
        one_head(q), one_head(k), one_head(v), **batched(gates), scale=1.0, form=form, chunk_size=2
    )
    close(o[0, :, 0], floats(GOLDEN[name]["o"]))
    close(S[0, 0], floats(GOLDEN[name]["S"]))


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunk"])
def test_reference_normalised(name, form):
    golden = GOLDEN[name]
    options = {"feature_map": NORMALISED[name][1], "scale": 1.0, "form": form, "chunk_size": 2}
    for causal, out in ((True, "causal_out"), (False, "out")):
        o, (S, z) = reference.linear_attention(
            one_head(q), one_head(k), one_head(v), causal=causal, **options
        )
        close(o[0, :, 0], floats(golden[out]), out)
        close(S[0, 0], floats(golden["KV"]))
        close(z[0, 0], floats(golden["key_sum"]))
        num = "causal_num" if causal else "num"
        o, _ = reference.linear_attention(
            one_head(q), one_head(k), one_head(v), causal=causal, normalize=False, **options
        )
        close(o[0, :, 0], floats(golden[num]), num)
    weights = reference.implicit_weights(
        "linear_attention", one_head(q), one_head(k), causal=False, **options
    )
    close(weights[0, 0], floats(golden["weights"]))


# ---- linattn itself. An ulp or two of room: its exp and its order of sums are its own.


def nearly(x, y, message=""):
    np.testing.assert_allclose(x, y, rtol=4e-14, atol=1e-14, err_msg=message)


@pytest.mark.parametrize(("name", "op", "gates"), ROWS, ids=ROW_NAMES)
@pytest.mark.parametrize("mode", ["recurrent", "parallel", "chunk"])
def test_op_rows(name, op, gates, mode):
    from support.device import ops as linattn

    common = {"scale": 1.0, "mode": mode, "output_final_state": True}
    o, S = getattr(linattn, op)(one_head(q), one_head(k), one_head(v), **batched(gates), **common)
    assert o.dtype == S.dtype == np.float64
    nearly(o[0, :, 0], floats(GOLDEN[name]["o"]))
    nearly(S[0, 0], floats(GOLDEN[name]["S"]))
    notebook_o, notebook_S = getattr(linattn, op)(q, k, v, **gates, **common)
    np.testing.assert_array_equal(notebook_o, o[0, :, 0])
    np.testing.assert_array_equal(notebook_S, S[0, 0])


@pytest.mark.parametrize("mode", ["recurrent", "parallel", "chunk"])
def test_op_decays_before_it_predicts(mode):
    from support.device import ops as linattn

    beta, decay = per_token(Fraction(1, 2)), per_token(Fraction(9, 10))
    wrong = np.concatenate([np.zeros((1, 4)), table(WRONG_ORDER).astype(np.float64)])
    for op, alpha in (("gated_delta_rule", decay), ("kda", np.repeat(decay[:, None], 4, 1))):
        o, _ = getattr(linattn, op)(q, k, v, alpha=alpha, beta=beta, scale=1.0, mode=mode)
        nearly(o[:2], wrong[:2])
        assert (np.abs(o - wrong).max(axis=1)[2:] > 1e-3).all()


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("mode", ["recurrent", "parallel", "chunk"])
def test_op_normalised(name, mode):
    from support.device import ops as linattn

    golden = GOLDEN[name]
    common = {
        "feature_map": NORMALISED[name][1],
        "scale": 1.0,
        "mode": mode,
        "output_final_state": True,
    }
    for causal, out in ((True, "causal_out"), (False, "out")):
        o, (S, z) = linattn.linear_attention(
            one_head(q), one_head(k), one_head(v), causal=causal, **common
        )
        nearly(o[0, :, 0], floats(golden[out]), out)
        nearly(S[0, 0], floats(golden["KV"]))
        nearly(z[0, 0], floats(golden["key_sum"]))
        num = "causal_num" if causal else "num"
        o, S = linattn.linear_attention(
            one_head(q), one_head(k), one_head(v), causal=causal, normalize=False, **common
        )
        nearly(o[0, :, 0], floats(golden[num]), num)
        nearly(S[0, 0], floats(golden["KV"]))


@pytest.mark.parametrize("name", NORMALISED)
def test_op_weights(name):
    from support.device import ops as linattn

    options = {"feature_map": NORMALISED[name][1], "scale": 1.0}
    weights = linattn.implicit_weights(one_head(q), one_head(k), causal=False, **options)
    assert weights.shape == (1, 1, 5, 5)
    nearly(weights[0, 0], floats(GOLDEN[name]["weights"]))
    weights = linattn.implicit_weights(
        one_head(q), one_head(k), causal=False, normalize=False, **options
    )
    nearly(weights[0, 0], floats(GOLDEN[name]["raw"]))
    weights = linattn.implicit_weights(one_head(q), one_head(k), **options)
    nearly(
        weights[0, 0],
        np.tri(5) * floats(GOLDEN[name]["raw"]) / floats(GOLDEN[name]["causal_den"])[:, None],
    )
