/* Diagonal scans on a GPU: the launches of a call, and its memory. */
#ifndef LINATTN_CUDA_DIAGONAL_LAUNCH_CUH
#define LINATTN_CUDA_DIAGONAL_LAUNCH_CUH

#include "diagonal_backward.cuh"
#include "diagonal_forward.cuh"
#include "diagonal_gated.cuh"

/* Memory of the call, until it has run. */
struct scan_memory {
    cudaMemPool_t pool;
    cudaStream_t stream;
    void *held;

    /* A block for these parts, of so many bytes each. A part of no bytes is NULL. */
    cudaError_t take(std::initializer_list<void **> to, std::initializer_list<int64_t> bytes)
    {
        int64_t all = 0;
        for (int64_t n : bytes) all += div_up(n, 256) * 256;
        if (!all) return cudaSuccess;
        const cudaError_t error = cudaMallocFromPoolAsync(&held, (size_t)all, pool, stream);
        char *next = (char *)held;
        const int64_t *n = bytes.begin();
        for (void **one : to) {
            *one = *n && error == cudaSuccess ? next : NULL;
            next += div_up(*n++, 256) * 256;
        }
        return error;
    }
    cudaError_t give_back(cudaError_t error)
    {
        const cudaError_t freed = held ? cudaFreeAsync(held, stream) : cudaSuccess;
        return error == cudaSuccess ? freed : error;
    }
};

cudaError_t run_scan_f64(const scan_call &, la_scan_form, bool pairs, bool backwards, scan_memory);

/* Threads enough for two warps of each of a Hopper's schedulers. */
static constexpr int64_t ENOUGH_THREADS = 1024 * 32;

enum {
    MOST_PARTS = 64,   /* of the sequences or their pieces: each has sums of its own */
    LEAST_PIECE = 256, /* tokens */
};

/* The pieces that an adjoint cuts each sequence into. Its blocks fill a Hopper if there are three for each
 * of 132 processors. There are five times as many, because the last ones leave processors idle. There
 * are no cuts if the whole sequences have blocks enough. */
static int cuts_of(const scan_call &c)
{
    enum { SEATS = 3 * 132, ROUNDS = 5 };
    const int64_t units = (int64_t)c.room.S * c.G * c.panels;
    if (units == 0 || units >= SEATS || c.blocks > 1) return 1;
    const int64_t cuts = min(ROUNDS * SEATS / units, (int64_t)MOST_PARTS / c.room.S);
    return (int)max((int64_t)1, min(cuts, (int64_t)c.room.T / LEAST_PIECE));
}

/* A forward pass, or the states that a backward pass starts from, or states alone. */
template <typename real, bool FIXED, bool PAIRS, int LANES, int NUMBERS, bool READS, la_dtype GIVEN>
static cudaError_t start_tokens(scan_call c, cudaStream_t stream)
{
    typedef scan_forward<real, FIXED, PAIRS, LANES, NUMBERS, READS ? READ : KEEP, GIVEN> pass;
    const auto kernel = READS ? scan_tokens<real, FIXED, PAIRS, LANES, NUMBERS, GIVEN>
                              : scan_states<real, FIXED, PAIRS, LANES, NUMBERS, GIVEN>;
    c.panels = (int)div_up(c.room.D / c.G, pass::CHANNELS);
    const int64_t blocks = (int64_t)c.room.S * c.G * c.panels * c.blocks;
    return launch(kernel, c.cuts > 1 ? 2 * blocks : blocks, SCAN_THREADS,
                  sizeof(typename pass::memory), stream, c);
}

/* More numbers for a thread where there are threads enough: fewer loads and sums for each. */
template <typename real, bool FIXED, bool PAIRS, int LANES, bool READS, la_dtype GIVEN>
static cudaError_t start_tokens(const scan_call &c, cudaStream_t stream)
{
    const int64_t channels = (int64_t)c.room.S * c.room.D * (c.cuts > 1 ? 2 : 1);
    if constexpr (LANES == 8 && !FIXED && !PAIRS && sizeof(real) == 4) {
        if (channels * 2 >= ENOUGH_THREADS)
            return start_tokens<real, FIXED, PAIRS, 2, 8, READS, GIVEN>(c, stream);
        if (channels * 4 >= ENOUGH_THREADS)
            return start_tokens<real, FIXED, PAIRS, 4, 4, READS, GIVEN>(c, stream);
    }
    return start_tokens<real, FIXED, PAIRS, LANES, 2, READS, GIVEN>(c, stream);
}

template <int LANES> static void share_numbers(scan_call *c)
{
    c->blocks = (int)div_up(c->N, 2 * LANES);
    c->numbers = c->blocks * 2 * LANES;
}

template <typename real, bool FIXED, bool PAIRS, int LANES, la_dtype GIVEN>
static cudaError_t forward(scan_call c, scan_memory memory)
{
    share_numbers<LANES>(&c);
    if (c.alone) return start_tokens<real, FIXED, PAIRS, LANES, false, GIVEN>(c, memory.stream);
    const int64_t numbers = (int64_t)c.room.B * c.room.T * c.room.D;
    cudaError_t error = memory.take(
        {(void **)&c.sums}, {c.blocks > 1 ? c.blocks * numbers * (int64_t)sizeof(real) : 0});
    if (error == cudaSuccess)
        error = start_tokens<real, FIXED, PAIRS, LANES, true, GIVEN>(c, memory.stream);
    if (error == cudaSuccess && c.blocks > 1)
        error = launch(finish_reads<real>, div_up(numbers, 256), 256, 0, memory.stream, c);
    return memory.give_back(error);
}

template <typename real, bool FIXED, bool PAIRS, int LANES, int LOOP, la_dtype GIVEN>
static cudaError_t backward(scan_call c, scan_memory memory)
{
    typedef scan_backward<real, FIXED, PAIRS, LANES, LOOP, GIVEN> pass;
    const int64_t tokens = (int64_t)c.room.B * c.room.T, size = sizeof(real), D = c.room.D;
    share_numbers<LANES>(&c);
    c.panels = (int)div_up(c.room.D / c.G, pass::CHANNELS);
    c.cuts = cuts_of(c);
    c.parts = c.cuts > 1 ? c.room.S * c.cuts : (int)min(c.room.S, (int)MOST_PARTS);
    const int64_t per_channel = c.parts * D * (int64_t)sizeof(double),
                  per_number = per_channel * c.N;
    const int64_t rows = FIXED ? 0 : c.panels * tokens * c.G * c.numbers * size;
    const cudaStream_t stream = memory.stream;
    cudaError_t error = memory.take(
        {(void **)&c.kept, (void **)&c.later, (void **)&c.sums, (void **)&c.dB, (void **)&c.dC,
         (void **)&c.dA, (void **)&c.dB0, (void **)&c.dC0, (void **)&c.dD, (void **)&c.dbias},
        {places_of(c.room, GROUP) * D * c.numbers * size,
         c.cuts > 1 ? (int64_t)c.room.S * c.cuts * D * c.numbers * size : 0,
         c.blocks > 1 ? 3 * c.blocks * tokens * D * size : 0, rows, rows, per_number,
         FIXED ? per_number : 0, FIXED ? per_number : 0, c.d[LA_SCAN_D].data ? per_channel : 0,
         c.d[LA_SCAN_BIAS].data ? per_channel : 0});
    if (error == cudaSuccess)
        error = start_tokens<real, FIXED, PAIRS, LANES, false, GIVEN>(c, stream);
    if (error == cudaSuccess)
        error = launch(scan_adjoint<real, FIXED, PAIRS, LANES, LOOP, GIVEN>,
                       (int64_t)c.parts * c.G * c.panels * c.blocks, SCAN_THREADS,
                       sizeof(typename pass::memory), stream, c);
    if (error == cudaSuccess && c.blocks > 1)
        error = launch(finish_adjoint<real, FIXED>, div_up(c.parts * D, SCAN_THREADS), SCAN_THREADS,
                       0, stream, c);
    if (error == cudaSuccess && !FIXED)
        error = launch(add_panels<real>, div_up(2 * tokens * c.G * c.N, 256), 256, 0, stream, c);
    const struct {
        const double *from;
        la_scan_line line;
        int64_t inner;
    } sums[] = {{c.dA, LA_SCAN_A, c.N},
                {c.dB0, LA_SCAN_B0, c.N},
                {c.dC0, LA_SCAN_C0, c.N},
                {c.dD, LA_SCAN_D, 1},
                {c.dbias, LA_SCAN_BIAS, 1}};
    for (const auto &sum : sums)
        if (error == cudaSuccess)
            error = add_parts(sum.from, c.d[sum.line], D * sum.inner, sum.inner, c.parts,
                              D * sum.inner, stream);
    return memory.give_back(error);
}

template <typename real> static cudaError_t gated(scan_call c, bool backwards, scan_memory memory)
{
    const int64_t blocks = (int64_t)c.room.S * div_up(c.room.D, 32), threads = GATED_WARPS * 32;
    if (c.alone)
        return launch(backwards ? gated_adjoint<real> : gated_tokens<real, false>, blocks, threads,
                      0, memory.stream, c);
    if (!backwards) return launch(gated_tokens<real, true>, blocks, threads, 0, memory.stream, c);
    cudaError_t error = memory.take(
        {(void **)&c.kept}, {places_of(c.room, GATED_TILE) * c.room.D * (int64_t)sizeof(real)});
    if (error == cudaSuccess)
        error = launch(gated_tokens<real, false>, blocks, threads, 0, memory.stream, c);
    if (error == cudaSuccess)
        error = launch(gated_adjoint<real>, blocks, threads, 0, memory.stream, c);
    return memory.give_back(error);
}

/* A set has 16 channels. More sets in a block add up dB and dC of more channels before they leave it. */
template <typename real, bool FIXED, bool PAIRS, la_dtype GIVEN>
static cudaError_t of_few_numbers(const scan_call &c, bool backwards, scan_memory memory)
{
    constexpr int LOOP = !FIXED && !PAIRS && sizeof(real) == 4 ? 4 : 1;
    const int64_t channels = (int64_t)c.room.S * c.room.D, pieces = max(1, c.room.T / LEAST_PIECE);
    const bool many = c.room.D / c.G >= LOOP * 16 && channels * pieces * 8 >= LOOP * ENOUGH_THREADS;
    if (!backwards) return forward<real, FIXED, PAIRS, 8, GIVEN>(c, memory);
    return many ? backward<real, FIXED, PAIRS, 8, LOOP, GIVEN>(c, memory)
                : backward<real, FIXED, PAIRS, 8, 1, GIVEN>(c, memory);
}

/* By the size of a state: of the forms that have large ones, 64 numbers have threads of their own. */
template <typename real, bool FIXED, bool PAIRS>
static cudaError_t by_numbers(const scan_call &c, bool backwards, scan_memory memory)
{
    constexpr bool PLAIN = !FIXED && !PAIRS && sizeof(real) == 4;
    constexpr int WIDE = PLAIN || (FIXED && PAIRS && sizeof(real) == 4) ? 32 : 8;
    if (WIDE > 8 && c.N > 16)
        return backwards ? backward<real, FIXED, PAIRS, WIDE, 1, ANY_DTYPE>(c, memory)
                         : forward<real, FIXED, PAIRS, WIDE, ANY_DTYPE>(c, memory);
    if constexpr (PLAIN)
        if (c.x[LA_SCAN_U].dtype == LA_BF16 && c.fours && c.row_fours)
            return of_few_numbers<real, FIXED, PAIRS, LA_BF16>(c, backwards, memory);
    return of_few_numbers<real, FIXED, PAIRS, ANY_DTYPE>(c, backwards, memory);
}

template <typename real>
static cudaError_t by_form(const scan_call &c, la_scan_form form, bool pairs, bool backwards,
                           scan_memory memory)
{
    if (form == LA_GATED_SCAN) return gated<real>(c, backwards, memory);
    if (c.alone) backwards = false; /* the states' kernel goes either way */
    if (form == LA_FIXED)
        return pairs ? by_numbers<real, true, true>(c, backwards, memory)
                     : by_numbers<real, true, false>(c, backwards, memory);
    return pairs ? by_numbers<real, false, true>(c, backwards, memory)
                 : by_numbers<real, false, false>(c, backwards, memory);
}

#endif
