// Decode attention: one query position per row, over pages of K and V.
//
// An item of work (decode_pages.h) reads K and V once for all query heads of the group: scores of up to CHUNK positions,
// then an online softmax (Milakov and Gimelshein, arXiv 1805.02867), then their values. Spans of a row are merged in their
// order (Flash-Decoding), so no result depends on the number of threads or on other rows.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "decode_tiles.h"

namespace decode {

// The number of tokens with values that are added to registers at once.
constexpr int VALUE_TILE = 32;
// The most query rows with scores that are computed at once; larger groups have several times as many.
constexpr int MOST_ROWS = 8;

// Sizes of the scratch memory, in floats, for any type of elements.
struct Sizes {
    int64_t query, acc, scores, floats, num_spans;
    // Query heads with those that fill the last block.
    int64_t rows;

    Sizes(const DecodeCall &call) : num_spans(0) {
        rows = call.group > 4 ? round_up(call.group, MOST_ROWS) : call.group > 2 ? 4 : 2;
        query = rows * round_up(call.key_dim, 32);
        acc = rows * round_up(call.value_dim, 32);
        scores = rows * CHUNK;
        floats = VALUE_TILE * call.head_dim;
        for (int64_t row = 0; row < call.num_rows; row++)
            for_spans(call, call.positions[row], [&](int64_t, int64_t) { num_spans++; });
    }

    // Of one span and KV head: the accumulators, then largest score and sum of each lane.
    int64_t partial() const { return acc + 2 * rows * LANES; }
    int64_t of_thread() const { return round_up(query + scores * 2 + floats + rows * LANES + partial(), 16); }
    int64_t bytes(const DecodeCall &call) const {
        return num_spans * int64_t(sizeof(Span)) + (call.num_rows + 1) * 8 + 64 +
               4 * (num_spans * call.num_kv_heads * partial() + call.threads * of_thread());
    }
};

// A largest score that can be subtracted: before the first finite score every weight is 0.
static inline Floats finite(Floats largest) {
    return largest == broadcast(-INFINITY) ? Floats{} : largest;
}

// The state of one item: the query, and the softmax so far. Rows behind the group have a query of zeros, and are computed
// as the others as far as that is simpler.
template <typename T, bool DOTS, int R, int M>
struct Item {
    // What products are of, and the rows of values that are added at once.
    using E = std::conditional_t<DOTS, BFloat16, float>;
    static constexpr int W = LANES / R, VALUE_ROWS = std::min(R * M, DOTS ? 8 : LANES == 16 ? 4 : 2);
    static constexpr bool CONVERTS = !std::is_same_v<T, E>;

    const DecodeCall &call;
    const Scale scale;
    const int64_t blocks, steps, value_dim;
    float *query;          // [blocks, steps, R, W]
    float *scores;         // [blocks, CHUNK / W, R, W]
    E *weights;            // the same; where E is float, in place of the scores
    float *floats;         // [VALUE_TILE, head_dim]: converted tokens
    float *found;          // [blocks, LANES]: the largest scores of a chunk
    float *acc;            // [blocks * R, value_dim]
    float *largest, *sum;  // [blocks, R, W]: the same in the lanes of a row; parts of its sum

    Item(const DecodeCall &call, const Sizes &sizes, float *scratch)
        : call(call), scale(call), blocks(round_up(call.group, R * M) / R),
          steps(round_up(call.key_dim, 16) * int64_t(sizeof(E)) / (W * 4)),
          value_dim(round_up(call.value_dim, DOTS ? 32 : 16)) {
        query = scratch;
        scores = query + sizes.query;
        weights = reinterpret_cast<E *>(DOTS ? scores + sizes.scores : scores);
        floats = scores + 2 * sizes.scores;
        found = floats + sizes.floats;
        point(found + sizes.rows * LANES);
        std::fill(query, query + sizes.query, 0.0f);
    }

    void point(float *partial) {
        acc = partial;
        largest = acc + blocks * R * value_dim;
        sum = largest + blocks * LANES;
    }

    void begin(int64_t row, int64_t head) {
        const T *from = static_cast<const T *>(call.query) + row * call.query_token_stride;
        for (int64_t g = 0; g < call.group; g++) {
            const T *own = from + (head * call.group + g) * call.query_head_stride;
            E elements[MOST_DIM];
            for (int64_t d = 0; d < call.key_dim; d++) {
                if constexpr (CONVERTS)
                    elements[d] = to_float(own[d]);
                else
                    elements[d] = own[d];
            }
            std::memset(elements + call.key_dim, 0, (steps * W * 4) - call.key_dim * sizeof(E));
            char *to = reinterpret_cast<char *>(query + g / R * steps * LANES + g % R * W);
            for (int64_t step = 0; step < steps; step++)
                std::memcpy(to + step * LANES * 4, reinterpret_cast<char *>(elements) + step * W * 4, W * 4);
        }
        std::fill(acc, acc + blocks * R * value_dim, 0.0f);
        std::fill(largest, largest + blocks * LANES, -INFINITY);
        std::fill(sum, sum + blocks * LANES, 0.0f);
    }

    void add(const Chunk<T> &chunk, Prefetcher<T> &prefetcher) {
        std::fill(found, found + blocks * LANES, -INFINITY);
        chunk.template for_parts<TILE>([&](const Piece<T> &piece, int first, int tokens, int slot) {
            const bool prefetches = prefetcher.begin(tokens, false);
            score(piece.keys + first * call.head_dim, tokens, slot, prefetches, prefetcher);
        });
        for (int64_t block = 0; block < blocks; block++) weigh(block, chunk.slots);
        chunk.template for_parts<VALUE_TILE>([&](const Piece<T> &piece, int first, int tokens, int slot) {
            const bool prefetches = prefetcher.begin(tokens, true);
            value(piece.values + first * call.head_dim, tokens, slot, prefetches, prefetcher);
        });
    }

    // Tokens as elements of products.
    const E *converted(const T *from, int tokens, int64_t dim) {
        if constexpr (!CONVERTS) return from;
        if constexpr (CONVERTS) {
            for (int64_t t = 0; t < tokens * call.head_dim; t += call.head_dim)
                for (int64_t d = 0; d < dim; d += LANES) store(floats + t + d, load(from + t + d));
            return floats;
        }
    }

    void score(const T *from, int tokens, int slot, bool prefetches, Prefetcher<T> &prefetcher) {
        const E *keys = converted(from, tokens, round_up(call.key_dim, 16));
        for (int64_t block = 0; block < blocks; block += M) {
            auto run = prefetches && block == 0 ? score_tile<R, M, true, E, T> : score_tile<R, M, false, E, T>;
            float *to = scores + block * CHUNK * R + slot * R;
            run(query + block * steps * LANES, steps, keys, call.head_dim, tokens, scale, to, found + block * LANES,
                prefetcher);
        }
    }

    void value(const T *from, int tokens, int slot, bool prefetches, Prefetcher<T> &prefetcher) {
        const E *values = converted(from, tokens, round_up(call.value_dim, 16));
        // Two passes over the same values prefetch half each.
        const bool halves = call.group > VALUE_ROWS;
        for (int64_t g = 0; g < call.group; g += VALUE_ROWS) {
            const E *own = weights + row_offset<R>(g);
            float *to = acc + g * value_dim;
            auto add = [&](auto share) {
                value_tile<VALUE_ROWS, R, share>(to, value_dim, own, slot, values, call.head_dim, tokens, prefetcher);
            };
            if (!prefetches || g >= 2 * VALUE_ROWS)
                add(std::integral_constant<int, 0>());
            else if (halves)
                add(std::integral_constant<int, 2>());
            else
                add(std::integral_constant<int, 1>());
        }
    }

    // Scores of a block become weights relative to the largest score so far.
    void weigh(int64_t block, int slots) {
        float *most = largest + block * LANES, *total = sum + block * LANES, *own = scores + block * CHUNK * R;
        const Floats before = load(most);
        const Floats now = over_row<W>(
            max(load(found + block * LANES), before), [](Floats a, Floats b) { return max(a, b); }
        );
        const Floats factor = power_of_two(before - finite(now)), offset = finite(now);
        Floats added = {};
        for (int at = 0; at < slots * R; at += LANES) {
            const Floats weight = power_of_two<DOTS ? 3 : 5>(load(own + at) - offset);
            store(weights + block * CHUNK * R + at, weight);
            added += weight;
        }
        store(total, load(total) * factor + added);
        store(most, now);
        multiply(block, factor);
    }

    // Multiplies the accumulators of a block by a factor of each row.
    void multiply(int64_t block, Floats factor) {
        for (int r = 0; r < R; r++) {
            const float own = factor[r * W];
            if (own == 1) continue;
            float *to = acc + (block * R + r) * value_dim;
            for (int64_t d = 0; d < value_dim; d += LANES) store(to + d, load(to + d) * own);
        }
    }

    // Adds another span's state to this one.
    void merge(const float *partial) {
        const float *other_largest = partial + blocks * R * value_dim, *other_sum = other_largest + blocks * LANES;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t at = block * LANES;
            const Floats now = max(load(largest + at), load(other_largest + at));
            const Floats own = power_of_two(load(largest + at) - finite(now));
            const Floats other = power_of_two(load(other_largest + at) - finite(now));
            store(sum + at, load(sum + at) * own + load(other_sum + at) * other);
            store(largest + at, now);
            multiply(block, own);
            for (int r = 0; r < R; r++) {
                const int64_t row = (block * R + r) * value_dim;
                const float factor = other[r * W];
                for (int64_t d = row; d < row + value_dim; d += LANES)
                    store(acc + d, load(acc + d) + load(partial + d) * factor);
            }
        }
    }

    void finish(int64_t row, int64_t head) {
        for (int64_t g = 0; g < call.group; g++) {
            const int64_t h = head * call.group + g, lane = g / R * LANES + g % R * W;
            float total = 0, factor = 1;
            for (int w = 0; w < W; w++) total += sum[lane + w];
            if (call.sinks) {
                // A learned sink is a score without a value.
                const float sink = call.sinks[h] * Scale::LOG2_E, now = std::max(sink, largest[lane]);
                factor = power_of_two(broadcast(largest[lane] - now))[0];
                total = total * factor + power_of_two(broadcast(sink - now))[0];
            }
            factor /= total;
            T *to = static_cast<T *>(call.out) + (row * call.num_kv_heads * call.group + h) * call.value_dim;
            float *own = acc + g * value_dim;
#if defined(__AVX512BF16__)
            if constexpr (DOTS) in_order(own, value_dim);
#endif
            int64_t d = 0;
            for (; d + LANES <= call.value_dim; d += LANES) store(to + d, load(own + d) * factor);
            for (; d < call.value_dim; d++) put(to + d, own[d] * factor);
        }
    }
};

// DOTS: products of pairs of bfloat16. R: query rows of a block. M: blocks of scores that are computed at once.
template <typename T, bool DOTS, int R, int M>
static void run_all(const DecodeCall &call) {
    const Sizes sizes(call);
    Span *spans = reinterpret_cast<Span *>(*call.scratch);
    int64_t *first = reinterpret_cast<int64_t *>(spans + sizes.num_spans);
    int64_t num = 0, total = 0;
    for (int64_t row = 0; row < call.num_rows; row++) {
        first[row] = num;
        for_spans(call, call.positions[row], [&](int64_t begin, int64_t end) {
            spans[num++] = {row, begin, end};
            total += (end - begin) * call.num_kv_heads;
        });
    }
    first[call.num_rows] = num;
    uintptr_t after = reinterpret_cast<uintptr_t>(first + call.num_rows + 1);
    float *partials = reinterpret_cast<float *>((after + 63) / 64 * 64);
    const int64_t partial = sizes.partial(), heads = call.num_kv_heads;
    float *of_threads = partials + num * heads * partial;
    auto is_whole = [&](int64_t row) { return first[row + 1] - first[row] == 1; };

    // Each thread computes consecutive items with an equal share of the positions.
    auto compute = [&](int64_t thread) {
        int64_t before = 0, item = 0, from = total * thread / call.threads, to = total * (thread + 1) / call.threads;
        int64_t item_begin = -1, item_end = num * heads;
        for (; item < num * heads; item++) {
            if (before >= from && item_begin < 0) item_begin = item;
            if (before >= to) {
                item_end = item;
                break;
            }
            const Span &span = spans[item / heads];
            before += span.end - span.begin;
        }
        if (item_begin < 0) return;
        Chunks<T> chunks(call, spans, item_begin, item_end);
        Prefetcher<T> prefetcher(chunks);
        Item<T, DOTS, R, M> state(call, sizes, of_threads + thread * sizes.of_thread());
        float *own = state.acc;
        Chunk<T> chunk;
        bool begins = true;
        while (chunks.next(chunk)) {
            const int64_t row = spans[chunk.item / heads].row, head = chunk.item % heads;
            if (begins) {
                state.point(is_whole(row) ? own : partials + chunk.item * partial);
                state.begin(row, head);
            }
            state.add(chunk, prefetcher);
            begins = chunk.ends_item;
            if (begins && is_whole(row)) state.finish(row, head);
        }
    };
    auto merge = [&](int64_t row, int64_t head, int64_t thread) {
        if (is_whole(row)) return;
        Item<T, DOTS, R, M> state(call, sizes, of_threads + thread * sizes.of_thread());
        state.point(partials + (first[row] * heads + head) * partial);
        for (int64_t nth = first[row] + 1; nth < first[row + 1]; nth++)
            state.merge(partials + (nth * heads + head) * partial);
        state.finish(row, head);
    };
    if (call.threads == 1) {
        compute(0);
        for (int64_t at = 0; at < call.num_rows * heads; at++) merge(at / heads, at % heads, 0);
        return;
    }
#pragma omp parallel num_threads(call.threads)
    {
#pragma omp for schedule(static, 1)
        for (int64_t thread = 0; thread < call.threads; thread++) compute(thread);
#pragma omp for schedule(static)
        for (int64_t at = 0; at < call.num_rows * heads; at++) merge(at / heads, at % heads, omp_get_thread_num());
    }
}

// Each load of a key's elements serves M vectors of products, because loads are what limits larger groups.
template <typename T, bool DOTS>
static void run_rows(const DecodeCall &call) {
    // A vector of pairs of one row has 32 elements.
    const bool fits_one = !DOTS || round_up(call.key_dim, 16) % 32 == 0;
    if (call.group == 1 && fits_one) return run_all<T, DOTS, 1, 1>(call);
    if (call.group <= 2) return run_all<T, DOTS, 2, 1>(call);
    if (call.group <= 4) return run_all<T, DOTS, 2, 2>(call);
    run_all<T, DOTS, MOST_ROWS / 2, 2>(call);
}

template <typename T>
static void run(const DecodeCall &call) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2) return run_rows<T, true>(call);
#endif
    run_rows<T, false>(call);
}

}  // namespace decode
