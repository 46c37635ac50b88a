/* A call in words and numbers, as module.c has them from Python and xla.c from XLA: the names of ops
 * and of arrays, the options, and which arrays a call gives and makes. No Python here. */
#ifndef LINATTN_OPTIONS_H
#define LINATTN_OPTIONS_H

#include "linattn.h"

typedef enum {
    LA_OPTION_FLAG,
    LA_OPTION_DEFAULT,
    LA_OPTION_NUMBER,
    LA_OPTION_COUNT,
    LA_OPTION_MAYBE,
    LA_OPTION_MODE,
    LA_OPTION_FEATURES
} la_option_kind;

/* A line of options.def. */
typedef struct {
    const char *name;
    la_option_kind kind;
    size_t offset; /* of its field in la_problem */
    int passes;    /* a bit for each la_pass */
} la_option;

enum {
#define LA_OPTION(name, ...) LA_OPTION_OF_##name,
#include "options.def"
    LA_OPTIONS
};
extern const la_option la_options[LA_OPTIONS];

extern const char *const la_mode_names[];
enum { LA_MODES = LA_PARALLEL + 1 };

/* Linear attention's options as seven floats, which an operator of PyTorch takes too: the map of q
 * and its eps, the map of k and its eps, the normaliser, eps, causal. linattn/features.py makes
 * them. False, and nothing is written, if there is no such map or normaliser. */
enum { LA_FEATURES = 7 };
bool la_set_features(la_problem *p, const double x[LA_FEATURES]);

/* The decay is one array, which four keywords give. */
typedef struct {
    const char *name;
    la_gate how;
} la_gate_keyword;
enum { LA_GATE_KEYWORDS = 4 };
extern const la_gate_keyword la_gate_keywords[LA_GATE_KEYWORDS];

/* The arrays that a caller may give: what the pass reads, and out. The second state of a pair comes
 * with the first, under one keyword. */
la_set la_given_arrays(la_pass pass);

/* The arrays that the pass writes, and what the call asks for besides. */
la_set la_outputs(const la_problem *p);

/* After la_check: does the call make this array of what its pass writes? The gradient of each array
 * that was given, final states where they are asked for, and o. */
bool la_is_wanted(const la_problem *p, la_name name);

/* Each size becomes its letter, so that la_shape_of says the letters of an array. */
void la_name_sizes(la_problem *p);

#endif
