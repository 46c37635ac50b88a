"""The C core's functions as linattn/ops.py calls them: positions only, None for what is absent."""

from typing import Any, Final, Literal, Never, final

# An array of any kind: NumPy's, or any with __dlpack__ or __cuda_array_interface__.
_Array = Any
_State = Any
# (map of q, its eps, map of k, its eps, normaliser, eps, causal)
_Features = tuple[int, float, int, float, int, float, bool]

_Decay = Literal["none", "head", "token", "key"]
_Rule = Literal["additive", "delta"]

OPS: Final[tuple[str, ...]]
VARIANTS: Final[tuple[tuple[str, _Decay, _Rule, bool], ...]]  # a row of variants.def each
COMPILER: Final[str]

@final
class BoundStep:
    def __call__(self, /, *args: Never, **kwargs: Never) -> _Array: ...

# Only a step takes a number for a gate or beta (one head, one token). `level` says how many frames
# above its caller a warning belongs, as in warnings.warn; 0: no warnings.

def forward(
    op: int,
    q: _Array,
    k: _Array,
    v: _Array,
    g: _Array | None,
    alpha: _Array | None,
    beta: _Array | None,
    initial_state: _State | None,
    cu_seqlens: _Array | None,
    out: _Array | None,
    output_final_state: bool,
    scale: float | None,
    mode: str,
    chunk_size: int | None,
    qk_l2norm: bool,
    state_v_first: bool,
    allow_tf32: bool | None,
    features: _Features | None,
    level: int = 2,
    /,
) -> tuple[_Array, Any]: ...
def step(
    op: int,
    q: _Array,
    k: _Array,
    v: _Array,
    g: _Array | float | None,
    alpha: _Array | float | None,
    beta: _Array | float | None,
    state: _State,
    state_indices: _Array | None,
    out: _Array | None,
    scale: float | None,
    qk_l2norm: bool,
    state_v_first: bool,
    features: _Features | None,
    /,
) -> _Array: ...
def bind(
    op: int,
    q: _Array,
    k: _Array,
    v: _Array,
    g: _Array | float | None,
    alpha: _Array | float | None,
    beta: _Array | float | None,
    state: _State,
    state_indices: _Array | None,
    out: _Array | None,
    scale: float | None,
    qk_l2norm: bool,
    state_v_first: bool,
    features: _Features | None,
    /,
) -> BoundStep: ...
def backward(
    op: int,
    do: _Array,
    q: _Array,
    k: _Array,
    v: _Array,
    g: _Array | None,
    alpha: _Array | None,
    beta: _Array | None,
    initial_state: _State | None,
    d_final_state: _State | None,
    cu_seqlens: _Array | None,
    scale: float | None,
    mode: str,
    chunk_size: int | None,
    qk_l2norm: bool,
    state_v_first: bool,
    features: _Features | None,
    level: int = 2,
    /,
) -> tuple[_Array, _Array, _Array, _Array | None, _Array | None, Any]: ...
def shares_memory(x: _Array, y: _Array, /) -> bool: ...
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
