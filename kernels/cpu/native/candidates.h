// The tokens of a row that may be kept, and which of them are: the fewest greatest whose amounts sum
// up to what is wanted. Nobody sorts the vocabulary.
#pragma once

#include <cfloat>

#include "row.h"

class Candidates {
  public:
    Candidates(int64_t vocab_size, Room& room) : units_(units_of(vocab_size)) {
        const int64_t padded = padded_row(vocab_size);
        room.take(ids, padded);
        room.take(logits, padded);
        room.take(weights, padded);
        room.take(masses, padded + SPAN);
        room.take(edge_, padded);
        room.take(edge_logits_, padded);
        room.take(bins_, padded);
        room.take(order_, (vocab_size + SPAN - 1) / SPAN);
    }

    // The tokens whose logits reach `least`, by id; behind the last one lie tokens of -inf.
    void gather(const Row& row, float least) {
        int64_t found = 0;
        const Ints first = first_ids();
        for (int64_t span = 0; span < row.num_spans; span++) {
            if (row.peaks[span] < least) continue;
            for (int64_t i = span * SPAN, end = std::min(row.size, i + SPAN); i < end; i += LANES) {
                const Floats v = row.at(i);
                const uint32_t bits = bits_of(v >= fill(least));
                store_first(ids + found, (Floats)(first + (int32_t)i), bits);
                store_first(logits + found, v, bits);
                found += __builtin_popcount(bits);
            }
        }
        store(logits + found, fill(-INFINITY));
        count = found;
    }

    // Those that reach the `wanted`-th greatest of the spans' greatest, which are `wanted` at least;
    // with more wanted than there are spans, all.
    void gather_greatest(const Row& row, int64_t wanted) {
        float least = -FLT_MAX;
        if (wanted <= row.num_spans) {
            std::copy(row.peaks, row.peaks + row.num_spans, order_);
            std::nth_element(order_, order_ + (wanted - 1), order_ + row.num_spans,
                             [](float a, float b) { return a > b; });
            least = std::max(least, order_[wanted - 1]);
        }
        gather(row, least);
    }

    // Weights and masses of all that were gathered. Returns the sum of the masses.
    double weigh(float peak, float divisor) {
        for (int64_t i = 0; i < count; i += LANES)
            store(weights + i, exp_of((load(logits + i) - fill(peak)) / fill(divisor)));
        return sum_up();
    }

    // Settles which are kept: the fewest greatest whose amounts sum up to `wanted`; of equal logits the
    // one with the smaller id comes first.
    //
    // They are put into bins, by logit, so that only the bin in which the sum reaches what is wanted
    // has to be looked into again.
    template <class Amount>
    void select(double wanted, Amount amount) {
        int64_t left = count;
        for (int64_t i = 0; i < left; i += LANES) {
            store(edge_ + i, (Floats)(first_ids() + (int32_t)i));
            store(edge_logits_ + i, load(logits + i));
        }
        while (left > FEW && split(left, wanted, amount)) {}
        if (left <= FEW)
            std::sort(edge_, edge_ + left, [this](int32_t a, int32_t b) { return comes_before(a, b); });
        int64_t i = 0;
        for (double sum = amount(edge_[0]); sum < wanted && i + 1 < left;) sum += amount(edge_[++i]);
        last_ = edge_[i];
    }

    // Lists the ids of the `wanted` greatest, greatest first; of all, if there are fewer. Returns how
    // many there are.
    int64_t list_greatest(int64_t wanted, int32_t* list) {
        const bool has_all = count <= wanted;
        if (!has_all) select((double)wanted, [](int32_t) { return 1.0; });
        int64_t found = 0;
        for (int64_t i = 0; i < count; i++) {
            edge_[found] = (int32_t)i;
            found += has_all || logits[i] > logits[last_] || (logits[i] == logits[last_] && i <= last_);
        }
        std::sort(edge_, edge_ + found, [this](int32_t a, int32_t b) { return comes_before(a, b); });
        for (int64_t i = 0; i < found; i++) list[i] = ids[edge_[i]];
        return found;
    }

    // Takes weight and mass from those that are not kept or weigh less than `min_p`. Returns the sum
    // of the masses that are left.
    double drop_the_rest(float min_p) {
        const Floats edge = fill(logits[last_]), least = fill(min_p);
        const Ints last = (Ints){} + last_;
        for (int64_t i = 0; i < count; i += LANES) {
            const Floats v = load(logits + i), weight = load(weights + i);
            const Ints is_first = first_ids() + (int32_t)i <= last;
            const Ints is_kept = ((v > edge) | ((v == edge) & is_first)) & (weight >= least);
            store(weights + i, choose(is_kept, weight, zeros()));
        }
        return sum_up();
    }

    // The one on which `before` units fall, by id.
    int32_t at(double before) const {
        int64_t i = 0;
        while (true) {
            double sum = 0;
            for (int64_t j = i; j < i + SPAN; j++) sum += masses[j];
            if (sum > before) break;
            before -= sum;
            i += SPAN;
        }
        while (masses[i] <= before) before -= masses[i++];
        return ids[i];
    }

    int64_t count;
    int32_t* ids;
    float *logits, *weights;
    double* masses;

  private:
    bool comes_before(int32_t a, int32_t b) const {
        return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    }

    // Leaves of `left` candidates those in the bin that matters; false if all are equal.
    template <class Amount>
    bool split(int64_t& left, double& wanted, Amount amount) {
        store(edge_logits_ + left, fill(edge_logits_[left - 1]));
        Floats most = fill(-INFINITY), least = most;
        for (int64_t i = 0; i < left; i += LANES) {
            most = larger(most, load(edge_logits_ + i));
            least = larger(least, -load(edge_logits_ + i));
        }
        const double greatest = greatest_lane(most), spread = greatest + greatest_lane(least);
        if (spread == 0) return false;
        const double scale = BINS / spread;
        for (int64_t i = 0; i < left; i += HALF) {
            const auto v = __builtin_convertvector(load_as<HalfFloats>(edge_logits_ + i), Doubles);
            const auto bin = __builtin_convertvector((greatest - v) * scale, HalfInts);
            const HalfInts bounded = bin < BINS ? bin : (HalfInts){} + (BINS - 1);
            memcpy(bins_ + i, &bounded, sizeof bounded);
        }
        double amounts[BINS] = {};
        for (int64_t i = 0; i < left; i++) amounts[bins_[i]] += amount(edge_[i]);
        int crossing = 0;
        while (crossing < BINS - 1 && amounts[crossing] < wanted) wanted -= amounts[crossing++];
        int64_t found = 0;
        const Ints there = (Ints){} + crossing;
        for (int64_t i = 0; i < left; i += LANES) {
            uint32_t bits = bits_of(load_as<Ints>(bins_ + i) == there);
            if (left - i < LANES) bits &= (1u << (left - i)) - 1;
            const Floats indexes = load_as<Floats>(edge_ + i), values = load(edge_logits_ + i);
            store_first(edge_ + found, indexes, bits);
            store_first(edge_logits_ + found, values, bits);
            found += __builtin_popcount(bits);
        }
        left = found;
        return true;
    }

    // Masses of all weights; returns their sum. Behind the last one lie masses of nothing.
    double sum_up() {
        Doubles sum = {};
        for (int64_t i = 0; i < count; i += HALF) {
            const Doubles mass = masses_of(weights + i, units_);
            memcpy(masses + i, &mass, sizeof mass);
            sum += mass;
        }
        for (int64_t i = 0; i < SPAN; i++) masses[round_up(count, HALF) + i] = 0;
        return sum_lanes(sum);
    }

    static constexpr int BINS = 512;
    static constexpr int64_t FEW = 64;  // so many are sorted at once

    const double units_;
    int32_t *edge_, *bins_;  // numbers of candidates that may be the last one kept, and their bins
    float *edge_logits_, *order_;
    int32_t last_;  // number of the last one that is kept
};
