// What amx_registers.h does, in plain C++: for CPUs that have no matrix registers, so that what is
// built on them can be tried there and under sanitizers. The same numbers bit by bit.
#pragma once

#include "simd.h"

namespace amx {

INLINE bool are_allowed() { return true; }

struct Shapes {
    int bytes_a_row[8] = {}, rows[8] = {};

    void set(int number, int num_rows, int num_bytes) {
        rows[number] = num_rows;
        bytes_a_row[number] = num_bytes;
    }
};

inline thread_local Shapes shapes;
inline thread_local uint32_t registers[8][16][16];  // [register][row][four bytes]

INLINE void give_up() { shapes = {}; }
INLINE void take_shape(const Shapes& wanted) {
    shapes = wanted;
    memset(registers, 0, sizeof registers);
}

template <int N>
INLINE void zero() { memset(registers[N], 0, sizeof registers[N]); }
template <int N>
INLINE void load(const void* at, int64_t stride) {
    for (int r = 0; r < shapes.rows[N]; r++)
        memcpy(registers[N][r], (const char*)at + r * stride, shapes.bytes_a_row[N]);
}
template <int N>
INLINE void load_once(const void* at, int64_t stride) { load<N>(at, stride); }
template <int N>
INLINE void store(void* at, int64_t stride) {
    for (int r = 0; r < shapes.rows[N]; r++)
        memcpy((char*)at + r * stride, registers[N][r], shapes.bytes_a_row[N]);
}

INLINE float from_bits(uint32_t bits) {  // numbers too small to be normal are zeros
    float x;
    memcpy(&x, &bits, 4);
    return std::fpclassify(x) == FP_SUBNORMAL ? 0.f : x;
}
INLINE float normal(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.f : x; }

// All first ones of pairs are one chain of fused products, all second ones another.
template <int SUMS, int INPUTS, int WEIGHTS>
INLINE void dot() {
    const int steps = shapes.bytes_a_row[INPUTS] / 4;
    for (int r = 0; r < shapes.rows[SUMS]; r++)
        for (int n = 0; n < shapes.bytes_a_row[SUMS] / 4; n++) {
            float chains[2] = {0, 0};
            for (int k = 0; k < steps; k++) {
                const uint32_t a = registers[INPUTS][r][k], b = registers[WEIGHTS][k][n];
                chains[0] = normal(std::fma(from_bits(a << 16), from_bits(b << 16), chains[0]));
                chains[1] = normal(std::fma(from_bits(a & 0xffff0000u), from_bits(b & 0xffff0000u), chains[1]));
            }
            const float sum = normal(from_bits(registers[SUMS][r][n]) + normal(chains[0] + chains[1]));
            memcpy(&registers[SUMS][r][n], &sum, 4);
        }
}

}  // namespace amx
