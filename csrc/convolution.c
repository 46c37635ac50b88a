/* Which arrays a causal convolution takes. No Python here. */
#include "convolution.h"

#include <stdio.h>

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif

static const la_room_line lines[LA_CONVOLUTION_ARRAYS] = {
#define LA_CONVOLUTION_ARRAY(name, label, letters, in, need, slot, gradient) \
    [LA_CONVOLUTION_##name] = {label, letters, gradient, LA_##slot, LA_IN_##in, LA_##need, ~0},
#define LA_CONVOLUTION_INDEX(name, label, passes, slot) \
    [LA_CONVOLUTION_##name] = {label, "", NULL, LA_##slot, LA_IN_##passes, LA_OPTIONAL, ~0},
#include "convolution.def"
};

static const la_room_form forms[] = {{"causal", "", "T"}};

static const char *const activations[] = {"silu", "swish", NULL}; /* two names of one */

static const la_room_option options[] = {
    {"activation", offsetof(la_convolution, silu), LA_IN_FSB, activations},
    {"output_final_state", offsetof(la_convolution, room.want_final), LA_IN_F, NULL},
};

static la_status check(la_room_job *room)
{
    la_convolution *const j = (la_convolution *)room;
    j->B = room->size['B'];
    j->T = room->p->pass == LA_STEP ? 1 : room->size['T'];
    j->D = room->size['D'];
    j->W = room->size['W'];
    j->S = room->size['S'];
    const la_array *state = j->room.array[LA_CONVOLUTION_S0];
    j->older = room->p->pass == LA_STEP ? state->shape[2] - (j->W - 1) : 0;
    if (j->W >= 1) return LA_OK;
    snprintf(room->p->message, LA_MESSAGE, "weight: expected W >= 1 taps, got W = 0");
    return LA_VALUE_ERROR;
}

static la_status run(la_room_job *j) { return la_convolution_run((la_convolution *)j); }

const la_room la_convolution_room = {
    .name = "convolve",
    .kernel = "convolution",
    .form = forms,
    .forms = sizeof forms / sizeof *forms,
    .line = lines,
    .lines = LA_CONVOLUTION_ARRAYS,
    .option = options,
    .options = sizeof options / sizeof *options,
    .plain_states = true,
    .job_bytes = sizeof(la_convolution),
    .check = check,
    .run = run,
#ifdef LA_WITH_CUDA
    .enqueue = la_cuda_convolution,
#endif
};
_Static_assert((int)LA_CONVOLUTION_ARRAYS <= (int)LA_ROOM_LINES,
               "a job has room for so many lines");
