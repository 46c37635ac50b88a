/* The memory of a unit's backward pass in chunks (chunk_backward.h), and how many states it keeps. */

enum { ONE_SEGMENT = 32 };

LA_FN int64_t segment_length(int64_t chunks)
{
    int64_t m = 16;
    if (chunks <= ONE_SEGMENT) return chunks < 1 ? 1 : chunks;
    while (m * m < chunks) m++;
    return m;
}

/* The states that are kept at once, for so many chunks or fewer. */
LA_FN int64_t segment_room(int64_t chunks)
{
    const int64_t m = segment_length(chunks);
    return chunks > ONE_SEGMENT && m < ONE_SEGMENT ? ONE_SEGMENT : m;
}

/* A column of lanes of the rows that scores_key_adjoint reads and changes again and again. In the
 * rows these lanes lie kp reals apart: they share a few sets of the L1 cache, and displace one
 * another. Side by side they stay in it. */
typedef struct key_column {
    lane *q, *x, *a, *dq, *dx, *da; /* [n] */
    lane *row[2];                   /* [n]: k's row as it decays, DPLR: and y's */
    lane dbonus;
} key_column;

enum { COLUMNS = 8 }; /* the arrays of a key_column */

typedef struct backward_scratch {
    chunk c;
    real *S, *dS;         /* [K][width]; PAIR [2K][width] */
    real *kept;           /* [M]: of a segment's chunks: state and z at their start, U, E */
    real *checkpoints;    /* [segments]: state and z */
    real *z, *dz, *kahan; /* [kp] */
    real *owed, *d_owed;  /* [kp]: to S, to dS */
    real *U, *E;    /* [C][width], in `kept`: the chunk's writes, and the errors that they correct;
                  * DPLR: U is [2C][width], and has no E */
    real *rU;       /* TOKEN [C][width]: r U */
    real *dO;       /* [2C][width]: -dE (DPLR: -dW), then (from row n) dO; one matrix for dS */
    real *edO;      /* TOKEN [2C][width]: e times that */
    real *dU;       /* as U: dU, then dV */
    real *Ut, *dOt; /* [width][cp] (DPLR: two of them), [width][2C, padded]: U and dO transposed */
    real *across;   /* [K][2C, padded]: d_tilde and d_hat, transposed */
    real *dP, *dL;  /* as P and L */
    real *d_hat;    /* [2C][sp]: dx^, then (from row n) dq^ */
    real *d_tilde;  /* [C][sp]; DPLR [2C][kp] */
    real *dq, *dk;  /* [C][kp] */
    real *dx, *dy;  /* [C][kp]; dx is dk where x is not given */
    real *dbonus;   /* [kp]: of the chunk */
    real *all_bonus, *lost_bonus; /* [kp]: the sum of dbonus, and what it rounded off */
    real *da, *dbeta, *deta;      /* as a, beta and eta */
    real *xqt;     /* [sp][2C, padded]: x, then (from column n) q (or x^, q^), transposed */
    real *de;      /* TOKEN [1], KEY [kp]: of the chunk's decay; PAIR [3]: of e, f and m */
    real *rows;    /* KEY: a key_column; TOKEN: [C][cp], dGamma; PAIR: dG, dN */
    real *carried; /* [kp] */
    real *d_den;   /* [C] */
} backward_scratch;

/* The rows of a token that are kept: U and E, or V and W. */
LA_FN int64_t rows_kept(const la_rule rule) { return la_predicts(rule) ? 2 : 1; }

LA_FN void backward_take(backward_scratch *f, arena *m, const la_problem *p, int64_t C,
                         int64_t length, int64_t columns, const la_decay decay, const la_rule rule)
{
    const int64_t kp = padded(p->K), cp = padded(C), width = padded(columns);
    const int64_t chunks = (length + C - 1) / C, M = segment_length(chunks);
    const int64_t written = rows_written(rule) * C;
    const int64_t K = state_rows(p), sp = padded(K);
    const size_t start = la_plus(la_times(K, width), kp);
    chunk_take(&f->c, m, p, C, true, decay, rule);
    f->S = arena_take(m, K, width);
    f->dS = arena_take(m, K, width);
    f->kept = arena_take(m, p->states_only ? 0 : segment_room(chunks),
                         la_plus(start, la_times(rows_kept(rule) * C, width)));
    f->checkpoints = arena_take(m, p->states_only ? 0 : (chunks + M - 1) / M, start);
    f->z = arena_take(m, 1, kp);
    f->dz = arena_take(m, 1, kp);
    f->kahan = arena_take(m, 1, kp);
    f->owed = arena_take(m, 1, kp);
    f->d_owed = arena_take(m, 1, kp);
    f->rU = arena_take(m, decay == LA_TOKEN ? C : 0, width);
    f->dO = arena_take(m, 2 * C, width);
    f->edO = arena_take(m, decay == LA_TOKEN ? 2 * C : 0, width);
    f->dU = arena_take(m, written, width);
    f->Ut = arena_take(m, rows_written(rule) * width, cp);
    f->dOt = arena_take(m, width, padded(2 * C));
    f->across = arena_take(m, K, padded(2 * C));
    f->dP = arena_take(m, written, cp);
    f->dL = arena_take(m, written, cp);
    f->d_hat = arena_take(m, 2 * C, sp);
    f->d_tilde = arena_take(m, written, sp);
    f->dq = arena_take(m, C, kp);
    f->dk = arena_take(m, C, kp);
    f->dx = p->array[LA_X].given ? arena_take(m, C, kp) : f->dk;
    f->dy = arena_take(m, rule == LA_DPLR ? C : 0, kp);
    f->dbonus = arena_take(m, rule == LA_BONUS, kp);
    f->all_bonus = arena_take(m, rule == LA_BONUS, kp);
    f->lost_bonus = arena_take(m, rule == LA_BONUS, kp);
    f->da = arena_take(m, C, decay == LA_KEY ? kp : 1);
    f->xqt = arena_take(m, sp, padded(2 * C));
    f->deta = arena_take(m, decay == LA_PAIR, C);
    f->dbeta = arena_take(m, 1, C);
    f->de = arena_take(m, 1, kp);
    f->rows = arena_take(m,
                         decay == LA_KEY    ? COLUMNS * C
                         : decay == LA_PAIR ? 2 * C
                                            : C,
                         decay == LA_KEY ? LANES : cp);
    f->carried = arena_take(m, 1, kp);
    f->d_den = arena_take(m, 1, C);
}
