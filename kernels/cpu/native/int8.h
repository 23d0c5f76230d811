// int8 and its scales: a number is its int8 times the scale of its output of a matrix, of its key or
// value, or of its GROUP of a row's inputs.
#pragma once

#include <algorithm>

#include "kernels.h"

constexpr float MOST_INT8 = 127.f;
constexpr int GROUP = 64;  // inputs that share a scale: few have a large neighbour that spoils it

struct Scale {  // of a group
    float scale;
    int32_t excess;  // what INT8_OFFSET adds to its sums
};

INLINE Floats to_floats(Ints v) {
#if defined(__AVX512F__)  // compilers make sixteen conversions of what is one
    return (Floats)_mm512_cvtepi32_ps((__m512i)v);
#else
    return __builtin_convertvector(v, Floats);
#endif
}

// max|x|; NaN if there is a NaN or an infinity.
template <class E>
INLINE float largest(const E* x, int64_t size) {
    Ints most = {};  // as whole numbers, the bits of NaN and infinity are above all others
    for (int64_t i = 0; i < size; i += LANES) {
        const Ints v = (Ints)load_first(x + i, (int)std::min<int64_t>(size - i, LANES)) & 0x7fffffff;
        most = most < v ? v : most;
    }
    int32_t part[LANES];
    memcpy(part, &most, sizeof most);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = std::max(part[i], part[i + half]);
    float found;
    memcpy(&found, part, sizeof found);
    return part[0] >= 0x7f800000 ? NAN : found;
}

INLINE Ints scaled(Floats v, float scale) {
    const Floats magic = fill(12582912.f);  // adding 1.5 * 2^23 rounds to whole numbers, ties to even
    Floats q = (v / fill(scale) + magic) - magic;
    q = larger(smaller(q, fill(MOST_INT8)), fill(-MOST_INT8));
    if (!(scale > 0)) q = zeros();
    return __builtin_convertvector(q, Ints);
}
INLINE void put_bytes(int8_t* at, Ints v) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v);
#else
    const Bytes bytes = __builtin_convertvector(v, Bytes);
#endif
    memcpy(at, &bytes, sizeof bytes);
}
INLINE void put_scaled(int8_t* at, Floats v, float scale) { put_bytes(at, scaled(v, scale)); }

// One output's weights as int8; returns their scale, max|w| / 127: 0 for zeros, NaN if there is a NaN
// or an infinity. `whole` has room for a whole number of LANES.
template <class E>
__attribute__((noinline)) float weights_to_int8(const E* weights, int64_t size, int8_t* whole) {
    const float scale = largest(weights, size) / MOST_INT8;
    for (int64_t i = 0; i < size; i += LANES)
        put_scaled(whole + i, load_first(weights + i, (int)std::min<int64_t>(size - i, LANES)), scale);
    return scale;
}

// A row as int8, filled up with zeros to whole groups, each with a scale made of it alone.
template <class E>
__attribute__((noinline)) void row_to_int8(const E* x, int64_t size, q8* whole, Scale* scales) {
    for (int64_t first = 0; first < size; first += GROUP, scales++) {
        const int64_t count = std::min<int64_t>(size - first, GROUP);
        scales->scale = largest(x + first, count) / MOST_INT8;
        Ints sums = {};
        for (int64_t i = 0; i < GROUP; i += LANES) {
            const int lanes = (int)std::clamp<int64_t>(count - i, 0, LANES);
            const Ints v = scaled(load_first(x + first + i, lanes), scales->scale);
            put_bytes((int8_t*)whole + first + i, v);
            sums += v;
        }
        scales->excess = INT8_OFFSET == 0 ? 0 : INT8_OFFSET * (int32_t)sum_lanes(to_floats(sums));
    }
}

// out[row][tile * LANES ..] = rows in int8 times two tiles, but for the scales of the outputs. Sums
// of a group are whole numbers, exact; those of groups are added in their order.
template <int ROWS>
void multiply_int8(const q8* a, int64_t a_stride, const Scale* scales, const q8* const* tiles, int steps,
                   const q8* const* next, float* out) {
    constexpr int STEPS = GROUP / PAIR<q8>, STEP = LANES * PAIR<q8>;
    const int64_t groups = a_stride / GROUP;
    UNROLL for (int i = 0; i < ROWS * 2; i++) store(out + i * LANES, zeros());
    for (int first = 0; first < steps; first += STEPS, a += GROUP, scales++) {
        const int64_t at = (int64_t)first * STEP;
        const q8* const from[2] = {tiles[0] + at, tiles[1] + at};
        const q8* const soon[2] = {next ? next[0] + at : nullptr, next ? next[1] + at : nullptr};
        const int count = std::min(steps - first, STEPS);
        Floats sums[ROWS][2];
        UNROLL for (int r = 0; r < ROWS; r++)
            sums[r][0] = sums[r][1] = (Floats)((Ints){} - scales[r * groups].excess);
        if (next)
            multiply<q8, q8, ROWS, 2>(a, a_stride, from, STEP, count, soon, true, sums);
        else
            multiply<q8, q8, ROWS, 2>(a, a_stride, from, STEP, count, soon, false, sums);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const Floats scale = fill(scales[r * groups].scale);
            UNROLL for (int t = 0; t < 2; t++) {
                float* to = out + (r * 2 + t) * LANES;
                store(to, load(to) + to_floats((Ints)sums[r][t]) * scale);
            }
        }
    }
}

// The same for any number of rows up to MOST_ROWS, picked from a table.
using Int8Kernel = void (*)(const q8*, int64_t, const Scale*, const q8* const*, int, const q8* const*,
                            float*);
template <int... R>
INLINE Int8Kernel int8_kernel(int rows, std::integer_sequence<int, R...>) {
    static constexpr Int8Kernel table[] = {multiply_int8<R + 1>...};
    return table[rows - 1];
}
INLINE Int8Kernel int8_kernel(int rows) {
    return int8_kernel(rows, std::make_integer_sequence<int, MOST_ROWS<q8, 2>>{});
}
