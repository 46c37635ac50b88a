/* Gradients of the factors of values, around a backward pass that knows none (factors.c). */
#ifndef LINATTN_CPU_FACTORS_H
#define LINATTN_CPU_FACTORS_H

#include "../linattn.h"

bool la_has_factors(const la_problem *p);
la_status la_backward_with_factors(la_problem *p, la_status (*backward)(la_problem *));

#endif
