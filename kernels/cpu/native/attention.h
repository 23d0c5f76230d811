// Paged attention over a pool's tiles (pool.h).
//
// Keys are worked through in segments of SEGMENT tokens, counted from the sequence's start. A
// segment gives sums, a maximum and a total weight; segments are folded together first to last.
// This is the same for one query or many, on one thread or on several.
#pragma once

#include "pool.h"

constexpr int SEGMENT = 256;
// Queries times heads of a group, where there are many queries.
constexpr int TILE_QUERIES = amx::IS_BUILT ? amx::MOST_ROWS : 24;

struct Batch {
    const int64_t* token_ids;
    const int32_t* positions;
    const int64_t* slots;
    const int32_t* row_starts;
    const int32_t* context_lengths;
    const int32_t* tables;
    int64_t table_stride;
    int64_t num_rows, num_tokens;
    const int64_t* logit_tokens;
    int64_t num_logits;
};

struct Heads {
    int64_t heads, kv_heads, head_dim;
    float scale;

    int64_t group() const { return heads / kv_heads; }
    int64_t padded() const { return round_up(head_dim, 2 * LANES); }
};

// A head turned by its token's position: `rotary` is head_dim/2 cosines, then as many sines.
template <class E>
__attribute__((noinline)) void rotate(const float* head, const float* rotary, E* turned,
                                      int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int count = (int)std::min<int64_t>(half - i, LANES);
        const Floats x = load_first(head + i, count), y = load_first(head + half + i, count);
        const Floats c = load_first(rotary + i, count), s = load_first(rotary + half + i, count);
        put_first(turned + i, x * c - y * s, count);
        put_first(turned + half + i, y * c + x * s, count);
    }
}

struct Item {  // queries of one row and one key-value head, and the segments they attend to
    int32_t row, head, first_query, num_queries, first_segment, end_segment;
    int64_t part;  // where the only segment's result is kept, or -1: all segments are here
};

struct Group {  // the parts of one query
    int64_t token, head, first_part, num_parts;
};

template <class E, class S>
struct Attention : Phase {
    Heads heads;
    Pool pool;
    Batch batch;
    int64_t layer;
    int64_t window;  // tokens that a query sees, itself included; 0: all before it
    const Item* items;
    int64_t num_items;
    const E* queries;     // [tokens][heads][head_dim], or null: then
    const float* qkv;     // [tokens][qkv_stride], not yet turned
    int64_t qkv_stride;
    const float* rotary;  // [tokens][head_dim]
    E* attended;          // [tokens][heads][head_dim]
    float* parts;         // [parts][group][padded + 2]
    char* scratch;        // a piece for each member
    int64_t scratch_bytes;

    static int64_t most_queries(const Heads& heads) {
        return std::max<int64_t>(1, TILE_QUERIES / heads.group());
    }

    struct Scratch {
        E *queries, *weights;
        S *keys, *values, *last_values;
        float *key_scales, *value_scales, *scores, *made, *sums, *largest, *totals, *largest_here, *totals_here;
        int64_t bytes;

        Scratch(const Heads& heads, char* memory) {
            const int64_t rows = most_queries(heads) * heads.group(), padded = heads.padded();
            const int64_t beyond = 4 * LANES * PAIR<E>;  // a load past the last column
            const int64_t scales = IS_SCALED<S> ? SEGMENT : 0;
            char* at = memory;
            auto take = [&](auto*& pointer, int64_t count) {
                pointer = (std::remove_reference_t<decltype(pointer)>)at;
                at += round_up(count * sizeof(*pointer), 64);
            };
            take(queries, rows * heads.head_dim);
            take(weights, rows * SEGMENT);
            take(keys, SEGMENT * heads.head_dim + beyond);
            take(values, SEGMENT * heads.head_dim + beyond);
            take(last_values, LANES * heads.head_dim + beyond);
            take(key_scales, scales);
            take(value_scales, scales);
            take(scores, rows * SEGMENT);
            take(made, rows * padded);
            take(sums, rows * padded);
            take(largest, rows);
            take(totals, rows);
            take(largest_here, rows);
            take(totals_here, rows);
            bytes = at - memory;
        }
    };

    int64_t num_chunks() const override { return num_items; }

    void run(int64_t chunk, int member, bool is_last_of_share, Hold& hold) const override {
        const Attention mine = *this;  // outlives the phase, which may end without this chunk
        mine.attend(chunk, member, is_last_of_share, hold);
    }

    void attend(int64_t chunk, int member, bool is_last_of_share, Hold& hold) const {
        const Item item = items[chunk];
        const Scratch mine(heads, scratch + member * scratch_bytes);
        const int64_t group = heads.group(), padded = heads.padded(), D = heads.head_dim;
        const int rows = (int)(item.num_queries * group);
        fetch_queries(item, mine);
        hold.lend();
        for (int r = 0; r < rows; r++) {
            mine.largest[r] = -INFINITY;
            mine.totals[r] = 0;
        }
        for (int segment = first_segment(item); segment < item.end_segment; segment++) {
            const int start = segment * SEGMENT;
            const int count = std::min(SEGMENT, seen(item, (int)item.num_queries - 1) - start);
            Places at = places(item, mine, start, count);
            if (segment + 1 < item.end_segment)
                look_ahead(at, item, start + SEGMENT);
            else if (!is_last_of_share)
                look_ahead(at, items[chunk + 1], first_segment(items[chunk + 1]) * SEGMENT);
            if (!on_matrices<E, S>() && rows <= MOST_ROWS<E, 4>)
                score<4>(mine, at, rows);
            else
                score<2>(mine, at, rows);
            if constexpr (IS_SCALED<S>) fetch_scales(item, mine, start, count);
            for (int r = 0; r < rows; r++) {
                const Span span = span_of(item, r, start, count);
                if (span.first < span.end) weigh(mine, r, span, count);
            }
            for (int64_t column = 0; column < D;) {
                const bool is_wide = !on_matrices<E, S>() && D - column > 2 * LANES;
                if (is_wide)
                    add_columns<4>(mine, at, rows, column);
                else
                    add_columns<2>(mine, at, rows, column);
                column += (is_wide ? 4 : 2) * LANES;
            }
            for (int r = 0; r < rows; r++) {
                const Span span = span_of(item, r, start, count);
                if (span.first >= span.end) continue;
                fold(mine.sums + r * padded, mine.largest[r], mine.totals[r], mine.made + r * padded,
                     mine.largest_here[r], mine.totals_here[r], D, heads.scale);
            }
        }
        if (!hold.keep()) return;
        for (int r = 0; r < rows; r++) {
            const float* sums = mine.sums + r * padded;
            if (item.part < 0) {
                const int64_t token = batch.row_starts[item.row] + item.first_query + r / group;
                finish(sums, mine.totals[r], token, item.head * group + r % group);
                continue;
            }
            float* part = parts + (item.part * group + r) * (padded + 2);
            memcpy(part, sums, D * sizeof(float));
            part[padded] = mine.largest[r];
            part[padded + 1] = mine.totals[r];
        }
    }

    // Keys that an item's query sees, its own included.
    int seen(const Item& item, int query) const {
        const int row_tokens = batch.row_starts[item.row + 1] - batch.row_starts[item.row];
        return batch.context_lengths[item.row] - row_tokens + item.first_query + query + 1;
    }

    // The first key that a query sees which sees none after the `seen` first.
    int first_seen(int seen) const {
        return window ? (int)std::max<int64_t>(0, seen - window) : 0;
    }

    int first_segment(const Item& item) const {
        return std::max(item.first_segment, first_seen(seen(item, 0)) / SEGMENT);
    }

    struct Span {  // of a segment's `count` keys, those that a row sees
        int first, end;
    };

    Span span_of(const Item& item, int row, int start, int count) const {
        const int end = seen(item, row / (int)heads.group());
        return {std::max(0, first_seen(end) - start), std::min(count, end - start)};
    }

    // The item's queries, turned if they are not; a row's only token is also written here, as no
    // other item reads it.
    void fetch_queries(const Item& item, const Scratch& mine) const {
        const int64_t group = heads.group(), D = heads.head_dim;
        const int64_t first = batch.row_starts[item.row] + item.first_query;
        for (int64_t i = 0; i < item.num_queries; i++)
            for (int64_t g = 0; g < group; g++) {
                const int64_t head = item.head * group + g;
                E* query = mine.queries + (i * group + g) * D;
                if (queries)
                    memcpy(query, queries + ((first + i) * heads.heads + head) * D, D * sizeof(E));
                else
                    rotate(qkv + (first + i) * qkv_stride + head * D, rotary + (first + i) * D, query, D);
            }
        const bool is_alone = batch.row_starts[item.row + 1] - batch.row_starts[item.row] == 1;
        const bool sees_itself = item.end_segment * SEGMENT >= batch.context_lengths[item.row];
        if (!queries && is_alone && sees_itself)
            write_turned(heads, pool, layer, batch.slots[first], item.head, qkv + first * qkv_stride,
                         rotary + first * D, (float*)mine.values);
    }

    static void write_turned(const Heads& heads, const Pool& pool, int64_t layer, int64_t slot,
                             int64_t head, const float* qkv, const float* rotary, float* key) {
        const int64_t D = heads.head_dim;
        rotate(qkv + (heads.heads + head) * D, rotary, key, D);
        const float* value = qkv + (heads.heads + heads.kv_heads + head) * D;
        write_token<E, S>(pool, layer, slot, head, D, (const float*)key, value);
    }

    struct Places {  // of a segment's groups of LANES tokens
        const S *keys[SEGMENT / LANES], *values[SEGMENT / LANES];
        const S* soon[SEGMENT / LANES];  // keys wanted after this segment
        const S* const* next = nullptr;  // `soon`, if there are any
        int64_t key_step;
        int groups;
    };

    // Where keys and values lie; copied side by side first if blocks do not hold whole groups.
    Places places(const Item& item, const Scratch& mine, int start, int count) const {
        Places at;
        const int64_t D = heads.head_dim, size = pool.block_size;
        const int32_t* table = batch.tables + item.row * batch.table_stride;
        at.groups = (count + LANES - 1) / LANES;
        at.key_step = size * PAIR<E>;
        if (size % LANES) {
            gather(table, item.head, mine, start, count);
            at.key_step = SEGMENT * PAIR<E>;
        }
        for (int g = 0; g < at.groups; g++) {
            const int64_t token = start + g * LANES, offset = token % size;
            if (size % LANES) {
                at.keys[g] = mine.keys + g * LANES * PAIR<E>;
                at.values[g] = mine.values + g * LANES * D;
                continue;
            }
            const S* tile = tile_of<S>(pool, layer, table[token / size], item.head);
            at.keys[g] = tile + offset * PAIR<E>;
            at.values[g] = tile + half_tile<S>(size, D) + offset * D;
        }
        const int last = count % LANES;  // tokens of the last group: what follows may be NaN
        if (last) {
            const S* from = at.values[at.groups - 1];
            const int64_t whole = last / PAIR<E> * PAIR<E> * D;
            memcpy(mine.last_values, from, whole * sizeof(S));
            memset((void*)(mine.last_values + whole), 0, (LANES * D - whole) * sizeof(S));
            if (last % PAIR<E>)
                for (int64_t d = 0; d < D; d++)
                    mine.last_values[whole + d * PAIR<E>] = from[whole + d * PAIR<E>];
            at.values[at.groups - 1] = mine.last_values;
        }
        return at;
    }

    // The keys from token `start` on are wanted soon.
    void look_ahead(Places& at, const Item& item, int start) const {
        if (pool.block_size % LANES) return;
        const int32_t* table = batch.tables + item.row * batch.table_stride;
        const int last = batch.context_lengths[item.row] - 1;
        for (int g = 0; g < at.groups; g++) {
            const int64_t token = std::min(start + g * LANES, last);
            at.soon[g] = tile_of<S>(pool, layer, table[token / pool.block_size], item.head) +
                         token % pool.block_size / LANES * LANES * heads.head_dim;
        }
        at.next = at.soon;
    }

    void gather(const int32_t* table, int64_t head, const Scratch& mine, int start,
                int count) const {
        const int64_t D = heads.head_dim, size = pool.block_size, pair = value_pair<E>(size);
        for (int64_t i = 0; i < count; i++) {
            const int64_t offset = (start + i) % size;
            const S* keys = tile_of<S>(pool, layer, table[(start + i) / size], head);
            const S* values =
                keys + half_tile<S>(size, D) + offset / pair * D * pair + offset % pair;
            for (int64_t d = 0; d < D; d += PAIR<E>)
                memcpy(mine.keys + (d / PAIR<E> * SEGMENT + i) * PAIR<E>,
                       keys + (d / PAIR<E> * size + offset) * PAIR<E>, PAIR<E> * sizeof(S));
            S* to = mine.values + i / PAIR<E> * D * PAIR<E> + i % PAIR<E>;
            for (int64_t d = 0; d < D; d++) to[d * PAIR<E>] = values[d * pair];
        }
    }

    // Scales of a segment's keys and values, one after the other.
    void fetch_scales(const Item& item, const Scratch& mine, int start, int count) const {
        const int64_t D = heads.head_dim, size = pool.block_size;
        const int32_t* table = batch.tables + item.row * batch.table_stride;
        const int at_once = size % LANES ? 1 : LANES;
        for (int i = 0; i < count; i += at_once) {
            const int64_t offset = (start + i) % size;
            const S* keys = tile_of<S>(pool, layer, table[(start + i) / size], item.head);
            const bf16* key = scales_of(keys, size, D) + offset;
            const bf16* value = scales_of(keys + half_tile<S>(size, D), size, D) + offset;
            put_first(mine.key_scales + i, load_first(key, at_once), at_once);
            put_first(mine.value_scales + i, load_first(value, at_once), at_once);
        }
    }

    // Scores of all queries against a segment's keys; those past a query's last mean nothing.
    template <int TILES>
    void score(const Scratch& mine, const Places& at, int rows) const {
        const int64_t D = heads.head_dim;
        const int at_once = even_rows(rows, most_rows<E, S, TILES>());
        for (int g = 0; g < at.groups; g += TILES) {
            const S *tiles[TILES], *soon[TILES];
            for (int t = 0; t < TILES; t++) {
                tiles[t] = at.keys[std::min(g + t, at.groups - 1)];
                soon[t] = at.values[std::min(g + t, at.groups - 1)];
            }
            for (int r = 0; r < rows; r += at_once) {
                const int count = std::min(at_once, rows - r);
                multiply_rows<E, S, TILES>(count, mine.queries + r * D, D, tiles, at.key_step,
                                           (int)(D / PAIR<E>), r == 0 ? soon : nullptr,
                                           mine.scores + r * SEGMENT + g * LANES, SEGMENT);
            }
        }
    }

    // Scores of one row to weights, with their maximum and their sum; keys outside its span weigh
    // nothing. Where values are scaled, a weight takes its value's scale with it.
    void weigh(const Scratch& mine, int row, Span span, int count) const {
        float* scores = mine.scores + row * SEGMENT;
        E* weights = mine.weights + row * SEGMENT;
        const int first = span.first / LANES, end = (span.end + LANES - 1) / LANES;
        Floats most = fill(-INFINITY), sum = zeros();
        for (int g = first; g < end; g++) {
            Floats score = load(scores + g * LANES);
            if constexpr (IS_SCALED<S>) {
                score = score * load(mine.key_scales + g * LANES);
                store(scores + g * LANES, score);
            }
            if (!is_within(span, g)) score = choose(lanes_of(span, g), score, fill(-INFINITY));
            most = larger(most, score);
        }
        const float largest = max_lanes(most);
        const Floats top = fill(largest), factor = fill(heads.scale * LOG2_E);
        for (int g = 0; g < first; g++) put(weights + g * LANES, zeros());
        for (int g = first; g < end; g++) {
            Floats weight = exp2_of((load(scores + g * LANES) - top) * factor);
            if (!is_within(span, g)) weight = choose(lanes_of(span, g), weight, zeros());
            sum = sum + weight;
            if constexpr (IS_SCALED<S>) {
                weight = weight * load(mine.value_scales + g * LANES);
                if (!is_within(span, g)) weight = choose(lanes_of(span, g), weight, zeros());
            }
            put(weights + g * LANES, weight);
        }
        for (int g = end; g * LANES < count; g++) put(weights + g * LANES, zeros());
        mine.largest_here[row] = largest;
        mine.totals_here[row] = sum_lanes(sum);
    }

    static bool is_within(Span span, int group) {
        return span.first <= group * LANES && (group + 1) * LANES <= span.end;
    }
    static Ints lanes_of(Span span, int group) {
        return first_lanes(span.end - group * LANES) & ~first_lanes(span.first - group * LANES);
    }

    // Weights times values, for some columns of them.
    template <int TILES>
    void add_columns(const Scratch& mine, const Places& at, int rows, int64_t column) const {
        const int64_t padded = heads.padded();
        const int at_once = even_rows(rows, most_rows<E, S, TILES>());
        for (int r = 0; r < rows; r += at_once) {
            const int count = std::min(at_once, rows - r);
            multiply_row_groups<E, S, TILES>(count, mine.weights + r * SEGMENT, SEGMENT, at.values,
                                             at.groups, column, heads.head_dim * PAIR<E>,
                                             r == 0 ? at.next : nullptr, mine.made + r * padded,
                                             padded);
        }
    }

    // Add a segment's result to those before it.
    __attribute__((noinline)) static void fold(float* sums, float& largest, float& total,
                                               const float* made, float made_largest,
                                               float made_total, int64_t head_dim, float scale) {
        if (largest == -INFINITY) {  // it is the first
            memcpy(sums, made, head_dim * sizeof(float));
            largest = made_largest;
            total = made_total;
            return;
        }
        const float both = largest < made_largest ? made_largest : largest;
        const float old_factor = exp2_of((largest - both) * (scale * LOG2_E));
        const float new_factor = exp2_of((made_largest - both) * (scale * LOG2_E));
        total = total * old_factor + made_total * new_factor;
        largest = both;
        for (int64_t d = 0; d < head_dim; d += LANES) {
            const int count = (int)std::min<int64_t>(head_dim - d, LANES);
            put_first(sums + d,
                      load_first(sums + d, count) * fill(old_factor) +
                          load_first(made + d, count) * fill(new_factor),
                      count);
        }
    }

    void finish(const float* sums, float total, int64_t token, int64_t head) const {
        const int64_t D = heads.head_dim;
        E* to = attended + (token * heads.heads + head) * D;
        const Floats factor = fill(1.f / total);
        for (int64_t d = 0; d < D; d += LANES) {
            const int count = (int)std::min<int64_t>(D - d, LANES);
            put_first(to + d, load_first(sums + d, count) * factor, count);
        }
    }
};

// Queries whose segments were attended to apart: fold them in order.
template <class E, class S>
struct Merge : Phase {
    const Attention<E, S>* attention;
    const Group* groups;
    int64_t num_groups;

    int64_t num_chunks() const override { return num_groups; }

    void run(int64_t chunk, int, bool, Hold&) const override {
        const Heads& heads = attention->heads;
        const int64_t group = heads.group(), padded = heads.padded();
        const Group& whole = groups[chunk];
        for (int64_t g = 0; g < group; g++) {
            float* first = attention->parts + (whole.first_part * group + g) * (padded + 2);
            for (int64_t p = 1; p < whole.num_parts; p++) {
                const float* part = first + p * group * (padded + 2);
                Attention<E, S>::fold(first, first[padded], first[padded + 1], part, part[padded],
                                   part[padded + 1], heads.head_dim, heads.scale);
            }
            attention->finish(first, first[padded + 1], whole.token, whole.head * group + g);
        }
    }
};
