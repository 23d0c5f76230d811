// What logits weigh. A weight is exp((logit - greatest) / temperature), a mass the weight as a whole
// number of units: sums of whole numbers are exact in any order, so they depend neither on the width
// of this CPU's registers nor on the way the tokens were found.
#pragma once

#include <cmath>

#include "product.h"
#if defined(__AVX__)
#include <immintrin.h>
#endif

typedef double Doubles __attribute__((vector_size(LANES * 4)));
typedef float HalfFloats __attribute__((vector_size(LANES * 2)));
typedef int32_t HalfInts __attribute__((vector_size(LANES * 2)));
typedef int64_t Longs __attribute__((vector_size(LANES * 4)));
constexpr int HALF = LANES / 2;

#if defined(__aarch64__)
#define REGISTER(x) "+w"(x)
#else
#define REGISTER(x) "+x"(x)
#endif

INLINE Floats fused(Floats a, Floats b, Floats c) {  // a * b + c, rounded once where this CPU can
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// e^x for x <= 0, bit for bit what NumPy's float32 `exp` is on a CPU with fused products: the
// constants are those of its `simd_exp_FLOAT`. Below -60 it is e^-60, which has no mass.
INLINE Floats exp_of(Floats x) {
    x = larger(x, fill(-60.f));
    const Floats magic = fill(12582912.f);
    Floats power = x * fill(1.442695040888963407f);
    asm("" : REGISTER(power));  // not fused with the addition
    power = (power + magic) - magic;
    x = fused(power, fill(-6.93145752e-1f), x);
    x = fused(power, fill(-1.42860677e-6f), x);
    Floats above = fused(fill(5.082762527590693718096e-04f), x, fill(6.757896990527504603057e-03f));
    above = fused(above, x, fill(5.114512081637298353406e-02f));
    above = fused(above, x, fill(2.473615434895520810817e-01f));
    above = fused(above, x, fill(7.257664613233124478488e-01f));
    above = fused(above, x, fill(9.999999999980870924916e-01f));
    Floats below = fused(fill(2.159509375685829852307e-02f), x, fill(-2.742335390411667452936e-01f));
    below = fused(below, x, fill(1.f));
    return (Floats)((Ints)(above / below) + (__builtin_convertvector(power, Ints) << 23));
}

INLINE int bits_for(int64_t count) {  // as many as numbers below `count` have
    int bits = 0;
    while (((int64_t)1 << bits) < count) bits++;
    return bits;
}

// ---- masses to draw by: whole numbers in float64, of which a sum has 51 bits

constexpr double ROUNDER = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number

INLINE double units_of(int64_t vocab_size) {  // that a weight of 1 has
    return std::ldexp(1.0, 51 - bits_for(vocab_size));
}

INLINE Doubles masses_of(const float* weights, double units) {
    const Doubles rounder = (Doubles){} + ROUNDER;
    const auto mass = __builtin_convertvector(load_as<HalfFloats>(weights), Doubles) * units;
    return (mass + rounder) - rounder;
}

INLINE double mass_of(float weight, double units) { return (weight * units + ROUNDER) - ROUNDER; }

INLINE double sum_lanes(Doubles v) {  // of whole numbers: exact
    typedef double Quarter __attribute__((vector_size(LANES * 2)));
    Quarter quarters[2];
    memcpy(quarters, &v, sizeof v);
    const Quarter quarter = quarters[0] + quarters[1];
    double sum = quarter[0];
    for (int lane = 1; lane < HALF / 2; lane++) sum += quarter[lane];
    return sum;
}

// ---- lanes chosen by a comparison

INLINE uint32_t bits_of(Ints where) {  // a bit for each lane, the first one lowest
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)where, (__m512i)where);
#elif defined(__AVX__)
    return (uint32_t)_mm256_movemask_ps((__m256)where);
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= (uint32_t)(where[lane] & 1) << lane;
    return bits;
#endif
}

// The lanes that have a bit, side by side; what follows them, up to LANES in all, is overwritten.
INLINE void store_first(void* at, Floats v, uint32_t bits) {
#if defined(__AVX512F__)
    store(at, (Floats)_mm512_maskz_compress_ps((__mmask16)bits, (__m512)v));
#else
    if (!bits) return;
    float all[LANES];
    store(all, v);
    for (int lane = 0, count = 0; lane < LANES; lane++, bits >>= 1) {
        memcpy((float*)at + count, all + lane, sizeof(float));
        count += bits & 1;
    }
#endif
}

INLINE Ints first_ids() {
    Ints ids;
    for (int lane = 0; lane < LANES; lane++) ids[lane] = lane;
    return ids;
}

// Memory laid out piece by piece; from nullptr on, only its size is found out.
class Room {
  public:
    explicit Room(char* memory) : memory_(memory) {}
    template <class T>
    void take(T*& array, int64_t count) {
        array = (T*)(memory_ + bytes_);
        bytes_ += round_up(count * (int64_t)sizeof(T), 64);
    }
    int64_t bytes() const { return bytes_; }

  private:
    char* memory_;
    int64_t bytes_ = 0;
};
