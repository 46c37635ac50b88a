/* The keywords of an op's passes, as values by their places. */
#ifndef LINATTN_KEYWORDS_H
#define LINATTN_KEYWORDS_H

#include "call.h"

#include "options.h"

/* Where the value of a keyword is kept: an array's by its name, then the gates', the options' and
 * the remarks', which Python alone has. */
enum { LA_REMARKS = 2 };
enum {
    LA_FIRST_GATE = LA_ARRAYS,
    LA_FIRST_OPTION = LA_FIRST_GATE + LA_GATE_KEYWORDS,
    LA_FIRST_REMARK = LA_FIRST_OPTION + LA_OPTIONS,
    LA_PLACES = LA_FIRST_REMARK + LA_REMARKS
};

int la_keywords_init(void);

/* (op, q, k, v, ...): begins the call, and finds the values by their places, NULL for what is not
 * there. */
int la_read_keywords(la_call *c, la_pass pass, PyObject *const *args, Py_ssize_t nargs,
                     PyObject *names, PyObject *values[LA_PLACES]);
/* The options; the options and the arrays; these, and la_check. */
int la_take_options(la_call *c, PyObject *const *values);
int la_take_given(la_call *c, PyObject *const *values);
int la_take_all(la_call *c, PyObject *const *values);

/* A number, and no flag. */
int la_as_number(PyObject *object, const char *label, double *number);
/* An int, and no flag. kind: what is expected, for the message. Its sign is the caller's affair. */
int la_as_count(PyObject *object, const char *label, const char *kind, int64_t *to);

#endif
