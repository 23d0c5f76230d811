// What a row of logits tells of its tokens: the sum that makes log-probabilities of logits, the rank
// of one token, and the likeliest ones. services/executor/logprobs.py says the same again, slowly.
#pragma once

#include "candidates.h"
#include "team.h"

struct Ask {
    const float* logits;  // [vocab_size]
    int64_t token;        // whose rank is asked for; -1: of none
    int64_t num_top;      // how many of the likeliest, at most vocab_size
    int32_t* top;         // [num_top], made: the likeliest, best first; of equals the smaller id
    int64_t total;        // made: the sum of exp(logit - peak) in units; 0 if it is no distribution
    int64_t rank;         // made: 1 and how many are likelier than `token`
    double peak;          // made: the greatest logit
};

class Likeliest {
  public:
    Likeliest(int64_t vocab_size, Room room) : row_(vocab_size, room), candidates_(vocab_size, room) {
        bytes = room.bytes();
    }

    void answer(Ask& ask) {
        ask.total = ask.rank = 0;
        if (!row_.read(ask.logits)) return;
        ask.peak = row_.peak;
        ask.total = total();
        if (ask.token >= 0) ask.rank = 1 + num_above(ask.logits[ask.token]);
        if (ask.num_top == 0) return;
        candidates_.gather_greatest(row_, ask.num_top);
        int64_t found = candidates_.list_greatest(ask.num_top, ask.top);
        for (int64_t i = 0; found < ask.num_top; i++)  // too few are finite
            if (ask.logits[i] == -INFINITY) ask.top[found++] = (int32_t)i;
    }

    int64_t bytes;  // of memory in all

  private:
    int64_t total() const {
        const float units = (float)std::ldexp(1.0, 62 - bits_for(row_.size));
        Longs sum = {};
        for (int64_t i = 0; i < row_.size; i += LANES) {
            const Floats units_each = exp_of(row_.below_peak(i, 1)) * fill(units);
            HalfFloats halves[2];
            memcpy(halves, &units_each, sizeof halves);
            sum += __builtin_convertvector(halves[0], Longs) + __builtin_convertvector(halves[1], Longs);
        }
        int64_t all = 0;
        for (int lane = 0; lane < HALF; lane++) all += sum[lane];
        return all;
    }

    int64_t num_above(float logit) const {
        int64_t count = 0;
        for (int64_t i = 0; i < row_.size; i += LANES)
            count += __builtin_popcount(bits_of(row_.at(i) > fill(logit)));
        return count;
    }

    Row row_;
    Candidates candidates_;
};
