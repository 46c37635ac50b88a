/* Calls of rooms from Python. */
#ifndef LINATTN_ROOMS_H
#define LINATTN_ROOMS_H

#include "call.h"

#include "room.h"

/* (form, pass, keywords): the results of a call; or what it is given and would make, as la_outline
 * says it of an op. */
PyObject *la_room_call(const la_room *room, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *names, bool outlined);

/* Its name, its forms (name, letters left out), its lines (label, letters, passes, role, required,
 * gradient, forms) and its options (label, passes, is it a word). */
PyObject *la_room_table(const la_room *room);

#endif
