/* Which arrays a diagonal scan takes. No Python here. */
#include "diagonal.h"

#include <stdio.h>

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif

enum {
    SELECTIVE = 1 << LA_SELECTIVE,
    FIXED = 1 << LA_FIXED,
    GATED = 1 << LA_GATED_SCAN,
    UNGATED = SELECTIVE | FIXED,
    ALL = UNGATED | GATED
};

static const la_room_line lines[LA_SCAN_ARRAYS] = {
#define LA_SCAN_ARRAY(name, label, letters, forms, passes, needed, slot, gradient) \
    [LA_SCAN_##name] = {label, letters, gradient, LA_##slot, LA_IN_##passes, LA_##needed, forms},
#define LA_SCAN_INDEX(name, label, passes, slot) \
    [LA_SCAN_##name] = {label, "", NULL, LA_##slot, LA_IN_##passes, LA_OPTIONAL, ~0},
#define LA_SCAN_RESULT(name, label, letters, forms, passes, slot) \
    [LA_SCAN_##name] = {label, letters, NULL, LA_##slot, LA_IN_##passes, LA_OPTIONAL, forms},
#include "diagonal.def"
};

static const la_room_form forms[] = {
    [LA_SELECTIVE] = {"selective", "", "T"},
    [LA_FIXED] = {"fixed", "", "T"},
    [LA_GATED_SCAN] = {"gated", "N", "NT"},
};

static const char *const writes[] = {"share", "root", NULL}; /* in the order of la_scan_written */

static const la_room_option options[] = {
    {"complex", offsetof(la_diagonal, room.pairs), LA_IN_FSB, NULL},
    {"delta_softplus", offsetof(la_diagonal, softplus), LA_IN_FSB, NULL},
    {"write", offsetof(la_diagonal, write), LA_IN_FSB, writes},
    {"output_final_state", offsetof(la_diagonal, room.want_final), LA_IN_F, NULL},
    {"states_only", offsetof(la_diagonal, room.states_only), LA_IN_FB, NULL},
    {"segment_map", offsetof(la_diagonal, room.want_map), LA_IN_F, NULL},
};

static int64_t size_of(const la_diagonal *j, char letter, int64_t otherwise)
{
    const int64_t size = j->room.size[(int)letter];
    return size < 0 ? otherwise : size;
}

static la_status check(la_room_job *room)
{
    la_diagonal *const j = (la_diagonal *)room;
    j->B = size_of(j, 'B', 1);
    j->T = size_of(j, 'T', 1);
    j->D = size_of(j, 'D', 0);
    j->N = size_of(j, 'N', 1);
    j->G = size_of(j, 'G', 1);
    j->S = size_of(j, 'S', 1);
    char *const message = room->p->message;
    if (j->N < 1)
        snprintf(message, LA_MESSAGE, "A: expected N >= 1, got N = 0");
    else if (j->write && room->form != LA_GATED_SCAN)
        snprintf(message, LA_MESSAGE, "write: expected None, for the scan is not gated");
    else if (room->pairs && j->N % 2)
        snprintf(message, LA_MESSAGE, "A: expected pairs of reals, got %lld numbers",
                 (long long)j->N);
    else if (j->G < 1 || j->D % j->G)
        snprintf(message, LA_MESSAGE, "B: expected D = %lld to be a multiple of G, got G = %lld",
                 (long long)j->D, (long long)j->G);
    else
        return LA_OK;
    return LA_VALUE_ERROR;
}

static la_status run(la_room_job *j) { return la_diagonal_run((la_diagonal *)j); }

const la_room la_scan_room = {
    .name = "scan",
    .kernel = "scan",
    .form = forms,
    .forms = sizeof forms / sizeof *forms,
    .line = lines,
    .lines = LA_SCAN_ARRAYS,
    .option = options,
    .options = sizeof options / sizeof *options,
    .job_bytes = sizeof(la_diagonal),
    .check = check,
    .run = run,
#ifdef LA_WITH_CUDA
    .enqueue = la_cuda_scan,
#endif
};
_Static_assert((int)LA_SCAN_ARRAYS <= (int)LA_ROOM_LINES, "a job has room for so many lines");
