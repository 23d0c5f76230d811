// What a request adds to, takes from and forbids in its logits before a token is drawn: the same
// operations in the same order as services/executor/adjustment.py, and so the same bits.
#pragma once

#include <cfloat>

#include "row.h"

struct Ids {
    const int32_t* ids;
    int64_t count;
    const int32_t* begin() const { return ids; }
    const int32_t* end() const { return ids + count; }
};

struct Adjustment {
    Ids biased, prompt, answer, allowed, excluded;
    const float* biases;          // of each of `biased`, which are all different
    double frequency, presence;   // 0: none
    double repetition;            // a float32; 1: none
};

class Adjusting {
  public:
    Adjusting(int64_t vocab_size, Room& room) : size_(vocab_size) {
        room.take(row, padded_row(vocab_size));
        room.take(counts_, padded_row(vocab_size));
    }

    // Apply all that is asked for to `row`, finite or -inf; it may be -inf everywhere afterwards.
    void apply(const Adjustment& wish) {
        for (int64_t i = 0; i < wish.biased.count; i++) row[wish.biased.ids[i]] += wish.biases[i];
        if (wish.repetition != 1) repeat((float)wish.repetition, wish.prompt, wish.answer);
        if (wish.frequency != 0 || wish.presence != 0) count(wish.frequency, wish.presence, wish.answer);
        if (wish.allowed.count) allow(wish.allowed);
        for (int32_t id : wish.excluded) row[id] = -INFINITY;
    }

    float* row;  // [vocab_size]

  private:
    // Every token is lowered once, however often it was said.
    void repeat(float penalty, const Ids& prompt, const Ids& answer) {
        for (const Ids& said : {prompt, answer})
            for (int32_t id : said) counts_[id] = 0;
        for (const Ids& said : {prompt, answer})
            for (int32_t id : said) {
                if (counts_[id]++) continue;
                const float logit = row[id];
                row[id] = std::min(logit < 0 ? logit * penalty : logit / penalty, FLT_MAX);
            }
    }

    void count(double frequency, double presence, const Ids& answer) {
        for (int32_t id : answer) counts_[id] = 0;
        for (int32_t id : answer) counts_[id]++;
        for (int32_t id : answer) {
            if (!counts_[id]) continue;
            double often = counts_[id] * frequency;
            asm("" : REGISTER(often));  // not fused with the addition
            row[id] -= (float)(often + presence);
            counts_[id] = 0;
        }
    }

    void allow(const Ids& allowed) {
        std::fill(counts_, counts_ + size_, 0);
        for (int32_t id : allowed) counts_[id] = 1;
        for (int64_t i = 0; i < size_; i++) row[i] = counts_[i] ? row[i] : -INFINITY;
    }

    const int64_t size_;
    int32_t* counts_;
};
