/* ROOMS beside the table of variants.def: families of calls whose state is no [K,V] matrix. A room
 * has a .def file with a line for each of its arrays. Here is what all rooms do with such lines:
 * check a call's arrays, and say what its outputs are. rooms.c takes the arrays from Python.
 *
 * arrays.c keeps an array by a name of arrays.def. An array of a room borrows such a name, its
 * slot. The slot says which role it has, which dtypes, and which passes write it in place. No
 * Python here. */
#ifndef LINATTN_ROOM_H
#define LINATTN_ROOM_H

#include "linattn.h"

enum { LA_IN_F = 1 << LA_FORWARD, LA_IN_S = 1 << LA_STEP, LA_IN_B = 1 << LA_BACKWARD };
enum {
    LA_IN_FS = LA_IN_F | LA_IN_S,
    LA_IN_FB = LA_IN_F | LA_IN_B,
    LA_IN_FSB = LA_IN_F | LA_IN_S | LA_IN_B
};

/* A line of a room's table. Letters that rooms have in common: B batch, T tokens, D channels,
 * S sequences (B, or len(cu_seqlens) - 1), P states in a step's pool. A small letter is one less
 * than its capital, which an earlier line has. */
typedef struct {
    const char *label, *letters;
    const char *gradient; /* the label of its gradient; NULL: none */
    la_name slot;
    int passes;
    la_need need;
    int forms; /* a bit for each form of the room that has it */
} la_room_line;

/* An option, kept at this offset in the room's job: True or False as a bool; or None or one of some
 * words as an int, which is 0 for None and counts the words from 1. */
typedef struct {
    const char *label;
    size_t offset;
    int passes;
    const char *const *words; /* ends with a NULL. NULL: True or False */
} la_room_option;

/* A form of a room's calls: its name, and the letters that no array of such a call has. */
typedef struct {
    const char *name;
    const char *left_out, *left_out_in_step;
} la_room_form;

enum { LA_ROOM_LINES = 17 };

/* The job of each room begins with this. */
typedef struct la_room_job {
    /* what the caller says */
    const struct la_room *room;
    int form;
    bool want_final;
    bool states_only; /* no y, and of the gradients that of the initial state alone */
    bool want_map;    /* M of the tokens, which turn a state h into M h + X. It sets states_only */
    bool pairs;       /* N counts reals, two for each complex number */
    la_problem *p;    /* pass, device, arrays by slot, watch, message */

    /* what la_room_check settles: arrays by line, NULL where there is none, with the strides of
     * the letters in the table's order, 0 for a letter that is left out; sizes by letter */
    const char *left_out;
    la_array *array[LA_ROOM_LINES];
    la_array
        *gradient[LA_ROOM_LINES]; /* of inputs, which are written; of outputs, which are read */
    int64_t size[128];
} la_room_job;

typedef struct la_room {
    const char *name;
    const char *kernel; /* that of its passes over a sequence, in words */
    const la_room_form *form;
    int forms;
    const la_room_line *line;
    int lines;
    const la_room_option *option;
    int options;
    /* A state holds inputs as they are, the oldest first. So it may have their dtype too, and in a
     * step more of them than a small letter says. */
    bool plain_states;
    size_t job_bytes;
    /* Checks what the letters cannot say, after all inputs have been compared with them. */
    la_status (*check)(la_room_job *j);
    la_status (*run)(la_room_job *j);
    la_status (*enqueue)(la_room_job *j); /* the same on a GPU; NULL without the CUDA part */
} la_room;

/* Is this line in the call? */
bool la_room_has(const la_room_job *j, int line);

bool la_room_is_output(const la_room *room, int line);

/* May a caller give it? All inputs, the gradients of outputs, and an out. And where it is kept. */
bool la_room_is_given(const la_room_job *j, int line);
la_name la_room_given_slot(const la_room_job *j, int line);

/* The names of all arrays of the call, by their slots. */
void la_room_name_arrays(const la_room_job *j, const char *labels[LA_ARRAYS]);

/* The letters that a user writes for this array in this call, as a string. */
void la_room_letters(const la_room_job *j, int line, char letters[LA_MAX_DIMS + 1]);

/* Compare the arrays of the call, which lie in j->p by their slots, with the room's lines. */
la_status la_room_check(la_room_job *j);

/* After la_room_check: an array that the call makes. Its dtype, and its shape as a user sees it.
 * `gradient`: not the array of the line, but its gradient. */
la_name la_room_slot(const la_room_job *j, int line, bool gradient);
void la_room_shape(const la_room_job *j, int line, la_array *like);
/* Take over an output that was made, or that the caller gave. */
la_status la_room_settle(la_room_job *j, int line, bool gradient);

/* Say which kernel takes the call (linattn.h, la_taken), if it writes a number. */
void la_room_tell(const la_room_job *j, const char *unit, int bits);

/* Where sequence n begins in its row, and which row that is. */
int64_t la_room_start(const la_room_job *j, int64_t n);
static inline int64_t la_room_row(const la_room_job *j, int64_t n)
{
    return j->p->array[LA_CU].given ? 0 : n;
}

/* A row of the batch that has no state: its one token of y [B,T,D] reads zeros, from channel d0 to
 * d1. */
void la_room_clear(const la_array *y, int64_t b, int64_t d0, int64_t d1);

extern const la_room la_scan_room, la_convolution_room;

#endif
