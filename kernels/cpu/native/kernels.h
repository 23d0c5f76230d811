// The innermost loops: a few rows of inputs against a few tiles of LANES outputs. Inputs are E,
// weights are stored as S: E itself, or a smaller type that is widened on the way.
//
// Every sum is one chain in the order of its inputs, whatever the number of rows and tiles, so a
// row's result does not depend, bit by bit, on the rows beside it.
#pragma once

#include <utility>

#include "amx.h"

// Sums held in registers, beside the weights and one row's input. Without a dot product of its
// numbers both halves of every weight take a register of their own.
template <class E>
constexpr bool IN_HALVES = (PAIR<E> == 2 && !DOTS_BF16) || (PAIR<E> == 4 && !DOTS_INT8);
template <class E>
constexpr int SUMS = (REGISTERS == 32 ? 24 : 12) - (IN_HALVES<E> ? REGISTERS / 8 * 2 : 0);
template <class E, int TILES>
constexpr int MOST_ROWS = SUMS<E> / TILES;

// Whether these products are the matrix registers': for every number of rows or for none.
template <class E, class S>
INLINE bool on_matrices() {
    return std::is_same_v<E, bf16> && std::is_same_v<S, bf16> && amx::are_allowed();
}
template <class E, class S, int TILES>
INLINE int most_rows() {
    return on_matrices<E, S>() ? amx::MOST_ROWS : MOST_ROWS<E, TILES>;
}

#define UNROLL _Pragma("GCC unroll 16")

template <class E, class S, int ROWS, int TILES>
INLINE void multiply(const E* a, int64_t a_stride, const S* const (&tiles)[TILES], int64_t step,
                     int steps, const S* const (&next)[TILES], bool fetches,
                     Floats (&sums)[ROWS][TILES]) {
    // A pointer for three rows: a pointer each would be more than there are registers.
    const E* thirds[(ROWS + 2) / 3];
    UNROLL for (int i = 0; i < (ROWS + 2) / 3; i++) {
        thirds[i] = a + 3 * i * a_stride;
        asm("" : "+r"(thirds[i]));  // the compiler would make it pointers again
    }
    for (int k = 0; k < steps; k++) {
        Floats weights[TILES];
        UNROLL for (int t = 0; t < TILES; t++) {
            weights[t] = load_weights<E>(tiles[t] + k * step);
            if (fetches) __builtin_prefetch(next[t] + k * step, 0, 2);
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            const Floats inputs = spread(thirds[r / 3] + r % 3 * a_stride + k * PAIR<E>);
            UNROLL for (int t = 0; t < TILES; t++)
                sums[r][t] = dot<E>(sums[r][t], inputs, weights[t]);
        }
    }
}

// out[row][tile * LANES ..] = rows of `a` times tiles that lie anywhere, `step` elements from one
// input (pair) to the next; asks memory for `next`, tiles that will be wanted soon, if there are.
template <class E, class S, int ROWS, int TILES>
__attribute__((noinline)) void multiply_tiles(const E* a, int64_t a_stride, const S* const* tiles, int64_t step, int steps,
                    const S* const* next, float* out, int64_t out_stride) {
    Floats sums[ROWS][TILES];
    const S *from[TILES], *soon[TILES];
    UNROLL for (int t = 0; t < TILES; t++) {
        from[t] = tiles[t];
        soon[t] = next ? next[t] : nullptr;
        UNROLL for (int r = 0; r < ROWS; r++) sums[r][t] = zeros();
    }
    if (next)
        multiply<E, S, ROWS, TILES>(a, a_stride, from, step, steps, soon, true, sums);
    else
        multiply<E, S, ROWS, TILES>(a, a_stride, from, step, steps, soon, false, sums);
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int t = 0; t < TILES; t++) store(out + r * out_stride + t * LANES, sums[r][t]);
}

// out[row][column] = rows of `a` times groups of `steps` inputs, one after the other in `groups`;
// each group holds all its columns side by side. While it works on a group it asks memory for the
// lines from `next[group]` on, as many as it reads, if there are any.
template <class E, class S, int ROWS, int TILES>
void multiply_groups(const E* a, int64_t a_stride, const S* const* groups, int num_groups,
                     int64_t column, int64_t step, int steps, const S* const* next, float* out,
                     int64_t out_stride) {
    Floats sums[ROWS][TILES];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int t = 0; t < TILES; t++) sums[r][t] = zeros();
    for (int g = 0; g < num_groups; g++, a += steps * PAIR<E>) {
        const S *tiles[TILES], *soon[TILES];
        UNROLL for (int t = 0; t < TILES; t++) {
            tiles[t] = groups[g] + (column + t * LANES) * PAIR<E>;
            soon[t] = next ? next[g] + (column + t * LANES) * PAIR<E> : nullptr;
        }
        if (next)
            multiply<E, S, ROWS, TILES>(a, a_stride, tiles, step, steps, soon, true, sums);
        else
            multiply<E, S, ROWS, TILES>(a, a_stride, tiles, step, steps, soon, false, sums);
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int t = 0; t < TILES; t++)
            store(out + r * out_stride + (column + t * LANES), sums[r][t]);
}

// The same for any number of rows up to MOST_ROWS, picked from a table.
template <class E, class S>
using TilesKernel = void (*)(const E*, int64_t, const S* const*, int64_t, int, const S* const*,
                             float*, int64_t);
template <class E, class S>
using GroupsKernel = void (*)(const E*, int64_t, const S* const*, int, int64_t, int64_t, int,
                              const S* const*, float*, int64_t);

template <class E, class S, int TILES, int... R>
INLINE TilesKernel<E, S> tiles_kernel(int rows, std::integer_sequence<int, R...>) {
    static constexpr TilesKernel<E, S> table[] = {multiply_tiles<E, S, R + 1, TILES>...};
    return table[rows - 1];
}
template <class E, class S, int TILES>
INLINE TilesKernel<E, S> tiles_kernel(int rows) {
    return tiles_kernel<E, S, TILES>(rows, std::make_integer_sequence<int, MOST_ROWS<E, TILES>>{});
}
template <class E, class S, int TILES, int... R>
INLINE GroupsKernel<E, S> groups_kernel(int rows, std::integer_sequence<int, R...>) {
    static constexpr GroupsKernel<E, S> table[] = {multiply_groups<E, S, R + 1, TILES>...};
    return table[rows - 1];
}
template <class E, class S, int TILES>
INLINE GroupsKernel<E, S> groups_kernel(int rows) {
    return groups_kernel<E, S, TILES>(rows, std::make_integer_sequence<int, MOST_ROWS<E, TILES>>{});
}

// `rows` rows times two tiles, or more where rows are few, by what this CPU does it with.
template <class E, class S, int TILES>
INLINE void multiply_rows(int rows, const E* a, int64_t a_stride, const S* const (&tiles)[TILES],
                          int64_t step, int steps, const S* const* next, float* out,
                          int64_t out_stride) {
    if constexpr (amx::IS_BUILT && TILES == 2 && std::is_same_v<E, bf16> && std::is_same_v<S, bf16>)
        if (amx::are_allowed())
            return amx::multiply_tiles(rows, a, a_stride, tiles, step, steps, next, out, out_stride);
    tiles_kernel<E, S, TILES>(rows)(a, a_stride, tiles, step, steps, next, out, out_stride);
}

// The same of groups of LANES tokens, each with all its columns.
template <class E, class S, int TILES>
INLINE void multiply_row_groups(int rows, const E* a, int64_t a_stride, const S* const* groups,
                                int num_groups, int64_t column, int64_t step,
                                const S* const* next, float* out, int64_t out_stride) {
    if constexpr (amx::IS_BUILT && TILES == 2 && std::is_same_v<E, bf16> && std::is_same_v<S, bf16>)
        if (amx::are_allowed())
            return amx::multiply_groups(rows, a, a_stride, groups, num_groups, column, step, next,
                                        out, out_stride);
    groups_kernel<E, S, TILES>(rows)(a, a_stride, groups, num_groups, column, step, LANES / PAIR<E>,
                                     next, out, out_stride);
}

// Rows at a time so that as few as possible are left over: 32 rows by 12 are 11, 11 and 10.
INLINE int even_rows(int rows, int most) {
    const int pieces = (rows + most - 1) / most;
    return (rows + pieces - 1) / pieces;
}
