/* libFuzzer: bytes become a problem with memory of its own. It is checked and run, its memory is
 * looked over, and then it is corrupted. */
#include "sample.h"

#include <stdlib.h>

bool check_corrupted(const sample *s, draw *d); /* corrupt.c */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    draw d = {.bytes = bytes, .left = size, .from_bytes = true};
    for (size_t i = 0; i < size; i++) d.state = d.state * 31 + bytes[i];
    bool here;
    const char *isa = la_isa_name((int)draw_int(&d, 0, la_isa_count() - 1), &here);
    if (here) la_isa_choose(isa);
    la_set_num_threads((int)draw_int(&d, 1, 3));
    sample s;
    sample_make(&s, &d, 40);
    bool good = sample_run(&s) == LA_OK && sample_intact(&s) && check_corrupted(&s, &d);
    if (!good) {
        sample_describe(&s);
        abort();
    }
    sample_free(&s);
    return 0;
}
