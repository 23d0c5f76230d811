// Draws and what logits tell, against a plain version that sorts everything and adds one by one.
// Weights are exp_of's, which has a check of its own, and sums those of whole numbers: so both must
// be the same to the last token and unit, on any CPU.
#pragma once

#include <algorithm>
#include <numeric>

namespace plain {

// ---- logits of every kind, and wishes of every kind

float pick(std::initializer_list<float> from) { return from.begin()[dice() % from.size()]; }

double throw_die() {
    const double die = (double)((uint64_t)dice() << 21 | dice() >> 11) * 0x1p-53;
    const double edges[] = {0, 0x1p-53, 0.25, 0.5, 1 - 0x1p-53};
    return dice() % 5 ? die : edges[dice() % 5];
}

std::vector<float> logits(int64_t size) {
    const int kind = (int)(dice() % 10);
    std::vector<float> row = random_numbers(size, pick({1e-3f, 1, 4, 40, 1e38f}), 0);
    for (float& x : row) {
        if (kind == 1) x = std::nearbyint(x);
        if (kind == 2) x = 0;
        if (kind == 3 && dice() % 8) x = -INFINITY;
        if (kind == 4) x = 1 + std::ldexp((float)(dice() % 3), -23);
        if (kind == 5) x = -INFINITY;
        if (kind == 9) x = -13;
    }
    if (kind == 3 || kind == 5) row[dice() % size] = pick({0, -7, -3e38f, 3e38f});
    if (kind == 6) row[dice() % size] = NAN;
    if (kind == 7) row[dice() % size] = pick({INFINITY, NAN, 0});
    if (kind == 9) row[dice() % size] = 0;
    if (kind == 8) std::sort(row.begin(), row.end());
    return row;
}

std::vector<int32_t> some_ids(int64_t size, int64_t most) {
    std::vector<int32_t> ids(dice() % (most + 1));
    for (int32_t& id : ids) id = (int32_t)(dice() % std::min<int64_t>(size, dice() % 2 ? 9 : size));
    return ids;
}

struct Wish {
    std::vector<int32_t> biased, prompt, answer, allowed, excluded;
    std::vector<float> biases;
    Adjustment adjustment;

    explicit Wish(int64_t size) : prompt(some_ids(size, 30)), answer(some_ids(size, 30)) {
        for (int32_t id = (int32_t)(dice() % 7); id < size; id += 1 + (int32_t)(dice() % 700)) {
            biased.push_back(id);
            biases.push_back(pick({-100, -1.5f, 0.1f, 3, 100}));
        }
        if (dice() % 3 == 0) allowed = some_ids(size, 12);
        excluded = some_ids(size, dice() % 3 ? 2 : 12);
        adjustment = {ids_of(biased), ids_of(prompt), ids_of(answer), ids_of(allowed),
                      ids_of(excluded), biases.data(), pick({0, 0.3f, -1.1f, 2}),
                      pick({0, 0.7f, -2}), pick({1, 1.3f, 0.1f, FLT_MIN})};
    }

    static Ids ids_of(const std::vector<int32_t>& ids) { return {ids.data(), (int64_t)ids.size()}; }
};

Draw draw_of(int64_t size, const float* row) {
    return {row, nullptr, throw_die(),
            pick({1, 1, 1, 0.5f, 0.9f, 0.999999f, 1e-30f}),
            (int64_t)pick({0, 0, 1, 2, 50, (float)(size / 2), (float)size, 1e9f}),
            pick({0, FLT_MIN, 1e-3f, 0.7f, 1, 1, 100}), pick({0, 0, 1e-30f, 0.05f, 1})};
}

// ---- the plain version

bool is_distribution(const std::vector<float>& row) {
    float most = -INFINITY;
    for (float x : row) {
        if (x != x) return false;
        most = std::max(most, x);
    }
    return std::isfinite(most);
}

void adjust(std::vector<float>& row, const Wish& wish) {
    const Adjustment& a = wish.adjustment;
    for (size_t i = 0; i < wish.biased.size(); i++) row[wish.biased[i]] += wish.biases[i];
    for (size_t id = 0; id < row.size(); id++) {
        const auto times = [&](const std::vector<int32_t>& said) {
            return std::count(said.begin(), said.end(), (int32_t)id);
        };
        const float penalty = (float)a.repetition;
        if (penalty != 1 && times(wish.prompt) + times(wish.answer))
            row[id] = std::min(row[id] < 0 ? row[id] * penalty : row[id] / penalty, FLT_MAX);
        volatile double often = (double)times(wish.answer) * a.frequency;  // volatile: not fused
        if (times(wish.answer) && (a.frequency != 0 || a.presence != 0))
            row[id] -= (float)(often + a.presence);
        if ((!wish.allowed.empty() && !times(wish.allowed)) || times(wish.excluded))
            row[id] = -INFINITY;
    }
}

std::vector<int32_t> in_order(const std::vector<float>& row) {
    std::vector<int32_t> order(row.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
    return order;
}

int64_t draw(const Draw& draw, std::vector<float> row, const Wish* wish) {
    const int64_t size = (int64_t)row.size();
    if (!is_distribution(row)) return NOTHING_TO_DRAW;
    if (wish) adjust(row, *wish);
    if (!is_distribution(row)) return NOTHING_TO_DRAW;
    std::vector<int32_t> kept = in_order(row);
    if (draw.temperature == 0) return kept[0];
    std::vector<float> weights(size);
    std::vector<double> masses(size);
    for (int64_t i = 0; i < size; i++) {
        weights[i] = exp_of(fill((row[i] - row[kept[0]]) / draw.temperature))[0];
        masses[i] = std::nearbyint(weights[i] * units_of(size));
    }
    const auto sum = [&] {
        double total = 0;
        for (int32_t id : kept) total += masses[id];
        return total;
    };
    if (draw.top_k > 0 && draw.top_k < size) kept.resize(draw.top_k);
    if (draw.top_p < 1) {
        const double wanted = std::ceil(draw.top_p * sum());
        size_t count = 1;
        for (double mass = masses[kept[0]]; mass < wanted; count++) mass += masses[kept[count]];
        kept.resize(count);
    }
    const auto is_unlikely = [&](int32_t id) { return weights[id] < draw.min_p; };
    kept.erase(std::remove_if(kept.begin(), kept.end(), is_unlikely), kept.end());
    std::sort(kept.begin(), kept.end());
    double before = std::min(std::floor(draw.die * sum()), sum() - 1);
    size_t i = 0;
    while (masses[kept[i]] <= before) before -= masses[kept[i++]];
    return kept[i];
}

bool is_right(const Ask& ask, const std::vector<float>& row) {
    if (!is_distribution(row)) return ask.total == 0;
    const std::vector<int32_t> order = in_order(row);
    const float peak = row[order[0]], units = (float)std::ldexp(1.0, 62 - bits_for((int64_t)row.size()));
    int64_t total = 0, rank = ask.token < 0 ? 0 : 1;
    for (float x : row) {
        total += (int64_t)(exp_of(fill(x - peak))[0] * units);
        rank += ask.token >= 0 && x > row[ask.token];
    }
    return ask.total == total && ask.rank == rank && ask.peak == peak &&
           std::equal(order.begin(), order.begin() + ask.num_top, ask.top);
}

// ---- one against the other

bool is_exp_near() {
    double most = 0;
    for (int i = 0; i <= 600000; i++) {
        const float x = -1e-4f * (float)i;
        most = std::max(most, std::abs(exp_of(fill(x))[0] / std::exp((double)x) - 1));
    }
    const bool is_near = most < 3e-7 && exp_of(zeros())[0] == 1 && exp_of(fill(-INFINITY))[0] < 1e-26f;
    printf("e^x: error %.1e%s\n", most, is_near ? "" : " TOO LARGE");
    return is_near;
}

int num_wrong(int64_t size, int rounds) {
    int wrong = 0;
    for (int round = 0; round < rounds; round++) {
        std::vector<std::vector<float>> rows;
        std::vector<Wish> wishes;
        std::vector<Draw> draws;
        std::vector<Ask> asks;
        const int count = 1 + (int)(dice() % 5), threads = 1 + (int)(dice() % 3);
        const int64_t most = std::min<int64_t>(size, dice() % 3 ? 20 : 448);
        std::vector<int32_t> top(count * most);
        for (int i = 0; i < count; i++) {
            rows.push_back(logits(size));
            wishes.emplace_back(size);
        }
        for (int i = 0; i < count; i++) {
            draws.push_back(draw_of(size, rows[i].data()));
            if (dice() % 3 == 0) draws[i].adjustment = &wishes[i].adjustment;
            asks.push_back({rows[i].data(), (int64_t)(dice() % (size + 1)) - 1,
                            (int64_t)(dice() % (most + 1)), &top[i * most], 0, 0, 0});
        }
        std::vector<int64_t> tokens(count);
        if (splitflap_draw(draws.data(), count, size, tokens.data(), threads) != DONE) std::abort();
        if (splitflap_tell(asks.data(), count, size, threads) != DONE) std::abort();
        for (int i = 0; i < count; i++) {
            wrong += tokens[i] != draw(draws[i], rows[i], draws[i].adjustment ? &wishes[i] : nullptr);
            wrong += !is_right(asks[i], rows[i]);
        }
    }
    return wrong;
}

bool draws_are_right() {
    bool is_right = is_exp_near();
    for (int64_t size : {1, 2, 3, 15, 16, 17, 63, 64, 65, 129, 1000, 4099}) {
        const int wrong = num_wrong(size, size > 500 ? 30 : 200);
        printf("draws from %d tokens, and what they tell: ", (int)size);
        printf(wrong ? "%d WRONG\n" : "as sorted\n", wrong);
        is_right &= wrong == 0;
    }
    return is_right;
}

}  // namespace plain
