/* A message, written piece by piece. A piece that does not fit is cut off. */
#ifndef LINATTN_TEXT_H
#define LINATTN_TEXT_H

#include "linattn.h"

typedef struct {
    char *at, *end;
} la_text;

la_text la_text_of(char message[LA_MESSAGE]);

void la_append(la_text *w, const char *format, ...);

#endif
