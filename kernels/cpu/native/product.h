// Weights in tiles of LANES outputs, and the product of a step's rows with them.
//
// A tile is [steps][LANES][PAIR]: the weights of PAIR inputs of each output side by side. Outputs
// are filled up with zeros to whole tiles, tiles to an even number, inputs to whole pairs.
#pragma once

#include <algorithm>

#include "int8.h"
#include "team.h"

struct Matrix {
    const void* tiles;
    const float* bias;  // of all tiles, or null
    int64_t outputs, inputs;
    const float* scales;  // of the outputs of all tiles if they hold int8, or null
};

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class E>
int64_t tile_size(int64_t inputs) { return round_up(inputs, PAIR<E>) * LANES; }
INLINE int64_t num_tiles(int64_t outputs) { return round_up(outputs, 2 * LANES) / LANES; }

template <class E>
void pack_tiles(const E* weight, int64_t outputs, int64_t inputs, E* tiles) {
    for (int64_t first = 0; first < num_tiles(outputs) * LANES; first += LANES) {
        const bool is_whole = first + LANES <= outputs && inputs % PAIR<E> == 0;
        for (int64_t k = 0; k < round_up(inputs, PAIR<E>); k += PAIR<E>)
            for (int64_t output = first; output < first + LANES; output++, tiles += PAIR<E>) {
                const E* from = weight + output * inputs + k;
                if (is_whole) {
                    memcpy(tiles, from, 4);
                    continue;
                }
                for (int i = 0; i < PAIR<E>; i++)
                    tiles[i] = output < outputs && k + i < inputs ? from[i] : E{};
            }
    }
}

// The same in int8, each weight greater by INT8_OFFSET. `whole` has room for a row of `inputs`,
// rounded up to LANES.
template <class E>
void pack_int8_tiles(const E* weight, int64_t outputs, int64_t inputs, q8* tiles, float* scales,
                     int8_t* whole) {
    const int64_t size = tile_size<q8>(inputs), padded = num_tiles(outputs) * LANES;
    memset((void*)tiles, 0, padded / LANES * size);
    for (int64_t output = 0; output < padded; output++) {
        scales[output] = 0;
        if (output >= outputs) continue;
        scales[output] = weights_to_int8(weight + output * inputs, inputs, whole);
        q8* at = tiles + output / LANES * size + output % LANES * PAIR<q8>;
        for (int64_t k = 0; k < inputs; k++)
            at[k / PAIR<q8> * LANES * PAIR<q8> + k % PAIR<q8>] = {(int8_t)(whole[k] ^ INT8_OFFSET)};
    }
}

INLINE float to_float(q8 x) { return (int8_t)(x.bits ^ INT8_OFFSET); }

template <class E>
int64_t tile_bytes(const Matrix& matrix) {
    return matrix.scales ? tile_size<q8>(matrix.inputs) : tile_size<E>(matrix.inputs) * sizeof(E);
}

// One output's weights, as they are multiplied.
template <class S>
void unpack_row_of(const Matrix& matrix, int64_t output, float scale, float* row) {
    const S* at = (const S*)matrix.tiles + output / LANES * tile_size<S>(matrix.inputs) +
                  output % LANES * PAIR<S>;
    for (int64_t k = 0; k < matrix.inputs; k++)
        row[k] = to_float(at[k / PAIR<S> * LANES * PAIR<S> + k % PAIR<S>]) * scale;
}
template <class E>
void unpack_row(const Matrix& matrix, int64_t output, float* row) {
    if (matrix.scales)
        unpack_row_of<q8>(matrix, output, matrix.scales[output], row);
    else
        unpack_row_of<E>(matrix, output, 1, row);
}

INLINE float root_mean_square(const float* x, int64_t size, float eps) {
    Floats sums = zeros();
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats v = load_first(x + i, size - i);
        sums = sums + v * v;
    }
    return 1.f / std::sqrt(sum_lanes(sums) / size + eps);
}

// normed[i] = x[i] / rms(x) * weight[i]; zeros follow up to `padded` numbers.
template <class E>
__attribute__((noinline)) void norm_row(const float* x, const float* weight, E* normed,
                                        int64_t size, int64_t padded, float eps) {
    const Floats scale = fill(root_mean_square(x, size, eps));
    int64_t i = 0;
    for (; i < size; i += LANES) {
        const int count = (int)std::min<int64_t>(size - i, LANES);
        put_first(normed + i, load_first(x + i, count) * scale * load_first(weight + i, count), count);
    }
    for (i = size; i < padded; i++) normed[i] = E{};
}

INLINE Floats gated(Floats gate, Floats up) {  // silu(gate) * up
    return gate / (fill(1.f) + exp2_of(gate * fill(-LOG2_E))) * up;
}

enum class Into { NUMBERS, SUMS, ACTIVATIONS, ELEMENTS };  // how a product's results are kept

// rows x inputs times a matrix, both held as A; activations and elements become E. A unit is two tiles of outputs side by side, or, for ACTIVATIONS, a
// tile of gates and one of ups; a chunk is some units for a block of rows that the cache holds.
template <class E, class A = E>
struct Product : Phase {
    const Matrix* matrix;
    const A* a;
    int64_t a_stride;
    const Scale* scales = nullptr;  // of rows in int8, one a group
    int64_t rows;
    Into into;
    void* out;
    int64_t out_stride, out_limit;  // outputs past the limit are not written
    const Matrix* next = nullptr;   // the matrix wanted after this one
    bool next_is_gated = false;

    static constexpr int MOST = std::max(MOST_ROWS<A, 2>, amx::MOST_ROWS);
    static int most() { return most_rows<A, A, 2>(); }
    // So few, and the CPU looks ahead better itself: it is soon done with what it has.
    static int unfetched_rows() { return on_matrices<A, A>() ? amx::SHORT : 3; }
    static constexpr int64_t CACHED_BYTES = (amx::IS_BUILT ? 1024 : 384) * 1024;  // of rows

    int64_t rows_at_once() const {
        const int64_t fit = std::max<int64_t>(most(), CACHED_BYTES / (matrix->inputs * sizeof(A)));
        return rows <= fit ? rows : even_rows(rows, fit / most() * most());
    }
    int64_t units() const { return num_tiles(matrix->outputs) / 2; }
    int64_t units_at_once() const { return std::clamp<int64_t>(units() / 64, 1, 8); }
    int64_t chunks_of_units() const { return (units() + units_at_once() - 1) / units_at_once(); }

    int64_t num_chunks() const override {
        if (rows == 0) return 0;
        return chunks_of_units() * ((rows + rows_at_once() - 1) / rows_at_once());
    }

    // The two tiles of a unit.
    static void tiles_of(const Matrix& matrix, bool is_gated, int64_t unit, const A* (&tiles)[2]) {
        const int64_t size = tile_bytes<E>(matrix);
        const int64_t first = is_gated ? unit : 2 * unit;
        const int64_t second = is_gated ? unit + matrix.outputs / LANES / 2 : first + 1;
        tiles[0] = (const A*)((const char*)matrix.tiles + first * size);
        tiles[1] = (const A*)((const char*)matrix.tiles + second * size);
    }

    void run(int64_t chunk, int member, bool is_last_of_share, Hold& hold) const override {
        const Product mine = *this;  // outlives the phase, which may end without this chunk
        mine.multiply(chunk, member, is_last_of_share, hold);
    }

    void multiply(int64_t chunk, int member, bool is_last_of_share, Hold& hold) const {
        const int64_t groups = chunks_of_units(), at_once = rows_at_once();
        const int64_t first_row = chunk / groups * at_once;
        const int64_t end_row = std::min(rows, first_row + at_once);
        const int64_t first = chunk % groups * units_at_once();
        const int64_t end = std::min(units(), first + units_at_once());
        for (int64_t unit = first; unit < end; unit++) {
            const A *tiles[2], *soon[2];
            tiles_of(*matrix, into == Into::ACTIVATIONS, unit, tiles);
            const A* const* fetched = soon;
            if (unit + 1 < end || (!is_last_of_share && unit + 1 < units()))
                tiles_of(*matrix, into == Into::ACTIVATIONS, unit + 1, soon);
            else if (next)
                tiles_of(*next, next_is_gated, next_unit(member), soon);
            else
                fetched = nullptr;
            const bool is_left_alone = rows <= unfetched_rows() && !(unit + 1 == end && is_last_of_share);
            if (unit == first) hold.lend();
            if (!run_unit(unit, tiles, is_left_alone ? nullptr : fetched, first_row, end_row, hold,
                          unit == first))
                return;
        }
    }

    int64_t next_unit(int member) const {  // the first one of this member's share
        const int64_t count = num_tiles(next->outputs) / 2;
        const int members = team_members;
        return member < members ? count * member / members : 0;
    }

    // False if the chunk is another's by now. It is lent until its first results are written.
    bool run_unit(int64_t unit, const A* const (&tiles)[2], const A* const* soon, int64_t first_row,
                  int64_t end_row, Hold& hold, bool is_lent) const {
        const int steps = (int)(round_up(matrix->inputs, PAIR<A>) / PAIR<A>);
        const int at_once = even_rows((int)(end_row - first_row), most());
        alignas(64) float made[MOST * 2 * LANES];
        for (int64_t row = first_row; row < end_row; row += at_once) {
            const int count = (int)std::min<int64_t>(at_once, end_row - row);
            if constexpr (std::is_same_v<A, q8>)
                int8_kernel(count)(a + row * a_stride, a_stride, scales + row * (a_stride / GROUP),
                                   tiles, steps, soon, made);
            else
                multiply_rows<A, A, 2>(count, a + row * a_stride, a_stride, tiles, LANES * PAIR<A>,
                                       steps, soon, made, 2 * LANES);
            soon = nullptr;
            if (is_lent && !hold.keep()) return false;
            is_lent = false;
            keep(unit, row, count, made);
        }
        return true;
    }

    void keep(int64_t unit, int64_t row, int count, const float* made) const {
        const bool is_gated = into == Into::ACTIVATIONS;
        const int64_t first = is_gated ? unit * LANES : 2 * unit * LANES;
        const int64_t second = is_gated ? matrix->outputs / 2 + first : first + LANES;
        const int64_t start = row * out_stride + first;
        if (is_gated) {
            for (int r = 0; r < count; r++, made += 2 * LANES)
                put((E*)out + start + r * out_stride,
                    gated(number(made, first), number(made + LANES, second)));
            return;
        }
        keep_tile(first, start, count, made);
        keep_tile(second, start + LANES, count, made + LANES);
    }

    Floats number(const float* sums, int64_t at) const {
        Floats v = load(sums);
        if constexpr (std::is_same_v<A, q8>) v = v * load(matrix->scales + at);
        return matrix->bias ? v + load(matrix->bias + at) : v;
    }

    void keep_tile(int64_t at, int64_t start, int count, const float* made) const {
        const int lanes = (int)std::clamp<int64_t>(out_limit - at, 0, LANES);
        if (lanes == LANES)
            keep_lanes(at, start, count, made, LANES);  // known here: whole registers
        else if (lanes)
            keep_lanes(at, start, count, made, lanes);
    }

    inline __attribute__((always_inline)) void keep_lanes(int64_t at, int64_t start, int count,
                                                          const float* made, int lanes) const {
        for (int r = 0; r < count; r++, made += 2 * LANES, start += out_stride) {
            const Floats v = number(made, at);
            float* numbers = (float*)out + start;
            if (into == Into::ELEMENTS)
                put_first((E*)out + start, v, lanes);
            else if (into == Into::NUMBERS)
                put_first(numbers, v, lanes);
            else
                put_first(numbers, load_first(numbers, lanes) + v, lanes);
        }
    }

    int team_members = 1;
};
