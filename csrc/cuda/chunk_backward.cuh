/* The chunk form's adjoint on Hopper's tensor cores, for bf16 arrays: three kernels.
 *
 * `prepare` as in the forward, with L besides; `walk_both`, forwards and backwards; and the local part of
 * every chunk. dq and dk go to the caller's arrays, or, where value heads share them or q and k
 * were normed or mapped, by way of a slot per value head and `gather`. */
#include "local_key.cuh"

template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_walks_again(const call &c, const gradients &d, const chunks &w,
                                      const back_maps &maps, const kept &f, int processors,
                                      cudaStream_t stream)
{
    const auto kernel = walk_both<KP, DECAY, RULE>;
    const int panels = (c.V + PANEL - 1) / PANEL;
    const int64_t heads = (int64_t)c.N * c.HV;
    /* two panels share the tiles of a block, unless that leaves processors without one */
    const int warps = panels > 1 && heads * ((panels + 1) / 2) * 2 >= processors ? 8 : 4;
    const int tiles = (panels + warps / 4 - 1) / (warps / 4);
    const int bytes = LAP_STAGES * lap<KP, DECAY, RULE, true>::bytes(warps); /* the larger one's */
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    kernel<<<(unsigned)(2 * heads * tiles), (warps + LAP_FETCHERS) * 32, bytes, stream>>>(c, d, w, maps,
                                                                                        f, tiles);
    return cudaGetLastError();
}

/* Is this the code for Hopper, on a device with room for it? Other code is empty, and for one warp. */
static cudaError_t suits(const void *local, int bytes, int *processors)
{
    int device, room;
    cudaFuncAttributes code;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, local);
    if (error != cudaSuccess) return error;
    return code.maxThreadsPerBlock >= LOCAL_THREADS && bytes <= room ? cudaSuccess
                                                                    : cudaErrorNotSupported;
}

/* dq and dk of the value heads of one q/k head, together, and what loading did to q and k undone. A warp
 * has a token: a lane four keys. */
static __global__ void __launch_bounds__(256)
    join_heads(const __grid_constant__ call c, const __grid_constant__ gradients d, const local_flags from)
{
    const int64_t i = (int64_t)blockIdx.x * 8 + threadIdx.x / 32, tokens = (int64_t)c.B * c.T;
    const int64_t token = i / c.H;
    const int group = c.HV / c.H, h = (int)(i % c.H), key = threadIdx.x % 32 * 4;
    if (token >= tokens) return;
    const int b = (int)(token / c.T), t = (int)(token % c.T);
    const bool plain = !c.qk_l2norm && c.map[0] == LA_IDENTITY && c.map[1] == LA_IDENTITY;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const view &x = which ? c.k : c.q, &to = which ? d.dk : d.dq;
        const float *slot = (which ? from.dk : from.dq) + (h * group * tokens + token) * from.kp + key;
        float dx[4] = {}, y[4] = {};
        for (int j = 0; j < group && key < from.kp; j++, slot += tokens * from.kp) {
            const float4 part = *(const float4 *)slot;
            dx[0] += part.x, dx[1] += part.y, dx[2] += part.z, dx[3] += part.w;
        }
        if (!plain) {
            load_row(y, at(x, b, t, h, key), x.dtype, 0, 1, c.K - key);
            key_gradient(c, which, y, dx);
        }
        char *const own = at(to, b, t, h, key);
        if (c.K % 4 == 0) {
            if (key < c.K) *(uint2 *)own = make_uint2(pack(dx[0], dx[1]), pack(dx[2], dx[3]));
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (key + e < c.K) store(own + e * 2, to.dtype, dx[e]);
        }
    }
}

template <int KP, la_decay DECAY, la_rule RULE> constexpr auto local_of()
{
    if constexpr (DECAY == LA_KEY)
        return local_key<KP, RULE>;
    else
        return local_scalar<KP, DECAY, RULE>;
}

template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_chunk_backward(const call &c, const gradients &d, cudaMemPool_t pool,
                                         cudaStream_t stream)
{
    constexpr bool delta = RULE == LA_DELTA, per_key = DECAY == LA_KEY;
    constexpr int local_bytes =
        per_key ? sizeof(local_key_room<KP, RULE>) : sizeof(local_room<KP, RULE>);
    constexpr int prepare_bytes = per_key ? sizeof(key_room<KP>) : sizeof(scalar_room<KP, RULE>);
    const auto local = local_of<KP, DECAY, RULE>();
    const auto prepare = prepare_of<KP, DECAY, RULE>();
    int processors;
    cudaError_t error = suits((const void *)local, local_bytes, &processors);
    if (error != cudaSuccess) return error;
    /* local_key knows the gradient of the logarithm, which divided by a decay of zero is nothing */
    if (per_key && c.gate == LA_DECAY) return cudaErrorNotSupported;
    back_maps maps = {};
    const bool plain = !c.qk_l2norm && c.map[0] == LA_IDENTITY && c.map[1] == LA_IDENTITY;
    const bool q_as_given = map_of(c, c.q, c.H, c.K, &maps.q) && plain;
    const bool k_as_given = map_of(c, c.k, c.H, c.K, &maps.k) && plain;
    if (!map_of(c, c.v, c.HV, c.V, &maps.v) || !map_of(c, d.d_o, c.HV, c.V, &maps.d_o))
        return cudaErrorNotSupported; /* rows that the copy engine cannot take */

    const int64_t slots = c.cu.data ? (int64_t)c.T / C + c.N : (int64_t)c.N * ((c.T + C - 1) / C);
    const int64_t places = slots * c.HV, tile = tile_bytes(KP), panels = (c.V + PANEL - 1) / PANEL;
    if (places > INT32_MAX) return cudaErrorNotSupported;
    const int64_t tokens = (int64_t)c.B * c.T, score = places * PANEL_BYTES;
    const int heads = per_key ? c.HV : c.H;
    const int64_t keys = slots * heads * tile;
    chunks w = {};
    kept f = {};
    local_flags to = {};
    w.slots = (int)slots;
    w.heads = heads;
    to.direct = plain && c.HV == c.H;
    to.q_as_given = q_as_given;
    to.k_as_given = k_as_given;
    to.kp = (c.K + 31) / 32 * 32;
    const struct {
        char **to;
        int64_t bytes;
    } parts[] = {
        {&w.scores, score},
        {&w.inverse, delta ? score : 0},
        {&w.lower, delta ? score : 0},
        {&w.q, per_key || !q_as_given ? keys : 0},
        {&w.k, per_key ? (delta ? keys : 0) : k_as_given ? 0 : keys},
        {&w.kt, per_key ? keys : 0},
        {(char **)&w.total, per_key ? places * KP * 4 : 0},
        {(char **)&w.in, DECAY == LA_TOKEN ? places * C * 4 : 0},
        {(char **)&w.out, DECAY == LA_TOKEN ? places * C * 4 : 0},
        {(char **)&w.odd, (places * 4 + 1023) / 1024 * 1024},
        {&f.states, places * panels * tile},
        {&f.d_states, places * panels * tile},
        {&f.E, delta ? places * panels * PANEL_BYTES : 0},
        {&f.Z, delta ? places * panels * PANEL_BYTES : 0},
        {(char **)&to.dq, to.direct ? 0 : tokens * c.HV * to.kp * 4},
        {(char **)&to.dk, to.direct ? 0 : tokens * c.HV * to.kp * 4},
        {(char **)&to.da, d.per_head ? tokens * c.HV * 4 : 0},
    };
    int64_t bytes = 0;
    for (const auto &x : parts) bytes += x.bytes;
    char *room = NULL;
    if (bytes) error = cudaMallocFromPoolAsync((void **)&room, bytes, pool, stream);
    if (error != cudaSuccess) return error;
    char *next = room;
    for (const auto &x : parts) {
        *x.to = x.bytes ? next : NULL;
        next += x.bytes;
    }

    error = cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, prepare_bytes);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(local, cudaFuncAttributeMaxDynamicSharedMemorySize, local_bytes);
    if (error == cudaSuccess && places) {
        prepare<<<(unsigned)(slots * heads), per_key ? KEY_THREADS : SCALAR_THREADS, prepare_bytes,
                  stream>>>(c, w, q_as_given, k_as_given);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess)
        error = launch_walks_again<KP, DECAY, RULE>(c, d, w, maps, f, processors, stream);
    if (error == cudaSuccess && places) {
        local<<<(unsigned)places, LOCAL_THREADS, local_bytes, stream>>>(c, d, w, maps, f, to);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess && !to.direct && tokens) {
        join_heads<<<(unsigned)((tokens * c.H + 7) / 8), 256, 0, stream>>>(c, d, to);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess && d.per_head) error = gather_gates(c, d, to.da, stream);
    const cudaError_t freed = room ? cudaFreeAsync(room, stream) : cudaSuccess;
    return error == cudaSuccess ? freed : error;
}

template <la_decay DECAY, la_rule RULE>
static cudaError_t chunk_backward_any(const call &c, const gradients &d, cudaMemPool_t pool,
                                      cudaStream_t stream)
{
    return c.K <= 64 ? launch_chunk_backward<64, DECAY, RULE>(c, d, pool, stream)
                     : launch_chunk_backward<128, DECAY, RULE>(c, d, pool, stream);
}
