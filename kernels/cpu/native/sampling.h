// From logits to tokens: greedy, or one number of the dice through the inverse of the kept mass.
// services/executor/sampler.py says what is drawn; this says it again, fast, and draws the same.
#pragma once

#include "adjusting.h"
#include "candidates.h"
#include "team.h"

struct Draw {
    const float* logits;           // [vocab_size]
    const Adjustment* adjustment;  // null: none
    double die;                    // in [0, 1)
    double top_p;                  // 1: all
    int64_t top_k;                 // 0: all
    float temperature;             // 0: greedy
    float min_p;                   // 0: all
};

constexpr int64_t NOTHING_TO_DRAW = -1;

class Sampling {
  public:
    Sampling(int64_t vocab_size, Room room)
        : row_(vocab_size, room), candidates_(vocab_size, room), adjusting_(vocab_size, room),
          units_(units_of(vocab_size)) {
        room.take(span_masses_, row_.num_spans);
        bytes = room.bytes();
    }

    int64_t draw(const Draw& draw) {
        if (!read(draw)) return NOTHING_TO_DRAW;
        if (draw.temperature == 0) return row_.first_of_peak();
        divisor_ = std::max(draw.temperature, FLT_MIN);
        const bool has_top_k = 0 < draw.top_k && draw.top_k < row_.size;
        if (has_top_k) return draw_of_greatest(draw);
        return draw.top_p < 1 ? draw_of_mass(draw) : draw_of_all(draw);
    }

    int64_t bytes;  // of memory in all

  private:
    static constexpr int NUM_DEPTHS = 5;
    static constexpr float DEPTHS[NUM_DEPTHS] = {2, 4, 6, 8, 12};  // below the greatest, in temperatures

    // The row as it is drawn from; false if nothing can be drawn from it.
    bool read(const Draw& draw) {
        if (!draw.adjustment) return row_.read(draw.logits);
        if (!row_.read_and_copy(draw.logits, adjusting_.row)) return false;
        adjusting_.apply(*draw.adjustment);
        return row_.read(adjusting_.row);
    }

    // Where the die falls: so many units come before the token that is drawn.
    static double fall(double die, double total) {
        return std::min(std::floor(die * total), total - 1);
    }

    // ---- without top-k and top-p no order is needed

    // Weights of a span, [SPAN]; tokens past the end and those below `min_p` have none. Returns the
    // sum of their masses.
    double weigh(int64_t span, float min_p, float* weights) const {
        const int64_t first = span * SPAN, count = std::min(row_.size - first, SPAN);
        Doubles sum = {};
        for (int64_t i = 0; i < count; i += LANES) {
            const Floats weight = exp_of(row_.below_peak(first + i, divisor_));
            store(weights + i, choose(weight >= fill(min_p), weight, zeros()));
            sum += masses_of(weights + i, units_) + masses_of(weights + i + HALF, units_);
        }
        return sum_lanes(sum);
    }

    int64_t draw_of_all(const Draw& draw) {
        float weights[SPAN];
        double total = 0;
        for (int64_t span = 0; span < row_.num_spans; span++)
            total += span_masses_[span] = weigh(span, draw.min_p, weights);
        double before = fall(draw.die, total);
        int64_t span = 0;
        while (span_masses_[span] <= before) before -= span_masses_[span++];
        weigh(span, draw.min_p, weights);
        int64_t i = 0;
        while (mass_of(weights[i], units_) <= before) before -= mass_of(weights[i++], units_);
        return span * SPAN + i;
    }

    // ---- with them, only the tokens near the greatest logit are looked at

    int64_t draw_of_greatest(const Draw& draw) {
        candidates_.gather_greatest(row_, draw.top_k);
        candidates_.weigh(row_.peak, divisor_);
        candidates_.select((double)draw.top_k, [](int32_t) { return 1.0; });
        if (draw.top_p < 1) return draw_of_share(draw, candidates_.drop_the_rest(0));
        return draw_of_rest(draw);
    }

    // As candidates the tokens that are no farther from the greatest logit than it takes.
    int64_t draw_of_mass(const Draw& draw) {
        double near[NUM_DEPTHS], total = mass_near(near);
        const double wanted = std::ceil(draw.top_p * total);
        int depth = 0;
        while (depth < NUM_DEPTHS && near[depth] < wanted) depth++;
        for (double mass = 0; mass < wanted; depth++) {
            const double least = depth < NUM_DEPTHS ? row_.peak - DEPTHS[depth] * divisor_ : -FLT_MAX;
            candidates_.gather(row_, (float)std::max<double>(least, -FLT_MAX));
            mass = candidates_.weigh(row_.peak, divisor_);
            if (depth >= NUM_DEPTHS) break;
        }
        return draw_of_share(draw, total);
    }

    // The mass of all tokens, and about the mass of those within each of the depths.
    double mass_near(double (&near)[NUM_DEPTHS]) const {
        Floats sums[NUM_DEPTHS] = {};
        Doubles all = {};
        for (int64_t i = 0; i < row_.size; i += LANES) {
            const Floats x = row_.below_peak(i, divisor_), weight = exp_of(x);
            for (int depth = 0; depth < NUM_DEPTHS; depth++)
                sums[depth] += choose(x >= fill(-DEPTHS[depth]), weight, zeros());
            float weights[LANES];
            store(weights, weight);
            all += masses_of(weights, units_) + masses_of(weights + HALF, units_);
        }
        for (int depth = 0; depth < NUM_DEPTHS; depth++) near[depth] = sum_lanes(sums[depth]) * units_;
        return sum_lanes(all);
    }

    // From the candidates that reach top-p of a mass.
    int64_t draw_of_share(const Draw& draw, double total) {
        candidates_.select(std::ceil(draw.top_p * total),
                           [this](int32_t i) { return candidates_.masses[i]; });
        return draw_of_rest(draw);
    }

    int64_t draw_of_rest(const Draw& draw) {
        const double total = candidates_.drop_the_rest(draw.min_p);
        return candidates_.at(fall(draw.die, total));
    }

    Row row_;
    Candidates candidates_;
    Adjusting adjusting_;
    const double units_;
    double* span_masses_;
    float divisor_;
};
