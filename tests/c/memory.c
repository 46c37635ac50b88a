/* Blocks between guard pages, and what may have happened to them. */
#define _GNU_SOURCE
#include "sample.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, UNTOUCHED = 0xff }; /* all ones: NaN in every dtype, and no result looks so */

double element_value(const char *x, la_dtype dtype)
{
    uint16_t half;
    uint32_t word;
    float f;
    double value = 0;
    switch (dtype) {
    case LA_F64: memcpy(&value, x, 8); return value;
    case LA_F32: memcpy(&f, x, 4); return f;
    case LA_BF16:
        memcpy(&half, x, 2);
        word = (uint32_t)half << 16;
        memcpy(&f, &word, 4);
        return f;
    case LA_F16:
        memcpy(&half, x, 2);
        if ((half >> 10 & 31) == 31)
            value = half & 1023 ? NAN : INFINITY;
        else if (half >> 10 & 31)
            value = ldexp(1024 + (half & 1023), (half >> 10 & 31) - 25);
        else
            value = ldexp(half & 1023, -24);
        return half >> 15 ? -value : value;
    default: return 0;
    }
}

int64_t array_size(const la_array *a)
{
    int64_t n = 1;
    for (int i = 0; i < a->ndim; i++) n *= a->shape[i];
    return n;
}

char *array_element(const la_array *a, int64_t i)
{
    int64_t offset = 0;
    for (int axis = a->ndim - 1; axis >= 0; axis--) {
        offset += i % a->shape[axis] * a->stride[axis];
        i /= a->shape[axis];
    }
    return a->data + offset * la_size_of(a->dtype);
}

/* Which bytes of a block are elements. */
static char *mask_of(const sample *s, int name)
{
    const la_array *a = &s->p.array[name];
    char *mask = calloc(1, s->block[name].bytes + 1);
    if (!mask) abort();
    for (int64_t i = 0; i < array_size(a); i++)
        memset(mask + (array_element(a, i) - s->block[name].start), 1, la_size_of(a->dtype));
    return mask;
}

/* The element has all bits set, so nobody wrote it, or wrote what scratch was poisoned with. */
static bool looks_untouched(const char *x, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)x[i] != UNTOUCHED) return false;
    return true;
}

static bool fail(const sample *s, int name, const char *what, int64_t where)
{
    fprintf(stderr, "%s: %s at %lld\n", la_array_name(&s->run, (la_name)name), what,
            (long long)where);
    return false;
}

static bool output_intact(const sample *s, int name)
{
    const la_array *a = &s->p.array[name];
    const block *b = &s->block[name];
    const size_t size = la_size_of(a->dtype);
    bool good = true;
    char *mask = mask_of(s, name);
    for (size_t i = 0; good && i < b->bytes; i++)
        if (!mask[i] && (unsigned char)b->start[i] != UNTOUCHED)
            good = fail(s, name, "written between elements, byte", (int64_t)i);
    free(mask);
    for (int64_t i = 0; good && i < array_size(a); i++) {
        const char *x = array_element(a, i);
        if (looks_untouched(x, size))
            good = fail(s, name, "never written, element", i);
        else if (s->tame && !isfinite(element_value(x, a->dtype)))
            good = fail(s, name, "not finite, element", i);
    }
    return good;
}

/* Was this row of the pool some row's? */
static bool picked(const sample *s, int64_t row)
{
    for (int64_t n = 0; n < s->p.B; n++)
        if (s->run.slots[n] == row) return true;
    return false;
}

/* States that no row of the batch has: every bit as it was. */
static bool pool_intact(const sample *s, int name)
{
    const la_array *a = &s->p.array[name];
    const int64_t each = array_size(a) / s->p.P;
    for (int64_t row = 0; row < s->p.P; row++)
        for (int64_t i = 0; !picked(s, row) && i < each; i++) {
            const char *x = array_element(a, row * each + i);
            const char *before = s->block[name].saved + (x - s->block[name].start);
            if (memcmp(x, before, la_size_of(a->dtype)) != 0)
                return fail(s, name, "a state that nobody picked was written, element", i);
        }
    return true;
}

bool sample_intact(const sample *s)
{
    for (int name = 0; name < LA_ARRAYS; name++) {
        const block *b = &s->block[name];
        if (!b->map) continue;
        if (s->written[name] ? !output_intact(s, name)
                             : memcmp(b->start, b->saved, b->bytes) != 0 &&
                                   !fail(s, name, "an input was written", 0))
            return false;
        if (s->run.slots && la_array_rows[name].role == LA_STATE && !pool_intact(s, name))
            return false;
    }
    return true;
}

bool sample_untouched(const sample *s)
{
    for (int name = 0; name < LA_ARRAYS; name++)
        if (s->block[name].map &&
            memcmp(s->block[name].start, s->block[name].saved, s->block[name].bytes) != 0)
            return fail(s, name, "a call that failed wrote", 0);
    return true;
}

la_status sample_run(sample *s)
{
    for (int name = 0; name < LA_ARRAYS; name++)
        if (s->written[name])
            memcpy(s->block[name].start, s->block[name].saved, s->block[name].bytes);
    s->run = s->p;
    la_status status = la_check(&s->run);
    for (int name = LA_O; name < LA_ARRAYS && !status; name++)
        if (s->written[name]) status = la_check_output(&s->run, (la_name)name);
    if (!status && s->p.array[LA_SLOT].given) {
        if (!s->slots) s->slots = malloc(sizeof *s->slots * (size_t)(s->p.B + 1));
        if (!s->slots) abort();
        status = la_check_slots(&s->run, s->slots);
    }
    if (status) return status;
    return s->p.pass == LA_STEP       ? la_step(&s->run)
           : s->p.pass == LA_BACKWARD ? la_backward(&s->run)
                                      : la_forward(&s->run);
}

/* A block of `bytes`, all ones, that touches the shut page before it or the one behind it. */
void block_map(block *b, size_t bytes, bool at_end)
{
    size_t inside = (bytes + PAGE - 1) / PAGE * PAGE;
    b->map_bytes = inside + 2 * PAGE;
    b->map = mmap(NULL, b->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b->map == MAP_FAILED || (inside && mprotect(b->map + PAGE, inside, PROT_READ | PROT_WRITE)))
        abort();
    b->start = b->map + PAGE + (at_end ? inside - bytes : 0);
    b->bytes = bytes;
    memset(b->start, UNTOUCHED, bytes);
    b->saved = malloc(bytes + 1);
    if (!b->saved) abort();
}

void sample_free(sample *s)
{
    for (int name = 0; name < LA_ARRAYS; name++)
        if (s->block[name].map) {
            munmap(s->block[name].map, s->block[name].map_bytes);
            free(s->block[name].saved);
        }
    free(s->slots);
    memset(s, 0, sizeof *s);
}
