// What Python calls: plain C functions, with the structs of the headers. Each runs on the one team
// of this process, one call at a time.
#include <algorithm>
#include <cstring>
#include <new>

#include "likeliest.h"
#include "sampling.h"
#include "step.h"

namespace {

Team& the_team() {
    static Team* team = new Team;  // never destroyed: its followers live as long as the process
    return *team;
}

struct Turn {  // one call at a time
    Team& team = the_team();
    std::lock_guard<std::mutex> lock{team.busy};
    explicit Turn(int threads) { team.begin(threads); }
    ~Turn() {
        team.recall();
        amx::release();
    }
};

Workspace workspace;
Work work;

template <class F>
auto with_type(int64_t is_bf16, F function) {
    return is_bf16 ? function(bf16{}) : function(float{});
}

// The type that numbers are multiplied as, and the one that a pool stores them as. A pool of bfloat16
// or int8 goes with either; one of float32 with float32.
template <class F>
auto with_types(int64_t is_bf16, const Pool& pool, F function) {
    if (pool.numbers == INT8)
        return is_bf16 ? function(bf16{}, int8_t{}) : function(float{}, int8_t{});
    if (is_bf16) return function(bf16{}, bf16{});
    return pool.numbers == BFLOAT16 ? function(float{}, bf16{}) : function(float{}, float{});
}

enum Outcome : int { DONE = 0, NO_MEMORY = 1 };

// A phase over `count` rows of logits, each read by a member of the team in memory of its own.
template <class Reader, class F>
struct Readings : Phase {
    int64_t count, vocab_size, bytes;
    char* memory;
    F function;

    explicit Readings(F function) : function(function) {}
    int64_t num_chunks() const override { return count; }
    void run(int64_t chunk, int member, bool, Hold&) const override {
        Reader reader(vocab_size, Room(memory + member * bytes));
        function(reader, chunk);
    }
};

template <class Reader, class F>
Outcome with_rooms(int64_t count, int64_t vocab_size, int threads, F function) {
    Turn turn(threads);
    Readings<Reader, F> phase(function);
    phase.count = count;
    phase.vocab_size = vocab_size;
    phase.bytes = Reader(vocab_size, Room(nullptr)).bytes;
    workspace.begin();
    workspace.plan(phase.memory, phase.bytes * turn.team.members());
    phase.memory = workspace.settle();
    if (!phase.memory) return NO_MEMORY;
    turn.team.run(phase);
    return DONE;
}

}  // namespace

extern "C" {

// Struct sizes, so that a caller that sees others does not run.
int64_t splitflap_abi() {
    return sizeof(Matrix) + 100 * sizeof(Pool) + 10000 * sizeof(Batch) + 1000000 * sizeof(Layer) +
           100000000 * (int64_t)sizeof(Decoder) +
           10000000000 * (int64_t)(sizeof(Draw) + 1000 * sizeof(Adjustment) + 1000000 * sizeof(Ask));
}

int splitflap_lanes() { return LANES; }

int splitflap_has_matrices() { return amx::are_allowed(); }

int64_t splitflap_packed_size(int64_t is_bf16, int64_t outputs, int64_t inputs) {
    return with_type(is_bf16, [&](auto element) {
        return num_tiles(outputs) * tile_size<decltype(element)>(inputs);
    });
}

void splitflap_pack(int64_t is_bf16, const void* weight, int64_t outputs, int64_t inputs,
                    void* tiles) {
    with_type(is_bf16, [&](auto element) {
        using E = decltype(element);
        pack_tiles((const E*)weight, outputs, inputs, (E*)tiles);
    });
}

int64_t splitflap_int8_size(int64_t outputs, int64_t inputs) {
    return num_tiles(outputs) * tile_size<q8>(inputs);
}

int64_t splitflap_int8_scales(int64_t outputs) { return num_tiles(outputs) * LANES; }

int splitflap_pack_int8(int64_t is_bf16, const void* weight, int64_t outputs, int64_t inputs,
                        void* tiles, float* scales) {
    return with_type(is_bf16, [&](auto element) -> int {
        try {
            std::vector<int8_t> whole(round_up(inputs, LANES));
            using E = decltype(element);
            pack_int8_tiles((const E*)weight, outputs, inputs, (q8*)tiles, scales, whole.data());
            return DONE;
        } catch (const std::bad_alloc&) {
            return NO_MEMORY;
        }
    });
}

int splitflap_step(const Decoder* decoder, const Pool* pool, const Batch* batch, float* logits,
                   int threads) {
    return with_types(decoder->is_bf16, *pool, [&](auto element, auto stored) -> int {
        try {
            Turn turn(threads);
            Step<decltype(element), decltype(stored)> step(turn.team, workspace, work, *decoder, *pool, *batch);
            return step.run(logits) ? DONE : NO_MEMORY;
        } catch (const std::bad_alloc&) {
            return NO_MEMORY;
        }
    });
}

// [rows][inputs] times a matrix: float32 out, or elements if `keeps_type`.
int splitflap_multiply(int64_t is_bf16, const Matrix* matrix, const void* x, int64_t rows, void* out,
                       int64_t keeps_type, int threads) {
    return with_type(is_bf16, [&](auto element) -> int {
        using E = decltype(element);
        Turn turn(threads);
        const int64_t x_stride = round_up(matrix->inputs, PAIR<E>);
        const auto run = [&](auto product, const auto* inputs, int64_t stride, const Scale* scales) {
            product.matrix = matrix;
            product.a = inputs;
            product.a_stride = stride;
            product.scales = scales;
            product.rows = rows;
            product.into = keeps_type ? Into::ELEMENTS : Into::NUMBERS;
            product.out = out;
            product.out_stride = product.out_limit = matrix->outputs;
            turn.team.run(product);
            return DONE;
        };
        if (!matrix->scales) return run(Product<E>{}, (const E*)x, x_stride, nullptr);
        const int64_t stride = round_up(matrix->inputs, GROUP);
        q8* whole;
        Scale* scales;
        workspace.begin();
        workspace.plan(whole, rows * stride);
        workspace.plan(scales, rows * (stride / GROUP));
        char* memory = workspace.settle();
        if (!memory) return NO_MEMORY;
        whole = (q8*)(memory + (int64_t)whole);
        scales = (Scale*)(memory + (int64_t)scales);
        rows_to_int8(turn.team, (const E*)x, x_stride, rows, matrix->inputs, whole, scales);
        return run(Product<E, q8>{}, whole, stride, scales);
    });
}

void splitflap_rows(int64_t is_bf16, const Matrix* matrix, const int64_t* ids, int64_t count,
                    float* out) {
    with_type(is_bf16, [&](auto element) {
        for (int64_t i = 0; i < count; i++)
            unpack_row<decltype(element)>(*matrix, ids[i], out + i * matrix->inputs);
    });
}

int splitflap_attend(int64_t is_bf16, const Pool* pool, int64_t layer, const Batch* batch,
                     int64_t num_heads, int64_t kv_heads, int64_t head_dim, double scale,
                     int64_t window, const void* queries, void* attended, int threads) {
    return with_types(is_bf16, *pool, [&](auto element, auto stored) -> int {
        using E = decltype(element);
        using S = decltype(stored);
        try {
            Turn turn(threads);
            const Heads heads{num_heads, kv_heads, head_dim, (float)scale};
            work.list(*batch, heads, turn.team.members());
            Attention<E, S> attention;
            attention.heads = heads;
            attention.pool = *pool;
            attention.batch = *batch;
            attention.layer = layer;
            attention.window = window;
            attention.items = work.items.data();
            attention.num_items = (int64_t)work.items.size();
            attention.queries = (const E*)queries;
            attention.attended = (E*)attended;
            attention.scratch_bytes = typename Attention<E, S>::Scratch(heads, nullptr).bytes;
            workspace.begin();
            workspace.plan(attention.parts, work.num_parts * heads.group() * (heads.padded() + 2));
            workspace.plan(attention.scratch, attention.scratch_bytes * turn.team.members());
            char* memory = workspace.settle();
            if (!memory) return NO_MEMORY;
            attention.parts = (float*)(memory + (int64_t)attention.parts);
            attention.scratch = memory + (int64_t)attention.scratch;
            turn.team.run(attention);
            Merge<E, S> merge;
            merge.attention = &attention;
            merge.groups = work.groups.data();
            merge.num_groups = (int64_t)work.groups.size();
            turn.team.run(merge);
            return DONE;
        } catch (const std::bad_alloc&) {
            return NO_MEMORY;
        }
    });
}

// keys, values: [tokens][kv_heads][head_dim], each token to its slot.
void splitflap_write(int64_t is_bf16, const Pool* pool, int64_t layer, int64_t kv_heads,
                     int64_t head_dim, const void* keys, const void* values, const int64_t* slots,
                     int64_t tokens, int threads) {
    with_types(is_bf16, *pool, [&](auto element, auto stored) {
        using E = decltype(element);
        using S = decltype(stored);
        Turn turn(threads);
        run_each(turn.team, tokens, 16, [&](int64_t first, int64_t end) {
            for (int64_t i = first; i < end; i++)
                for (int64_t head = 0; head < kv_heads; head++) {
                    const int64_t at = (i * kv_heads + head) * head_dim;
                    write_token<E, S>(*pool, layer, slots[i], head, head_dim, (const E*)keys + at,
                                      (const E*)values + at);
                }
        });
    });
}

// Whole blocks of `block_bytes`: pairs of (block of `from`, block of `to`), a piece at a time.
void splitflap_copy(const char* from, char* to, const int64_t* pairs, int64_t num_pairs,
                    int64_t block_bytes, int threads) {
    constexpr int64_t PIECE = 1 << 16;
    const int64_t pieces = (block_bytes + PIECE - 1) / PIECE;
    const int64_t count = num_pairs * pieces;
    const int64_t at_once = std::max<int64_t>({1, PIECE / block_bytes, count >> 18});
    Turn turn(threads);
    run_each(turn.team, count, at_once, [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; i++) {
            const int64_t *pair = pairs + 2 * (i / pieces), start = i % pieces * PIECE;
            std::memcpy(to + pair[1] * block_bytes + start, from + pair[0] * block_bytes + start,
                        std::min(PIECE, block_bytes - start));
        }
    });
}

// One token for each draw, or NOTHING_TO_DRAW.
int splitflap_draw(const Draw* draws, int64_t count, int64_t vocab_size, int64_t* tokens,
                   int threads) {
    return with_rooms<Sampling>(count, vocab_size, threads, [&](Sampling& sampling, int64_t i) {
        tokens[i] = sampling.draw(draws[i]);
    });
}

int splitflap_tell(Ask* asks, int64_t count, int64_t vocab_size, int threads) {
    return with_rooms<Likeliest>(count, vocab_size, threads,
                                 [&](Likeliest& likeliest, int64_t i) { likeliest.answer(asks[i]); });
}

}  // extern "C"
