/* The C core of linattn: one problem, one check, three entry points.
 *
 * Letters, here and everywhere: B batch, T tokens, H query/key heads, HV value heads (HV % H == 0;
 * value head h reads q/k head h / (HV / H)), K key dim, V value dim, N sequences, C chunk.
 *
 * A caller describes a call in an la_problem (arrays as the user gave them, options), la_check
 * compares it with the table in variants.def and settles the letters and the strides, and
 * la_forward, la_backward or la_step do the work. No room behind la_check looks at a shape again.
 */
#ifndef LINATTN_H
#define LINATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    LA_OK = 0,
    LA_TYPE_ERROR,    /* not an array of a supported dtype */
    LA_VALUE_ERROR,   /* shapes, values, combinations */
    LA_MEMORY_ERROR,  /* scratch could not be had */
    LA_RUNTIME_ERROR, /* the device, in its own words */
    LA_INTERRUPTED,   /* the caller's wish: outputs hold anything */
} la_status;

/* Marks a function that kernels of a GPU may call too, and one whose result may choose a kernel. */
#ifdef __CUDACC__
#define LA_BOTH __host__ __device__
#define LA_FACT LA_BOTH constexpr
#else
#define LA_BOTH
#define LA_FACT
#endif

typedef enum { LA_F64, LA_F32, LA_F16, LA_BF16, LA_I64, LA_I32, LA_DTYPES } la_dtype;

/* Bytes of a number. */
LA_BOTH static inline int la_size_of(la_dtype dtype)
{
    return dtype == LA_F64 || dtype == LA_I64 ? 8 : dtype == LA_F32 || dtype == LA_I32 ? 4 : 2;
}

/* Number i from `data` on, which are int32 or int64. */
LA_BOTH static inline int64_t la_integer_at(const char *data, la_dtype dtype, int64_t i)
{
    return dtype == LA_I64 ? ((const int64_t *)data)[i] : ((const int32_t *)data)[i];
}

typedef enum {
#define LA_VARIANT(name, decay, rule, z) LA_OP_##name,
#include "variants.def"
    LA_OPS
} la_op;

typedef enum { LA_CPU, LA_CUDA } la_device;
typedef enum { LA_FORWARD, LA_STEP, LA_BACKWARD } la_pass;
typedef enum { LA_CHUNK, LA_RECURRENT, LA_PARALLEL } la_mode;

/* HEAD exists for the checker only: the kernels see it as TOKEN with token stride 0. */
typedef enum { LA_NONE, LA_HEAD, LA_TOKEN, LA_KEY, LA_PAIR, LA_DECAYS } la_decay;
typedef enum { LA_ADDITIVE, LA_DELTA, LA_DPLR, LA_BONUS, LA_RULES } la_rule;

/* The facts in which rules differ (recurrence.h). Do they predict? Does the prediction take the decayed
 * state, and does the read? */
LA_FACT static inline bool la_predicts(la_rule rule) { return rule == LA_DELTA || rule == LA_DPLR; }
LA_FACT static inline bool la_predicts_after(la_decay decay, la_rule rule)
{
    return rule == LA_DELTA && decay != LA_PAIR;
}
/* May writes have weights, and reads a part of v? A decay per head has the kernels, but no arrays
 * for it. */
LA_FACT static inline bool la_weighs(la_decay decay, la_rule rule)
{
    return decay == LA_TOKEN && rule == LA_ADDITIVE;
}
/* May the values that are written have gates, and x be a factor of k? */
LA_FACT static inline bool la_is_gated(la_decay decay, la_rule rule)
{
    return decay == LA_KEY && rule == LA_DELTA;
}
LA_FACT static inline bool la_reads_after(la_rule rule) { return rule != LA_BONUS; }

/* Which kernels an op has: the rows of kinds.def. Tables of kernels are indexed by this. */
typedef enum {
#define LA_KIND(decay, rule) LA_##decay##_##rule,
#include "kinds.def"
    LA_KINDS,
    LA_HEAD_ADDITIVE = LA_TOKEN_ADDITIVE,
    LA_HEAD_DELTA = LA_TOKEN_DELTA,
} la_kind;

/* A row of variants.def. */
typedef struct {
    const char *name;
    la_decay decay;
    la_rule rule;
    la_kind kind;
    bool normaliser; /* the op may divide by q'z */
} la_variant;

/* How a gate is given: its logarithm g, the decay itself (alpha, gamma), or minus the logarithm
 * (slopes). */
typedef enum { LA_LOG, LA_DECAY, LA_SLOPE } la_gate;

/* The curves of gates from projections (gates.def): c A softplus(u), c sigmoid(A u). */
typedef enum { LA_SOFTPLUS, LA_SIGMOID } la_curve;

/* How a denominator q'z becomes a divisor: not at all, max(den, eps), or den + eps. */
typedef enum { LA_UNNORMALISED, LA_CLAMP, LA_ADD } la_normaliser;

/* Feature maps that are applied while q and k are loaded. */
typedef enum { LA_IDENTITY, LA_ELU1, LA_RELU, LA_RELU2, LA_EXP, LA_MAPS } la_map;

/* Every array a call can have: the lines of arrays.def, and behind them their gradients. */
typedef enum {
#define LA_ARRAY(name, ...) LA_##name,
#define LA_INDEX(name, ...) LA_##name,
#define LA_RESULT(name, ...) LA_##name,
#include "arrays.def"
#define LA_ARRAY(name, ...) LA_D##name,
#define LA_INDEX(...)
#include "arrays.def"
    LA_ARRAYS
} la_name;

/* The columns of arrays.def. */
typedef enum { LA_INPUT, LA_STATE, LA_OUTPUT } la_role;
typedef enum {
    LA_DTYPE_OF_Q,
    LA_DTYPE_FLOAT,
    LA_DTYPE_REAL,
    LA_DTYPE_STORED,
    LA_DTYPE_INTEGER
} la_dtypes;
typedef enum {
    LA_ALWAYS,
    LA_DECAY_OPS,
    LA_DELTA_OPS,
    LA_PREDICTS,
    LA_DPLR_OPS,
    LA_BONUS_OPS,
    LA_PAIR_OPS,
    LA_WEIGHED,
    LA_GATED,
    LA_NORMALISED,
    LA_OF_SEGMENTS
} la_part;
typedef enum { LA_REQUIRED, LA_OPTIONAL, LA_IN_STEP, LA_IN_DPLR } la_need;

/* A line of arrays.def, or the gradient that follows from it. */
typedef struct {
    const char *label[3]; /* of the array; of its parts where a state is a pair */
    const char *letters;
    la_role role;
    la_dtypes dtype;
    la_part part;
    la_need need;
    la_name of; /* whose gradient it is; itself, if of none */
} la_array_row;

extern const la_array_row la_array_rows[LA_ARRAYS];

/* A set of arrays, a bit each. */
typedef uint64_t la_set;

/* By pass: the arrays that a call reads, and those that it writes. A step's states are in both. */
extern const la_set la_read[], la_written[];
/* The outputs of a forward pass that has want_map, besides those. */
extern const la_set la_results;

static inline bool la_in(la_set set, la_name name) { return set >> name & 1; }
/* for (la_name name; la_next(&set, &name);): the arrays of a set, which is empty after. */
static inline bool la_next(la_set *set, la_name *name)
{
    if (!*set) return false;
    *name = (la_name)__builtin_ctzll(*set);
    *set &= *set - 1;
    return true;
}

#define LA_MAX_DIMS 4

/* As given: the user's dimensions, strides in elements. After la_check: the array's letters in
 * their canonical order (q: B T H K, S: N HV K V whatever the layout), with stride 0 for a letter
 * the user left out (one-head calls, steps, per-head gates). */
typedef struct la_array {
    char *data;
    bool given;
    bool on_host; /* in a call on a device: a number per head, or one, that lies on the host */
    bool number;  /* one number for all tokens and heads; a row of keys is written out */
    la_dtype dtype;
    int ndim;
    int64_t shape[LA_MAX_DIMS];
    int64_t stride[LA_MAX_DIMS];
} la_array;

#define LA_MESSAGE 320

/* The kernel that took a call, in words. */
typedef struct la_taken {
    const char *kernel; /* "chunks", "token by token", "one token", "noncausal", a room, "none" */
    const char *unit;   /* the instruction set, or "tensor cores" or "CUDA cores" */
    const char *why;    /* the reason, where it is not the kernel that the mode names; else empty */
    int64_t chunk;      /* tokens in a chunk; 0 where there are none */
    int bits;           /* of a number that is multiplied */
} la_taken;

typedef struct la_problem {
    /* what the caller says */
    la_op op;
    la_pass pass;
    la_device device; /* where every array lies */
    int ordinal;      /* which CUDA device */
    void *stream;     /* CUDA: the caller's current stream, a cudaStream_t */
    la_mode mode;
    bool has_chunk;
    int64_t chunk; /* tokens per chunk; 0 after la_check: the library's choice */
    int64_t batch; /* PAIR: so many tokens predict from one memory; 1: each from its own */
    la_array array[LA_ARRAYS];
    bool has_scale;
    double scale;
    la_gate gate;
    bool qk_l2norm;     /* q, k <- x / sqrt(sum x^2 + 1e-6), before the feature map */
    bool state_v_first; /* states are [N,HV,V,K] */
    bool want_final;
    bool want_map;        /* of a call for states alone: M, where the op mixes keys */
    bool states_only;     /* no o, and of the gradients those of initial states alone */
    bool predicts_before; /* a delta rule with x: x looks at the state before its decay */
    bool x_is_factor;     /* la_is_gated: x times k predicts, k as the recurrence sees it */
    bool allow_tf32;      /* products of float32 numbers may be rounded as tf32's are */
    la_map map[2];        /* of q, of k */
    double map_eps[2];    /* relu: max(x,0) + eps */
    la_normaliser normaliser;
    double eps;
    bool causal;
    struct la_watch *watch; /* watch.h; NULL: the call runs to its end */
    la_taken *taken;        /* what takes the call, written before it runs; may be NULL */
    bool *clamped; /* CPU: becomes true if a denominator below zero is clamped; may be NULL */
    const char *const
        *labels;      /* the arrays' names by la_name, in a call of no op; NULL in others */
    bool any_strides; /* a call of no op whose innermost axes may have any strides */

    /* what la_check settles */
    int64_t B, T, H, HV, K, V, N;
    int64_t L;     /* tokens of k and v in a row: T, unless a noncausal call has others */
    int64_t P;     /* states in a step's pool, if there are state_indices */
    bool one_head; /* 2-D notebook call (1-D for a step): no B, H, HV in any array */
    la_decay decay;
    la_rule rule;
    la_kind kind;
    la_dtype real;  /* of sums and states: LA_F32, or LA_F64 for float64 inputs */
    int64_t tokens; /* B * the larger of T and L */

    /* what la_check_slots settles: [B], -1 for no state; NULL without state_indices */
    const int64_t *slots;

    /* what went wrong, in words */
    char message[LA_MESSAGE];
} la_problem;

/* The table, and the words for its values and for dtypes. */
extern const la_variant la_variants[LA_OPS];
extern const char *const la_decay_names[LA_DECAYS];
extern const char *const la_rule_names[LA_RULES];
extern const char *const la_dtype_names[LA_DTYPES];

/* The name of an array in this call: `state` in a step, `alpha` for a decay given as such. */
const char *la_array_name(const la_problem *p, la_name name);

/* The decay as kernels see it: one per head is one per token that is always the same. */
static inline la_decay la_kernel_decay(const la_problem *p)
{
    return p->decay == LA_HEAD ? LA_TOKEN : p->decay;
}

/* Is a state a pair: (S, z) of a normalised call, or a memory and its momentum? */
static inline bool la_has_pair(const la_problem *p)
{
    return p->normaliser != LA_UNNORMALISED || p->decay == LA_PAIR;
}

/* Is this state the second of such a pair? Which one is, for a call whose first is given? */
bool la_is_second(la_name name);
la_name la_second_of(const la_problem *p, la_name first);

/* Is this one of the calls for which a GPU has but one family of kernels that go token by token
 * (cuda/rare.cuh)? Calls with x, and pairs of states, have kernels in chunks too. */
static inline bool la_is_rare(const la_problem *p)
{
    return p->rule > LA_DELTA || p->decay == LA_PAIR || p->array[LA_X].given;
}

/* Tokens of a batch row: those of q, or those of k and v. */
static inline int64_t la_longest_row(const la_problem *p) { return p->T > p->L ? p->T : p->L; }

/* Set every option to its documented default. */
void la_problem_init(la_problem *p, la_op op, la_pass pass);

/* Compare the inputs with the table; settle letters, strides and defaults. On failure the message
 * names the argument, what was expected and what came, and nothing has been touched. */
la_status la_check(la_problem *p);

/* Parts of la_check that rooms (room.h) have too: is the dtype of an array one that it may have, after q
 * (or what stands in its place); what cu_seqlens says, after B and T. */
la_status la_check_dtype(la_problem *p, la_name name);
la_status la_settle_sequences(la_problem *p);

/* An array of more than LA_MAX_DIMS dimensions, which no op takes: the message for it. */
la_status la_refuse_dims(la_problem *p, la_name name, int ndim, const int64_t *shape);

/* After la_check: the shape of an array in the user's own dimensions; returns ndim. */
int la_shape_of(const la_problem *p, la_name name, int64_t shape[LA_MAX_DIMS]);

/* After la_check: has no output of the call an element? The sizes of the others may be anything. */
bool la_writes_nothing(const la_problem *p);

/* The message that an output of the call, of this shape, is too large for the memory there is. */
la_status la_refuse_memory(la_problem *p, la_name name, int ndim, const int64_t *shape);

/* After la_check: do the op, the pass and the normaliser have this array at all? */
bool la_has(const la_problem *p, la_name name);

/* After la_check: the dtype of an array that the call writes. */
la_dtype la_dtype_of(const la_problem *p, la_name name);

/* Must the kernels find this array's innermost axis with unit stride? The other axes may lie anywhere. */
bool la_has_rows(const la_problem *p, la_name name);

/* After la_check: compare an output of the caller's with the problem, and make its strides canonical. */
la_status la_check_output(la_problem *p, la_name name);

/* After la_check: make the strides of an output canonical that was made to la_shape_of and la_dtype_of. */
void la_settle_output(la_problem *p, la_name name);

/* After la_check, on the host: copy a step's state_indices into room for B numbers, which must live as long
 * as the problem, and check the copy, which no other thread can change. */
la_status la_check_slots(la_problem *p, int64_t *room);

/* After la_check, on the host: is some decay above one? A pass over the gate, for callers that must
 * know first. */
bool la_gate_above_one(const la_problem *p);

/* The CPU's entry points. Everything has been checked, state_indices too; only memory can fail, and it
 * fails before an output is written. */
la_status la_forward(la_problem *p);
la_status la_backward(la_problem *p);
la_status la_step(la_problem *p);

/* Is the call to end early (watch.h)? Cheap enough for every chunk of tokens. */
bool la_stopped(const la_problem *p);

/* The environment's number of threads: LINATTN_NUM_THREADS, else OMP_NUM_THREADS, whose first number
 * counts. The name of the variable that holds none, with its text; NULL if all is well. */
const char *la_threads_unreadable(const char **text);

/* Threads: 0 asks for the default (the environment, else the processors this process may use). */
void la_set_num_threads(int n);
int la_get_num_threads(void);

/* The default of allow_tf32; false at first. */
void la_set_allow_tf32(bool allow);
bool la_get_allow_tf32(void);

/* The scale of scale=None: K^-1/2. */
double la_default_scale(int64_t K);

/* Instruction sets: the one in use, and the names compiled in that this machine can run. */
const char *la_isa(void);
int la_isa_count(void);
const char *la_isa_name(int i, bool *runs_here);
/* Choose by name; false if it is unknown or cannot run here. */
bool la_isa_choose(const char *name);

/* Tests only: let the n-th scratch allocation from now on fail (0: never). */
void la_fail_allocation(int n);
/* Tests only: bits of a number that the forward pass of this problem multiplies; 53, 24, or fewer. */
int la_forward_bits(const la_problem *p);

#endif
