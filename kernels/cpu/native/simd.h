// Rows of numbers as wide as this CPU's registers, and all that is done with them: loads, stores,
// bfloat16, the dot product of pairs, 2^x. Everything above this file is the same for every CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int REGISTERS = 32;
#else
constexpr int LANES = 4;
constexpr int REGISTERS = 16;
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool DOTS_BF16 = true;  // products of bfloat16 pairs are one instruction
#else
constexpr bool DOTS_BF16 = false;  // pairs are widened to float32 first
#endif

// Sums of products of four int8 at a time. Where the CPU has one instruction for it that takes one of
// the two unsigned, weights are kept greater by INT8_OFFSET.
#if (defined(__AVX512VNNI__) && defined(__AVX512F__)) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool DOTS_INT8 = true;
constexpr int INT8_OFFSET = 128;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr bool DOTS_INT8 = true;
constexpr int INT8_OFFSET = 0;
#else
constexpr bool DOTS_INT8 = false;
constexpr int INT8_OFFSET = 0;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

struct bf16 {
    uint16_t bits;
};
struct q8 {  // a whole number that stands for itself times a scale kept elsewhere
    int8_t bits;
};

// A lane of a weight register holds one float32, or two bfloat16 or four q8 that are multiplied
// together.
template <class E>
constexpr int PAIR = 4 / sizeof(E);

#define INLINE static inline __attribute__((always_inline))

template <class V>
INLINE V load_as(const void* at) {
    V v;
    memcpy(&v, at, sizeof v);
    return v;
}
INLINE void store(void* at, Floats v) { memcpy(at, &v, sizeof v); }

INLINE Floats fill(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (Floats)((Words){} + bits);
}
INLINE Floats zeros() { return (Floats){}; }

INLINE Floats choose(Ints where, Floats yes, Floats no) { return where ? yes : no; }
// One instruction each, written so; NaN in `a` stays.
INLINE Floats larger(Floats a, Floats b) { return a < b ? b : a; }
INLINE Floats smaller(Floats a, Floats b) { return a > b ? b : a; }

INLINE Ints first_lanes(int count) {
    Ints places;
    for (int i = 0; i < LANES; i++) places[i] = i;
    return places < ((Ints){} + count);
}

// Sum and maximum over the lanes, always in this order.
INLINE float sum_lanes(Floats v) {
    float part[LANES];
    memcpy(part, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}
INLINE float max_lanes(Floats v) {
    float part[LANES];
    memcpy(part, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            if (part[i] < part[i + half]) part[i] = part[i + half];
    return part[0];
}

// ---- float32 and bfloat16 in memory, float32 in registers

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
INLINE Words rounded_to_bf16(Words bits) {  // to the nearest, ties to even; NaN stays NaN
    Words up = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Words is_nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
    return (up & ~is_nan) | (((bits >> 16) | 0x40u) & is_nan);
}
INLINE Floats load(const float* at) { return load_as<Floats>(at); }
INLINE Floats load(const bf16* at) {
    return (Floats)(__builtin_convertvector(load_as<Halves>(at), Words) << 16);
}
INLINE Floats load(const int8_t* at) {
#if defined(__AVX512F__)  // compilers make sixteen conversions of what is one
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(at)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#else
    return __builtin_convertvector(__builtin_convertvector(load_as<Bytes>(at), Ints), Floats);
#endif
}
INLINE void put(float* at, Floats v) { store(at, v); }
INLINE void put(bf16* at, Floats v) {
#if defined(__AVX512BF16__)
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
    memcpy(at, &narrow, sizeof narrow);
#else
    Halves narrow = __builtin_convertvector(rounded_to_bf16((Words)v), Halves);
    memcpy(at, &narrow, sizeof narrow);
#endif
}
template <class E>
INLINE void put_first(E* at, Floats v, int count) {  // `count` lanes
    if (count >= LANES) return put(at, v);
    E all[LANES];
    put(all, v);
    memcpy(at, all, count * sizeof(E));
}
template <class E>
INLINE Floats load_first(const E* at, int count) {  // `count` lanes, zeros after them
    if (count >= LANES) return load(at);
    E all[LANES] = {};
    memcpy(all, at, count * sizeof(E));
    return load(all);
}

// ---- the dot product: sums + inputs * weights, a pair at a time in bfloat16

INLINE Floats spread(const float* at) { return (Floats)((Words){} + load_as<uint32_t>(at)); }
INLINE Floats spread(const bf16* at) { return (Floats)((Words){} + load_as<uint32_t>(at)); }
INLINE Floats spread(const q8* at) { return (Floats)((Words){} + load_as<uint32_t>(at)); }

// Pairs of int16 side by side, multiplied and added.
INLINE Ints dot_int16(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return ((Ints)a << 16 >> 16) * ((Ints)b << 16 >> 16) + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

// Exact in whatever order, as long as the sums stay within int32.
INLINE Ints dot_int8(Ints sums, Ints inputs, Ints weights) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)inputs);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)inputs, (int8x16_t)weights);
#else  // maddubs would be one instruction, but ends at int16
    const Shorts even[2] = {(Shorts)inputs << 8 >> 8, (Shorts)weights << 8 >> 8};
    const Shorts odd[2] = {(Shorts)inputs >> 8, (Shorts)weights >> 8};
    return sums + dot_int16(even[0], even[1]) + dot_int16(odd[0], odd[1]);
#endif
}

// Sums of q8 are int32, in the bits of a float register.
template <class E>
INLINE Floats dot(Floats sums, Floats inputs, Floats weights) {
    if constexpr (PAIR<E> == 1) {
        return sums + inputs * weights;
    } else if constexpr (PAIR<E> == 4) {
        return (Floats)dot_int8((Ints)sums, (Ints)inputs, (Ints)weights);
    } else {
#if defined(__AVX512BF16__)
        return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)inputs, (__m512bh)weights);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        return (Floats)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)inputs, (bfloat16x8_t)weights);
#else
        const Floats low = (Floats)((Words)inputs << 16) * (Floats)((Words)weights << 16);
        const Floats high = (Floats)((Words)inputs & 0xffff0000u);
        return sums + low + high * (Floats)((Words)weights & 0xffff0000u);
#endif
    }
}

// Weights as `dot<E>` takes them, from numbers stored as E or smaller. Whole numbers up to 256, so
// all of int8, are exact in bfloat16.
template <class E, class S>
INLINE Floats load_weights(const S* at) {
    if constexpr (std::is_same_v<E, S>) {
        return load_as<Floats>(at);
    } else if constexpr (PAIR<E> == 1) {
        return load(at);
    } else {
#if defined(__AVX512BF16__)
        return (Floats)_mm512_cvtne2ps_pbh((__m512)load(at + LANES), (__m512)load(at));
#else
        const Ints pairs = (Ints)__builtin_convertvector(load_as<Halves>(at), Words);
        const Words low = (Words)__builtin_convertvector(pairs << 24 >> 24, Floats);
        const Words high = (Words)__builtin_convertvector(pairs << 16 >> 24, Floats);
        return (Floats)(low >> 16 | (high & 0xffff0000u));
#endif
    }
}

// ---- 2^x, to about 1e-7; NaN stays NaN, everything below 2^-126 becomes about that

INLINE Floats exp2_of(Floats x) {
    x = smaller(larger(x, fill(-126.f)), fill(126.f));
    const Floats magic = fill(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats whole = (x + magic) - magic;
    const Floats f = x - whole;
    Floats p = fill(1.535336188e-4f);  // Cephes, exp2f
    p = p * f + fill(1.339887440e-3f);
    p = p * f + fill(9.618437357e-3f);
    p = p * f + fill(5.550332471e-2f);
    p = p * f + fill(2.402264791e-1f);
    p = p * f + fill(6.931472028e-1f);
    p = p * f + fill(1.f);
    return (Floats)((Ints)p + (__builtin_convertvector(whole, Ints) << 23));
}
constexpr float LOG2_E = 1.44269504f;

INLINE float exp2_of(float x) { return exp2_of(fill(x))[0]; }
