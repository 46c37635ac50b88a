/* The only code that knows which arrays an op has, which shapes and dtypes are right, and how to
 * say that something is wrong, by the tables of tables.c. It serves every device: it reads no array
 * but cu_seqlens and state_indices, and these only where they lie on the host. */
#include "linattn.h"
#include "text.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- names and letters ---- */

/* How the decay is given decides what it is called. */
static const char *gate_name(const la_problem *p)
{
    if (p->gate == LA_SLOPE) return "slopes";
    if (p->gate == LA_LOG) return "g";
    return p->decay == LA_HEAD ? "gamma" : "alpha";
}

static bool is_state(la_name name) { return la_array_rows[name].letters[0] == 'N'; }

bool la_is_second(la_name name)
{
    const la_part part = la_array_rows[name].part;
    return is_state(name) && (part == LA_NORMALISED || part == LA_PAIR_OPS);
}

la_name la_second_of(const la_problem *p, la_name first)
{
    la_name name = (la_name)(first + 1);
    while (!la_is_second(name) || !la_has(p, name)) name++;
    return name;
}

const char *la_array_name(const la_problem *p, la_name name)
{
    static const char *const state[] = {"state", "state[0]", "state[1]"};
    if (p->labels) return p->labels[name];
    const la_array_row *row = &la_array_rows[name];
    const bool pair = la_has_pair(p) && is_state(name);
    const int part = !pair ? 0 : la_is_second(name) ? 2 : 1;
    if (name == LA_G) return gate_name(p);
    return p->pass == LA_STEP && row->role == LA_STATE ? state[part] : row->label[part];
}

/* A state whose columns come before its keys. */
static bool is_turned(const la_problem *p, const char *full)
{
    return p->state_v_first && full[0] == 'N' && full[3] == 'V';
}

/* The size of an array's axis, and whether the user writes it in this call: one-head calls leave heads
 * out, steps T, a gate the axes that it has one number for. A step that picks its states has a pool of P
 * where others have N states. */
static int64_t axis_of(const la_problem *p, la_name name, char letter, bool *written)
{
    const bool heads = !p->one_head, gate = la_array_rows[name].of == LA_G;
    int64_t size = 0;
    *written = true;
    switch (letter) {
    case 'B': *written = heads || name == LA_SLOT, size = p->B; break;
    case 'T': *written = p->pass != LA_STEP, size = p->T; break;
    case 'L': *written = p->pass != LA_STEP, size = p->L; break;
    case 'H': *written = heads, size = p->H; break;
    case 'h': *written = heads, size = p->HV; break;
    case 'K': *written = !gate || p->decay == LA_KEY, size = p->K; break;
    case 'V': size = p->V; break;
    case 'P': size = p->P; break;
    case 'N':
        *written = heads || p->array[LA_CU].given || p->array[LA_SLOT].given;
        size = p->array[LA_SLOT].given ? p->P : p->N;
        break;
    case 'n': size = p->N + 1; break;
    }
    if (gate && p->decay == LA_HEAD) *written = letter == 'h'; /* [HV] stays [1], and so does [B] */
    return size;
}

static bool is_written(const la_problem *p, la_name name, char letter)
{
    bool written;
    axis_of(p, name, letter, &written);
    return written;
}

/* The letters that the user writes for this call, in the user's order. */
static void user_letters(const la_problem *p, la_name name, char letters[LA_MAX_DIMS + 1])
{
    const char *full = la_array_rows[name].letters;
    int n = 0;
    if (is_turned(p, full)) full = "NhVK";
    for (const char *c = full; *c; c++)
        if (is_written(p, name, *c))
            letters[n++] = *c == 'N' && p->array[LA_SLOT].given ? 'P'
                           : *c == 'L' && p->causal             ? 'T'
                                                                : *c;
    letters[n] = 0;
}

static int values_of(const la_problem *p, const char *letters, int64_t shape[LA_MAX_DIMS])
{
    int ndim = 0;
    for (bool written; letters[ndim]; ndim++)
        shape[ndim] = axis_of(p, LA_Q, letters[ndim], &written);
    return ndim;
}

int la_shape_of(const la_problem *p, la_name name, int64_t shape[LA_MAX_DIMS])
{
    char letters[LA_MAX_DIMS + 1];
    user_letters(p, name, letters);
    return values_of(p, letters, shape);
}

bool la_has_rows(const la_problem *p, la_name name)
{
    const char *letters = la_array_rows[name].letters;
    const char last = letters[strlen(letters) - 1];
    if (p->any_strides) return false;
    return (last == 'K' || last == 'V') && is_written(p, name, last);
}

/* ---- messages ---- */

static void append_shape(la_text *w, int ndim, const int64_t *shape)
{
    la_append(w, "(");
    for (int i = 0; i < ndim; i++) la_append(w, i ? ", %lld" : "%lld", (long long)shape[i]);
    la_append(w, ndim == 1 ? ",)" : ")");
}

static void append_letters(la_text *w, const char *letters)
{
    la_append(w, "[");
    for (const char *c = letters; *c; c++)
        la_append(w, "%s%s", c == letters ? "" : ",",
                  *c == 'h'   ? "HV"
                  : *c == 'n' ? "N+1"
                              : (char[2]){*c, 0});
    la_append(w, "]");
}

static la_status fail(la_problem *p, la_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(p->message, sizeof p->message, format, args);
    va_end(args);
    return status;
}

/* ---- one array ---- */

la_status la_check_dtype(la_problem *p, la_name name)
{
    const la_array_row *row = &la_array_rows[name];
    const la_dtype got = p->array[name].dtype;
    if (row->dtype == LA_DTYPE_FLOAT && row->of == name) {
        if (got <= LA_BF16) return LA_OK;
        return fail(p, LA_TYPE_ERROR, "%s: expected float64, float32, float16 or bfloat16, got %s",
                    la_array_name(p, name), la_dtype_names[got]);
    }
    if (row->dtype == LA_DTYPE_INTEGER) {
        if (got == LA_I32 || got == LA_I64) return LA_OK;
        return fail(p, LA_TYPE_ERROR, "%s: expected int32 or int64, got %s", la_array_name(p, name),
                    la_dtype_names[got]);
    }
    const la_dtype want = la_dtype_of(p, name);
    const bool stored = row->dtype == LA_DTYPE_STORED && row->of == name;
    const bool bf16_too = stored && p->real == LA_F32;
    if (got == want || (bf16_too && got == LA_BF16)) return LA_OK;
    const bool as_first = want == p->array[LA_Q].dtype && !stored;
    return fail(p, LA_TYPE_ERROR, "%s: expected %s%s%s%s%s, got %s", la_array_name(p, name),
                la_dtype_names[want], bf16_too ? " or bfloat16" : "",
                as_first ? " (the dtype of " : "", as_first ? la_array_name(p, LA_Q) : "",
                as_first ? ")" : "", la_dtype_names[got]);
}

/* Is this the shape that was expected, but for the axes of tokens and heads? */
static bool swapped(const char *letters, const int64_t *want, const int64_t *got)
{
    if (letters[0] != 'B' || !letters[1] || (letters[2] != 'H' && letters[2] != 'h')) return false;
    for (int i = 0; letters[i]; i++)
        if (got[i] != want[i == 1 ? 2 : i == 2 ? 1 : i]) return false;
    return want[1] != want[2];
}

static la_status refuse_shape(la_problem *p, la_name name)
{
    const la_array *x = &p->array[name];
    char letters[LA_MAX_DIMS + 1];
    int64_t want[LA_MAX_DIMS];
    user_letters(p, name, letters);
    const int ndim = values_of(p, letters, want);
    la_text w = la_text_of(p->message);
    la_append(&w, "%s: expected ", la_array_name(p, name));
    if (ndim == 0) {
        la_append(&w, "a scalar (one head), got ");
    } else {
        append_letters(&w, letters);
        la_append(&w, " = ");
        append_shape(&w, ndim, want);
        la_append(&w, ", got ");
    }
    append_shape(&w, x->ndim, x->shape);
    if (x->ndim == ndim && swapped(letters, want, x->shape))
        la_append(&w,
                  ": tokens come before heads; transpose(1, 2) is a view of [B,H,T,...] that fits");
    return LA_VALUE_ERROR;
}

la_status la_refuse_dims(la_problem *p, la_name name, int ndim, const int64_t *shape)
{
    char letters[LA_MAX_DIMS + 1];
    user_letters(p, name, letters);
    la_text w = la_text_of(p->message);
    la_append(&w, "%s: expected ", la_array_name(p, name));
    if (p->labels)
        la_append(&w, "up to %d dimensions", LA_MAX_DIMS);
    else
        append_letters(&w, letters);
    la_append(&w, ", got ");
    append_shape(&w, ndim, shape);
    return LA_VALUE_ERROR;
}

la_status la_refuse_memory(la_problem *p, la_name name, int ndim, const int64_t *shape)
{
    char letters[LA_MAX_DIMS + 1];
    la_text w = la_text_of(p->message);
    la_append(&w, "%s: expected memory for ",
              p->labels || name != LA_O ? la_array_name(p, name) : "o");
    if (!p->labels) {
        user_letters(p, name, letters);
        append_letters(&w, letters);
        la_append(&w, " = ");
    }
    append_shape(&w, ndim, shape);
    la_append(&w, ", got none");
    return LA_MEMORY_ERROR;
}

/* A number has every shape: all tokens and heads read it in one place, or one row of keys. */
static bool spread_number(la_problem *p, la_name name)
{
    la_array *x = &p->array[name];
    const char *full = la_array_rows[name].letters;
    for (x->ndim = 0; full[x->ndim]; x->ndim++) {
        bool written;
        x->shape[x->ndim] = axis_of(p, name, full[x->ndim], &written);
        x->stride[x->ndim] = written && full[x->ndim] == 'K';
    }
    return true;
}

/* From the user's dimensions to the kernels': a letter the user left out gets stride 0. False, and
 * nothing is changed, if the shape is not right. */
static bool make_canonical(la_problem *p, la_name name)
{
    la_array *x = &p->array[name];
    if (x->number) return spread_number(p, name);
    const char *full = la_array_rows[name].letters;
    const bool turned = is_turned(p, full);
    int64_t value[LA_MAX_DIMS];
    bool written[LA_MAX_DIMS];
    int n = 0, given = 0;
    for (; full[n]; n++) {
        value[n] = axis_of(p, name, full[n], &written[n]);
        if (!written[n]) continue;
        const int i = given++ + (turned && n == 2) - (turned && n == 3);
        if (i >= x->ndim || x->shape[i] != value[n]) return false;
    }
    if (given != x->ndim) return false;
    if (turned) { /* K and V are always written */
        const int64_t of_v = x->stride[given - 2];
        x->stride[given - 2] = x->stride[given - 1];
        x->stride[given - 1] = of_v;
    }
    x->ndim = n;
    while (n-- > 0) { /* the last first: none is written before it is read */
        x->shape[n] = value[n];
        x->stride[n] = written[n] ? x->stride[--given] : 0;
    }
    return true;
}

static la_status check_array(la_problem *p, la_name name)
{
    const la_status status = la_check_dtype(p, name);
    if (status) return status;
    return make_canonical(p, name) ? LA_OK : refuse_shape(p, name);
}

/* ---- the letters ---- */

static la_status refuse_missing(la_problem *p, la_name name)
{
    char letters[LA_MAX_DIMS + 1];
    user_letters(p, name, letters);
    la_text w = la_text_of(p->message);
    la_append(&w, "%s: expected ", la_array_name(p, name));
    if (name == LA_G && p->decay != LA_HEAD) la_append(&w, "the log decay ");
    append_letters(&w, letters);
    if (name == LA_G && p->decay != LA_HEAD) la_append(&w, " (or alpha=, the decay itself)");
    la_append(&w, ", got None");
    return LA_TYPE_ERROR;
}

/* Noncausal, k and v may have other tokens than q. Packed sequences have the same. */
static int64_t keys_of_row(const la_problem *p)
{
    const la_array *q = &p->array[LA_Q], *k = &p->array[LA_K];
    const bool own = !p->causal && p->pass != LA_STEP && !p->array[LA_CU].given && k->given;
    return own && k->ndim == q->ndim ? k->shape[p->one_head ? 0 : 1] : p->T;
}

/* q and v say how many dimensions the call has and what every letter is. */
static la_status settle_letters(la_problem *p)
{
    const la_array *q = &p->array[LA_Q], *v = &p->array[LA_V];
    const bool step = p->pass == LA_STEP;
    const int full = step ? 3 : 4, one = step ? 1 : 2;
    const char *shape_q = step ? "[B,H,K]" : "[B,T,H,K]", *one_q = step ? "[K]" : "[T,K]";
    const char *shape_v = step ? "[B,HV,V]" : "[B,T,HV,V]", *one_v = step ? "[V]" : "[T,V]";

    if (q->ndim != full && q->ndim != one) {
        la_text w = la_text_of(p->message);
        la_append(&w, "q: expected %d-D %s, or %d-D %s for one head; got ", full, shape_q, one,
                  one_q);
        append_shape(&w, q->ndim, q->shape);
        if (!step && q->ndim == 3)
            la_append(&w, ", which could mean two things: write q[None] if it is [T,H,K], "
                          "q[:, :, None] if it is [B,T,K]");
        return LA_VALUE_ERROR;
    }
    p->one_head = q->ndim == one;
    if (v->ndim != q->ndim) {
        la_text w = la_text_of(p->message);
        la_append(&w, "v: expected %d-D %s like q, got ", q->ndim, p->one_head ? one_v : shape_v);
        append_shape(&w, v->ndim, v->shape);
        return LA_VALUE_ERROR;
    }
    p->B = p->T = p->H = p->HV = 1;
    if (!p->one_head) {
        p->B = q->shape[0];
        p->H = q->shape[full - 2];
        p->HV = v->shape[full - 2];
    }
    if (!step) p->T = q->shape[p->one_head ? 0 : 1];
    p->L = keys_of_row(p);
    p->K = q->shape[q->ndim - 1];
    p->V = v->shape[v->ndim - 1];
    if (p->K < 1) return fail(p, LA_VALUE_ERROR, "q: expected K >= 1, got K = 0");
    if (p->V < 1) return fail(p, LA_VALUE_ERROR, "v: expected V >= 1, got V = 0");
    if (p->H < 1) return fail(p, LA_VALUE_ERROR, "q: expected H >= 1, got H = 0");
    if (p->HV < 1 || p->HV % p->H)
        return fail(p, LA_VALUE_ERROR, "v: expected HV to be a multiple of H = %lld, got HV = %lld",
                    (long long)p->H, (long long)p->HV);
    p->N = p->B;
    p->tokens = p->B * la_longest_row(p);
    return LA_OK;
}

la_status la_settle_sequences(la_problem *p)
{
    la_array *cu = &p->array[LA_CU];
    if (!cu->given) return LA_OK;
    la_status status = la_check_dtype(p, LA_CU);
    if (status) return status;
    if (cu->ndim != 1 || cu->shape[0] < 1) {
        la_text w = la_text_of(p->message);
        la_append(&w, "cu_seqlens: expected [N+1], got ");
        append_shape(&w, cu->ndim, cu->shape);
        return LA_VALUE_ERROR;
    }
    if (p->B != 1)
        return fail(p, LA_VALUE_ERROR,
                    "cu_seqlens: expected packed sequences to have B = 1, got B = %lld",
                    (long long)p->B);
    p->N = cu->shape[0] - 1;
    /* reading it would wait for the device; an outline has no memory */
    if (p->device == LA_CUDA || !cu->data) {
        make_canonical(p, LA_CU);
        return LA_OK;
    }
    int64_t before = 0;
    for (int64_t n = 0; n <= p->N; n++) {
        const int64_t value = la_integer_at(cu->data, cu->dtype, n * cu->stride[0]);
        if (n == 0 && value != 0)
            return fail(p, LA_VALUE_ERROR, "cu_seqlens: expected to start at 0, got %lld",
                        (long long)value);
        if (value < before)
            return fail(p, LA_VALUE_ERROR,
                        "cu_seqlens: expected never to fall, got %lld after %lld at index %lld",
                        (long long)value, (long long)before, (long long)n);
        before = value;
    }
    if (before != p->T)
        return fail(p, LA_VALUE_ERROR, "cu_seqlens: expected to end at T = %lld, got %lld",
                    (long long)p->T, (long long)before);
    make_canonical(p, LA_CU);
    return LA_OK;
}

/* The states that a step picks from: as many as there are. */
static la_status settle_pool(la_problem *p)
{
    const la_array *S = &p->array[LA_S0];
    int64_t unknown[LA_MAX_DIMS];
    if (!p->array[LA_SLOT].given) return LA_OK;
    const la_status status = check_array(p, LA_SLOT);
    if (status || !S->given) return status;
    if (S->ndim != la_shape_of(p, LA_S0, unknown))
        return la_refuse_dims(p, LA_S0, S->ndim, S->shape);
    p->P = S->shape[0];
    if (p->P < 1)
        return fail(p, LA_VALUE_ERROR, "%s: expected P >= 1 states in the pool, got P = 0",
                    la_array_name(p, LA_S0));
    return LA_OK;
}

/* The CUDA kernels keep whole rows of a state on the chip. */
#define CUDA_MAX_DIM 512
#define CUDA_MAX_RARE 256 /* of the kernels of cuda/rare.cuh */

/* Kernels number the heads of all sequences by ints, eight blocks for each at most. */
#define CUDA_MAX_HEADS (INT32_MAX / 8)

static la_status check_options(la_problem *p)
{
    if (p->device == LA_CUDA && p->K > CUDA_MAX_DIM)
        return fail(p, LA_VALUE_ERROR, "q: expected K <= %d on CUDA, got K = %lld", CUDA_MAX_DIM,
                    (long long)p->K);
    if (p->device == LA_CUDA && la_is_rare(p) && p->K > CUDA_MAX_RARE)
        return fail(
            p, LA_VALUE_ERROR, "q: expected K <= %d on CUDA for %s, got K = %lld", CUDA_MAX_RARE,
            p->array[LA_X].given && p->rule == LA_DELTA ? "calls with x" : la_variants[p->op].name,
            (long long)p->K);
    if (p->device == LA_CUDA && p->V > CUDA_MAX_DIM)
        return fail(p, LA_VALUE_ERROR, "v: expected V <= %d on CUDA, got V = %lld", CUDA_MAX_DIM,
                    (long long)p->V);
    if (p->device == LA_CUDA && p->P > INT32_MAX)
        return fail(p, LA_VALUE_ERROR, "%s: expected P < 2^31 on CUDA, got P = %lld",
                    la_array_name(p, LA_S0), (long long)p->P);
    if (p->device == LA_CUDA && !la_writes_nothing(p) && /* else nothing is launched */
        (la_longest_row(p) > INT32_MAX || p->N > INT32_MAX || p->HV > INT32_MAX ||
         p->N * p->HV > CUDA_MAX_HEADS))
        return fail(p, LA_VALUE_ERROR,
                    "q: expected T < 2^31 and N * HV <= 2^28 on CUDA, got T = %lld, N * HV = %lld",
                    (long long)la_longest_row(p), (long long)(p->N * p->HV));
    if (p->has_chunk && p->chunk < 1)
        return fail(p, LA_VALUE_ERROR, "chunk_size: expected >= 1, got %lld", (long long)p->chunk);
    if (p->batch < 1)
        return fail(p, LA_VALUE_ERROR, "batch: expected >= 1, got %lld", (long long)p->batch);
    if (p->batch != 1 && p->decay != LA_PAIR)
        return fail(p, LA_VALUE_ERROR, "batch: %s has no batches", la_variants[p->op].name);
    if (p->predicts_before && (p->decay != LA_TOKEN || p->rule != LA_DELTA))
        return fail(p, LA_VALUE_ERROR, "predicts_before: %s has no such form",
                    la_variants[p->op].name);
    if (p->x_is_factor && !la_is_gated(p->decay, p->rule))
        return fail(p, LA_VALUE_ERROR, "x_is_factor: %s has no such form", la_variants[p->op].name);
    /* no kernel takes a gate of values alone */
    const bool gated = p->array[LA_W].given && la_has(p, LA_W);
    const bool wants_x = p->predicts_before || p->x_is_factor || gated;
    if (wants_x && !p->array[LA_X].given) return refuse_missing(p, LA_X);
    if (p->has_scale && !isfinite(p->scale))
        return fail(p, LA_VALUE_ERROR, "scale: expected a finite number, got %g", p->scale);
    if (!(p->eps >= 0) || isinf(p->eps))
        return fail(p, LA_VALUE_ERROR, "eps: expected a finite number >= 0, got %g", p->eps);
    if (p->normaliser != LA_UNNORMALISED && !la_variants[p->op].normaliser)
        return fail(p, LA_VALUE_ERROR, "normalize: %s has no normaliser", la_variants[p->op].name);
    if (!p->causal && (p->pass == LA_STEP || p->decay != LA_NONE || p->rule != LA_ADDITIVE))
        return fail(p, LA_VALUE_ERROR, "causal: %s has no non-causal form",
                    la_variants[p->op].name);
    if (p->states_only && !p->causal)
        return fail(p, LA_VALUE_ERROR, "states_only: expected a causal call");
    /* the gradient of the initial state then depends on that state */
    if (p->states_only && p->pass == LA_BACKWARD && p->normaliser != LA_UNNORMALISED)
        return fail(p, LA_VALUE_ERROR, "states_only: expected gradients without a normaliser");
    return LA_OK;
}

/* ---- entry points ---- */

void la_problem_init(la_problem *p, la_op op, la_pass pass)
{
    *p = (la_problem){.op = op, .pass = pass, .batch = 1, .causal = true, .eps = 1e-6};
    p->allow_tf32 = la_get_allow_tf32();
    p->decay = la_variants[op].decay;
    p->rule = la_variants[op].rule;
    p->kind = la_variants[op].kind;
}

static bool is_needed(const la_problem *p, la_name name)
{
    const la_need need = la_array_rows[name].need;
    return la_has(p, name) && (need == LA_REQUIRED || (need == LA_IN_STEP && p->pass == LA_STEP) ||
                               (need == LA_IN_DPLR && p->rule == LA_DPLR));
}

la_status la_check(la_problem *p)
{
    la_status status = LA_OK;

    p->states_only |= p->want_map;
    if (!p->array[LA_Q].given) return refuse_missing(p, LA_Q);
    p->one_head = p->array[LA_Q].ndim == (p->pass == LA_STEP ? 1 : 2);
    if (!p->array[LA_V].given) return refuse_missing(p, LA_V);
    la_dtype dtype = p->array[LA_Q].dtype;
    if (dtype > LA_BF16)
        return fail(
            p, LA_TYPE_ERROR,
            "q: expected float64, float32, float16 or bfloat16, got %s (q.astype(float), or "
            "q.float() of a tensor, has floats)",
            la_dtype_names[dtype]);
    p->real = dtype == LA_F64 ? LA_F64 : LA_F32;
    if ((status = settle_letters(p)) || (status = la_settle_sequences(p)) ||
        (status = settle_pool(p)) || (status = check_options(p)))
        return status;
    if (!p->has_scale) p->scale = la_default_scale(p->K);

    la_set inputs = la_read[p->pass];
    for (la_name name; !status && la_next(&inputs, &name);) {
        if (la_array_rows[name].dtype == LA_DTYPE_INTEGER) continue; /* settled above */
        if (p->array[name].given)
            status = check_array(p, name);
        else if (is_needed(p, name))
            status = refuse_missing(p, name);
    }
    return status;
}

la_status la_check_output(la_problem *p, la_name name) { return check_array(p, name); }
void la_settle_output(la_problem *p, la_name name) { make_canonical(p, name); }

bool la_writes_nothing(const la_problem *p)
{
    if (p->tokens) return false;
    if (p->states_only) return !p->N;
    if (p->pass == LA_BACKWARD)
        return p->decay != LA_HEAD && p->rule != LA_BONUS && !p->array[LA_SKIP].given &&
               !(p->N && p->array[LA_S0].given);
    return p->pass == LA_STEP || !(p->N && p->want_final);
}

/* Two rows of one state would change it at once. Those that are equal modulo SEEN meet in a bit, and
 * only then all before them are looked through. */
la_status la_check_slots(la_problem *p, int64_t *room)
{
    enum { SEEN = 4096 };
    const la_array *slot = &p->array[LA_SLOT];
    uint64_t seen[SEEN / 64] = {0};
    for (int64_t n = 0; n < p->B; n++) {
        const int64_t i = la_integer_at(slot->data, slot->dtype, n * slot->stride[0]);
        room[n] = i;
        if (i == -1) continue;
        if (i < -1 || i >= p->P)
            return fail(p, LA_VALUE_ERROR,
                        "state_indices: expected 0 to P - 1 = %lld, or -1 for no state, got "
                        "%lld at index %lld",
                        (long long)p->P - 1, (long long)i, (long long)n);
        const uint64_t bit = (uint64_t)1 << i % 64;
        uint64_t *const word = &seen[i % SEEN / 64];
        for (int64_t before = 0; *word & bit && before < n; before++)
            if (room[before] == i)
                return fail(p, LA_VALUE_ERROR,
                            "state_indices: expected no state twice, got %lld at index %lld "
                            "and at index %lld",
                            (long long)i, (long long)before, (long long)n);
        *word |= bit;
    }
    p->slots = room;
    return LA_OK;
}
