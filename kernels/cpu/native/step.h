// A whole decoder step of the Llama family: phases of a team, one after the other.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <vector>

#include "attention.h"

struct Layer {
    const float *input_norm, *post_norm;
    Matrix qkv, output, gate_up, down;
    int64_t window;  // tokens that a query sees, itself included; 0: all before it
};

struct Decoder {
    int64_t is_bf16, num_layers, hidden_size, intermediate_size, vocab_size;
    int64_t heads, kv_heads, head_dim;
    double eps, scale;
    const Layer* layers;
    const float *final_norm, *frequencies;  // frequencies: [head_dim / 2] radians per position
    Matrix embedding, head;
};

// Memory that steps work in: kept from step to step, on huge pages where the system has them.
class Workspace {
  public:
    void begin() { used_ = 0; }
    template <class T>
    void plan(T*& pointer, int64_t count) {
        pointer = (T*)used_;  // an offset until `settle`
        used_ += round_up(count * sizeof(T) + 1, 256);
    }
    char* settle() {
        if (used_ > size_) {
            free(memory_);
            size_ = round_up(used_ + used_ / 4, HUGE_PAGE);
            memory_ = (char*)aligned_alloc(HUGE_PAGE, size_);
            if (!memory_) size_ = 0;
#if defined(MADV_HUGEPAGE)
            if (memory_) madvise(memory_, size_, MADV_HUGEPAGE);
#endif
        }
        return memory_;
    }

  private:
    static constexpr int64_t HUGE_PAGE = 2 << 20;
    char* memory_ = nullptr;
    int64_t size_ = 0, used_ = 0;
};

struct Work {  // of attention, listed once a step
    std::vector<Item> items;
    std::vector<Group> groups;
    std::vector<int64_t> prompt_tokens;  // of rows with several: written before any is read
    int64_t num_parts;

    void list(const Batch& batch, const Heads& heads, int members) {
        items.clear();
        groups.clear();
        prompt_tokens.clear();
        num_parts = 0;
        const bool few = batch.num_rows * heads.kv_heads < 8 * members;
        const int most = (int)std::max<int64_t>(1, TILE_QUERIES / heads.group());
        for (int32_t row = 0; row < batch.num_rows; row++) {
            const int count = batch.row_starts[row + 1] - batch.row_starts[row];
            const int before = batch.context_lengths[row] - count;
            const int segments = (before + count + SEGMENT - 1) / SEGMENT;
            for (int i = 0; count > 1 && i < count; i++)
                prompt_tokens.push_back(batch.row_starts[row] + i);
            for (int32_t head = 0; head < heads.kv_heads; head++) {
                if (few && count == 1 && segments > 1) {
                    for (int s = 0; s < segments; s++)
                        items.push_back({row, head, 0, 1, s, s + 1, num_parts + s});
                    groups.push_back({batch.row_starts[row], head, num_parts, segments});
                    num_parts += segments;
                    continue;
                }
                for (int first = 0; first < count; first += most) {
                    const int queries = std::min(most, count - first);
                    const int last = (before + first + queries + SEGMENT - 1) / SEGMENT;
                    items.push_back({row, head, first, queries, 0, last, -1});
                }
            }
        }
    }
};

template <class F>
struct Each : Phase {  // a phase of any function of (first, end) over `count` things
    int64_t count, at_once;
    F function;

    Each(int64_t count, int64_t at_once, F function)
        : count(count), at_once(at_once), function(function) {}
    int64_t num_chunks() const override { return (count + at_once - 1) / at_once; }
    void run(int64_t chunk, int, bool, Hold&) const override {
        function(chunk * at_once, std::min(count, (chunk + 1) * at_once));
    }
};

template <class F>
void run_each(Team& team, int64_t count, int64_t at_once, F function) {
    team.run(Each<F>(count, at_once, function));
}

// Rows as products with int8 take them.
template <class E>
void rows_to_int8(Team& team, const E* a, int64_t a_stride, int64_t rows, int64_t inputs, q8* whole,
                  Scale* scales) {
    const int64_t stride = round_up(inputs, GROUP);
    run_each(team, rows, rows > 64 ? 8 : rows > 4 ? 2 : 4, [&](int64_t first, int64_t end) {
        for (int64_t row = first; row < end; row++)
            row_to_int8(a + row * a_stride, inputs, whole + row * stride,
                        scales + row * (stride / GROUP));
    });
}

template <class E, class S>
class Step {
  public:
    Step(Team& team, Workspace& space, Work& work, const Decoder& decoder, const Pool& pool,
         const Batch& batch)
        : team_(team), work_(work), decoder_(decoder), pool_(pool), batch_(batch),
          heads_{decoder.heads, decoder.kv_heads, decoder.head_dim, (float)decoder.scale},
          tokens_(batch.num_tokens), wide_(round_up(decoder.hidden_size, 2 * LANES)),
          qkv_wide_(round_up(decoder.heads * decoder.head_dim + 2 * decoder.kv_heads * decoder.head_dim,
                             2 * LANES)) {
        work.list(batch, heads_, team.members());
        const int64_t attended_wide = decoder.heads * decoder.head_dim;
        const int64_t rows = std::max(tokens_, batch.num_logits);
        const int64_t widest = std::max({wide_, attended_wide, decoder.intermediate_size});
        int8_wide_ = has_int8(decoder) ? round_up(widest, GROUP) : 0;
        scratch_bytes_ = typename Attention<E, S>::Scratch(heads_, nullptr).bytes;
        auto all = [&](auto each) {
            each(residual_, rows * wide_);
            each(chosen_residual_, batch.num_logits * wide_);
            each(rotary_, tokens_ * decoder.head_dim);
            each(qkv_, tokens_ * qkv_wide_);
            each(normed_, rows * wide_);
            each(activated_, rows * decoder.intermediate_size);
            each(attended_, tokens_ * attended_wide);
            each(chosen_attended_, batch.num_logits * attended_wide);
            each(parts_, work.num_parts * heads_.group() * (heads_.padded() + 2));
            each(scratch_, scratch_bytes_ * team.members());
            each(int8_rows_, rows * int8_wide_);
            each(int8_scales_, rows * (int8_wide_ / GROUP));
        };
        space.begin();
        all([&](auto*& pointer, int64_t count) { space.plan(pointer, count); });
        char* memory = space.settle();
        has_memory_ = memory != nullptr;
        all([&](auto*& pointer, int64_t) {
            pointer = (std::remove_reference_t<decltype(pointer)>)(memory + (int64_t)pointer);
        });
    }

    bool run(float* logits) {
        if (!has_memory_) return false;
        embed();
        for (int64_t index = 0; index < decoder_.num_layers; index++) {
            const Layer& layer = decoder_.layers[index];
            const bool is_last = index + 1 == decoder_.num_layers;
            const Matrix& after = is_last ? decoder_.head : decoder_.layers[index + 1].qkv;
            norm(residual_, tokens_, layer.input_norm);
            multiply(layer.qkv, normed_, wide_, tokens_, Into::NUMBERS, qkv_, qkv_wide_,
                     &layer.output);
            attend(index);
            E* attended = attended_;
            int64_t rows = tokens_;
            if (is_last) {  // from here on, only tokens whose logits are wanted
                choose();
                rows = batch_.num_logits;
                attended = chosen_attended_;
                residual_ = chosen_residual_;
            }
            multiply(layer.output, attended, decoder_.heads * decoder_.head_dim, rows, Into::SUMS,
                     residual_, wide_, &layer.gate_up, true);
            norm(residual_, rows, layer.post_norm);
            multiply(layer.gate_up, normed_, wide_, rows, Into::ACTIVATIONS, activated_,
                     decoder_.intermediate_size, &layer.down);
            multiply(layer.down, activated_, decoder_.intermediate_size, rows, Into::SUMS, residual_,
                     wide_, &after);
        }
        norm(residual_, batch_.num_logits, decoder_.final_norm);
        multiply(decoder_.head, normed_, wide_, batch_.num_logits, Into::NUMBERS, logits,
                 decoder_.vocab_size, nullptr);
        return true;
    }

  private:
    static bool has_int8(const Decoder& decoder) {
        return decoder.head.scales || (decoder.num_layers && decoder.layers[0].qkv.scales);
    }

    void embed() {
        const int64_t D = decoder_.head_dim;
        run_each(team_, tokens_, tokens_ > 64 ? 8 : 1, [&](int64_t first, int64_t end) {
            for (int64_t token = first; token < end; token++) {
                float* x = residual_ + token * wide_;
                unpack_row<E>(decoder_.embedding, batch_.token_ids[token], x);
                for (int64_t i = decoder_.hidden_size; i < wide_; i++) x[i] = 0;
                float* rotary = rotary_ + token * D;
                for (int64_t i = 0; i < D / 2; i++) {
                    const float angle = (float)batch_.positions[token] * decoder_.frequencies[i];
                    rotary[i] = std::cos(angle);
                    rotary[D / 2 + i] = std::sin(angle);
                }
            }
        });
    }

    void norm(const float* x, int64_t rows, const float* weight) {
        run_each(team_, rows, rows > 64 ? 8 : rows > 4 ? 2 : 4, [&](int64_t first, int64_t end) {
            for (int64_t row = first; row < end; row++)
                norm_row(x + row * wide_, weight, normed_ + row * wide_, decoder_.hidden_size, wide_,
                         (float)decoder_.eps);
        });
    }

    void multiply(const Matrix& matrix, const E* a, int64_t a_stride, int64_t rows, Into into,
                  void* out, int64_t out_stride, const Matrix* next, bool next_is_gated = false) {
        const auto run = [&](auto product, const auto* inputs, int64_t stride) {
            product.matrix = &matrix;
            product.a = inputs;
            product.a_stride = stride;
            product.scales = int8_scales_;
            product.rows = rows;
            product.into = into;
            product.out = out;
            product.out_stride = product.out_limit = out_stride;
            product.next = next;
            product.next_is_gated = next_is_gated;
            product.team_members = team_.members();
            team_.run(product);
        };
        if (!matrix.scales) return run(Product<E>{}, a, a_stride);
        const int64_t stride = round_up(matrix.inputs, GROUP);
        rows_to_int8(team_, a, a_stride, rows, matrix.inputs, int8_rows_, int8_scales_);
        run(Product<E, q8>{}, int8_rows_, stride);
    }

    void attend(int64_t layer) {
        run_each(team_, (int64_t)work_.prompt_tokens.size(), 4,
                 [&](int64_t first, int64_t end) { write(layer, first, end); });
        Attention<E, S> attention;
        attention.heads = heads_;
        attention.pool = pool_;
        attention.batch = batch_;
        attention.layer = layer;
        attention.window = decoder_.layers[layer].window;
        attention.items = work_.items.data();
        attention.num_items = (int64_t)work_.items.size();
        attention.queries = nullptr;
        attention.qkv = qkv_;
        attention.qkv_stride = qkv_wide_;
        attention.rotary = rotary_;
        attention.attended = attended_;
        attention.parts = parts_;
        attention.scratch = scratch_;
        attention.scratch_bytes = scratch_bytes_;
        team_.run(attention);
        Merge<E, S> merge;
        merge.attention = &attention;
        merge.groups = work_.groups.data();
        merge.num_groups = (int64_t)work_.groups.size();
        team_.run(merge);
    }

    // Keys and values of prompt tokens [first, end) of the list into the pool.
    void write(int64_t layer, int64_t first, int64_t end) {
        std::vector<float> room(heads_.head_dim + LANES);
        for (int64_t i = first; i < end; i++)
            for (int64_t head = 0, token = work_.prompt_tokens[i]; head < heads_.kv_heads; head++)
                Attention<E, S>::write_turned(heads_, pool_, layer, batch_.slots[token], head,
                                           qkv_ + token * qkv_wide_,
                                           rotary_ + token * heads_.head_dim, room.data());
    }

    void choose() {
        const int64_t wide = heads_.heads * heads_.head_dim;
        run_each(team_, batch_.num_logits, 16, [&](int64_t first, int64_t end) {
            for (int64_t i = first; i < end; i++) {
                const int64_t token = batch_.logit_tokens[i];
                memcpy(chosen_attended_ + i * wide, attended_ + token * wide, wide * sizeof(E));
                memcpy(chosen_residual_ + i * wide_, residual_ + token * wide_, wide_ * sizeof(float));
            }
        });
    }

    Team& team_;
    Work& work_;
    const Decoder& decoder_;
    const Pool& pool_;
    const Batch& batch_;
    const Heads heads_;
    const int64_t tokens_, wide_, qkv_wide_;
    int64_t scratch_bytes_, int8_wide_;
    bool has_memory_;
    float *residual_, *chosen_residual_, *rotary_, *qkv_, *parts_;
    E *normed_, *activated_, *attended_, *chosen_attended_;
    char* scratch_;
    q8* int8_rows_;  // what the next product multiplies, if its weights are int8
    Scale* int8_scales_;
};
