// Attention of prompt chunks over the paged pool, with the online softmax of FlashAttention (arXiv 2307.08691).
//
// A chunk's queries come in tiles of consecutive positions. The queries of a tile that share a KV head (all heads of its
// group) are the lanes of vectors, query after query: scores are S^T = K Q^T [keys, lanes], outputs O^T = V^T P^T
// [dimensions, lanes]. Each element of K and V is broadcast, and maximum, sum and mask need no operation across lanes.
// A panel is as many lanes as the registers hold; a block is as many keys as fit the L1 cache beside it.
//
// Products read K and V in the pool where pages are as long as a block and have the same words, else in a copy.
// A product reads words: floats, or pairs of bfloat16 (AVX512_BF16), which its instruction multiplies and adds.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "attention.h"
#include "simd.h"

namespace prefill {

// Lanes of a work item, which share the copies of K and V; vectors of a panel; keys of a block.
// Blocks of 128 keys and items of 256 lanes are as fast within 3 % (Zen 4, heads of 64 and 128, groups of 1 to 8).
constexpr int ITEM_LANES = 128, PANEL = LANES == 16 ? 4 : 2, BLOCK = 64;
constexpr int PANEL_LANES = PANEL * LANES, MOST_PANELS = ITEM_LANES / PANEL_LANES;
// Scores are computed for groups of keys, which begin at multiples of the group; a page is a multiple too.
constexpr int KEY_GROUP = 8;
constexpr float LEAST = -1e30f, LOG2_E = 1.44269504088896341f;

struct Call : AttentionCall {
    // [tiles]: line of the table, position of the first query, number of queries, index of the first query's token.
    const int64_t *lines, *starts, *counts, *tokens;
    int64_t num_tiles, most_queries;
};

// Two bfloat16, the first in the lower half.
struct Pair {
    uint32_t bits;
};

template <class T>
using WordOf = typename std::conditional<
#if defined(__AVX512BF16__)
    std::is_same<T, BFloat16>::value,
#else
    false,
#endif
    Pair, float>::type;

// Elements of K, Q, V or P in a word.
template <class Word>
constexpr int WIDTH = std::is_same<Word, Pair>::value ? 2 : 1;

static inline Floats multiply_add(float a, Floats b, Floats sum) {
    return a * b + sum;
}

#if defined(__AVX512BF16__)
static inline Floats multiply_add(Pair a, Floats b, Floats sum) {
    return Floats(_mm512_dpbf16_ps(__m512(sum), (__m512bh)_mm512_set1_epi32(int(a.bits)), (__m512bh)__m512(b)));
}
#endif

template <class Word>
static inline Floats load_words(const Word *from) {
    return load(reinterpret_cast<const float *>(from));
}

template <class Word>
static inline void store_words(Word *to, Floats x) {
    store(reinterpret_cast<float *>(to), x);
}

// sums[m][n] += sum over k of a[m * row + k * step] * b[k][n].
template <int M, int N, class Word>
static inline __attribute__((always_inline)) void multiply(
    const Word *a, int64_t row, int64_t step, const Word *b, int count, Floats (&sums)[M][N]) {
    for (int k = 0; k < count; k++, a += step, b += N * LANES) {
        Floats right[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) right[n] = load_words(b + n * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Word left = a[m * row];
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[m][n] = multiply_add(left, right[n], sums[m][n]);
        }
    }
}

// Sums that the registers hold beside the operands, and enough of them to hide the latency of multiply_add.
template <int N>
constexpr int ROWS = LANES == 16 && N <= 2 ? 8 : 4;

// Memory of a thread. Keys and values are of the block at hand, unless they are read in the pool.
template <class Word>
struct Scratch {
    Word *query;    // [panels][words of a key][lanes]
    float *out;     // [panels][value dimension, a multiple of 16][lanes]
    float *scores;  // [BLOCK][lanes of a panel]
    Word *weights;  // [BLOCK / WIDTH][lanes of a panel]; floats replace the scores
    Word *keys;     // [BLOCK][words of a key]
    Word *values;   // [BLOCK / WIDTH][value dimension]
};

// The lanes of a panel: queries at positions first to last.
struct Panel {
    int64_t first, last;
    int vectors;
    bool begun;
    Ints position[PANEL];
    // By lane: the largest score so far, times log2(e), and the sum of the weights.
    Floats largest[PANEL], sum[PANEL];
};

template <class T>
struct Item {
    using Word = WordOf<T>;

    const Call &call;
    const Scratch<Word> &scratch;
    const int64_t kv_head, tile;
    const int64_t first_lane, num_lanes;
    const int64_t key_words, value_dim;
    const T *const pool_keys, *const pool_values;
    Panel panels[MOST_PANELS];
    int num_panels;

    Item(const Call &call, const Scratch<Word> &scratch, int64_t tile, int64_t kv_head, int64_t part)
        : call(call),
          scratch(scratch),
          kv_head(kv_head),
          tile(tile),
          first_lane(part * ITEM_LANES),
          num_lanes(std::min<int64_t>(ITEM_LANES, call.counts[tile] * call.group - first_lane)),
          key_words(words_of_key(call)),
          value_dim(round_up(call.value_dim, 16)),
          pool_keys(static_cast<const T *>(call.keys) + kv_head * call.pool_head_stride),
          pool_values(static_cast<const T *>(call.values) + kv_head * call.pool_head_stride) {}

    static int64_t words_of_key(const Call &call) {
        return round_up(call.key_dim, 16) / WIDTH<Word>;
    }

    int64_t position_of(int64_t lane) const {
        return call.starts[tile] + lane / call.group;
    }

    // The address of a lane's query or output, given the strides.
    template <class Of>
    Of *of_lane(Of *base, int64_t lane, int64_t per_token, int64_t per_head) const {
        const int64_t token = call.tokens[tile] + lane / call.group, head = kv_head * call.group + lane % call.group;
        return base + token * per_token + head * per_head;
    }

    void run() {
        begin();
        const int64_t first = position_of(first_lane), last = position_of(first_lane + num_lanes - 1);
        const int64_t window_start = call.window ? std::max<int64_t>(0, first - call.window + 1) : 0;
        attend(0, std::min(call.sink_tokens, window_start));
        attend(window_start, last + 1);
        finish();
    }

    void begin() {
        num_panels = int((num_lanes + PANEL_LANES - 1) / PANEL_LANES);
        for (int p = 0; p < num_panels; p++) {
            Panel &panel = panels[p];
            const int64_t lane = first_lane + p * PANEL_LANES;
            const int64_t end = first_lane + std::min<int64_t>(num_lanes, (p + 1) * PANEL_LANES);
            panel.first = position_of(lane);
            panel.last = position_of(end - 1);
            panel.vectors = int((end - lane + LANES - 1) / LANES);
            panel.begun = false;
            for (int n = 0; n < panel.vectors; n++) {
                // Lanes without a query repeat the last one.
                for (int i = 0; i < LANES; i++) {
                    const int64_t own = std::min(lane + n * LANES + i, end - 1);
                    panel.position[n][i] = int32_t(position_of(own));
                    panel.largest[n][i] = LEAST;
                    if (call.sinks) {
                        const float sink = call.sinks[kv_head * call.group + own % call.group] * LOG2_E;
                        panel.largest[n][i] = sink < LEAST ? LEAST : sink;
                    }
                }
                panel.sum[n] = broadcast(call.sinks ? 1.0f : 0.0f);
                pack_query(panel, lane + n * LANES, end, query_of(p) + n * LANES);
            }
        }
    }

    Word *query_of(int p) const {
        return scratch.query + p * key_words * PANEL_LANES;
    }

    float *out_of(int p) const {
        return scratch.out + p * value_dim * PANEL_LANES;
    }

    // Writes LANES queries, transposed, as one vector of each line of the panel.
    void pack_query(const Panel &panel, int64_t lane, int64_t end, Word *to) const {
        constexpr int ELEMENTS = LANES * WIDTH<Word>;
        const T *query = static_cast<const T *>(call.query);
        for (int64_t word = 0; word < key_words; word += LANES) {
            const int64_t dim = word * WIDTH<Word>;
            Floats rows[LANES];
            for (int i = 0; i < LANES; i++) {
                if (lane + i >= end) {
                    rows[i] = Floats{};
                    continue;
                }
                const T *from = of_lane(query, lane + i, call.query_token_stride, call.query_head_stride) + dim;
                if (dim + ELEMENTS <= call.key_dim) {
                    rows[i] = row_of_words(from);
                } else {
                    // The padding of a key may be longer than a vector, which then has no element of the query.
                    const int64_t left = std::max<int64_t>(call.key_dim - dim, 0);
                    T padded_row[ELEMENTS] = {};
                    std::memcpy(padded_row, from, left * sizeof(T));
                    rows[i] = row_of_words(padded_row);
                }
            }
            transpose(rows);
            for (int i = 0; i < LANES && word + i < key_words; i++) {
                store_words(to + (word + i) * panel.vectors * LANES, rows[i]);
            }
        }
    }

    static Floats row_of_words(const T *from) {
        if constexpr (WIDTH<Word> == 2) return load_words(from);
        return load(from);
    }

    // Attends to positions begin to end - 1, some of which a panel may not see.
    void attend(int64_t begin, int64_t end) {
        for (int64_t block = begin / BLOCK * BLOCK; block < end; block += BLOCK) {
            const int64_t low = std::max(begin, block), high = std::min(end, block + BLOCK);
            const Word *keys, *values;
            int64_t key_row, value_row;
            locate(block, low, high, keys, key_row, values, value_row);
            for (int p = 0; p < num_panels; p++) {
                Panel &panel = panels[p];
                int64_t panel_low = low;
                if (call.window && low >= call.sink_tokens) {
                    panel_low = std::max(low, panel.first - call.window + 1);
                }
                const int64_t panel_high = std::min(high, panel.last + 1);
                if (panel_low >= panel_high) continue;
                const int from = int(panel_low - block), to = int(panel_high - block);
                switch (panel.vectors) {
                    case 1: attend_panel<1>(p, block, from, to, keys, key_row, values, value_row); break;
                    case 2: attend_panel<2>(p, block, from, to, keys, key_row, values, value_row); break;
#if defined(__AVX512F__)
                    case 3: attend_panel<3>(p, block, from, to, keys, key_row, values, value_row); break;
                    case 4: attend_panel<4>(p, block, from, to, keys, key_row, values, value_row); break;
#endif
                }
            }
        }
    }

    const T *in_pool(const T *pool, int64_t position) const {
        const int64_t page = call.table[call.lines[tile] * call.table_stride + position / call.page_size];
        return pool + (page * call.page_size + position % call.page_size) * call.head_dim;
    }

    // Finds, or copies, the block's keys and values; their first rows are those of position `block`.
    void locate(int64_t block, int64_t low, int64_t high, const Word *&keys, int64_t &key_row, const Word *&values,
                int64_t &value_row) const {
        const bool is_whole = call.page_size >= BLOCK;
        if (is_whole && sizeof(Word) == sizeof(T) * WIDTH<Word>) {
            keys = reinterpret_cast<const Word *>(in_pool(pool_keys, block));
            key_row = call.head_dim / WIDTH<Word>;
        } else {
            keys = scratch.keys;
            key_row = key_words;
            for (int64_t at = low / KEY_GROUP * KEY_GROUP; at < high; at += KEY_GROUP) {
                const T *from = in_pool(pool_keys, at);
                for (int i = 0; i < KEY_GROUP; i++) {
                    copy_row(from + i * call.head_dim, key_words, scratch.keys + (at - block + i) * key_words);
                }
            }
        }
        if (is_whole && std::is_same<T, Word>::value) {
            values = reinterpret_cast<const Word *>(in_pool(pool_values, block));
            value_row = call.head_dim;
        } else {
            values = scratch.values;
            value_row = value_dim;
            for (int64_t at = low / KEY_GROUP * KEY_GROUP; at < high; at += KEY_GROUP) {
                const T *from = in_pool(pool_values, at);
                for (int i = 0; i < KEY_GROUP; i += WIDTH<Word>) {
                    Word *to = scratch.values + (at - block + i) / WIDTH<Word> * value_dim;
                    copy_values(from + i * call.head_dim, at + i, low, high, to);
                }
            }
        }
    }

    void copy_row(const T *from, int64_t words, Word *to) const {
        for (int64_t word = 0; word < words; word += 8) {
            if constexpr (std::is_same<T, BFloat16>::value && std::is_same<Word, float>::value) {
                for (int i = 0; i < 8; i++) to[word + i] = to_float(from[word + i]);
            } else {
                std::memcpy(to + word, reinterpret_cast<const Word *>(from) + word, 8 * sizeof(Word));
            }
        }
    }

    // The values at `position`, or a pair with the next position's, without those outside of low to high - 1.
    void copy_values(const T *from, int64_t position, int64_t low, int64_t high, Word *to) const {
        if constexpr (std::is_same<Word, Pair>::value) {
            const uint32_t first = position >= low && position < high ? 0xffffu : 0;
            const uint32_t second = position + 1 >= low && position + 1 < high ? 0xffffu : 0;
            const T *next = from + call.head_dim;
            for (int64_t dim = 0; dim < value_dim; dim++) {
                to[dim].bits = (from[dim].bits & first) | (next[dim].bits & second) << 16;
            }
        } else {
            copy_row(from, value_dim, to);
        }
    }

    // Attends from one panel to keys `from` to `to` - 1 of a block, some of which a lane may not see.
    template <int N>
    void attend_panel(int p, int64_t block, int from, int to, const Word *keys, int64_t key_row, const Word *values,
                      int64_t value_row) {
        Panel &panel = panels[p];
        compute_scores<N>(query_of(p), keys, key_row, from / KEY_GROUP * KEY_GROUP, to);
        const float to_log2 = call.softcap > 0 ? call.softcap * LOG2_E : call.scale * LOG2_E;
        if (call.softcap > 0) cap<N>(from, to);
        const int64_t low = block + from, high = block + to;
        const bool in_window = !call.window || low > panel.last - call.window || high <= call.sink_tokens;
        const bool is_masked = high - 1 > panel.first || !in_window;
        if (is_masked) mask<N>(panel, block, from, to);

        if (from % WIDTH<Word>) hide<N>(--from);
        if (to % WIDTH<Word>) hide<N>(to++);
        Floats factor[N], minus[N];
        for (int n = 0; n < N; n++) minus[n] = broadcast(LEAST);
        for (int key = from; key < to; key++) {
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) minus[n] = max(load(scratch.scores + (key * N + n) * LANES), minus[n]);
        }
        Floats sum[N];
        for (int n = 0; n < N; n++) {
            const Floats largest = max(minus[n] * to_log2, panel.largest[n]);
            factor[n] = power_of_two(panel.largest[n] - largest);
            panel.largest[n] = largest;
            minus[n] = -largest;
            sum[n] = panel.sum[n] * factor[n];
        }
        weigh<N>(from, to, to_log2, minus, sum);
        for (int n = 0; n < N; n++) panel.sum[n] = sum[n];
        const int first = from / WIDTH<Word>, end = to / WIDTH<Word>;
        if (is_masked && !is_finite(values + first * value_row, value_row, end - first)) {
            add_seen_values<N>(panel, low, high, block, values, value_row, factor, out_of(p));
        } else {
            add_values<N>(values, value_row, first, end, factor, panel.begun, out_of(p));
        }
        panel.begun = true;
    }

    template <int N>
    void compute_scores(const Word *query, const Word *keys, int64_t key_row, int from, int to) const {
        constexpr int M = ROWS<N>;
        for (int key = from; key < to; key += M) {
            Floats sums[M][N] = {};
            multiply<M, N>(keys + key * key_row, key_row, 1, query, int(key_words), sums);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) store(scratch.scores + ((key + m) * N + n) * LANES, sums[m][n]);
            }
        }
    }

    template <int N>
    void cap(int from, int to) const {
        const float inner = call.scale / call.softcap;
        for (int i = from * N; i < to * N; i++) {
            store(scratch.scores + i * LANES, hyperbolic_tangent(load(scratch.scores + i * LANES) * inner));
        }
    }

    Ints is_seen(Ints of_query, int32_t position) const {
        const Ints distance = of_query - position;
        if (!call.window || position < call.sink_tokens) return distance >= 0;
        return (distance >= 0) & (distance < int32_t(call.window));
    }

    template <int N>
    void mask(const Panel &panel, int64_t block, int from, int to) const {
        for (int key = from; key < to; key++) {
            for (int n = 0; n < N; n++) {
                float *score = scratch.scores + (key * N + n) * LANES;
                const Ints seen = is_seen(panel.position[n], int32_t(block + key));
                store(score, seen ? load(score) : broadcast(-__builtin_inff()));
            }
        }
    }

    // A key that nothing sees, with a weight that is one of a pair.
    template <int N>
    void hide(int key) const {
        for (int n = 0; n < N; n++) store(scratch.scores + (key * N + n) * LANES, broadcast(-__builtin_inff()));
    }

    // Turns scores into weights, and adds them up.
    template <int N>
    void weigh(int from, int to, float to_log2, const Floats (&minus)[N], Floats (&sum)[N]) const {
        // Weights that are rounded to bfloat16 need no better polynomial.
        constexpr int DEGREE = WIDTH<Word> == 2 ? 3 : 5;
        for (int key = from; key < to; key += WIDTH<Word>) {
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                Floats weight[WIDTH<Word>];
                for (int i = 0; i < WIDTH<Word>; i++) {
                    const Floats score = load(scratch.scores + ((key + i) * N + n) * LANES);
                    weight[i] = power_of_two<DEGREE>(score * to_log2 + minus[n]);
                    sum[n] += weight[i];
                }
                store_words(weights() + (key / WIDTH<Word> * N + n) * LANES, words_of(weight));
            }
        }
    }

    static Floats words_of(const Floats (&weight)[1]) {
        return weight[0];
    }

#if defined(__AVX512BF16__)
    static Floats words_of(const Floats (&weight)[2]) {
        alignas(64) static constexpr uint16_t INTERLEAVED[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                 21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(__m512(weight[1]), __m512(weight[0]));
        return Floats(_mm512_permutexvar_epi16(_mm512_load_si512(INTERLEAVED), both));
    }
#endif

    // out = out * factor + values^T weights, for the words `from` to `to` - 1 of the block.
    template <int N>
    void add_values(const Word *values, int64_t value_row, int from, int to, const Floats (&factor)[N], bool begun,
                    float *out) const {
        constexpr int M = ROWS<N>;
        for (int64_t dim = 0; dim < value_dim; dim += M) {
            Floats sums[M][N];
            float *into = out + dim * N * LANES;
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    sums[m][n] = begun ? load(into + (m * N + n) * LANES) * factor[n] : Floats{};
                }
            }
            multiply<M, N>(values + from * value_row + dim, 1, value_row, weights() + from * N * LANES, to - from, sums);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) store(into + (m * N + n) * LANES, sums[m][n]);
            }
        }
    }

    static float element(float word, int) {
        return word;
    }

    static float element(Pair word, int key) {
        return to_float(BFloat16{uint16_t(key % 2 ? word.bits >> 16 : word.bits)});
    }

    static Floats elements(const float *words, int) {
        return load(words);
    }

    static Floats elements(const Pair *words, int key) {
        const Ints bits = Ints(load_words(words));
        return Floats(key % 2 ? bits & int32_t(0xffff0000) : bits << 16);
    }

    bool is_finite(const Word *values, int64_t value_row, int rows) const {
        // Exponents of NaN and infinity are all ones.
        const int32_t high = 0x7f800000, low = WIDTH<Word> == 2 ? 0x7f80 : -1;
        Ints found = {};
        for (int row = 0; row < rows; row++) {
            for (int64_t dim = 0; dim < value_dim; dim += LANES) {
                const Ints bits = Ints(load_words(values + row * value_row + dim));
                found |= ((bits & high) == high) | ((bits & low) == low);
            }
        }
        for (int i = 0; i < LANES; i++) {
            if (found[i]) return false;
        }
        return true;
    }

    // The same as add_values for values that contain NaN or infinity: weights of hidden keys are 0, but 0 * NaN is NaN.
    template <int N>
    void add_seen_values(const Panel &panel, int64_t low, int64_t high, int64_t block, const Word *values,
                         int64_t value_row, const Floats (&factor)[N], float *out) const {
        for (int64_t i = 0; i < value_dim * N; i++) {
            store(out + i * LANES, panel.begun ? load(out + i * LANES) * factor[i % N] : Floats{});
        }
        for (int64_t position = low; position < high; position++) {
            const int key = int(position - block);
            const Word *value = values + key / WIDTH<Word> * value_row;
            for (int n = 0; n < N; n++) {
                const Ints seen = is_seen(panel.position[n], int32_t(position));
                const Word *weight = weights() + (key / WIDTH<Word> * N + n) * LANES;
                for (int64_t dim = 0; dim < value_dim; dim++) {
                    float *into = out + (dim * N + n) * LANES;
                    const Floats sum = load(into) + elements(weight, key) * element(value[dim], key);
                    store(into, seen ? sum : load(into));
                }
            }
        }
    }

    Word *weights() const {
        if constexpr (std::is_same<Word, float>::value) return scratch.scores;
        return scratch.weights;
    }

    void finish() const {
        T *const out = static_cast<T *>(call.out);
        const int64_t of_token = call.num_kv_heads * call.group * call.value_dim;
        for (int p = 0; p < num_panels; p++) {
            const Panel &panel = panels[p];
            for (int n = 0; n < panel.vectors; n++) {
                const int64_t lane = first_lane + p * PANEL_LANES + n * LANES;
                const int count = int(std::min<int64_t>(LANES, first_lane + num_lanes - lane));
                const Floats inverse = 1.0f / panel.sum[n];
                for (int64_t dim = 0; dim < call.value_dim; dim += LANES) {
                    Floats rows[LANES];
                    for (int i = 0; i < LANES; i++) {
                        rows[i] = load(out_of(p) + ((dim + i) * panel.vectors + n) * LANES) * inverse;
                    }
                    transpose(rows);
                    for (int i = 0; i < count; i++) {
                        T *to = of_lane(out, lane + i, of_token, call.value_dim) + dim;
                        if (dim + LANES <= call.value_dim) {
                            store(to, rows[i]);
                        } else {
                            T whole[LANES];
                            store(whole, rows[i]);
                            std::memcpy(to, whole, (call.value_dim - dim) * sizeof(T));
                        }
                    }
                }
            }
        }
    }
};

template <class Word>
static int64_t scratch_bytes(int64_t key_words, int64_t value_dim) {
    const int64_t words = key_words * ITEM_LANES + BLOCK * PANEL_LANES + BLOCK * key_words + BLOCK * value_dim;
    return words * sizeof(Word) + (value_dim * ITEM_LANES + BLOCK * PANEL_LANES) * sizeof(float);
}

template <class Word>
static Scratch<Word> scratch_at(char *memory, int64_t key_words, int64_t value_dim) {
    Scratch<Word> scratch;
    auto take = [&](auto *&part, int64_t count) {
        part = reinterpret_cast<decltype(+part)>(memory);
        memory += count * sizeof *part;
    };
    // All sizes are multiples of a cache line.
    take(scratch.query, key_words * ITEM_LANES);
    take(scratch.out, value_dim * ITEM_LANES);
    take(scratch.scores, BLOCK * PANEL_LANES);
    take(scratch.weights, BLOCK * PANEL_LANES);
    take(scratch.keys, BLOCK * key_words);
    take(scratch.values, BLOCK * value_dim);
    return scratch;
}

template <class T>
static void run(const Call &call) {
    using Word = WordOf<T>;
    const int64_t key_words = Item<T>::words_of_key(call), value_dim = round_up(call.value_dim, 16);
    const int64_t bytes = round_up(scratch_bytes<Word>(key_words, value_dim), 64);
    const int64_t parts = (call.most_queries * call.group + ITEM_LANES - 1) / ITEM_LANES;
    const int64_t num_items = call.num_tiles * call.num_kv_heads * parts;
    char *memory = static_cast<char *>(std::aligned_alloc(64, bytes * call.threads));
    // The last tiles of a chunk see most keys; they come first, so that threads end together.
    auto work = [&](int64_t item, char *own) {
        const int64_t part = item % parts, kv_head = item / parts % call.num_kv_heads;
        const int64_t tile = call.num_tiles - 1 - item / parts / call.num_kv_heads;
        if (part * ITEM_LANES >= call.counts[tile] * call.group) return;
        Item<T>(call, scratch_at<Word>(own, key_words, value_dim), tile, kv_head, part).run();
    };
    if (call.threads == 1) {
        for (int64_t item = 0; item < num_items; item++) work(item, memory);
    } else {
#pragma omp parallel num_threads(int(call.threads))
        {
            char *own = memory + bytes * omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < num_items; item++) work(item, own);
        }
    }
    std::free(memory);
}

}  // namespace prefill
