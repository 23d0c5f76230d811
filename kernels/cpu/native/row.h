// A row of logits as its reader sees it: the greatest of every few, and what all of them weigh.
#pragma once

#include <algorithm>

#include "weights.h"

constexpr int64_t SPAN = 64;  // tokens whose greatest logit is remembered

INLINE int64_t padded_row(int64_t vocab_size) { return round_up(vocab_size, LANES) + LANES; }

// The greatest lane; if one is a NaN, any of them.
INLINE float greatest_lane(Floats v) {
    typedef float Quarter __attribute__((vector_size(LANES)));
    HalfFloats halves[2];
    memcpy(halves, &v, sizeof v);
    const HalfFloats half = halves[0] < halves[1] ? halves[1] : halves[0];
    Quarter quarters[2];
    memcpy(quarters, &half, sizeof half);
    const Quarter quarter = quarters[0] < quarters[1] ? quarters[1] : quarters[0];
    float most = quarter[0];
    for (int lane = 1; lane < LANES / 4; lane++) most = quarter[lane] > most ? quarter[lane] : most;
    return most;
}

class Row {
  public:
    Row(int64_t vocab_size, Room& room)
        : size(vocab_size), num_spans((vocab_size + SPAN - 1) / SPAN) {
        room.take(peaks, num_spans);
    }

    // Look at these logits, [size]; false if they are no distribution: if there is a NaN or +inf
    // among them, or none is finite.
    bool read(const float* logits) { return look<false>(logits, nullptr); }

    // The same, with a copy: [size], in memory of `padded_row`.
    bool read_and_copy(const float* logits, float* copy) { return look<true>(logits, copy); }

    Floats at(int64_t i) const { return at(logits_, i); }

    int64_t first_of_peak() const {
        int64_t i = 0;
        while (peaks[i / SPAN] != peak) i += SPAN;
        while (logits_[i] != peak) i++;
        return i;
    }

    // How far the LANES logits from `i` on lie below the greatest: 0 or less, -inf past the end.
    Floats below_peak(int64_t i, float divisor) const {
        Floats x = at(i) - fill(peak);
        if (divisor != 1) x /= fill(divisor);
        return x;
    }

    const int64_t size, num_spans;
    float peak;
    float* peaks;  // [num_spans]

  private:
    Floats at(const float* logits, int64_t i) const {  // -inf past the end
        if (i + LANES <= size) return load(logits + i);
        float all[LANES];
        for (int64_t lane = 0; lane < LANES; lane++)
            all[lane] = i + lane < size ? logits[i + lane] : -INFINITY;
        return load(all);
    }

    template <bool COPIES>
    bool look(const float* logits, float* copy) {
        logits_ = logits;
        Ints is_nan = {};
        Floats all = fill(-INFINITY);
        for (int64_t span = 0; span < num_spans; span++) {
            Floats most = fill(-INFINITY);
            for (int64_t i = span * SPAN, end = std::min(size, i + SPAN); i < end; i += LANES) {
                const Floats v = at(logits, i);
                if (COPIES) store(copy + i, v);
                is_nan |= v != v;
                most = larger(most, v);
            }
            peaks[span] = greatest_lane(most);
            all = larger(all, most);
        }
        peak = greatest_lane(all);
        return std::isfinite(peak) && !bits_of(is_nan);
    }

    const float* logits_;
};
