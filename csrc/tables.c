/* The tables of ops and of arrays as data: variants.def and arrays.def, and the words for their
 * values. */
#include "linattn.h"

/* ---- ops ---- */

const la_variant la_variants[LA_OPS] = {
#define PLAIN false
#define NORMALISER true
#define LA_VARIANT(name, decay, rule, z) {#name, LA_##decay, LA_##rule, LA_##decay##_##rule, z},
#include "variants.def"
#undef PLAIN
#undef NORMALISER
};

const char *const la_decay_names[LA_DECAYS] = {[LA_NONE] = "none",
                                               [LA_HEAD] = "head",
                                               [LA_TOKEN] = "token",
                                               [LA_KEY] = "key",
                                               [LA_PAIR] = "pair"};

const char *const la_rule_names[LA_RULES] = {
    [LA_ADDITIVE] = "additive", [LA_DELTA] = "delta", [LA_DPLR] = "dplr", [LA_BONUS] = "bonus"};

const char *const la_dtype_names[LA_DTYPES] = {
    [LA_F64] = "float64",   [LA_F32] = "float32", [LA_F16] = "float16",
    [LA_BF16] = "bfloat16", [LA_I64] = "int64",   [LA_I32] = "int32",
};

/* ---- arrays ---- */

enum {
    IN_F = 1 << LA_FORWARD,
    IN_S = 1 << LA_STEP,
    IN_B = 1 << LA_BACKWARD,
    IN_FS = IN_F | IN_S,
    IN_FB = IN_F | IN_B,
    IN_FSB = IN_F | IN_S | IN_B
};

/* arrays.def's words that mean something else in C, or in linattn.h. */
#define LA_PART_ALWAYS LA_ALWAYS
#define LA_PART_DECAY LA_DECAY_OPS
#define LA_PART_DELTA LA_DELTA_OPS
#define LA_PART_PREDICTS LA_PREDICTS
#define LA_PART_DPLR LA_DPLR_OPS
#define LA_PART_BONUS LA_BONUS_OPS
#define LA_PART_PAIR LA_PAIR_OPS
#define LA_PART_WEIGHED LA_WEIGHED
#define LA_PART_GATED LA_GATED
#define LA_PART_NORMALISED LA_NORMALISED
#define LA_PART_SEGMENT LA_OF_SEGMENTS
#define LABELS(label) {label, label "[0]", label "[1]"}
#define IS_OUTPUT(role) (LA_##role == LA_OUTPUT)

const la_array_row la_array_rows[LA_ARRAYS] = {
#define LA_ARRAY(name, label, letters, passes, role, dtype, part, needed, gradient) \
    [LA_##name] = {LABELS(label),  letters,     LA_##role, LA_DTYPE_##dtype, \
                   LA_PART_##part, LA_##needed, LA_##name}, \
    [LA_D##name] = {LABELS(gradient), letters,        IS_OUTPUT(role) ? LA_INPUT : LA_OUTPUT, \
                    LA_DTYPE_##dtype, LA_PART_##part, IS_OUTPUT(role) ? LA_##needed : LA_OPTIONAL, \
                    LA_##name},
#define LA_INDEX(name, label, letters, passes) \
    [LA_##name] = {LABELS(label), letters,     LA_INPUT, LA_DTYPE_INTEGER, \
                   LA_ALWAYS,     LA_OPTIONAL, LA_##name},
#define LA_RESULT(name, label, letters, passes, dtype, part) \
    [LA_##name] = {LABELS(label),  letters,     LA_OUTPUT, LA_DTYPE_##dtype, \
                   LA_PART_##part, LA_OPTIONAL, LA_##name},
#include "arrays.def"
};

_Static_assert(LA_ARRAYS <= 64, "a la_set has a bit per array");
#define BIT(name, condition) | ((condition) ? (la_set)1 << LA_##name : 0)

/* clang-format off */
const la_set la_read[] = {
#define LA_INDEX(name, label, letters, passes) BIT(name, IN_##passes & IN_F)
#define LA_ARRAY(name, label, letters, passes, role, ...) BIT(name, IN_##passes & IN_F && !IS_OUTPUT(role))
    [LA_FORWARD] = 0
#include "arrays.def"
    ,
#define LA_INDEX(name, label, letters, passes) BIT(name, IN_##passes & IN_S)
#define LA_ARRAY(name, label, letters, passes, role, ...) BIT(name, IN_##passes & IN_S && !IS_OUTPUT(role))
    [LA_STEP] = 0
#include "arrays.def"
    ,
#define LA_INDEX(name, label, letters, passes) BIT(name, IN_##passes & IN_B)
#define LA_ARRAY(name, label, letters, passes, role, ...) \
    BIT(name, IN_##passes & IN_B && !IS_OUTPUT(role)) BIT(D##name, IS_OUTPUT(role))
    [LA_BACKWARD] = 0
#include "arrays.def"
};

const la_set la_written[] = {
#define LA_INDEX(...)
#define LA_ARRAY(name, label, letters, passes, role, ...) BIT(name, IN_##passes & IN_F && IS_OUTPUT(role))
    [LA_FORWARD] = 0
#include "arrays.def"
    ,
#define LA_INDEX(...)
#define LA_ARRAY(name, label, letters, passes, role, ...) BIT(name, IN_##passes & IN_S && LA_##role != LA_INPUT)
    [LA_STEP] = 0
#include "arrays.def"
    ,
#define LA_INDEX(...)
#define LA_ARRAY(name, label, letters, passes, role, ...) BIT(D##name, IN_##passes & IN_B && !IS_OUTPUT(role))
    [LA_BACKWARD] = 0
#include "arrays.def"
};

#define LA_INDEX(...)
#define LA_ARRAY(...)
#define LA_RESULT(name, ...) BIT(name, true)
const la_set la_results = 0
#include "arrays.def"
    ;
/* clang-format on */

/* ---- what a call has of them ---- */

bool la_has(const la_problem *p, la_name name)
{
    if (!la_in(la_read[p->pass] | la_written[p->pass] | la_results, name)) return false;
    switch (la_array_rows[name].part) {
    case LA_ALWAYS: return true;
    case LA_DECAY_OPS: return p->decay != LA_NONE;
    case LA_DELTA_OPS: return p->rule == LA_DELTA;
    case LA_PREDICTS: return la_predicts(p->rule) && p->decay != LA_PAIR;
    case LA_DPLR_OPS: return p->rule == LA_DPLR;
    case LA_BONUS_OPS: return p->rule == LA_BONUS;
    case LA_PAIR_OPS: return p->decay == LA_PAIR;
    case LA_WEIGHED: return la_weighs(p->decay, p->rule);
    case LA_GATED: return la_is_gated(p->decay, p->rule);
    case LA_NORMALISED: return p->normaliser != LA_UNNORMALISED;
    case LA_OF_SEGMENTS: return la_predicts(p->rule) && p->decay != LA_PAIR && p->want_map;
    }
    return false;
}

la_dtype la_dtype_of(const la_problem *p, la_name name)
{
    const la_array_row *row = &la_array_rows[name];
    return row->dtype == LA_DTYPE_OF_Q    ? p->array[LA_Q].dtype
           : row->dtype == LA_DTYPE_FLOAT ? p->array[row->of].dtype
                                          : p->real;
}
