// Products by matrix registers (Intel AMX): up to sixteen rows of bfloat16 inputs times the sixteen
// outputs of a tile, thirty-two inputs at a time. Sixteen steps of a tile are a register, as they lie.
//
// A register's sums are made in an order of their own, the same for every row whatever the rows
// beside it. So where they are used they are used for every number of rows, one included.
#pragma once

#include "simd.h"

#if defined(__AVX512F__) && defined(SPLITFLAP_PLAIN_REGISTERS)
#define SPLITFLAP_HAS_REGISTERS
#include "plain_registers.h"
#elif defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define SPLITFLAP_HAS_REGISTERS
#include "amx_registers.h"
#endif

namespace amx {

#if !defined(SPLITFLAP_HAS_REGISTERS)

constexpr bool IS_BUILT = false;
constexpr int SHORT = 1, MOST_ROWS = 1;
INLINE bool are_allowed() { return false; }
INLINE void release() {}
template <class... Arguments>
void multiply_tiles(Arguments...) {}
template <class... Arguments>
void multiply_groups(Arguments...) {}

#else

constexpr bool IS_BUILT = true;
constexpr int SHORT = 16;      // rows of one register
constexpr int MOST_ROWS = 32;  // of two
constexpr int STEPS = 16;      // pairs of inputs in a register
constexpr int FEW = 8;         // pairs of tokens in a group of keys and values

inline thread_local int shaped_for = 0;  // 2 * rows, 1 more for FEW steps; 0: registers are given up

// Up to SHORT rows: 0, 1 are sums; 2 inputs, 3, 4 weights of STEPS; 5 inputs, 6, 7 weights of FEW.
// More rows: 0 to 3 are sums; 4, 5 inputs, 6, 7 weights of `steps`.
INLINE void shape(int rows, int steps) {
    const int wanted = rows * 2 + (rows > SHORT && steps == FEW);
    if (shaped_for == wanted) return;
    shaped_for = wanted;
    Shapes shapes;
    if (rows <= SHORT) {
        for (int n : {0, 1, 2}) shapes.set(n, rows, 64);
        for (int n : {3, 4}) shapes.set(n, STEPS, 64);
        shapes.set(5, rows, 4 * FEW);
        for (int n : {6, 7}) shapes.set(n, FEW, 64);
    } else {
        const int upper = rows / 2, lower = rows - upper;
        for (int n : {0, 1}) shapes.set(n, upper, 64);
        for (int n : {2, 3}) shapes.set(n, lower, 64);
        shapes.set(4, upper, 4 * steps);
        shapes.set(5, lower, 4 * steps);
        for (int n : {6, 7}) shapes.set(n, steps, 64);
    }
    take_shape(shapes);
}

// Before a thread rests: what registers hold would be saved at every change of threads.
INLINE void release() {
    if (!shaped_for) return;
    shaped_for = 0;
    give_up();
}

INLINE void begin(int rows, int steps) {
    shape(rows, steps);
    zero<0>();
    zero<1>();
    if (rows <= SHORT) return;
    zero<2>();
    zero<3>();
}

// Adds COUNT steps of all rows times two tiles to the sums.
template <int COUNT>
INLINE void add(int rows, const bf16* a, int64_t a_stride, const bf16* first, const bf16* second,
                int64_t step) {
    if (rows <= SHORT) {
        constexpr int INPUTS = COUNT == STEPS ? 2 : 5, WEIGHTS = COUNT == STEPS ? 3 : 6;
        load<INPUTS>(a, a_stride * 2);
        load<WEIGHTS>(first, step * 2);
        dot<0, INPUTS, WEIGHTS>();
        load<WEIGHTS + 1>(second, step * 2);
        dot<1, INPUTS, WEIGHTS + 1>();
        return;
    }
    load_once<4>(a, a_stride * 2);
    load<6>(first, step * 2);
    dot<0, 4, 6>();
    load<7>(second, step * 2);
    dot<1, 4, 7>();
    load_once<5>(a + rows / 2 * a_stride, a_stride * 2);
    dot<2, 5, 6>();
    dot<3, 5, 7>();
}

INLINE void keep(int rows, float* out, int64_t out_stride) {
    store<0>(out, out_stride * 4);
    store<1>(out + LANES, out_stride * 4);
    if (rows <= SHORT) return;
    float* lower = out + rows / 2 * out_stride;
    store<2>(lower, out_stride * 4);
    store<3>(lower + LANES, out_stride * 4);
}

INLINE void fetch(const bf16* const (&soon)[2], int64_t step, int steps) {
    for (int k = 0; k < steps; k++)
        for (int t = 0; t < 2; t++) __builtin_prefetch(soon[t] + k * step, 0, 2);
}

// What `multiply_tiles` of kernels.h does, for up to MOST_ROWS rows and two tiles: whole registers
// of inputs, then the steps left over one by one.
__attribute__((noinline)) inline void multiply_tiles(int rows, const bf16* a, int64_t a_stride,
                                                     const bf16* const* tiles, int64_t step,
                                                     int steps, const bf16* const* next, float* out,
                                                     int64_t out_stride) {
    const bf16 *first = tiles[0], *second = tiles[1];
    const bf16* soon[2] = {next ? next[0] : nullptr, next ? next[1] : nullptr};
    const int whole = steps / STEPS * STEPS;
    begin(rows, STEPS);
    for (int k = 0; k < whole; k += STEPS) {
        add<STEPS>(rows, a + k * 2, a_stride, first + k * step, second + k * step, step);
        if (!next) continue;
        fetch(soon, step, STEPS);
        for (int t = 0; t < 2; t++) soon[t] += STEPS * step;
    }
    keep(rows, out, out_stride);
    if (whole == steps) return;
    if (next) fetch(soon, step, steps - whole);
    for (int r = 0; r < rows; r++, a += a_stride, out += out_stride) {
        Floats sums[2] = {::load(out), ::load(out + LANES)};
        for (int k = whole; k < steps; k++) {
            const Floats inputs = spread(a + k * 2);
            sums[0] = ::dot<bf16>(sums[0], inputs, load_as<Floats>(first + k * step));
            sums[1] = ::dot<bf16>(sums[1], inputs, load_as<Floats>(second + k * step));
        }
        ::store(out, sums[0]);
        ::store(out + LANES, sums[1]);
    }
}

// What `multiply_groups` of kernels.h does, for up to MOST_ROWS rows and two tiles.
__attribute__((noinline)) inline void multiply_groups(int rows, const bf16* a, int64_t a_stride,
                                                      const bf16* const* groups, int num_groups,
                                                      int64_t column, int64_t step,
                                                      const bf16* const* next, float* out,
                                                      int64_t out_stride) {
    begin(rows, FEW);
    for (int g = 0; g < num_groups; g++, a += FEW * 2) {
        const bf16* at = groups[g] + column * 2;
        add<FEW>(rows, a, a_stride, at, at + LANES * 2, step);
        if (!next) continue;
        const bf16* soon[2] = {next[g] + column * 2, next[g] + (column + LANES) * 2};
        fetch(soon, step, FEW);
    }
    keep(rows, out + column, out_stride);
}

#endif

}  // namespace amx
