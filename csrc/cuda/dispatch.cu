/* The entry points of calls: a problem as kernels take it, the kernel that takes it, the stream.
 * Nothing here waits for the device. */
#include "cuda.h"
#include "device.cuh"
#include "kernels.cuh"
#include "layer.cuh"
#include "load.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* ---- a problem as the kernels take it ---- */

static view view_of(const la_problem *p, la_name name)
{
    const la_array *a = &p->array[name];
    view x = {};
    if (!a->given) return x;
    x.data = a->data;
    x.dtype = a->dtype;
    for (int i = 0; i < a->ndim; i++) x.stride[i] = a->stride[i];
    return x;
}

static call call_of(const la_problem *p)
{
    call c = {};
    for (int i = 0; i < ARRAYS; i++) c.x[i] = view_of(p, (la_name)i);
    if (p->pass == LA_STEP) {
        c.x[LA_ST] = c.x[LA_S0];
        c.x[LA_ZT] = c.x[LA_Z0];
        c.x[LA_YT] = c.x[LA_Y0];
    }
    c.B = (int)p->B;
    c.T = (int)la_longest_row(p);
    c.queries = (int)p->T;
    c.keys = (int)p->L;
    c.H = (int)p->H;
    c.HV = (int)p->HV;
    c.K = (int)p->K;
    c.V = (int)p->V;
    c.N = (int)p->N;
    c.P = (int)p->P;
    c.gate = p->gate;
    c.scale = p->scale;
    c.eps = p->eps;
    c.predicts_before = p->predicts_before;
    c.x_is_factor = p->x_is_factor;
    c.batch = (int)min(p->batch, (int64_t)INT32_MAX);
    c.normaliser = p->normaliser;
    c.qk_l2norm = p->qk_l2norm;
    c.causal = p->causal;
    c.states_only = p->states_only;
    for (int i = 0; i < 2; i++) {
        c.map[i] = p->map[i];
        c.map_eps[i] = p->map_eps[i];
    }
    return c;
}

static gradients gradients_of(const la_problem *p)
{
    gradients d = {};
    for (int i = ARRAYS; i < LA_ARRAYS; i++) d[(la_name)i] = view_of(p, (la_name)i);
    d.gate = p->gate;
    d.per_head = p->decay == LA_HEAD;
    return d;
}

/* ---- gates on the host: HV numbers, or one, which a launch brings to the device ---- */

enum { GATE_NUMBERS = 256 };
struct gate_numbers {
    double x[GATE_NUMBERS];
};

static __global__ void store_gate_numbers(double *to, int n,
                                          const __grid_constant__ gate_numbers from)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from.x[i];
}

static double host_number(const la_array *a, int64_t i)
{
    const char *x = a->data + i * la_size_of(a->dtype);
    if (a->dtype == LA_F64) return *(const double *)x;
    if (a->dtype == LA_F32) return *(const float *)x;
    if (a->dtype == LA_F16) return (double)__half2float(*(const __half *)x);
    return (double)__bfloat162float(*(const __nv_bfloat16 *)x);
}

/* Copy g, beta, eta, the bonus, a weight or a skip to the device as [HV], if it lies on the host; a
 * number for all keys as [K]. A gate per head becomes the decay itself. *held is then to be freed. */
static cudaError_t upload_gate(const la_problem *p, la_name name, view *to, void **held)
{
    const la_array *from = &p->array[name];
    cudaMemPool_t pool;
    *held = NULL;
    if (!from->given || !from->on_host) return cudaSuccess;
    const bool head = name == LA_G && p->decay == LA_HEAD, bonus = name == LA_U;
    const bool key = bonus || (name == LA_G && p->decay == LA_KEY);
    const int axis = name == LA_SKIP ? 0 : bonus ? 1 : key ? 3 : 2;
    const int64_t count = key ? p->K : p->HV, stride = from->stride[axis];
    cudaError_t error = pool_of(p->ordinal, &pool);
    if (error == cudaSuccess)
        error = cudaMallocFromPoolAsync(held, (size_t)count * 8, pool, (cudaStream_t)p->stream);
    for (int64_t first = 0; error == cudaSuccess && first < count; first += GATE_NUMBERS) {
        gate_numbers some;
        const int n = (int)(count - first < GATE_NUMBERS ? count - first : GATE_NUMBERS);
        for (int i = 0; i < n; i++) {
            const double x = host_number(from, (first + i) * stride);
            some.x[i] = head ? decay_of(x, p->gate) : x;
        }
        error = launch(store_gate_numbers, 1, 256, 0, (cudaStream_t)p->stream,
                       (double *)*held + first, n, some);
    }
    *to = {(char *)*held, {axis == 0, axis == 1, axis == 2, axis == 3}, LA_F64};
    return error;
}

/* ---- entry points ---- */

static la_status run(la_problem *p, cudaError_t (*launch)(const la_problem *, const call &))
{
    on_device here(p->ordinal);
    if (here.error != cudaSuccess) return status_of(p, here.error);
    if (la_writes_nothing(p)) return LA_OK;
    call c = call_of(p);
    static const la_name numbers[] = {LA_G, LA_BETA, LA_ETA, LA_U, LA_WEIGHT, LA_SKIP};
    enum { NUMBERS = sizeof numbers / sizeof *numbers };
    void *held[NUMBERS] = {};
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < NUMBERS && error == cudaSuccess; i++)
        error = upload_gate(p, numbers[i], &c.x[numbers[i]], held + i);
    if (held[0] && p->decay == LA_HEAD) c.gate = LA_DECAY; /* uploaded as the decay itself */
    if (error == cudaSuccess) error = launch(p, c);
    for (void *x : held) {
        const cudaError_t freed = x ? cudaFreeAsync(x, (cudaStream_t)p->stream) : cudaSuccess;
        if (error == cudaSuccess) error = freed;
    }
    return status_of(p, error);
}

static void tell(const la_problem *p, const char *kernel, const char *unit, int bits,
                 const char *why)
{
    if (p->taken) *p->taken = {kernel, unit, why, 0, bits};
}

static __global__ void store_identity(char *to, la_dtype real, int K)
{
    const int row = blockIdx.x;
    for (int i = threadIdx.x; i < K; i += blockDim.x)
        if (real == LA_F64)
            ((double *)to)[row * K + i] = i == row;
        else
            ((float *)to)[row * K + i] = i == row;
}

/* Token by token o is always made. If the caller does not want it, it goes to memory that is freed
 * behind it. The map of a segment is then what the tokens make of the columns of the identity, with
 * a v of zeros: one row for all tokens. */
static cudaError_t states_by_token(const la_problem *p, const call &c, launcher kernel)
{
    const cudaStream_t stream = (cudaStream_t)p->stream;
    const la_dtype dtype = p->array[LA_V].dtype;
    const int64_t rows = (int64_t)c.B * c.queries * c.HV, columns = max(c.V, c.K);
    const int64_t of_o = (rows * columns * la_size_of(dtype) + 255) / 256 * 256,
                  of_v = (c.K * la_size_of(dtype) + 255) / 256 * 256,
                  of_identity = (int64_t)c.K * c.K * la_size_of(p->real);
    cudaMemPool_t pool;
    char *room = NULL;
    cudaError_t error = pool_of(p->ordinal, &pool);
    if (error == cudaSuccess)
        error = cudaMallocFromPoolAsync((void **)&room, of_o + of_v + of_identity, pool, stream);
    if (error != cudaSuccess) return error;
    const auto run = [&](call some) {
        const int64_t row = (int64_t)some.HV * some.V;
        some.x[LA_O] = {room, {some.queries * row, row, some.V, 1}, dtype};
        return kernel(some, stream);
    };
    error = run(c);
    if (error == cudaSuccess && c.x[LA_MT].data) {
        call map = c;
        map.V = c.K;
        map.x[LA_V] = {room + of_o, {0, 0, 0, 1}, dtype};
        map.x[LA_W] = {};
        map.x[LA_S0] = {room + of_o + of_v, {0, 0, c.K, 1}, p->real};
        map.x[LA_ST] = c.x[LA_MT];
        error = cudaMemsetAsync(map.x[LA_V].data, 0, of_v, stream);
        if (error == cudaSuccess)
            error = launch(store_identity, c.K, 128, 0, stream, map.x[LA_S0].data, p->real, c.K);
        if (error == cudaSuccess) error = run(map);
    }
    const cudaError_t freed = cudaFreeAsync(room, stream);
    return error == cudaSuccess ? freed : error;
}

static cudaError_t token_by_token(const la_problem *p, const call &c, const char *why)
{
    tell(p, p->pass == LA_STEP ? "one token" : "token by token", "CUDA cores",
         p->real == LA_F64 ? 53 : 24, why);
    const bool rare = la_is_rare(p), wide = p->real == LA_F64;
    const launcher *const kernels = rare ? (wide ? rare_f64 : rare_f32)
                                    : wide ? scan_f64
                                           : scan_f32;
    const launcher kernel = kernels[p->kind];
    return c.states_only ? states_by_token(p, c, kernel) : kernel(c, (cudaStream_t)p->stream);
}

/* The limit of the chunk form and of step.cuh. With more keys every call goes token by token:
 * forward passes and steps by scan.cuh, gradients by files of their own. V has no limit, since all
 * kernels divide the value columns among blocks. */
enum { MOST_KEYS = 256 };

/* With fewer keys than this the keys of a chunk are nearly parallel. The inverse of the delta rule
 * then passes each rounding on to all later tokens, and the gradient of an l2norm is a small
 * difference of a few products. */
enum { FEWEST_KEYS = 16 };

/* A call with so few tokens takes no longer token by token than as one chunk of 64, which would be
 * mostly zeros (docs/decisions/0023), and no product is rounded. The tokens of packed sequences are
 * counted together, since only the device knows their lengths. */
enum { FEW_TOKENS = 8 };

enum { CHUNK = 64 }; /* tokens of a chunk */

/* Tensor cores round their operands to bf16 or to float16. Arrays of these dtypes lose nothing by
 * that. float32 arrays lose a little, so they go token by token unless allow_tf32 is set. float64
 * arrays always go token by token. The reason why a call does, or NULL. */
static const char *why_by_token(const la_problem *p)
{
    const la_dtype dtype = p->array[LA_Q].dtype;
    if (p->mode == LA_RECURRENT) return "";
    if (dtype == LA_F64) return "tensor cores would round float64";
    if (p->pass == LA_BACKWARD) {
        if (dtype == LA_F32) return "gradients in chunks are those of bfloat16 and float16 arrays";
        if (dtype == LA_F16 && (!p->causal || p->rule == LA_DPLR))
            return "float16 gradients in chunks are causal, and not those of DPLR";
        if (!p->causal && p->K > 128) return "noncausal gradients in chunks have at most 128 keys";
        if (!p->causal && p->T != p->L) return "q has other tokens than k and v";
    }
    if (p->decay == LA_PAIR) {
        if (dtype != LA_BF16) return "pairs of states in chunks are those of bfloat16 arrays";
        if (p->K > MOST_KEYS / 2) return "K is too large";
        if (p->batch > CHUNK || CHUNK % p->batch) return "batch is no divisor of 64";
    }
    if (dtype == LA_F32 && !p->allow_tf32) return "tensor cores would round float32: allow_tf32";
    if (p->K > (dtype == LA_F32 ? 128 : MOST_KEYS)) return "K is too large";
    if (p->K < FEWEST_KEYS && (la_predicts(p->rule) || p->pass == LA_BACKWARD))
        return "K is below 16";
    if (p->pass == LA_FORWARD && p->T <= FEW_TOKENS) return "T is at most 8";
    if (p->pass == LA_FORWARD && p->T != p->L) return "q has other tokens than k and v";
    return NULL;
}

/* The rule of its kernels in chunks. Those of the additive rule may have a bonus, and a token of
 * DPLR is two of the delta rule. */
static la_rule chunk_rule(const la_problem *p)
{
    static_assert(LA_RULES == 4, "a new rule goes token by token, or has its kernels here");
    return la_predicts(p->rule) ? LA_DELTA : LA_ADDITIVE;
}

/* Has the state of a call more than 128 keys in chunks? A pair of states has twice those of one. */
static bool is_wide(const la_problem *p) { return p->K * (p->decay == LA_PAIR ? 2 : 1) > 128; }

static const char not_here[] =
    "the arrays' strides, or the device, do not suit the kernel in chunks";

/* The kernels in chunks of a call that why_by_token lets pass. */
static chunk_launcher chunks_of(const la_problem *p)
{
    /* [dtype][is_wide]; HEAD is TOKEN */
    static const chunk_launcher *const chunk[][2][LA_DECAYS] = {
        {}, /* float64 */
        {{chunk_none_f32, NULL, chunk_token_f32, chunk_key_f32}},
        {{chunk_none_f16, NULL, chunk_token_f16, chunk_key_f16},
         {chunk_none_k256_f16, NULL, chunk_token_k256_f16, chunk_key_k256_f16}},
        {{chunk_none, NULL, chunk_token, chunk_key, chunk_pair},
         {chunk_none_k256, NULL, chunk_token_k256, chunk_key_k256, chunk_pair_k256}}};
    static_assert(LA_F64 == 0 && LA_F32 == 1 && LA_F16 == 2 && LA_BF16 == 3, "as the rows come");
    return chunk[p->array[LA_Q].dtype][is_wide(p)][la_kernel_decay(p)][chunk_rule(p)];
}

static cudaError_t by_chunks(const la_problem *p, const call &c)
{
    const char *why = why_by_token(p);
    cudaMemPool_t pool;
    if (why) return token_by_token(p, c, why);
    const chunk_launcher chunks = chunks_of(p);
    cudaError_t error = pool_of(p->ordinal, &pool);
    tell(p, "chunks", "tensor cores", p->array[LA_Q].dtype == LA_BF16 ? 8 : 11, "");
    const cudaStream_t stream = (cudaStream_t)p->stream;
    if (error == cudaSuccess)
        error =
            p->rule == LA_DPLR ? dplr_in_chunks(c, chunks, pool, stream) : chunks(c, pool, stream);
    return error == cudaErrorNotSupported ? token_by_token(p, c, not_here) : error;
}

la_status la_cuda_forward(la_problem *p) { return run(p, by_chunks); }

la_status la_cuda_gates(la_gating *j)
{
    on_device here(j->ordinal);
    cudaMemPool_t pool;
    cudaError_t error = here.error;
    if (error == cudaSuccess) error = pool_of(j->ordinal, &pool);
    if (error == cudaSuccess) error = run_gating(*j, pool, (cudaStream_t)j->stream);
    return status_of(j->ordinal, j->message, error);
}

la_status la_cuda_late(la_late *j)
{
    on_device here(j->ordinal);
    cudaError_t error = here.error;
    if (error == cudaSuccess) error = run_late(*j, (cudaStream_t)j->stream);
    j->is_done = error == cudaSuccess;
    return status_of(j->ordinal, j->message, error == cudaErrorNotSupported ? cudaSuccess : error);
}

static la_status run_room(la_room_job *j,
                          cudaError_t (*start)(const la_room_job &, cudaMemPool_t, cudaStream_t))
{
    la_problem *const p = j->p;
    on_device here(p->ordinal);
    cudaMemPool_t pool;
    cudaError_t error = here.error;
    for (int64_t size : j->size) /* kernels count with ints */
        if (error == cudaSuccess && size > INT32_MAX) error = cudaErrorInvalidConfiguration;
    if (error == cudaSuccess) error = pool_of(p->ordinal, &pool);
    la_room_tell(j, "CUDA cores", p->real == LA_F64 ? 53 : 24);
    if (error == cudaSuccess) error = start(*j, pool, (cudaStream_t)p->stream);
    return status_of(p->ordinal, p->message, error, la_array_name(p, LA_Q));
}

la_status la_cuda_scan(la_room_job *j) { return run_room(j, run_scan); }
la_status la_cuda_convolution(la_room_job *j) { return run_room(j, run_convolution); }

static cudaError_t one_token(const la_problem *p, const call &c)
{
    if (la_is_rare(p) || p->real == LA_F64 || p->K > MOST_KEYS ||
        !(c.x[LA_S0].stride[2] == 1 || c.x[LA_S0].stride[3] == 1))
        return token_by_token(p, c, "");
    tell(p, "one token", "CUDA cores", 24, "");
    const bool k_first = c.x[LA_S0].stride[3] == 1;
    const launcher many = (k_first ? step_many_kv : step_many_vk)[p->kind];
    const launcher step = (k_first ? step_kv : step_vk)[p->kind];
    const cudaError_t error = many(c, (cudaStream_t)p->stream);
    return error == cudaErrorNotSupported ? step(c, (cudaStream_t)p->stream) : error;
}

la_status la_cuda_step(la_problem *p) { return run(p, one_token); }

/* In one place, so that the device is set once: the step itself is la_cuda_step's. */
la_status la_cuda_layer(const la_layer *j)
{
    la_problem *const p = j->p;
    const cudaStream_t stream = (cudaStream_t)p->stream;
    on_device here(p->ordinal);
    cudaError_t error = here.error;
    if (error == cudaSuccess) error = run_layer_inputs(*j, stream);
    if (error != cudaSuccess) return status_of(p, error);
    const la_status status = la_cuda_step(p);
    if (status || !j->norm) return status;
    return status_of(p, run_group_norm(*j->norm, stream));
}

static cudaError_t adjoint_by_token(const la_problem *p, const call &c, const gradients &d,
                                    cudaMemPool_t pool)
{
    static const backward_launcher *const adjoints[2][2] = {/* [float64][K > 256] */
                                                            {adjoint_f32, adjoint_f32_k512},
                                                            {adjoint_f64, adjoint_f64_k512}};
    const bool wide = p->real == LA_F64, rare = la_is_rare(p);
    const backward_launcher adjoint = rare ? (wide ? rare_adjoint_f64 : rare_adjoint_f32)[p->kind]
                                           : adjoints[wide][p->K > MOST_KEYS][p->kind];
    const cudaStream_t stream = (cudaStream_t)p->stream;
    const cudaError_t error = adjoint(c, d, pool, stream);
    /* a block of those of large K takes less shared memory */
    if (error == cudaErrorNotSupported && !rare)
        return adjoints[wide][true][p->kind](c, d, pool, stream);
    return error;
}

/* Token by token all gradients are made. Those that the caller does not want go to memory that is
 * freed behind them. */
static cudaError_t in_reverse_by_token(const la_problem *p, const call &c, const gradients &d,
                                       cudaMemPool_t pool)
{
    if (!p->states_only) return adjoint_by_token(p, c, d, pool);
    const cudaStream_t stream = (cudaStream_t)p->stream;
    la_problem all = *p;
    all.states_only = false;
    int64_t place[LA_ARRAYS] = {}, bytes = 0;
    char *room = NULL;
    const auto each = [&](auto act) {
        la_set written = la_written[LA_BACKWARD];
        for (la_name name; la_next(&written, &name);)
            if (la_array_rows[name].letters[0] != 'N' && la_has(p, name) &&
                p->array[la_array_rows[name].of].given)
                act(name);
    };
    each([&](la_name name) {
        la_array *const x = &all.array[name];
        int64_t dense = 1;
        *x = {};
        x->given = true;
        x->dtype = la_dtype_of(&all, name);
        x->ndim = la_shape_of(&all, name, x->shape);
        for (int i = x->ndim - 1; i >= 0; i--) {
            x->stride[i] = dense;
            dense *= x->shape[i];
        }
        place[name] = bytes;
        bytes += (dense * la_size_of(x->dtype) + 255) / 256 * 256;
    });
    cudaError_t error = cudaSuccess;
    if (bytes) error = cudaMallocFromPoolAsync((void **)&room, (size_t)bytes, pool, stream);
    if (error != cudaSuccess) return error;
    each([&](la_name name) {
        all.array[name].data = room + place[name];
        la_settle_output(&all, name);
    });
    gradients own = gradients_of(&all);
    own.range = d.range;
    error = adjoint_by_token(&all, c, own, pool);
    const cudaError_t freed = room ? cudaFreeAsync(room, stream) : cudaSuccess;
    return error == cudaSuccess ? freed : error;
}

/* cudaErrorNotSupported: nothing has been done. */
static cudaError_t in_reverse_by_chunks(const la_problem *p, const call &c, gradients &d,
                                        cudaMemPool_t pool)
{
    /* [float16, or bfloat16][is_wide] */
    static const backward_launcher *const chunk[2][2][LA_DECAYS] = {
        {{chunk_backward_none_f16, NULL, chunk_backward_token_f16, chunk_backward_key_f16},
         {chunk_backward_none_k256_f16, NULL, chunk_backward_token_k256_f16,
          chunk_backward_key_k256_f16}},
        {{chunk_backward_none, NULL, chunk_backward_token, chunk_backward_key, chunk_backward_pair},
         {chunk_backward_none_k256, NULL, chunk_backward_token_k256, chunk_backward_key_k256,
          chunk_backward_pair_k256}}};
    const bool narrow = p->array[LA_Q].dtype == LA_F16;
    const cudaStream_t stream = (cudaStream_t)p->stream;
    const backward_launcher chunks = chunk[!narrow][is_wide(p)][la_kernel_decay(p)][chunk_rule(p)];
    if (p->rule == LA_DPLR)
        return dplr_gradients_in_chunks(c, d, chunks, chunks_of(p), pool, stream);
    if (!narrow) return chunks(c, d, pool, stream);
    cudaError_t error = cudaMallocFromPoolAsync((void **)&d.range, sizeof *d.range, pool, stream);
    if (error != cudaSuccess) return error;
    error = cudaMemsetAsync(d.range, 0, sizeof *d.range, stream);
    if (error == cudaSuccess) error = chunks(c, d, pool, stream);
    /* once more, if some number was too large for float16 */
    if (error == cudaSuccess) error = in_reverse_by_token(p, c, d, pool);
    const cudaError_t freed = cudaFreeAsync(d.range, stream);
    d.range = NULL;
    return error == cudaSuccess ? freed : error;
}

/* In chunks, unless there is a reason why not (why_by_token). */
static cudaError_t in_reverse_of_rule(const la_problem *p, const call &c, gradients &d,
                                      cudaMemPool_t pool)
{
    const char *why = why_by_token(p);
    tell(p, "chunks", "tensor cores", p->array[LA_Q].dtype == LA_F16 ? 11 : 8, "");
    if (!why) {
        const cudaError_t error = in_reverse_by_chunks(p, c, d, pool);
        if (error != cudaErrorNotSupported) return error;
    }
    tell(p, "token by token", "CUDA cores", p->real == LA_F64 ? 53 : 24, why ? why : not_here);
    return in_reverse_by_token(p, c, d, pool);
}

static cudaError_t in_reverse(const la_problem *p, const call &c)
{
    gradients d = gradients_of(p);
    cudaMemPool_t pool;
    const cudaError_t error = pool_of(p->ordinal, &pool);
    if (error != cudaSuccess) return error;
    if (!has_factors(c)) return in_reverse_of_rule(p, c, d, pool);
    return with_factors(c, d, p, in_reverse_of_rule, pool, (cudaStream_t)p->stream);
}

la_status la_cuda_backward(la_problem *p)
{
    const la_array *dg = &p->array[LA_DG];
    const bool none = p->N == 0 || (!p->tokens && !p->array[LA_S0].given);
    if (none && p->decay == LA_HEAD && !p->states_only) { /* a sum over no tokens */
        on_device here(p->ordinal);
        const size_t bytes = (size_t)p->HV * la_size_of(dg->dtype);
        return status_of(p, here.error != cudaSuccess
                                ? here.error
                                : cudaMemsetAsync(dg->data, 0, bytes, (cudaStream_t)p->stream));
    }
    return run(p, in_reverse);
}
