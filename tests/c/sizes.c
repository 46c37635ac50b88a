/* sizes: what is too large for memory stays too large, whatever is done with it. From Python only
 * arrays of more bytes than any machine has would show it. */
#include "../../csrc/sizes.h"

#include <stdio.h>

int main(void)
{
    const size_t half = (size_t)1 << (sizeof(size_t) * 4); /* its square is one too many */
    const struct {
        const char *what;
        size_t got, expected;
    } checks[] = {
        {"a product", la_times(half - 1, half + 1), SIZE_MAX},
        {"a product that wraps to 0", la_times(half, half), LA_TOO_LARGE},
        {"a product that wraps to a small one", la_times(half + 1, half), LA_TOO_LARGE},
        {"a multiple of too large", la_times(LA_TOO_LARGE, 4), LA_TOO_LARGE},
        {"nothing of too large", la_times(LA_TOO_LARGE, 0), 0},
        {"a sum", la_plus(SIZE_MAX - 2, 1), SIZE_MAX - 1},
        {"a sum that wraps to 0", la_plus(SIZE_MAX, 1), LA_TOO_LARGE},
        {"too large and more", la_plus(LA_TOO_LARGE, 64), LA_TOO_LARGE},
        {"whole units", la_whole(65, 64), 128},
        {"whole units already", la_whole(128, 64), 128},
        {"the last whole units", la_whole(SIZE_MAX - 64, 64), SIZE_MAX - 63},
        {"whole units that wrap to 0", la_whole(SIZE_MAX - 62, 64), LA_TOO_LARGE},
        {"too large, in whole units", la_whole(LA_TOO_LARGE, 64), LA_TOO_LARGE},
    };
    int wrong = 0;
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        if (checks[i].got != checks[i].expected) {
            printf("%s: expected %zu, got %zu\n", checks[i].what, checks[i].expected,
                   checks[i].got);
            wrong++;
        }
    return wrong > 0;
}
