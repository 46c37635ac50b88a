/* The stages of a layer's step, one after another, on either device. */
#include "layer.h"

#include "sizes.h"

#include "cpu/scratch.h"

#include <string.h>

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif

const la_name la_convolved[LA_LAYER_CONVOLUTIONS] = {LA_Q, LA_K, LA_V};

void la_layer_reserve(la_problem *p, la_name name, la_dtype dtype, int ndim, const int64_t *shape)
{
    la_array *a = &p->array[name];
    la_array dense = {.given = true, .dtype = dtype, .ndim = ndim};
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        dense.shape[i] = shape[i]; /* which may be the array's own */
        dense.stride[i] = stride;
        stride *= shape[i];
    }
    *a = dense;
}

/* ---- the arrays between the stages ---- */

/* An array's place in the scratch; `used` counts the bytes. A block of NULL: only count. */
static void place(la_array *a, char *block, size_t *used)
{
    size_t bytes = (size_t)la_size_of(a->dtype);
    for (int i = 0; i < a->ndim; i++) bytes = la_times(bytes, (size_t)a->shape[i]);
    if (block) a->data = block + *used;
    *used = la_plus(*used, la_whole(bytes, 256));
}

static size_t place_all(const la_layer *j, char *block)
{
    la_array *const array = j->p->array;
    size_t used = 0;
    for (int i = 0; i < LA_LAYER_CONVOLUTIONS; i++) {
        if (!j->convolution[i]) continue;
        place(&array[la_convolved[i]], block, &used);
        j->convolution[i]->room.array[LA_CONVOLUTION_Y]->data = array[la_convolved[i]].data;
    }
    const struct {
        la_gating *gate;
        la_name name;
    } gates[] = {{j->g, LA_G}, {j->beta, LA_BETA}, {j->weight, LA_WEIGHT}};
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
        if (!gates[i].gate) continue;
        place(&array[gates[i].name], block, &used);
        gates[i].gate->to = array[gates[i].name].data;
    }
    if (j->norm) {
        place(&array[LA_O], block, &used);
        j->norm->o = array[LA_O].data;
        j->norm->y = j->y;
    } else {
        array[LA_O].data = j->y;
    }
    return used;
}

static void settle_norm(const la_layer *j)
{
    if (!j->norm) return;
    j->norm->rows = j->p->B * j->norm->groups;
    j->norm->size = j->p->HV * j->p->V / j->norm->groups;
    j->norm->dtype = j->p->array[LA_O].dtype;
    j->norm->real = j->p->real;
}

/* ---- on a CPU ---- */

static la_status keep_message(const la_layer *j, la_status status, const char *message)
{
    if (status) memcpy(j->p->message, message, sizeof j->p->message);
    return status;
}

/* The states of convolutions move on last. That takes no memory, so no state has moved if memory
 * fails. */
static la_status run_here(const la_layer *j)
{
    la_status status = LA_OK;
    for (int i = 0; i < LA_LAYER_CONVOLUTIONS && !status; i++) {
        la_convolution *const stage = j->convolution[i];
        if (!stage) continue;
        stage->room.p->slots = j->p->slots;
        stage->part = LA_CONVOLVE_TOKEN;
        status = keep_message(j, la_convolution_run(stage), stage->room.p->message);
    }
    if (!status && j->g) status = keep_message(j, la_gates(j->g), j->g->message);
    if (!status && j->beta) status = keep_message(j, la_gates(j->beta), j->beta->message);
    if (!status && j->weight) status = keep_message(j, la_gates(j->weight), j->weight->message);
    if (!status) status = la_step(j->p);
    for (int i = 0; i < LA_LAYER_CONVOLUTIONS && !status; i++) {
        if (!j->convolution[i]) continue;
        j->convolution[i]->part = LA_MOVE_STATE;
        status = la_convolution_run(j->convolution[i]);
    }
    if (!status && j->norm) la_group_norm_run(j->norm);
    return status;
}

static la_status run_on_cpu(const la_layer *j, size_t bytes)
{
    char *const block = la_scratch_beside(bytes);
    if (!block) return la_out_of_scratch(j->p->message);
    place_all(j, block);
    const la_status status = run_here(j);
    la_scratch_end_beside(block);
    return status;
}

/* ---- on a GPU ---- */

#ifdef LA_WITH_CUDA
static la_status run_on_device(const la_layer *j, size_t bytes)
{
    void *block;
    la_status status = la_cuda_allocate(j->p, bytes, &block);
    if (status) return status;
    place_all(j, block);
    status = la_cuda_layer(j);
    const la_status freed = la_cuda_release(j->p->ordinal, j->p->stream, block);
    return status ? status : freed;
}
#endif

la_status la_layer_run(la_layer *j)
{
    settle_norm(j);
    const size_t bytes = la_plus(place_all(j, NULL), 256);
#ifdef LA_WITH_CUDA
    if (j->p->device == LA_CUDA) return run_on_device(j, bytes);
#endif
    return run_on_cpu(j, bytes);
}
