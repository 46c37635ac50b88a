/* Random problems for the C core, with memory that notices: every array lies between two pages that
 * cannot be touched, and every byte of its block that is not an element is watched. */
#ifndef LINATTN_TESTS_SAMPLE_H
#define LINATTN_TESTS_SAMPLE_H

#include "../../csrc/linattn.h"

/* Where choices come from: a fuzzer's bytes while there are some, else a generator. */
typedef struct {
    const uint8_t *bytes;
    size_t left;
    bool from_bytes;
    uint64_t state;
} draw;

uint64_t draw_bits(draw *d);
int64_t draw_int(draw *d, int64_t low, int64_t high); /* both included */
bool draw_chance(draw *d, int one_in);
double draw_real(draw *d, double low, double high); /* never from the fuzzer's bytes */

/* One array's memory: `bytes` at `start`, inside a mapping whose first and last page are shut. */
typedef struct {
    char *map;
    size_t map_bytes;
    char *start;
    size_t bytes;
    char *saved; /* the block as it was filled, for inputs and for a step's state */
} block;

typedef struct {
    la_problem p;   /* as a caller would give it: before la_check */
    la_problem run; /* after la_check, of the last run */
    block block[LA_ARRAYS];
    bool written[LA_ARRAYS]; /* outputs, and a step's state */
    int64_t *slots;          /* room for a step's state_indices */
    bool tame;               /* finite, well conditioned: results can be compared */
} sample;

/* A legal problem with all its arrays, outputs included. `largest` bounds T, K and V. */
void sample_make(sample *s, draw *d, int64_t largest);
void sample_free(sample *s);

/* Poison the outputs, restore a step's state, check and run. */
la_status sample_run(sample *s);

/* After a run: inputs as they were, nothing outside the elements of outputs changed, every element
 * of them written (and finite when tame), states of a pool that nobody picked as they were. On
 * failure a line on stderr and false. */
bool sample_intact(const sample *s);
/* After a run that was refused: nothing changed at all. */
bool sample_untouched(const sample *s);

/* Elements by their number in the user's order. */
int64_t array_size(const la_array *a);
char *array_element(const la_array *a, int64_t i);
double element_value(const char *x, la_dtype dtype);

/* One line that says which problem this is. */
void sample_describe(const sample *s);

#endif
