// int8 and its scales: a number is its int8 times the scale of its row, the same for a whole key, value,
// activation or output of a matrix.
#pragma once

#include <algorithm>

#include "kernels.h"

constexpr float MOST_INT8 = 127.f;

INLINE float to_float(q8 x) { return x.bits; }

INLINE Floats to_floats(Ints v) {
#if defined(__AVX512F__)  // compilers make sixteen conversions of what is one
    return (Floats)_mm512_cvtepi32_ps((__m512i)v);
#else
    return __builtin_convertvector(v, Floats);
#endif
}

// max|x|; NaN if there is a NaN or an infinity.
template <class E>
__attribute__((noinline)) float largest(const E* x, int64_t size) {
    Floats most = zeros(), wrong = zeros();
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats v = load_first(x + i, (int)std::min<int64_t>(size - i, LANES));
        most = larger(most, (Floats)((Words)v & 0x7fffffffu));
        wrong = wrong + v * zeros();
    }
    return sum_lanes(wrong) != 0 ? NAN : max_lanes(most);
}

INLINE void put_scaled(int8_t* at, Floats v, float scale) {
    const Floats magic = fill(12582912.f);  // adding 1.5 * 2^23 rounds to whole numbers, ties to even
    Floats q = (v / fill(scale) + magic) - magic;
    q = larger(choose(q > fill(MOST_INT8), fill(MOST_INT8), q), fill(-MOST_INT8));
    if (!(scale > 0)) q = zeros();
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(q, Ints), Bytes);
    memcpy(at, &bytes, sizeof bytes);
}

// A row as whole numbers, each greater by OFFSET; returns its scale, max|x| / 127: 0 for zeros, NaN
// for a row with a NaN or an infinity. Writes up to a whole number of LANES.
template <int OFFSET, class E>  // 0 or 128
float to_int8(const E* x, int64_t size, q8* whole) {
    const float scale = largest(x, size) / MOST_INT8;
    for (int64_t i = 0; i < size; i += LANES) {
        int8_t row[LANES];
        put_scaled(row, load_first(x + i, (int)std::min<int64_t>(size - i, LANES)), scale);
        const Bytes stored = load_as<Bytes>(row) ^ (int8_t)OFFSET;  // 128 more is the top bit turned
        memcpy(whole + i, &stored, sizeof stored);
    }
    return scale;
}
