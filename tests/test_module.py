"""The module itself: the cost of an import, its names, and that every list of ops agrees."""

import ast
import importlib
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import typing

import ml_dtypes
import numpy as np
import pytest
from support import processes
from support.compare import assert_same_bits, leaves, over_arrays
from support.problems import PER_HEAD
from support.processes import python
from support.variants import GATED, KEY_DECAY, PAIR_DECAY, PREDICTS, TOKEN_DECAY

import linattn
from linattn import _linattn, ops, reference, testing
from linattn.ops import _core
from linattn.testing import GATES, make_inputs, make_output_gradients
from linattn.variants import ARRAYS

PACKAGE = pathlib.Path(linattn.__file__).parent
CHECKOUT = pathlib.Path(__file__).parent.parent
PASSES = ("", "_step", "_backward")


# ---- importing ----


def test_importing_takes_less_than_50_ms_past_numpy():
    code = (
        "import time, numpy; t = time.perf_counter(); import linattn; "
        "print(time.perf_counter() - t)"
    )
    python(code)  # the byte code is written
    seconds = [float(python(code)) for _ in range(7)]
    assert min(seconds) < 0.05, seconds  # other load on the machine only adds to it


def test_importing_brings_in_numpy_only():
    loaded = set(
        python(
            "import sys, numpy; before = set(sys.modules); import linattn; "
            "print(*{m.split('.')[0] for m in set(sys.modules) - before})"
        ).split()
    )
    heavy = loaded & {
        "torch",
        "ml_dtypes",
        "jax",
        "cupy",
        "scipy",
        "matplotlib",
        "ctypes",
        "multiprocessing",
        "asyncio",
        "linattn.demo",
        "linattn.reference",
    }
    assert not heavy


def test_calls_on_numpys_arrays_bring_in_nothing():
    loaded = python(
        "import sys, numpy, linattn; x = numpy.ones((4, 2)); "
        "linattn.retention(x, x, x); print(*sys.modules)"
    ).split()
    assert not {"torch", "linattn.autograd"} & set(loaded)


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_a_free_threaded_python_stays_free():
    assert python("import linattn, sys; print(sys._is_gil_enabled())").strip() == "False"


def test_importing_starts_no_thread():
    assert (
        python(
            "import linattn, os; print(len(os.listdir('/proc/self/task')))",
            OPENBLAS_NUM_THREADS="1",
        ).strip()
        == "1"
    )


def test_star_import_and_all():
    names = set(python("from linattn import *; print(*dir())").split())
    assert set(linattn.__all__) <= names
    assert len(linattn.__all__) == len(set(linattn.__all__))
    for name in linattn.__all__:
        assert hasattr(linattn, name)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", linattn.__version__)


def test_it_works_before_and_after_ml_dtypes_is_imported():
    python("""
import numpy as np, linattn
x = np.ones((4, 2), np.float32)
linattn.retention(x, x, x)
import ml_dtypes
y = x.astype(ml_dtypes.bfloat16)
assert linattn.retention(y, y, y)[0].dtype == ml_dtypes.bfloat16
""")


# ---- the library's file ----


@pytest.fixture(scope="module")
def elf():
    """readelf's description of the core: sections, segments, dynamic entries, symbols."""
    library = pathlib.Path(_linattn.__file__)
    if library.read_bytes()[:4] != b"\x7fELF":
        pytest.skip("the core is no ELF library")
    if not shutil.which("readelf"):
        pytest.skip("no readelf (binutils) to read the library with")
    if os.environ.get("LINATTN_DEBUG", "0") not in ("", "0"):
        pytest.skip("LINATTN_DEBUG: the library keeps what the others lack")
    return subprocess.run(
        ["readelf", "-W", "-S", "-l", "-d", "--dyn-syms", library],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"LC_ALL": "C"},
    ).stdout


def test_the_library_is_found_without_paths(elf):
    assert re.search(r"\(NEEDED\)", elf)
    assert not re.findall(r"\((?:RPATH|RUNPATH)\).*", elf)


def test_addresses_of_functions_are_not_writable(elf):
    assert re.search(r"^ *GNU_RELRO ", elf, re.M)
    assert re.search(r"\(FLAGS\).*\bBIND_NOW\b|\(BIND_NOW\)", elf)


def test_the_library_exports_one_symbol(elf):
    symbol = re.compile(
        r"^ *\d+: [0-9a-f]+ +\w+ +\w+ +(?:GLOBAL|WEAK|UNIQUE) +\w+ +(\w+) (\S+)", re.M
    )
    symbols = symbol.findall(elf)
    assert [place for place, _ in symbols].count("UND") > 10, "no symbols were found"
    assert [name for place, name in symbols if place != "UND"] == ["PyInit__linattn"]


def test_the_library_has_no_debugging_information(elf):
    sections = re.findall(r"^ *\[ *\d+\] (\.\S+)", elf, re.M)
    assert ".text" in sections
    assert not [name for name in sections if re.match(r"\.(z?debug|symtab)", name)]


def test_the_library_names_no_folder_of_the_build(elf):
    content = pathlib.Path(_linattn.__file__).read_bytes()
    assert not re.findall(rb"(?:/[\w.+-]{2,}){2,}\.(?:c|h|cu|cuh|o)\b", content)
    assert os.fsencode(CHECKOUT) + b"/" not in content
    assert os.fsencode(sys.base_prefix) + b"/lib" not in content


# ---- one list of ops ----


def test_ops_are_the_tables():
    table = CHECKOUT / "csrc" / "variants.def"
    if not table.exists():
        pytest.skip("csrc/variants.def: not in a checkout")
    text = table.read_text()
    names = re.findall(r"^LA_VARIANT\((\w+),", text, re.M)
    assert linattn.OPS == tuple(names)


def test_ops_are_the_functions():
    assert linattn.OPS == _linattn.OPS == tuple(GATES)
    public = {name for name, x in vars(ops).items() if inspect.isfunction(x) and name[0] != "_"}
    assert public == {name + pass_ for name in linattn.OPS for pass_ in PASSES} | {
        "attend",
        "bind",
        "implicit_weights",
        "lightning_slopes",
    }
    assert public <= set(ops.__all__) <= set(linattn.__all__)
    for op in linattn.OPS:
        module = importlib.import_module(f"linattn.ops.{op}")
        assert sorted(module.__all__) == sorted(op + pass_ for pass_ in PASSES)


@pytest.mark.parametrize("table", ["VARIANTS", "ARRAYS"])
def test_the_tables_of_c(table):
    """Line by line, by their text."""
    name = {"VARIANTS": "variants", "ARRAYS": "arrays"}[table]
    path = CHECKOUT / "csrc" / f"{name}.def"
    if not path.exists():
        pytest.skip(f"csrc/{name}.def: not in a checkout")
    found = re.findall(r"^LA_(?:VARIANT|ARRAY|INDEX)\(([^)]*)\)", path.read_text(), re.M)
    lines = [[word.strip().strip('"') for word in line.split(",")] for line in found]
    if table == "VARIANTS":
        assert [list(v) for v in linattn.VARIANTS.values()] == [
            [op, decay.lower(), rule.lower(), z == "NORMALISER"] for op, decay, rule, z in lines
        ]
    else:
        assert [[x.label, x.letters, x.passes] for x in ARRAYS] == [line[1:4] for line in lines]
        # an input that no backward pass takes has none
        smooth = [x for x in lines if len(x) == 9 and (x[4] != "INPUT" or "B" in x[3])]
        assert [x.gradient for x in ARRAYS if x.gradient] == [x[8] for x in smooth]


def test_gradients_are_those_of_the_table():
    smooth = [x.gradient for x in ARRAYS if x.gradient and x.role != "OUTPUT"]
    assert list(dict.fromkeys(smooth)) == list(linattn.Gradients._fields)


@pytest.mark.parametrize("op", linattn.OPS)
def test_overloads_have_the_functions_own_parameters(op):
    """Type checkers read three signatures; the function has the keywords written out."""
    real = set(parameters_of(getattr(ops, op)))
    overloads = typing.get_overloads(getattr(ops, op))
    assert len(overloads) == 3
    for one in overloads:
        own = set(inspect.signature(one).parameters) - {"options"}
        assert own | set(_core.ForwardOptions.__annotations__) == real
        assert not own & set(_core.ForwardOptions.__annotations__)


def test_every_function_calls_the_core_by_its_own_name():
    for op in linattn.OPS:
        for pass_ in PASSES:
            constants = getattr(ops, op + pass_).__code__.co_consts
            assert [x for x in constants if x in linattn.OPS] == [op], op + pass_


def test_the_core_refuses_what_no_pass_has():
    with pytest.raises(TypeError, match="kda: no argument of this pass is called 'slots'"):
        _linattn.forward("kda", slots=None)
    with pytest.raises(TypeError, match="kda: no argument of this pass is called 'do'"):
        _linattn.step("kda", **{"".join(["d", "o"]): None})
    for args in ((), ("softmax",), (3,), ("kda", 1, 2)):
        with pytest.raises(TypeError, match="expected the name of an op"):
            _linattn.backward(*args)
    assert _linattn.step(
        "".join(["delta", "_rule"]),
        **{  # neither name is interned
            "".join([x]): y
            for x, y in (
                ("q", np.ones(2)),
                ("k", np.ones(2)),
                ("v", np.ones(2)),
                ("beta", 1.0),
                ("state", np.zeros((2, 2))),
            )
        },
    ).shape == (2,)


def test_the_core_takes_seven_floats_for_features():
    """As a list too, which an operator of PyTorch's has, and from which anyone may call it."""
    x, features = np.ones((1, 2)), [1, 1e-3, 1, 1e-3, 1, 1e-6, 1]
    for kind in (list, tuple):
        o, _ = _linattn.forward("linear_attention", x, x, x, features=kind(features))
        assert_same_bits(o, linattn.linear_attention(x, x, x)[0])
    for wrong in (features[:6], [*features, 1], "elu+1", 3, np.ones(7), ["1", *features[1:]]):
        with pytest.raises(TypeError):
            _linattn.forward("linear_attention", x, x, x, features=wrong)
    for place, wrong in ((0, -1), (0, 5), (2, 1e300), (2, np.nan), (4, 3), (4, -np.inf)):
        with pytest.raises(ValueError, match="features: expected maps and a normaliser by number"):
            _linattn.forward(
                "linear_attention",
                *(x, x, x),
                features=[*features[:place], wrong, *features[place + 1 :]],
            )


def squeezed(x):
    return x.reshape([n for n in x.shape if n > 1])


@pytest.mark.parametrize("one_head", [False, True])
@pytest.mark.parametrize("op", linattn.OPS)
def test_the_core_says_what_a_call_would_make(op, one_head):
    """As letters, which have the call's own sizes."""
    rng = np.random.default_rng(0)
    sizes = {"B": 1, "T": 5, "H": 1, "h": 1} if one_head else {"B": 2, "T": 5, "H": 2, "h": 4}
    sizes |= {"K": 3, "V": 6, "N": sizes["B"]}
    B, T, H, HV, K, V, _ = sizes.values()
    x = make_inputs(op, rng, B, T, H, HV, K, V, np.float32, initial_state=True, normalize=False)
    d = make_output_gradients(op, rng, x)
    x.pop("normalize", None)
    if one_head:
        x, d = (
            {name: over_arrays(squeezed, a) if name not in PER_HEAD else a for name, a in y}
            for y in (x.items(), d.items())
        )
    given = x | {"q": x["q"].ndim}

    def agree(rows, arrays):
        arrays = leaves(arrays)
        rows = [row for row in rows if row is not None]
        assert [tuple(sizes[x] for x in row[0]) for row in rows] == [a.shape for a in arrays]
        assert all(a.dtype == np.float32 for a in arrays)

    made = _linattn.forward(op, **x, output_final_state=True)
    agree(_linattn.shapes("forward", op, **given, output_final_state=True), made)
    agree(_linattn.shapes("forward", op, **given), made[:1])
    agree(_linattn.shapes("backward", op, **given, **d), _linattn.backward(op, **x, **d))


def test_the_core_says_what_a_state_looks_like():
    final = {"output_final_state": True, "state_v_first": True}
    assert _linattn.shapes("forward", "kda", q=2, **final)[1] == ("VK", "REAL")
    assert _linattn.shapes("forward", "kda", q=2, cu_seqlens=True, **final)[1] == ("NVK", "REAL")
    features = (1, 1e-3, 1, 1e-3, 1, 1e-6, True)
    rows = _linattn.shapes("forward", "linear_attention", q=4, features=features, **final)
    assert rows == (("BThV", "OF_Q"), ("NhVK", "REAL"), ("NhK", "REAL"), None)
    rows = _linattn.shapes("forward", "titans", q=4, **final)
    assert rows == (("BThV", "OF_Q"), ("NhVK", "REAL"), None, ("NhVK", "REAL"))
    assert _linattn.shapes("step", "kda", q=3, state=True) == (("BhV", "OF_Q"),)
    for wrong in ((), ("kda", "forward"), (3, "kda")):
        with pytest.raises(ValueError, match="pass: expected 'forward', 'step'"):
            _linattn.shapes(*wrong)


def test_the_readme_has_every_op():
    readme = CHECKOUT / "README.md"
    if not readme.exists():
        pytest.skip("README.md: not in a checkout")
    rows = re.findall(r"^\|\s*`(\w+)`\s*\|", readme.read_text(), re.M)
    assert [name for name in rows if name in linattn.OPS] == list(linattn.OPS)


def test_the_stub_of_the_core_has_every_function():
    stub = ast.parse((PACKAGE / "_linattn.pyi").read_text())
    declared = {
        node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    } | {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    there = {name for name in dir(_linattn) if not name.startswith("__")}
    assert declared == there


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


# ---- signatures ----

OPTIONS = {
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "cu_seqlens": None,
    "mask": None,
    "mode": "chunk",
    "chunk_size": None,
    "qk_l2norm": False,
    "state_v_first": False,
    "allow_tf32": None,
    "out": None,
}
STEP_OPTIONS = {
    "state_indices": None,
    "scale": None,
    "qk_l2norm": False,
    "state_v_first": False,
    "out": None,
}
EMPTY = inspect.Parameter.empty


def parameters_of(function):
    """Those for users."""
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if name[0] != "_"}


# The arrays after v of the rules and the decay that have arrays of their own.
OWN = {
    "dplr": {"x": EMPTY, "y": EMPTY, "g": None},
    "bonus": {"bonus": EMPTY, "g": None},
    "pair": {"beta": EMPTY, "eta": None, "g": None},
}


def extras(op):
    """(positional after v, keyword only) of an op, with defaults, by the contract."""
    positional, keyword = {}, {}
    row = linattn.VARIANTS[op]
    own = OWN.get(row.rule) or OWN.get(row.decay)
    if own:
        return dict(own), {"alpha": None} | ({"batch": 1} if op in PAIR_DECAY else {})
    for gate in GATES[op]:
        if gate == "g":
            positional["g"], keyword["alpha"] = None, None
        elif gate == "gamma":
            keyword["gamma"] = None
        else:
            positional[gate] = None if "g" in positional else EMPTY
    if op in PREDICTS:
        keyword["x"] = None
    if op == "linear_attention":
        keyword |= {"feature_map": "elu+1", "normalize": True, "causal": True, "eps": 1e-6}
    return positional, keyword


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("op", linattn.OPS)
def test_signatures(op, pass_):
    positional, keyword = extras(op)
    positional = {"q": EMPTY, "k": EMPTY, "v": EMPTY} | positional
    if pass_ == "":
        keyword |= OPTIONS
    elif pass_ == "_step":
        keyword |= {"state": EMPTY} | STEP_OPTIONS
        keyword.pop("causal", None)
        keyword.pop("batch", None)
    else:
        positional = {"do": EMPTY} | positional
        keyword |= OPTIONS | {"d_final_state": None}
        del keyword["output_final_state"], keyword["out"], keyword["allow_tf32"]
    keyword["scale"] = reference.OPS[op].default_scale
    parameters = parameters_of(getattr(linattn, op + pass_))
    of_kind = {
        kind: {name: p.default for name, p in parameters.items() if p.kind is kind}
        for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    got_positional, got_keyword = of_kind.values()
    assert list(got_positional.items()) == list(positional.items())
    assert got_keyword == keyword
    assert len(parameters) == len(got_positional) + len(got_keyword)
    assert [name for name in got_keyword if name in OPTIONS] == [
        name for name in OPTIONS if name in got_keyword
    ]  # one order everywhere
    for name, parameter in parameters.items():
        assert parameter.annotation is not EMPTY, name


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("op", linattn.OPS)
def test_docstrings_name_every_argument_and_its_shape(op, pass_):
    function = getattr(linattn, op + pass_)
    text = inspect.getdoc(function)
    for name in parameters_of(function):
        assert re.search(rf"\b{name}\b", text), name
    step = pass_ == "_step"
    for shape in (
        ["[B,H,K]", "[B,HV,V]", "[B,HV,K,V]"] if step else ["[B,T,H,K]", "[B,T,HV,V]", "[N,HV,K,V]"]
    ):
        assert shape in text
    if op in TOKEN_DECAY:
        assert ("[B,HV]" if step else "[B,T,HV]") in text
    if op in KEY_DECAY:
        assert ("[B,HV,K]" if step else "[B,T,HV,K]") in text
    if "beta" in GATES[op]:
        assert ("[B,HV]" if step else "[B,T,HV]") in text
    if op in GATED:
        assert "log of the decay" in text.lower()


def test_every_public_name_has_a_docstring():
    for name in linattn.__all__:
        thing = getattr(linattn, name)
        if callable(thing) or inspect.ismodule(thing):
            assert inspect.getdoc(thing), name
    for name in ("implicit_weights", "lightning_slopes", "zeros_state"):
        assert "[" in inspect.getdoc(getattr(linattn, name))


def test_forward_names_its_paper():
    for op in linattn.OPS:
        assert re.search(r"\b20[12]\d\b", inspect.getdoc(getattr(linattn, op))), op


def test_gradients():
    assert linattn.Gradients._fields == (
        *("dq", "dk", "dv", "dg", "dbeta", "dx", "dy", "dbonus", "deta"),
        *("dvalue_gate", "dweight", "dskip", "d_initial_state"),
    )
    assert linattn.Gradients._fields == reference.Gradients._fields
    x = np.ones((3, 2))
    grads = linattn.retention_backward(x, x, x, x)
    assert isinstance(grads, linattn.Gradients)
    assert grads.dg.shape == (1,) and grads.dbeta is None and grads.d_initial_state is None


def test_gradients_show_dtypes_and_shapes():
    x = np.ones((1, 8, 2, 4), np.float32)
    S, z = np.zeros((1, 2, 4, 4), np.float32), np.zeros((1, 2, 4), np.float32)
    assert repr(linattn.linear_attention_backward(x, x, x, x, initial_state=(S, z))) == (
        "Gradients(dq=float32[1,8,2,4], dk=float32[1,8,2,4], dv=float32[1,8,2,4], dg=None, "
        "dbeta=None, dx=None, dy=None, dbonus=None, deta=None, "
        "dvalue_gate=None, dweight=None, dskip=None, "
        "d_initial_state=(float32[1,2,4,4], float32[1,2,4]))"
    )
    absent = [None] * (len(linattn.Gradients._fields) - 3)
    dq, dk, *rest = linattn.Gradients(np.float64(1), 2.0, np.ones(0), *absent)
    assert isinstance(dq, float) and dk == 2 and rest[1:] == absent  # a tuple, as before
    shown = repr(linattn.Gradients(np.float64(1), 2.0, np.ones(0), *absent))
    assert shown.startswith("Gradients(dq=float64[], dk=2.0, dv=float64[0], dg=None")


# ---- what it says about itself ----


def test_show_config(capsys):
    linattn.show_config()
    text = capsys.readouterr().out
    for word in (
        linattn.__version__,
        np.__version__,
        "compiler",
        "instruction sets",
        "threads",
        "CUDA",
        _linattn.isa()[0],
    ):
        assert word in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_float32_precision():
    assert linattn.get_float32_precision() == "ieee"
    try:
        linattn.set_float32_precision("tf32")
        assert linattn.get_float32_precision() == "tf32"
        assert "tf32" in linattn.config.config()["float32"]
        for bad, error in (
            ("TF32", ValueError),
            ("", ValueError),
            ("bf16", ValueError),
            (None, TypeError),
            (True, TypeError),
            (b"tf32", TypeError),
        ):
            with pytest.raises(error, match=r"^precision: expected 'ieee' or 'tf32', got "):
                linattn.set_float32_precision(bad)
        assert linattn.get_float32_precision() == "tf32"
    finally:
        linattn.set_float32_precision("ieee")
    assert linattn.get_float32_precision() == "ieee"


@pytest.mark.parametrize("op", linattn.OPS)
def test_tf32_changes_nothing_on_the_host(op):
    x = testing.make_inputs(
        op, np.random.default_rng(0), B=1, T=70, H=1, HV=2, K=32, V=16, dtype=np.float32
    )
    want, _ = getattr(linattn, op)(**x)
    for allow in (True, False, np.True_, None):
        got, _ = getattr(linattn, op)(**x, allow_tf32=allow)
        assert got.tobytes() == want.tobytes()


def test_python_m_linattn_info():
    done = subprocess.run(
        [sys.executable, "-m", "linattn", "info"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert linattn.__version__ in done.stdout and _linattn.isa()[0] in done.stdout


CALL = """
import numpy as np, linattn
rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 2, 40, 2, 8))
g, beta = -rng.uniform(size=(2, 40, 2)), rng.uniform(size=(2, 40, 2))
k /= np.sqrt((k * k).sum(-1, keepdims=True))
o, _ = linattn.gated_delta_rule(q, k, v, g, beta)
"""


@pytest.mark.parametrize("isa", list(_linattn.isa()[1]))
def test_each_instruction_set_by_environment(isa):
    here = _linattn.isa()[1][isa]
    code = CALL + "print(linattn._linattn.isa()[0], repr(float((o * o).sum())))"
    if not here:
        done = python(code, check=False, LINATTN_ISA=isa)
        assert done.returncode != 0 and "ImportError: LINATTN_ISA: " in done.stderr
        return
    used, total = python(code, LINATTN_ISA=isa).split()
    assert used == isa
    assert abs(float(total) / float(python(code).split()[1]) - 1) < 1e-12


@pytest.mark.parametrize("bogus", ["avx1024", "AVX2", "avx2 ", "0"])
def test_an_unknown_instruction_set_is_an_import_error(bogus):
    done = python("import linattn", check=False, LINATTN_ISA=bogus)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: LINATTN_ISA: ") and bogus.strip() in last
    for name, here in _linattn.isa()[1].items():
        if here:
            assert name in last, "the message does not say what would work"


def test_an_empty_isa_is_the_default():
    best = [name for name, here in _linattn.isa()[1].items() if here][-1]
    used = python("import linattn; print(linattn._linattn.isa()[0])", LINATTN_ISA="")
    assert used.strip() == best


@pytest.mark.parametrize("bogus", ["lots", "49151", "1e6", "-1", "101376 "])
def test_an_unreadable_limit_of_shared_memory_is_an_import_error(bogus):
    if "no CUDA part" in (linattn.cuda.why_not() or ""):
        pytest.skip("this build has no CUDA part, which reads the limit")
    done = python("import linattn", check=False, LINATTN_SHARED_LIMIT=bogus)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: LINATTN_SHARED_LIMIT: ")
    assert "49152" in last and bogus.strip() in last
    python("import linattn", LINATTN_SHARED_LIMIT="101376")


def test_set_isa_refuses():
    for bad, error in (("nope", ValueError), (3, TypeError), (None, TypeError), ("", ValueError)):
        with pytest.raises(error, match="isa: "):
            _linattn.set_isa(bad)


@pytest.mark.skipif(linattn.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_is_not_there_and_says_why():
    assert linattn.cuda.is_available() is False
    reason = linattn.cuda.why_not()
    assert isinstance(reason, str) and len(reason) > 10


# ---- zeros_state ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_zeros_state(dtype, normalized, state_v_first):
    for N, HV, K, V in ((2, 3, 5, 7), (1, 1, 1, 1), (0, 2, 3, 4), (4, 8, 128, 128)):
        made = linattn.zeros_state(
            N, HV, K, V, dtype=dtype, state_v_first=state_v_first, normalized=normalized
        )
        S, *z = made if normalized else (made,)
        assert S.shape == ((N, HV, V, K) if state_v_first else (N, HV, K, V))
        assert [x.shape for x in z] == ([(N, HV, K)] if normalized else [])
        for x in (S, *z):
            assert x.dtype == dtype and not x.astype(np.float32).any()
            assert x.flags.c_contiguous and x.flags.writeable
            assert x.ctypes.data % 64 == 0 or x.size == 0


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_zeros_state_of_one_head(normalized, state_v_first):
    made = linattn.zeros_state(
        3, 5, dtype=np.float64, state_v_first=state_v_first, normalized=normalized
    )
    S, *z = made if normalized else (made,)
    assert S.shape == ((5, 3) if state_v_first else (3, 5)) and S.dtype == np.float64
    assert [x.shape for x in z] == [(3,)] * normalized
    with pytest.raises(ValueError, match="K: expected a size >= 0, got -3"):
        linattn.zeros_state(-3, 5)
    for some in ({"K": 3}, {"V": 3}):
        with pytest.raises(TypeError, match="expected all four, or K and V of one head, got three"):
            linattn.zeros_state(1, 2, **some)


LAYOUT = """
import sys, warnings
import numpy as np
import linattn
warnings.simplefilter("always")
q = np.ones((1, 3, 4, 2))
with warnings.catch_warnings(record=True) as caught:
    linattn.attend(q, q, q, causal=False)  # T = 3 < H = 4
    linattn.attend(q, q, q)
    linattn.delta_rule(q, q, q, 0.5)
print([(x.category.__name__, x.filename == __file__) for x in caught])
"""


@pytest.mark.parametrize("how", ["told", "few tokens", "off", "one token"])
def test_more_heads_than_tokens_are_hinted_at_once(how, tmp_path):
    text = LAYOUT
    if how == "few tokens":
        text = text.replace("(1, 3, 4, 2)", "(1, 4, 4, 2)")
    if how == "one token":
        text = text.replace("(1, 3, 4, 2)", "(1, 1, 4, 2)")
    if how == "off":
        off = "as caught:\n    warnings.filterwarnings('ignore', category=linattn.LayoutHint)\n"
        text = text.replace("as caught:\n", off)
    script = tmp_path / "script.py"
    script.write_text(text)
    run = [sys.executable, script]
    out = subprocess.run(run, capture_output=True, text=True, env=processes.environment())
    assert out.stdout.strip() == ("[('LayoutHint', True)]" if how == "told" else "[]"), out.stderr


def test_zeros_state_fits_a_step():
    x = np.ones((2, 3, 4), np.float32)
    for options in ({}, {"state_v_first": True}):
        state = linattn.zeros_state(2, 3, 4, 4, normalized=True, **options)
        linattn.linear_attention_step(x, x, x, state=state, **options)
        assert state[0].any() and state[1].any()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ((-1, 1, 1, 1), ValueError, "N: expected a size >= 0, got -1"),
        ((1, 1, 1, -2), ValueError, "V: expected a size >= 0, got -2"),
        ((1, 1, 1.5, 1), TypeError, "K: expected an int, got float"),
        (("2", 1, 1, 1), TypeError, "N: expected an int, got str"),
        ((1, None, 1, 1), TypeError, "HV: expected an int, got NoneType"),
        ((1, 1, 1, np.array([1, 2])), TypeError, "V: expected an int, got ndarray"),
        ((1, True, 1, 1), TypeError, "HV: expected an int, got bool"),
        *(
            (
                bad,
                ValueError,
                f"N, HV, K, V: expected a state of at most {2**63 - 65} bytes, got N = "
                f"{bad[0]}, HV = {bad[1]}, K = {bad[2]}, V = {bad[3]} of float32",
            )
            for bad in (
                (2**31, 2**31, 4, 1),
                (2**31, 2**31, 2**31, 1),
                (1, 1, 2**40, 2**40),
                (2**62, 1, 1, 1),
                (2**63, 1, 1, 1),
                (0, 2**62, 2**62, 1),
                (np.int32(2**30), np.int32(2**30), 4, 1),
            )
        ),
        *(
            (
                bad,
                MemoryError,
                f"N, HV, K, V: expected a state that fits in memory, got N = {bad[0]}, "
                f"HV = {bad[1]}, K = {bad[2]}, V = {bad[3]} of float32",
            )
            for bad in ((2**58, 1, 1, 1), (2**31, 2**27, 1, 1))
        ),
    ],
    ids=str,
)
def test_zeros_state_refuses_sizes(bad, error, message):
    for options in ({}, {"normalized": True}, {"state_v_first": True}):
        with pytest.raises(error) as refused:
            linattn.zeros_state(*bad, **options)
        assert str(refused.value) == message and type(refused.value) is error


def test_zeros_state_names_a_z_that_does_not_fit():
    """V is 0, and S takes nothing."""
    with pytest.raises(MemoryError, match=r"^N, HV, K, V: expected a state that fits"):
        linattn.zeros_state(2**58, 1, 1, 0, normalized=True)


def test_zeros_state_takes_any_int():
    class Two:
        def __index__(self):
            return 2

    assert linattn.zeros_state(Two(), np.int8(1), np.uint64(3), 4).shape == (2, 1, 3, 4)


@pytest.mark.parametrize("dtype", [np.int32, np.float16, "complex64", object, bool])
def test_zeros_state_refuses_dtypes(dtype):
    with pytest.raises(TypeError, match="dtype: "):
        linattn.zeros_state(1, 1, 2, 2, dtype=dtype)
