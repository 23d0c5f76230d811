// The native step against plain loops in double precision, draws (draws.h) and teams (teams.h),
// without Python or torch: for CPUs that only an emulator has here, and for sanitizers. Ends with 0
// if all is right.
//
//   aarch64-linux-gnu-g++ -std=c++17 -O3 -static -pthread check.cpp -o check && qemu-aarch64-static check
//   g++ -std=c++17 -O1 -g -march=native -fsanitize=address,undefined -pthread check.cpp -o check && ./check
//   the same with -DSPLITFLAP_PLAIN_REGISTERS: matrix registers too (about a minute)
#include <cstdio>
#include <random>

#include "../../../kernels/cpu/native/native.cpp"

namespace {

constexpr int64_t HIDDEN = 72, INNER = 96, HEADS = 6, KV_HEADS = 2, D = 24, LAYERS = 2, VOCAB = 117;
constexpr int64_t QKV = (HEADS + 2 * KV_HEADS) * D;
std::mt19937 dice(1);

std::vector<float> random_numbers(int64_t count, float scale, float middle = 0) {
    std::normal_distribution<float> normal(middle, scale);
    std::vector<float> numbers(count);
    for (float& x : numbers) x = normal(dice);
    return numbers;
}

bf16 narrow(float x) {
    bf16 all[LANES];
    put(all, fill(x));
    return all[0];
}

float as_stored(float x, bool is_bf16) { return is_bf16 ? to_float(narrow(x)) : x; }

struct Weight {  // plain and packed
    std::vector<float> plain;
    std::vector<uint32_t> packed;
    std::vector<float> scales;
    Matrix matrix;

    Weight(int64_t outputs, int64_t inputs, bool is_bf16, bool is_int8)
        : plain(random_numbers(outputs * inputs, 1.5f / std::sqrt((float)inputs))) {
        std::vector<bf16> narrow_plain(plain.size());
        for (size_t i = 0; i < plain.size(); i++) {
            plain[i] = as_stored(plain[i], is_bf16);
            narrow_plain[i] = narrow(plain[i]);
        }
        const void* from = is_bf16 ? (const void*)narrow_plain.data() : plain.data();
        if (is_int8) {
            packed.resize(splitflap_int8_size(outputs, inputs) / 4);
            scales.resize(splitflap_int8_scales(outputs));
            splitflap_pack_int8(is_bf16, from, outputs, inputs, packed.data(), scales.data());
            matrix = {packed.data(), nullptr, outputs, inputs, scales.data()};
            return;
        }
        packed.resize(splitflap_packed_size(is_bf16, outputs, inputs));
        splitflap_pack(is_bf16, from, outputs, inputs, packed.data());
        matrix = {packed.data(), nullptr, outputs, inputs, nullptr};
    }

    std::vector<double> times(const std::vector<double>& x) const {
        std::vector<double> y(matrix.outputs);
        for (int64_t o = 0; o < matrix.outputs; o++)
            for (int64_t i = 0; i < matrix.inputs; i++) y[o] += plain[o * matrix.inputs + i] * x[i];
        return y;
    }
};

struct Model {
    bool is_bf16, is_int8;
    Weight embedding{VOCAB, HIDDEN, is_bf16, is_int8};
    std::vector<Weight> weights;
    std::vector<std::vector<float>> norms;
    std::vector<float> frequencies;
    std::vector<Layer> layers;
    Decoder decoder;

    Model(bool is_bf16, bool is_int8) : is_bf16(is_bf16), is_int8(is_int8) {
        for (int64_t l = 0; l < LAYERS; l++) {
            weights.emplace_back(QKV, HIDDEN, is_bf16, is_int8);
            weights.emplace_back(HIDDEN, HEADS * D, is_bf16, is_int8);
            weights.emplace_back(2 * INNER, HIDDEN, is_bf16, is_int8);
            weights.emplace_back(HIDDEN, INNER, is_bf16, is_int8);
        }
        for (int64_t n = 0; n < 2 * LAYERS + 1; n++) norms.push_back(random_numbers(HIDDEN, .2f, 1));
        for (int64_t i = 0; i < D / 2; i++) frequencies.push_back(std::pow(1e4f, -2.f * i / D));
        for (int64_t l = 0; l < LAYERS; l++)
            layers.push_back({norms[2 * l].data(), norms[2 * l + 1].data(), weights[4 * l].matrix,
                              weights[4 * l + 1].matrix, weights[4 * l + 2].matrix,
                              weights[4 * l + 3].matrix, 0});
        decoder = {is_bf16, LAYERS, HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, D, 1e-5,
                   1 / std::sqrt((double)D), layers.data(), norms.back().data(), frequencies.data(),
                   embedding.matrix, embedding.matrix};
    }

    std::vector<double> normed(const std::vector<double>& x, const std::vector<float>& weight) const {
        double squares = 0;
        for (double v : x) squares += v * v;
        std::vector<double> y(HIDDEN);
        for (int64_t i = 0; i < HIDDEN; i++)
            y[i] = x[i] / std::sqrt(squares / HIDDEN + 1e-5) * weight[i];
        return y;
    }

    void turn(double* head, int64_t position) const {
        for (int64_t i = 0; i < D / 2; i++) {
            const double c = std::cos((float)position * frequencies[i]);
            const double s = std::sin((float)position * frequencies[i]);
            const double x = head[i], y = head[i + D / 2];
            head[i] = x * c - y * s;
            head[i + D / 2] = y * c + x * s;
        }
    }

    // Logits of every token of one sequence.
    std::vector<double> plain_logits(const std::vector<int64_t>& ids) const {
        const int64_t n = (int64_t)ids.size();
        std::vector<std::vector<double>> xs;
        for (int64_t id : ids)
            xs.emplace_back(&embedding.plain[id * HIDDEN], &embedding.plain[id * HIDDEN] + HIDDEN);
        for (int64_t l = 0; l < LAYERS; l++) {
            std::vector<std::vector<double>> qkv;
            for (int64_t t = 0; t < n; t++) {
                qkv.push_back(weights[4 * l].times(normed(xs[t], norms[2 * l])));
                for (int64_t h = 0; h < HEADS + KV_HEADS; h++) turn(&qkv[t][h * D], t);
            }
            for (int64_t t = 0; t < n; t++) {
                std::vector<double> attended(HEADS * D);
                for (int64_t h = 0; h < HEADS; h++) {
                    const int64_t kv = HEADS + h / (HEADS / KV_HEADS);
                    std::vector<double> scores;
                    double total = 0;
                    for (int64_t k = 0; k <= t; k++) {
                        double score = 0;
                        for (int64_t d = 0; d < D; d++) score += qkv[t][h * D + d] * qkv[k][kv * D + d];
                        scores.push_back(std::exp(score / std::sqrt((double)D)));
                        total += scores.back();
                    }
                    for (int64_t k = 0; k <= t; k++)
                        for (int64_t d = 0; d < D; d++)
                            attended[h * D + d] +=
                                scores[k] / total * qkv[k][(kv + KV_HEADS) * D + d];
                }
                const std::vector<double> out = weights[4 * l + 1].times(attended);
                for (int64_t i = 0; i < HIDDEN; i++) xs[t][i] += out[i];
                std::vector<double> both = weights[4 * l + 2].times(normed(xs[t], norms[2 * l + 1]));
                std::vector<double> active(INNER);
                for (int64_t i = 0; i < INNER; i++)
                    active[i] = both[i] / (1 + std::exp(-both[i])) * both[INNER + i];
                const std::vector<double> down = weights[4 * l + 3].times(active);
                for (int64_t i = 0; i < HIDDEN; i++) xs[t][i] += down[i];
            }
        }
        std::vector<double> logits;
        for (int64_t t = 0; t < n; t++)
            for (double v : embedding.times(normed(xs[t], norms.back()))) logits.push_back(v);
        return logits;
    }

    // The same by the step, in chunks of `chunk` tokens, on a pool of NaN that stores `numbers`.
    std::vector<float> logits(const std::vector<int64_t>& ids, int64_t block_size, int64_t chunk,
                              int threads, Numbers numbers) const {
        const int64_t n = (int64_t)ids.size(), blocks = (n + block_size - 1) / block_size;
        const int64_t bytes = numbers == INT8 ? 1 : numbers == BFLOAT16 ? 2 : 4;
        const int64_t tile = 2 * block_size * (D + (numbers == INT8 ? 2 : 0));
        const int64_t size = ((blocks + 1) * LAYERS * KV_HEADS * tile + 256) * bytes;
        std::vector<uint32_t> memory(size / 4 + 1, 0xffffffffu);
        const Pool pool{memory.data(), LAYERS * KV_HEADS * tile, KV_HEADS * tile,
                        tile,          block_size,               numbers};
        std::vector<int32_t> table(blocks);
        for (int64_t b = 0; b < blocks; b++) table[b] = (int32_t)(blocks - b);
        std::vector<float> all(n * VOCAB);
        for (int64_t first = 0; first < n; first += chunk) {
            const int32_t count = (int32_t)std::min(chunk, n - first), end = (int32_t)first + count;
            std::vector<int32_t> positions, starts{0, count};
            std::vector<int64_t> slots, wanted;
            for (int32_t i = 0; i < count; i++) {
                const int64_t position = first + i;
                positions.push_back((int32_t)position);
                slots.push_back(table[position / block_size] * block_size + position % block_size);
                wanted.push_back(i);
            }
            const Batch batch{&ids[first], positions.data(), slots.data(), starts.data(), &end,
                              table.data(), blocks, 1, count, wanted.data(), count};
            if (splitflap_step(&decoder, &pool, &batch, &all[first * VOCAB], threads) != 0) std::abort();
        }
        return all;
    }
};

}  // namespace

#include "draws.h"
#include "teams.h"

int main() {
    printf("%d lanes, dot product of bfloat16: %s, of int8: %s\n", LANES, DOTS_BF16 ? "yes" : "no",
           DOTS_INT8 ? "yes" : "no");
    bool is_right = plain::draws_are_right() & teams::are_right() & teams::go_on_alone();
    struct Kind {
        bool is_bf16;
        Numbers numbers;
        const char* name;
        double most;
        bool is_int8 = false;
    };
    for (Kind kind : {Kind{false, FLOAT32, "float32", 1e-5}, Kind{true, BFLOAT16, "bfloat16", 0.05},
                      Kind{false, BFLOAT16, "float32 over bfloat16", 0.03},
                      Kind{false, INT8, "float32 over int8", 0.05},
                      Kind{true, INT8, "bfloat16 over int8", 0.07},
                      Kind{false, FLOAT32, "float32, int8 weights", 0.1, true},
                      Kind{true, BFLOAT16, "bfloat16, int8 weights", 0.1, true}}) {
        const Model model(kind.is_bf16, kind.is_int8);
        for (int64_t length : {1, 7, 40, 290}) {
            if (kind.numbers != (kind.is_bf16 ? BFLOAT16 : FLOAT32) && length == 7) continue;
            std::vector<int64_t> ids;
            for (int64_t i = 0; i < length; i++) ids.push_back((int64_t)(dice() % VOCAB));
            const std::vector<double> plain = model.plain_logits(ids);
            const std::vector<float> whole = model.logits(ids, 16, length, 1, kind.numbers);
            double error = 0, size = 0;
            for (size_t i = 0; i < plain.size(); i++) {
                error += (plain[i] - whole[i]) * (plain[i] - whole[i]);
                size += plain[i] * plain[i];
            }
            error = std::sqrt(error / size);
            bool is_equal = true;
            for (int64_t block_size : {1, 3, 8, 16, 32})
                for (int64_t chunk : {1, 5, 64})
                    is_equal &= model.logits(ids, block_size, chunk, 2, kind.numbers) == whole;
            const bool is_near = error < kind.most;
            printf("%s, %3d tokens: error %.1e%s; in any chunks, blocks and threads %s\n",
                   kind.name, (int)length, error, is_near ? "" : " TOO LARGE",
                   is_equal ? "equal" : "NOT EQUAL");
            is_right &= is_near && is_equal;
        }
    }
    return is_right ? 0 : 1;
}
