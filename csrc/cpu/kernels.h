/* The kernels of one instance (an instruction set and a real type) for dispatch.c, and the units of
 * work that dispatch.c hands to them. */
#ifndef LINATTN_CPU_KERNELS_H
#define LINATTN_CPU_KERNELS_H

#include "../convolution.h"
#include "../diagonal.h"
#include "../gates.h"
#include "../layer.h"

/* One sequence of one value head (forward: or of a few), and a range of its value columns. */
typedef struct la_unit {
    int64_t n;          /* the sequence, and so its state; in a step's pool -1 for none */
    int64_t b;          /* batch row that holds its tokens */
    int64_t begin, end; /* its tokens in that row */
    int64_t keys_end;   /* noncausal: where the tokens of k and v end, which begin there too */
    int64_t read, stop; /* forward: the tokens it reads; those before only lead to its state */
    bool last;          /* forward: the state after `stop` is the sequence's, and is stored */
    int64_t h, hv;      /* query/key head, value head */
    int64_t heads;      /* forward: value heads, from hv on */
    int64_t v0, v1;     /* value columns */
    int64_t panel;      /* which panel of value columns (backward) */
} la_unit;

/* Does the call go token by token? The gradients of states alone have no such form. */
static inline bool la_by_token(const la_problem *p)
{
    return p->mode == LA_RECURRENT && !(p->pass == LA_BACKWARD && p->states_only);
}

/* Value columns per backward unit, at most. Every unit adds to dq, dk, dg and dbeta. The sums over
 * panels are taken in a fixed order, so the bits depend on this width and not on the number of
 * threads. */
#define LA_BACKWARD_PANEL 128

/* The backward's sums over value columns: a partial sum for each (value head, panel), so that units
 * never write to the same place. `reduce` adds the partial sums up in a fixed order. All are in the
 * instance's real type. `alone`: no other unit adds to the rows of any unit, and each unit writes
 * its rows out itself. Then there are no partial sums but those of da for a gate per head, and of
 * dz0. */
typedef struct la_partials {
    bool alone;
    int64_t panels;
    int64_t tokens;     /* B * row */
    int64_t row;        /* tokens of a batch row: of q, or of k and v if these are more */
    int64_t kp;         /* K, padded to whole lanes */
    void *dq, *dk;      /* [HV * panels][tokens][kp], of q and k as the recurrence sees them */
    void *dx, *dy;      /* as dk, where x is given, and of the rule DPLR */
    void *da;           /* KEY: [HV * panels][tokens][kp]; TOKEN, HEAD: [HV * panels][tokens] */
    void *dbeta, *deta; /* [HV * panels][tokens] */
    void *dz0;          /* [HV * panels][N][kp] */
    void *dbonus;       /* [HV * panels][N][kp]: the sum over a sequence's tokens */
} la_partials;

/* The factors of values of a backward pass (factors.c), and one row of values. */
typedef struct la_factors {
    const la_problem *p;
    la_array written; /* weight v, or gate v, as the rule takes it */
    double *of_skip;  /* [B T][HV]: the shares of dskip */
} la_factors;

typedef struct la_factor_row {
    int64_t b, t, hv;
} la_factor_row;

/* A block of tokens of one query/key head and its value heads: what one call of `reduce`
 * finishes. */
typedef struct la_rows {
    int64_t b, begin, end, h;
} la_rows;

/* A pass over a gate, in rows of whole tokens: where tokens lie without gaps, a row has several. */
typedef struct la_gate_rows {
    const la_gating *job;
    int64_t rows, columns; /* the last row may be shorter */
    void *rate, *bias;     /* [columns] of a row, in padded reals; NULL: 1, and 0 */
} la_gate_rows;

/* A diagonal scan: a panel of channels of one group, of one sequence; in a backward pass of a part
 * of all sequences, one after another. */
typedef struct la_scan_unit {
    int64_t d0, d1, group, panel; /* channels; their group, and which of its panels they are */
    int64_t first, last, part;    /* sequences first .. last, and which part that is */
    int64_t b, begin, end, state; /* of one sequence: its row, its tokens there, its state */
    int64_t longest;              /* tokens of the longest sequence of the part */
} la_scan_unit;

/* Channels of a panel, at most. The sums over a group's panels are taken in a fixed order. */
enum { LA_SCAN_PANEL = 128 };

/* The backward's sums, a part for each unit: of dB and dC by panels, in the instance's real type; of
 * the gradients of what all tokens share by parts of the sequences. NULL: not asked for. */
typedef struct la_scan_sums {
    int64_t panels, parts;
    void *dB, *dC;          /* [panels][B * T][G][N] */
    double *dA, *dB0, *dC0; /* [parts][D][N] */
    double *dD, *dbias;     /* [parts][D] */
} la_scan_sums;

/* Where sequence n lies: fills b, begin, end and state. */
void la_scan_sequence(const la_diagonal *j, la_scan_unit *u, int64_t n);

/* A causal convolution: some tokens of one sequence, in a panel of channels. The tokens may be those
 * before the first one, which an initial state has. */
typedef struct la_convolution_unit {
    int64_t d0, d1;
    int64_t n, b, begin, end; /* the sequence: which, its row, its tokens there */
    int64_t state;            /* where its state is in a step's pool */
    int64_t t0, t1;
} la_convolution_unit;

/* The taps of a convolution, which all its units read. */
typedef struct la_convolution_taps {
    void *taps;    /* [W + 1][width] reals: a tap's row, from the token's own on, then the bias */
    int64_t width; /* D, and zeros that a lane may read */
    bool along;    /* lanes of tokens and not of channels */
    bool streams;  /* y is so large that no cache keeps it: it is written past them */
} la_convolution_taps;

typedef struct la_kernels {
    const char *isa;
    int lanes; /* reals in a vector: how far rows are padded */
    int bits;  /* the bits of a real that are multiplied */

    /* Scratch is per thread. longest: the length of the longest sequence; heads: those of a
     * unit. */
    size_t (*forward_scratch)(const la_problem *p, int64_t longest, int64_t heads);
    void (*forward)(const la_problem *p, const la_unit *u, void *scratch);

    /* Tokens in a chunk of a sequence of that length. */
    int64_t (*chunk_tokens)(const la_problem *p, int64_t length);

    size_t (*step_scratch)(const la_problem *p);
    void (*step)(const la_problem *p, const la_unit *u, void *scratch);
    size_t (*backward_scratch)(const la_problem *p, int64_t longest);
    void (*backward)(const la_problem *p, const la_unit *u, const la_partials *sums, void *scratch);
    size_t (*reduce_scratch)(const la_problem *p);
    void (*reduce)(const la_problem *p, const la_rows *rows, const la_partials *sums,
                   void *scratch);
    /* The gradients without a token axis, of a per-head gate, of a bonus and of z0: one value head a
     * call. */
    void (*reduce_head)(const la_problem *p, int64_t hv, const la_partials *sums);

    /* Is any of n numbers of a gate, `stride` apart, above `highest` or below `lowest`? */
    bool (*outside)(const char *x, la_dtype dtype, int64_t n, int64_t stride, double lowest,
                    double highest);

    /* A gate from a projection: its parameters, once per pass; then rows first .. last. In a
     * backward pass the sums of du and of dA_log over these rows are added to [columns] each,
     * NULL for what is not asked for. */
    void (*gate_parameters)(const la_gate_rows *w);
    void (*gate_forward)(const la_gate_rows *w, int64_t first, int64_t last);
    void (*gate_backward)(const la_gate_rows *w, int64_t first, int64_t last, double *d_rate,
                          double *d_bias);

    /* Diagonal scans. A scratch is for a unit of so many channels. */
    size_t (*diagonal_scratch)(const la_diagonal *j, int64_t channels, int64_t longest);
    void (*diagonal_forward)(const la_diagonal *j, const la_scan_unit *u, void *scratch);
    void (*diagonal_backward)(const la_diagonal *j, const la_scan_unit *u, const la_scan_sums *sums,
                              void *scratch);
    /* dB or dC of a token, from its partial sums. */
    void (*diagonal_reduce)(const la_diagonal *j, int64_t token, const la_scan_sums *sums,
                            la_scan_line line, const void *partial);

    /* Causal convolutions. Taps once per pass. A scratch is for a unit of any size. */
    void (*convolution_taps)(const la_convolution *j, const la_convolution_taps *w);
    size_t (*convolution_scratch)(const la_convolution *j);
    void (*convolution_forward)(const la_convolution *j, const la_convolution_unit *u,
                                const la_convolution_taps *w, void *scratch);
    /* The final state of the unit's sequence; in a step, its next state in the place of the last. */
    void (*convolution_state)(const la_convolution *j, const la_convolution_unit *u);
    /* The gradients of the unit's tokens. Those of taps and bias are added to sums [W + 1][width],
     * which is NULL for tokens before the first one. */
    void (*convolution_backward)(const la_convolution *j, const la_convolution_unit *u,
                                 const la_convolution_taps *w, double *sums, void *scratch);

    /* The norm of groups in a layer's step: rows first .. last. */
    void (*group_norm)(const la_group_norm *j, int64_t first, int64_t last);

    /* Values before and after a backward pass that knows no factors of them (factors.c). */
    void (*make_written)(const la_factors *j, const la_factor_row *r);
    void (*undo_factors)(const la_factors *j, const la_factor_row *r);

    /* Numbers in an array's dtype. */
    void (*store_numbers)(char *to, la_dtype dtype, const double *from, int64_t n);
} la_kernels;

/* The chosen instance for a real type, float32 or float64. */
const la_kernels *la_cpu_kernels(la_dtype real);
/* The same for a forward pass, for which an instance may have kernels with products of bfloat16
 * numbers. */
const la_kernels *la_cpu_forward_kernels(const la_problem *p);

extern const la_kernels la_cpu_baseline_f32, la_cpu_baseline_f64;
#if defined(__x86_64__)
extern const la_kernels la_cpu_avx2_f32, la_cpu_avx2_f64;
extern const la_kernels la_cpu_avx512_f32, la_cpu_avx512_f64;
/* only forward: instance_bf16.h */
extern const la_kernels la_cpu_avx512_bf16, la_cpu_amx_bf16, la_cpu_amx;
extern const la_kernels la_cpu_avx2_bf16, la_cpu_avx2_amx;
#elif defined(__aarch64__)
extern const la_kernels la_cpu_neon_f32, la_cpu_neon_f64;
#endif

#endif
