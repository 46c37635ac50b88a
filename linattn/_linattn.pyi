"""The C core's functions as linattn/ops and linattn/autograd.py call them."""

from typing import Any, Final, Literal, Never, final

# An array of any kind: NumPy's, or any with __dlpack__ or __cuda_array_interface__.
_Array = Any

_Decay = Literal["none", "head", "token", "key", "pair"]
_Rule = Literal["additive", "delta", "dplr", "bonus"]

OPS: Final[tuple[str, ...]]
VARIANTS: Final[tuple[tuple[str, _Decay, _Rule, bool], ...]]  # a row of variants.def each
COMPILER: Final[str]
CUDA_ARCHS: Final[str]  # "sm_80, sm_90"; empty without a CUDA part

@final
class BoundStep:
    def __call__(self, /, *args: Never, **kwargs: Never) -> _Array: ...

_Line = tuple[str, str, str, str, str, str, str, str | None]
ARRAYS: Final[tuple[_Line, ...]]  # a line of arrays.def each

OPTIONS: Final[tuple[tuple[str, str, str], ...]]  # a line of options.def each: name, kind, passes

# XLA's way to the core (csrc/xla.c), for jax.ffi.register_ffi_target: name, platform, handler.
XLA_TARGETS: Final[tuple[tuple[str, str, Any], ...]]

# A room beside the table: its name; its forms, each with the letters that it leaves out; its lines
# (label, letters, passes, role, is it required, the label of its gradient, forms); its options
# (label, passes, is it a word; else it is True or False).
_RoomLine = tuple[str, str, str, str, bool, str | None, tuple[str, ...]]
_RoomOption = tuple[str, str, bool]
_Room = tuple[str, tuple[tuple[str, str], ...], tuple[_RoomLine, ...], tuple[_RoomOption, ...]]
ROOMS: Final[tuple[_Room, ...]]

# The op's name, q, k and v, then the arrays and options of the pass by keyword: the labels of
# arrays.def (the decay under g, alpha, gamma or slopes), and the options of options.def. None, or
# no keyword, for what is absent. warn=False: no warning of a decay above one. unrecorded=True (a
# forward): the caller has seen that PyTorch records none of the arrays. A forward with
# segment_map=True returns M too.
def forward(op: str, *qkv: _Array, **arguments: Any) -> tuple[Any, ...]: ...
def step(op: str, *qkv: _Array, **arguments: Any) -> _Array: ...

# A step and the stages around it, as linattn/layers.py names them: three convolutions, their
# activation, (curve, factor, A_log, dt_bias, weigh) of g, the factor of beta, and (weight, eps,
# gate, activation, gate_first, groups) of the norm; None for one that is missing.
def layer_step(
    stages: tuple[Any, ...], op: str, q: _Array, k: _Array, v: _Array, **arguments: Any
) -> _Array: ...
def bind(op: str, *qkv: _Array, **arguments: Any) -> BoundStep: ...

# A gradient per input of arrays.def that has one; a pair of states is one.
def backward(op: str, *qkv: _Array, **arguments: Any) -> tuple[Any, ...]: ...

# A gate of csrc/gates.def from a projection: its name, the factor of its curve, x, A_log, dt_bias;
# with the gradient of the result behind them it returns (dx, dA_log, ddt_bias).
def gate(
    name: str, factor: float, x: _Array, A_log: Any, dt_bias: Any, d: _Array = ..., /
) -> Any: ...

# Adds to dk and dv, as dS and dz do (csrc/late.h): the number of k's feature map and its eps, then
# k, v, dk, dv, dS, dz. False where no kernel takes such arrays.
def late(map: int, eps: float, /, *arrays: _Array) -> bool: ...

# Rooms (csrc/room.h): the form of a call and its pass, then arrays by the labels of the room's
# table, and its options. A forward pass returns (y, final_state), a step y, and a backward pass a
# gradient for each input.
def scan(form: Literal["selective", "fixed", "gated"], pass_: str, /, **arguments: Any) -> Any: ...
def convolve(form: Literal["causal"], pass_: str, /, **arguments: Any) -> Any: ...

# A row (letters, dtype) for each array that the pass makes, None where this call makes none. q is
# its number of dimensions. Of the other arrays it counts only whether they are given.
_Row = tuple[str, Literal["OF_Q", "FLOAT", "REAL"]]

def shapes(pass_: str, op: str, **arguments: Any) -> tuple[_Row | None, ...]: ...

# The call, checked by the shapes and dtypes of its arrays, and not run: a row (label, letters,
# shape, dtype) for each array that is given and for each that the pass makes.
_Outline = tuple[str, str, tuple[int, ...], str]

def outline(
    pass_: str, op: str, *qkv: Any, **arguments: Any
) -> tuple[tuple[_Outline, ...], tuple[_Outline, ...]]: ...
def outline_room(
    room: str, form: str, pass_: str, /, **arguments: Any
) -> tuple[tuple[_Outline, ...], tuple[_Outline, ...]]: ...
def shares_memory(x: _Array, y: _Array, /) -> bool: ...
def taken() -> tuple[str, str, str, int, int]: ...  # kernel, unit, why, chunk, bits
def cuda_why_not() -> str | None: ...
def cuda_device_count() -> int: ...
def cuda_trim() -> None: ...
def set_num_threads(n: int, /) -> None: ...
def get_num_threads() -> int: ...
def set_allow_tf32(allow: bool, /) -> None: ...
def get_allow_tf32() -> bool: ...
def isa() -> tuple[str, dict[str, bool]]: ...
def set_isa(name: str, /) -> None: ...
def _fail_allocation(n: int, /) -> None: ...
