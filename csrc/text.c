/* Messages. */
#include "text.h"

#include <stdarg.h>
#include <stdio.h>

la_text la_text_of(char message[LA_MESSAGE]) { return (la_text){message, message + LA_MESSAGE}; }

void la_append(la_text *w, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(w->at, (size_t)(w->end - w->at), format, args);
    va_end(args);
    w->at = n < w->end - w->at ? w->at + n : w->end - 1;
}
