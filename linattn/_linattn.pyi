"""The C core's functions as linattn/ops.py calls them: positions only, None for what is absent."""

from typing import Any, Final

from numpy import ndarray

_State = ndarray | tuple[ndarray, ndarray]
# (map of q, its eps, map of k, its eps, normaliser, eps, causal)
_Features = tuple[int, float, int, float, int, float, bool]

OPS: Final[tuple[str, ...]]
COMPILER: Final[str]

# Only a step takes a number for a gate or beta (one head, one token).

def forward(
    op: int,
    q: ndarray,
    k: ndarray,
    v: ndarray,
    g: ndarray | None,
    alpha: ndarray | None,
    beta: ndarray | None,
    initial_state: _State | None,
    cu_seqlens: ndarray | None,
    out: ndarray | None,
    output_final_state: bool,
    scale: float | None,
    mode: str,
    chunk_size: int | None,
    qk_l2norm: bool,
    state_v_first: bool,
    features: _Features | None,
    /,
) -> tuple[ndarray, Any]: ...
def step(
    op: int,
    q: ndarray,
    k: ndarray,
    v: ndarray,
    g: ndarray | float | None,
    alpha: ndarray | float | None,
    beta: ndarray | float | None,
    state: _State,
    out: ndarray | None,
    scale: float | None,
    qk_l2norm: bool,
    state_v_first: bool,
    features: _Features | None,
    /,
) -> ndarray: ...
def backward(
    op: int,
    do: ndarray,
    q: ndarray,
    k: ndarray,
    v: ndarray,
    g: ndarray | None,
    alpha: ndarray | None,
    beta: ndarray | None,
    initial_state: _State | None,
    d_final_state: _State | None,
    cu_seqlens: ndarray | None,
    scale: float | None,
    mode: str,
    chunk_size: int | None,
    qk_l2norm: bool,
    state_v_first: bool,
    features: _Features | None,
    /,
) -> tuple[ndarray, ndarray, ndarray, ndarray | None, ndarray | None, Any]: ...
def set_num_threads(n: int, /) -> None: ...
def get_num_threads() -> int: ...
def isa() -> tuple[str, dict[str, bool]]: ...
def set_isa(name: str, /) -> None: ...
def _fail_allocation(n: int, /) -> None: ...
