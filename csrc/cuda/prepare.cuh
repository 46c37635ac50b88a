/* Everything that depends on one chunk of C = 64 tokens alone, for all chunks side by side: the
 * scores P, the inverse A (for gradients of the delta rule M) and, where decays are per key, the
 * scaled rows. See chunk.cuh for their formulas. */
#ifndef LINATTN_CUDA_PREPARE_CUH
#define LINATTN_CUDA_PREPARE_CUH

#include "pair.cuh"
#include "prepare_dplr.cuh"
#include "prepare_key.cuh"
#include "prepare_scalar.cuh"

template <int KP, la_decay DECAY, la_rule RULE> constexpr int prepare_bytes(bool with_x)
{
    if constexpr (DECAY == LA_PAIR)
        return (int)sizeof(pair_room<keys_of<KP, DECAY>>);
    else if constexpr (RULE == LA_DPLR)
        return (int)sizeof(dplr_room);
    else
        return DECAY == LA_KEY ? (int)sizeof(key_room<KP, RULE>)
                               : scalar_room_bytes<KP, RULE>(with_x);
}

template <int KP, la_decay DECAY>
constexpr int prepare_threads = DECAY == LA_KEY ? key_threads<KP> : SCALAR_THREADS;

template <int KP, la_decay DECAY, la_rule RULE> constexpr auto prepare_of()
{
    if constexpr (DECAY == LA_PAIR)
        return prepare_pair<KP>;
    else if constexpr (RULE == LA_DPLR)
        return prepare_dplr<KP>;
    else if constexpr (DECAY == LA_KEY)
        return prepare_key<KP, RULE>;
    else
        return prepare_scalar<KP, RULE>;
}

#endif
