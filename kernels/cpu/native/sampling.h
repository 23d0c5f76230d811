// From logits to tokens: greedy, or one number of the dice through the inverse of the kept mass.
// services/executor/sampler.py says what is drawn; this says it again, fast, and draws the same.
//
// A weight is exp((logit - greatest) / temperature), a mass the weight as a whole number of units.
// Sums of whole numbers up to 2^51 are exact in any order, so a draw depends neither on the width
// of this CPU's registers nor on the way its tokens were found.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "product.h"
#if defined(__AVX__)
#include <immintrin.h>
#endif

struct Draw {
    const float* logits;  // [vocab_size]
    double die;           // in [0, 1)
    double top_p;         // 1: all
    int64_t top_k;        // 0: all
    float temperature;    // 0: greedy
    float min_p;          // 0: all
};

constexpr int64_t NOTHING_TO_DRAW = -1;  // a NaN or +inf among the logits, or no finite one
constexpr int64_t SPAN = 64;             // tokens whose greatest logit is remembered
constexpr int BINS = 1024;
constexpr int64_t FEW = 128;             // so many are sorted at once
constexpr double ROUNDER = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number

typedef double Doubles __attribute__((vector_size(LANES * 4)));
typedef float HalfFloats __attribute__((vector_size(LANES * 2)));

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

// A row as a draw sees it, in memory of its thread's own.
class Sampling {
  public:
    static int64_t bytes(int64_t vocab_size) {
        const int64_t size = round_up(vocab_size, LANES) + LANES;
        const int64_t of_token = 2 * sizeof(float) + sizeof(double) + 2 * sizeof(int32_t) + sizeof(int16_t) + 1;
        const int64_t of_span = 2 * sizeof(float) + sizeof(double);
        return round_up(size * of_token + (size / SPAN + 1) * of_span + 10 * 64, 64);
    }

    Sampling(int64_t vocab_size, char* memory) : size_(vocab_size) {
        const int64_t size = round_up(vocab_size, LANES) + LANES;
        num_spans_ = (vocab_size + SPAN - 1) / SPAN;
        take(memory, masses_, size);
        take(memory, span_masses_, num_spans_);
        take(memory, weights_, size);
        take(memory, logits_, size);
        take(memory, peaks_, num_spans_);
        take(memory, order_, num_spans_);
        take(memory, ids_, size);
        take(memory, edge_, size);
        take(memory, bins_, size);
        take(memory, kept_, size);
        int bits = 0;
        while (((int64_t)1 << bits) < vocab_size) bits++;
        units_ = std::ldexp(1.0, 51 - bits);
    }

    int64_t draw(const Draw& draw) {
        row_ = draw.logits;
        if (!find_peak()) return NOTHING_TO_DRAW;
        if (draw.temperature == 0) return first_of_peak();
        divisor_ = std::max(draw.temperature, FLT_MIN);
        const bool has_top_k = 0 < draw.top_k && draw.top_k < size_;
        if (!has_top_k && draw.top_p >= 1) return draw_from_all(draw);
        return draw_in_order(draw, has_top_k ? draw.top_k : 0);
    }

  private:
    template <class T>
    static void take(char*& memory, T*& array, int64_t count) {
        array = (T*)memory;
        memory += round_up(count * (int64_t)sizeof(T), 64);
    }

    Floats row_at(int64_t i) const {  // -inf past the end
        if (i + LANES <= size_) return load(row_ + i);
        float all[LANES];
        for (int64_t lane = 0; lane < LANES; lane++)
            all[lane] = i + lane < size_ ? row_[i + lane] : -INFINITY;
        return load(all);
    }

    // The greatest logit of each span, and of all; false if nothing can be drawn from the row.
    bool find_peak() {
        Ints is_nan = {};
        Floats all = fill(-INFINITY);
        for (int64_t span = 0; span < num_spans_; span++) {
            Floats most = fill(-INFINITY);
            for (int64_t i = span * SPAN, end = std::min(size_, i + SPAN); i < end; i += LANES) {
                const Floats v = row_at(i);
                is_nan |= v != v;
                most = larger(most, v);
            }
            peaks_[span] = max_lanes(most);
            all = larger(all, most);
        }
        peak_ = max_lanes(all);
        return std::isfinite(peak_) && max_lanes(choose(is_nan, fill(1), zeros())) == 0;
    }

    int64_t first_of_peak() const {
        int64_t i = 0;
        while (peaks_[i / SPAN] != peak_) i += SPAN;
        while (row_[i] != peak_) i++;
        return i;
    }

    // ---- weights and masses

    // Weights of the tokens of a span; tokens past the end have none.
    void weigh(int64_t first, int64_t end, float min_p, float* weights) const {
        const Floats peak = fill(peak_), divisor = fill(divisor_), least = fill(min_p);
        for (int64_t i = first; i < end; i += LANES) {
            Floats x = row_at(i) - peak;
            if (divisor_ != 1) x /= divisor;
            const Floats weight = exp_of(x);
            store(weights + (i - first), choose(weight >= least, weight, zeros()));
        }
    }

    double mass_of(float weight) const { return (weight * units_ + ROUNDER) - ROUNDER; }

    double mass_of(const float* weights, int64_t count) const {
        constexpr int64_t HALF = LANES / 2;
        Doubles sums[2] = {};
        const Doubles rounder = (Doubles){} + ROUNDER;
        for (int64_t i = 0; i < count; i += LANES)
            for (int half = 0; half < 2; half++) {
                const auto some = load_as<HalfFloats>(weights + i + half * HALF);
                const Doubles mass = __builtin_convertvector(some, Doubles) * units_;
                sums[half] += (mass + rounder) - rounder;
            }
        double sum = 0;
        for (int lane = 0; lane < HALF; lane++) sum += sums[0][lane] + sums[1][lane];
        return sum;
    }

    // Where the die falls: so many units come before the token that is drawn.
    static double fall(double die, double total) {
        return std::min(std::floor(die * total), total - 1);
    }

    // ---- without top-k and top-p no order is needed

    int64_t draw_from_all(const Draw& draw) {
        float weights[SPAN];
        double total = 0;
        for (int64_t span = 0; span < num_spans_; span++) {
            const int64_t first = span * SPAN, end = std::min(size_, first + SPAN);
            weigh(first, end, draw.min_p, weights);
            total += span_masses_[span] = mass_of(weights, end - first);
        }
        double before = fall(draw.die, total);
        int64_t span = 0;
        while (span_masses_[span] <= before) before -= span_masses_[span++];
        const int64_t first = span * SPAN;
        weigh(first, std::min(size_, first + SPAN), draw.min_p, weights);
        int64_t i = 0;
        while (mass_of(weights[i]) <= before) before -= mass_of(weights[i++]);
        return first + i;
    }

    // ---- with them, only the tokens near the greatest logit are looked at

    int64_t draw_in_order(const Draw& draw, int64_t top_k) {
        double total = 0;
        if (top_k) {
            gather_most_likely(top_k);
            if (count_ > top_k) {
                select(top_k, [](int64_t) { return 1.0; });
                drop_the_rest();
            }
            for (int64_t i = 0; i < count_; i++) total += masses_[i];
        } else {
            total = gather_mass(draw.top_p);
        }
        if (draw.top_p < 1) {
            select(std::ceil(draw.top_p * total), [this](int64_t i) { return masses_[i]; });
            drop_the_rest();
        }
        total = 0;
        for (int64_t i = 0; i < count_; i++) {
            if (weights_[i] < draw.min_p) masses_[i] = 0;
            total += masses_[i];
        }
        double before = fall(draw.die, total);
        int64_t i = 0;
        while (masses_[i] <= before) before -= masses_[i++];
        return ids_[i];
    }

    // As candidates: tokens that reach the `top_k`-th greatest of the spans' greatest, which are
    // `top_k` at least; with more than there are spans, all.
    void gather_most_likely(int64_t top_k) {
        float least = -FLT_MAX;
        if (top_k <= num_spans_) {
            std::copy(peaks_, peaks_ + num_spans_, order_);
            std::nth_element(order_, order_ + (top_k - 1), order_ + num_spans_,
                             [](float a, float b) { return a > b; });
            least = std::max(least, order_[top_k - 1]);
        }
        gather<false>(least);
    }

    // As candidates: tokens that have at least this share of the mass, and the greatest logits.
    // Returns the mass of all.
    double gather_mass(double share) {
        weigh(0, size_, 0, weights_);
        double total = 0;
        for (int64_t span = 0; span < num_spans_; span++) {
            const int64_t first = span * SPAN;
            total += span_masses_[span] =
                mass_of(weights_ + first, round_up(std::min(size_ - first, SPAN), LANES));
        }
        const double wanted = share * total;
        float least = -FLT_MAX;
        for (double depth : {4, 8, 16}) {
            const float near = (float)std::max(peak_ - depth * divisor_, -(double)FLT_MAX);
            if (mass_above(near) < wanted) continue;
            least = near;
            break;
        }
        gather<true>(least);
        return total;
    }

    // Mass of the tokens whose logits reach `least`, from all weights.
    double mass_above(float least) const {
        float weights[SPAN];
        double mass = 0;
        for (int64_t span = 0; span < num_spans_; span++) {
            if (peaks_[span] < least) continue;
            const int64_t first = span * SPAN, end = std::min(size_, first + SPAN);
            for (int64_t i = first; i < end; i += LANES)
                store(weights + (i - first),
                      choose(row_at(i) >= fill(least), load(weights_ + i), zeros()));
            mass += mass_of(weights, round_up(end - first, LANES));
        }
        return mass;
    }

    // The tokens whose logits reach `least`, by id. `IS_WEIGHED`: all weights are there already.
    template <bool IS_WEIGHED>
    void gather(float least) {
        int64_t count = 0;
        Ints first_ids;
        for (int lane = 0; lane < LANES; lane++) first_ids[lane] = lane;
        for (int64_t span = 0; span < num_spans_; span++) {
            if (peaks_[span] < least) continue;
            const int64_t first = span * SPAN, end = std::min(size_, first + SPAN);
            for (int64_t i = first; i < end; i += LANES) {
                const Floats logits = row_at(i);
                const uint32_t bits = bits_of(logits >= fill(least));
                const Ints ids = first_ids + (int32_t)i;
                store_first(ids_ + count, (Floats)ids, bits);
                store_first(logits_ + count, logits, bits);
                if (IS_WEIGHED) store_first(weights_ + count, load(weights_ + i), bits);
                count += __builtin_popcount(bits);
            }
        }
        count_ = count;
        const Floats peak = fill(peak_), divisor = fill(divisor_);
        for (int64_t i = 0; !IS_WEIGHED && i < count_; i += LANES)
            store(weights_ + i, exp_of((load(logits_ + i) - peak) / divisor));
        for (int64_t i = 0; i < count_; i++) masses_[i] = mass_of(weights_[i]);
    }

    // Marks the fewest greatest candidates whose amounts sum up to `wanted`; of equal logits the
    // one with the smaller id comes first. Candidates are put into bins, by logit, so that only
    // the bin in which the sum reaches what is wanted has to be looked into again.
    template <class Amount>
    void select(double wanted, Amount amount) {
        std::fill(kept_, kept_ + count_, 0);
        int64_t count = count_;
        for (int64_t i = 0; i < count; i++) edge_[i] = (int32_t)i;
        while (count > FEW) {
            float greatest = -INFINITY, smallest = INFINITY;
            for (int64_t i = 0; i < count; i++) {
                const float logit = logits_[edge_[i]];
                greatest = logit > greatest ? logit : greatest;
                smallest = logit < smallest ? logit : smallest;
            }
            const double most = greatest, least = smallest;
            if (most == least) break;  // all equal: their order is that of their ids
            const double scale = BINS / (most - least);
            double amounts[BINS] = {};
            for (int64_t i = 0; i < count; i++) {
                const auto bin = (int)((most - logits_[edge_[i]]) * scale);
                bins_[i] = (int16_t)std::min(bin, BINS - 1);
                amounts[bins_[i]] += amount(edge_[i]);
            }
            int crossing = 0;
            while (crossing < BINS - 1 && amounts[crossing] < wanted) wanted -= amounts[crossing++];
            int64_t left = 0;
            for (int64_t i = 0; i < count; i++) {
                const int32_t candidate = edge_[i];
                kept_[candidate] = bins_[i] < crossing;
                edge_[left] = candidate;
                left += bins_[i] == crossing;
            }
            count = left;
        }
        if (count <= FEW)
            std::sort(edge_, edge_ + count, [this](int32_t a, int32_t b) {
                return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b;
            });
        double sum = 0;
        for (int64_t i = 0; i < count; i++) {
            kept_[edge_[i]] = 1;
            if ((sum += amount(edge_[i])) >= wanted) break;
        }
    }

    void drop_the_rest() {
        int64_t count = 0;
        for (int64_t i = 0; i < count_; i++) {
            ids_[count] = ids_[i];
            logits_[count] = logits_[i];
            weights_[count] = weights_[i];
            masses_[count] = masses_[i];
            count += kept_[i];
        }
        count_ = count;
    }

    const int64_t size_;
    int64_t num_spans_;
    double units_;  // of mass, that a weight of 1 has
    const float* row_;
    float peak_, divisor_;
    float *peaks_, *order_;  // of each span the greatest logit; room to put them in order
    double* span_masses_;

    // Candidates: tokens that may be kept, by id.
    int64_t count_;
    int32_t *ids_, *edge_;
    float *logits_, *weights_;
    double* masses_;
    int16_t* bins_;
    uint8_t* kept_;
};

struct Draws : Phase {
    const Draw* draws;
    int64_t count, vocab_size, bytes;
    char* memory;  // `bytes` for each member
    int64_t* tokens;

    int64_t num_chunks() const override { return count; }
    void run(int64_t chunk, int member, bool) const override {
        tokens[chunk] = Sampling(vocab_size, memory + member * bytes).draw(draws[chunk]);
    }
};
