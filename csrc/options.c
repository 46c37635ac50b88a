/* The table of options, and what a call's words and numbers stand for. */
#include "options.h"

enum {
    F = 1 << LA_FORWARD,
    S = 1 << LA_STEP,
    B = 1 << LA_BACKWARD,
    FS = F | S,
    FB = F | B,
    FSB = F | S | B
};

const la_option la_options[LA_OPTIONS] = {
#define LA_OPTION(name, kind, field, passes) \
    {#name, LA_OPTION_##kind, offsetof(la_problem, field), passes},
#include "options.def"
};

const char *const la_mode_names[LA_MODES] = {
    [LA_CHUNK] = "chunk", [LA_RECURRENT] = "recurrent", [LA_PARALLEL] = "parallel"};

const la_gate_keyword la_gate_keywords[LA_GATE_KEYWORDS] = {
    {"g", LA_LOG}, {"alpha", LA_DECAY}, {"gamma", LA_DECAY}, {"slopes", LA_SLOPE}};

bool la_set_features(la_problem *p, const double x[LA_FEATURES])
{
    enum { MAP_Q, EPS_Q, MAP_K, EPS_K, NORMALISER, EPS, CAUSAL };
    if (!(x[MAP_Q] >= 0 && x[MAP_Q] < LA_MAPS && x[MAP_K] >= 0 && x[MAP_K] < LA_MAPS &&
          x[NORMALISER] >= 0 && x[NORMALISER] <= LA_ADD))
        return false;
    p->map[0] = (la_map)x[MAP_Q];
    p->map_eps[0] = x[EPS_Q];
    p->map[1] = (la_map)x[MAP_K];
    p->map_eps[1] = x[EPS_K];
    p->normaliser = (la_normaliser)x[NORMALISER];
    p->eps = x[EPS];
    p->causal = x[CAUSAL] != 0;
    return true;
}

la_set la_given_arrays(la_pass pass)
{
    return la_read[pass] | (la_written[pass] & (la_set)1 << LA_O);
}

la_set la_outputs(const la_problem *p)
{
    return la_written[p->pass] | (p->want_map ? la_results : 0);
}

bool la_is_wanted(const la_problem *p, la_name name)
{
    const la_array_row *row = &la_array_rows[name];
    if (!la_has(p, name)) return false;
    if (p->states_only) return row->letters[0] == 'N';
    if (row->of != name) return p->array[row->of].given;
    return row->need != LA_OPTIONAL || p->want_final;
}

void la_name_sizes(la_problem *p)
{
    p->B = 'B', p->T = 'T', p->L = 'L', p->H = 'H', p->HV = 'h', p->K = 'K', p->V = 'V', p->N = 'N',
    p->P = 'P';
}
