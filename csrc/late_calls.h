/* Late gradients (late.h) from Python. */
#ifndef LINATTN_LATE_CALLS_H
#define LINATTN_LATE_CALLS_H

#include "call.h"

/* late(map, eps, k, v, dk, dv, dS, dz) -> whether dk and dv have what dS and dz bring. False: no
 * kernel takes such arrays. map: the number of the feature map of k. */
PyObject *la_late_call(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

#endif
