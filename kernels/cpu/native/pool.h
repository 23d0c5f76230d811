// The KV pool: what a (block, layer, head) tile holds, and how a token gets into it.
//
// A tile is keys, then values. Each half is its numbers and then, in int8, a scale a token:
//   keys    [head_dim / PAIR][block_size][PAIR]   token-minor: one load is one pair of LANES tokens
//   values  [block_size / PAIR][head_dim][PAIR]   or [block_size][head_dim] if the size is odd
//   scales  [block_size] bfloat16                 a number is its int8 times its token's scale
//
// Numbers are stored as S and multiplied as E: PAIR is E's, whatever S is. A scale is made of its
// own token's key or value alone, so that the same token computed again has the same bytes.
#pragma once

#include <algorithm>

#include "product.h"

enum Numbers : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

struct Pool {
    void* memory;
    int64_t block_stride, layer_stride, head_stride;  // elements
    int64_t block_size;
    int64_t numbers;  // Numbers: what it is stored as
};

template <class S>
constexpr bool IS_SCALED = std::is_same_v<S, int8_t>;
template <class S>
constexpr int64_t SCALE = IS_SCALED<S> ? sizeof(bf16) : 0;  // elements a token's scale takes

template <class E>
int64_t value_pair(int64_t block_size) { return block_size % PAIR<E> == 0 ? PAIR<E> : 1; }

template <class S>
int64_t half_tile(int64_t block_size, int64_t head_dim) { return block_size * (head_dim + SCALE<S>); }

template <class S>
S* tile_of(const Pool& pool, int64_t layer, int64_t block, int64_t head) {
    return (S*)pool.memory + block * pool.block_stride + layer * pool.layer_stride +
           head * pool.head_stride;
}

// Scales of a half tile.
template <class S>
bf16* scales_of(const S* half, int64_t block_size, int64_t head_dim) {
    return (bf16*)(half + block_size * head_dim);
}

// The smallest bfloat16 by which a vector divided is within int8: 0 for zeros, NaN if it holds NaN
// or an infinity.
template <class I>
__attribute__((noinline)) bf16 scale_for(const I* vector, int64_t head_dim) {
    const float scale = largest(vector, head_dim) / MOST_INT8;
    if (scale != scale) return {0x7fc0};
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    return {(uint16_t)((bits + 0xffffu) >> 16)};
}

// A vector's numbers as they are stored, one after the other: use(d, number).
template <class S, class I, class F>
INLINE void each_stored(const I* vector, int64_t head_dim, float scale, F use) {
    for (int64_t first = 0; first < head_dim; first += LANES) {
        const int count = (int)std::min<int64_t>(head_dim - first, LANES);
        S stored[LANES];
        if constexpr (IS_SCALED<S>)
            put_scaled(stored, load_first(vector + first, count), scale);
        else
            put(stored, load_first(vector + first, count));
        if (count < LANES) {
            for (int i = 0; i < count; i++) use(first + i, stored[i]);
            return;
        }
        UNROLL for (int i = 0; i < LANES; i++) use(first + i, stored[i]);
    }
}

// A token's key and value, E or float32, to their slot.
template <class E, class S, class I>
void write_token(const Pool& pool, int64_t layer, int64_t slot, int64_t head, int64_t head_dim,
                 const I* key, const I* value) {
    const int64_t size = pool.block_size, offset = slot % size, pair = value_pair<E>(size);
    S* keys = tile_of<S>(pool, layer, slot / size, head);
    S* values = keys + half_tile<S>(size, head_dim);
    float key_scale = 1, value_scale = 1;
    if constexpr (IS_SCALED<S>) {
        const bf16 scales[2] = {scale_for(key, head_dim), scale_for(value, head_dim)};
        scales_of(keys, size, head_dim)[offset] = scales[0];
        scales_of(values, size, head_dim)[offset] = scales[1];
        key_scale = to_float(scales[0]);
        value_scale = to_float(scales[1]);
    }
    each_stored<S>(key, head_dim, key_scale, [&](int64_t d, S number) {
        keys[(d / PAIR<E> * size + offset) * PAIR<E> + d % PAIR<E>] = number;
    });
    S* first = values + offset / pair * head_dim * pair + offset % pair;
    each_stored<S>(value, head_dim, value_scale,
                   [&](int64_t d, S number) { first[d * pair] = number; });
}
