// Decode attention: one query position per row, over pages of K and V.
//
// The positions that a row sees are divided into spans of at most SPAN positions at fixed boundaries. A span of a row and
// a KV head is one item of work, which reads K and V once for all query heads of the group: scores of up to CHUNK
// positions, then an online softmax (Milakov and Gimelshein, arXiv 1805.02867), then their values. Spans of a row are
// merged in their order (Flash-Decoding), so no result depends on the number of threads or on other rows.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "threads.h"

// Mirrored in gpu_worker/cpu_attention/decode.py. Strides are in elements.
struct DecodeCall {
    const void *query, *keys, *values;  // [rows, H, key_dim], [K, N, head_dim] twice
    const float *sinks;                 // [H] or null
    void *out;                                  // [rows, H, value_dim], contiguous
    int64_t query_row_stride, query_head_stride, pool_head_stride;
    const int32_t *table;              // pages of each line, in logical order
    const int64_t *lines, *positions;  // [rows]: the line of each row, and the position of its query
    char *scratch;                     // decode_scratch() bytes
    int64_t table_stride, num_rows;
    int64_t num_kv_heads, group, key_dim, value_dim, head_dim, page_size;
    int64_t window, sink_tokens;  // window 0: every earlier position is seen
    int64_t threads;
    float scale, softcap;  // softcap 0: none
};

namespace decode {

constexpr int64_t SPAN = 512;
constexpr int CHUNK = 128;
constexpr int MAX_PIECES = CHUNK / 16 + 1;
// Query rows whose accumulators are in registers together.
constexpr int ROWS = LANES == 16 ? 4 : 2;
// Vectors of a value whose accumulators are in registers together.
constexpr int VECTORS = 4;

static inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// Positions begin to end - 1 of a row.
struct Span {
    int64_t row, begin, end;
};

// The spans of one row in order; `add` is called with each.
template <typename Add>
static void for_spans(const DecodeCall &call, int64_t position, Add add) {
    int64_t first = call.window ? std::max<int64_t>(position - call.window + 1, 0) : 0;
    int64_t sinks_end = std::min(call.sink_tokens, first);
    const int64_t ranges[2][2] = {{0, sinks_end}, {first, position + 1}};
    for (auto &range : ranges)
        for (int64_t begin = range[0]; begin < range[1];) {
            int64_t end = std::min((begin / SPAN + 1) * SPAN, range[1]);
            add(begin, end);
            begin = end;
        }
}

// Sizes of the scratch memory.
struct Sizes {
    int64_t query, acc, scores, num_spans;

    Sizes(const DecodeCall &call) : num_spans(0) {
        query = call.group * round_up(call.key_dim, LANES);
        acc = call.group * round_up(call.value_dim, LANES);
        scores = call.group * (CHUNK + LANES);
        for (int64_t row = 0; row < call.num_rows; row++)
            for_spans(call, call.positions[row], [&](int64_t, int64_t) { num_spans++; });
    }

    // Floats of one span and KV head: the accumulators, then maximum and sum of each query row.
    int64_t partial(const DecodeCall &call) const { return acc + 2 * call.group; }
    int64_t thread_floats(const DecodeCall &call) const { return round_up(query + scores + partial(call), 16) + 16; }
    int64_t bytes(const DecodeCall &call) const {
        return num_spans * int64_t(sizeof(Span)) + (call.num_rows + 1) * 8 + 64 +
               4 * (num_spans * call.num_kv_heads * partial(call) + call.threads * thread_floats(call));
    }
};

// Contiguous tokens of one page.
template <typename T>
struct Piece {
    const T *keys, *values;
    int tokens;
};

// The next positions of an item whose scores are computed together.
template <typename T>
struct Chunk {
    Piece<T> pieces[MAX_PIECES];
    int num_pieces, tokens;
    int64_t item;
    bool ends_item;
};

// The chunks of items `item` to `item_end` - 1, in order. Items are spans, and within a span its KV heads.
template <typename T>
struct Chunks {
    const DecodeCall &call;
    const Span *spans;
    int64_t item, item_end, position;

    Chunks(const DecodeCall &call, const Span *spans, int64_t item, int64_t item_end)
        : call(call), spans(spans), item(item), item_end(item_end), position(-1) {}

    bool next(Chunk<T> &chunk) {
        if (item >= item_end) return false;
        const Span &span = spans[item / call.num_kv_heads];
        if (position < 0) position = span.begin;
        const int64_t head = item % call.num_kv_heads * call.pool_head_stride;
        const int32_t *pages = call.table + call.lines[span.row] * call.table_stride;
        chunk.num_pieces = chunk.tokens = 0;
        chunk.item = item;
        while (position < span.end && chunk.tokens < CHUNK && chunk.num_pieces < MAX_PIECES) {
            int64_t offset = position % call.page_size;
            int64_t tokens = std::min({call.page_size - offset, span.end - position, int64_t(CHUNK - chunk.tokens)});
            int64_t start = (pages[position / call.page_size] * call.page_size + offset) * call.head_dim + head;
            chunk.pieces[chunk.num_pieces++] = {static_cast<const T *>(call.keys) + start,
                                                static_cast<const T *>(call.values) + start, int(tokens)};
            chunk.tokens += int(tokens);
            position += tokens;
        }
        chunk.ends_item = position == span.end;
        if (chunk.ends_item) item++, position = -1;
        return true;
    }
};

// Runs ahead of the chunks that are computed, in the order in which their memory is read.
template <typename T>
struct Prefetcher {
    static constexpr int64_t DISTANCE = 8192;
    Chunks<T> chunks;
    Chunk<T> chunk;
    int piece, is_value;
    const char *at, *end;
    int64_t piece_bytes;

    Prefetcher(const Chunks<T> &own) : chunks(own), piece(-1), is_value(0), at(nullptr), end(nullptr) {
        chunk.num_pieces = 0;
        is_value = 1;
        piece = 0;
        ahead(DISTANCE);
    }

    void next_piece() {
        if (++piece >= chunk.num_pieces) {
            piece = 0;
            is_value = !is_value;
            if (!is_value && !chunks.next(chunk)) {
                chunk.num_pieces = 0;
                return;
            }
        }
        const Piece<T> &next = chunk.pieces[piece];
        at = reinterpret_cast<const char *>(is_value ? next.values : next.keys);
        end = at + next.tokens * chunks.call.head_dim * int64_t(sizeof(T));
    }

    void ahead(int64_t bytes) {
        while (bytes > 0) {
            if (at == end) {
                next_piece();
                if (chunk.num_pieces == 0) return;
            }
            int64_t now = std::min<int64_t>(bytes, end - at);
            for (const char *line = at; line < at + now; line += 64) __builtin_prefetch(line, 0, 3);
            at += now;
            bytes -= now;
        }
    }
};

// Scores [R, LANES] of R query rows and the first `tokens` of LANES tokens; those after them are undefined.
template <int R, typename T>
static inline void score_tile(
    const float *query, int64_t query_stride, const T *keys, int64_t key_stride, int tokens, float *scores, int stride
) {
    constexpr int TOKENS = LANES / R;
    const int64_t dim = query_stride;
    for (int begin = 0; begin < tokens; begin += TOKENS) {
        const T *key[TOKENS];
        for (int t = 0; t < TOKENS; t++) key[t] = keys + std::min(begin + t, tokens - 1) * key_stride;
        Floats sums[LANES] = {};
        for (int64_t d = 0; d < dim; d += LANES) {
            Floats k[TOKENS];
            for (int t = 0; t < TOKENS; t++) k[t] = load(key[t] + d);
            for (int r = 0; r < R; r++) {
                Floats q = load(query + r * query_stride + d);
                for (int t = 0; t < TOKENS; t++) sums[r * TOKENS + t] += q * k[t];
            }
        }
        float products[LANES];
        store(products, sums_of(sums));
        for (int r = 0; r < R; r++) std::memcpy(scores + r * stride + begin, products + r * TOKENS, TOKENS * 4);
    }
}

// Adds the values of `tokens` tokens, weighted by [R, tokens], to [R, V * LANES] accumulators.
template <int R, int V, typename T>
static inline void add_values(
    float *acc, int64_t acc_stride, const float *weights, int stride, const T *values, int64_t value_stride, int tokens
) {
    Floats sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = load(acc + r * acc_stride + v * LANES);
    for (int t = 0; t < tokens; t++, values += value_stride) {
        Floats value[V];
        for (int v = 0; v < V; v++) value[v] = load(values + v * LANES);
        for (int r = 0; r < R; r++) {
            Floats weight = broadcast(weights[r * stride + t]);
            for (int v = 0; v < V; v++) sums[r][v] += weight * value[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(acc + r * acc_stride + v * LANES, sums[r][v]);
}

template <int R, typename T>
static inline void add_values_of_rows(
    float *acc, int64_t dim, const float *weights, int stride, const T *values, int64_t value_stride, int tokens
) {
    int64_t d = 0;
    for (; d + VECTORS * LANES <= dim; d += VECTORS * LANES)
        add_values<R, VECTORS>(acc + d, dim, weights, stride, values + d, value_stride, tokens);
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        add_values<R, 2>(acc + d, dim, weights, stride, values + d, value_stride, tokens);
    if (d < dim) add_values<R, 1>(acc + d, dim, weights, stride, values + d, value_stride, tokens);
}

// The state of one item: the query, and the softmax so far.
template <typename T>
struct Item {
    const DecodeCall &call;
    int64_t key_dim, value_dim;  // rounded up to LANES
    float *query, *scores;       // [G, key_dim], [G, CHUNK + LANES]
    float *acc, *largest, *sum;  // [G, value_dim], [G], [G]

    static constexpr int STRIDE = CHUNK + LANES;

    Item(const DecodeCall &call, const Sizes &sizes, float *scratch)
        : call(call), key_dim(round_up(call.key_dim, LANES)), value_dim(round_up(call.value_dim, LANES)) {
        query = scratch;
        scores = query + sizes.query;
        point(scores + sizes.scores);
    }

    void point(float *partial) {
        acc = partial;
        largest = acc + call.group * value_dim;
        sum = largest + call.group;
    }

    void begin(int64_t row, int64_t head) {
        const T *from = static_cast<const T *>(call.query) + row * call.query_row_stride;
        for (int64_t g = 0; g < call.group; g++) {
            const T *own = from + (head * call.group + g) * call.query_head_stride;
            for (int64_t d = 0; d < key_dim; d++) query[g * key_dim + d] = d < call.key_dim ? to_float(own[d]) : 0.0f;
            largest[g] = -INFINITY;
            sum[g] = 0;
        }
        std::fill(acc, acc + call.group * value_dim, 0.0f);
    }

    void add(const Chunk<T> &chunk, Prefetcher<T> &prefetcher) {
        int at = 0;
        for (int p = 0; p < chunk.num_pieces; p++) {
            const Piece<T> &piece = chunk.pieces[p];
            for (int t = 0; t < piece.tokens; t += LANES) {
                int tokens = std::min(LANES, piece.tokens - t);
                prefetcher.ahead(tokens * call.head_dim * int64_t(sizeof(T)));
                score(piece.keys + t * call.head_dim, tokens, at + t);
            }
            at += piece.tokens;
        }
        for (int64_t g = 0; g < call.group; g++) weigh(g, chunk.tokens);
        at = 0;
        for (int p = 0; p < chunk.num_pieces; p++) {
            const Piece<T> &piece = chunk.pieces[p];
            for (int t = 0; t < piece.tokens; t += LANES) {
                int tokens = std::min(LANES, piece.tokens - t);
                prefetcher.ahead(tokens * call.head_dim * int64_t(sizeof(T)));
                value(piece.values + t * call.head_dim, tokens, at + t);
            }
            at += piece.tokens;
        }
    }

    void score(const T *keys, int tokens, int at) {
        int64_t g = 0;
        for (; g + 4 <= call.group; g += 4)
            score_tile<4>(query + g * key_dim, key_dim, keys, call.head_dim, tokens, scores + g * STRIDE + at, STRIDE);
        for (; g + 2 <= call.group; g += 2)
            score_tile<2>(query + g * key_dim, key_dim, keys, call.head_dim, tokens, scores + g * STRIDE + at, STRIDE);
        if (g < call.group)
            score_tile<1>(query + g * key_dim, key_dim, keys, call.head_dim, tokens, scores + g * STRIDE + at, STRIDE);
    }

    // Scores of query row g become weights relative to the largest score so far.
    void weigh(int64_t g, int tokens) {
        float *own = scores + g * STRIDE;
        Floats found = broadcast(-INFINITY);
        for (int t = 0; t < tokens; t += LANES) {
            Floats score = load(own + t) * call.scale;
            if (call.softcap) score = call.softcap * hyperbolic_tangent(score / call.softcap);
            score = keep_first(score, tokens - t, -INFINITY);
            store(own + t, score);
            found = max(found, score);
        }
        const float now = std::max(::largest(found), largest[g]), factor = weight_of(largest[g], now);
        Floats total = {};
        for (int t = 0; t < tokens; t += LANES) {
            // Before the first finite score every weight is 0.
            Floats weight = exponential(load(own + t) - (now == -INFINITY ? 0 : now));
            store(own + t, weight);
            total += weight;
        }
        sum[g] = sum[g] * factor + ::sum(total);
        largest[g] = now;
        for (int64_t d = 0; d < value_dim; d += LANES) {
            float *to = acc + g * value_dim + d;
            store(to, load(to) * factor);
        }
    }

    static float weight_of(float score, float largest) {
        return exponential(broadcast(score - (largest == -INFINITY ? 0 : largest)))[0];
    }

    void value(const T *values, int tokens, int at) {
        int64_t g = 0;
        for (; g + ROWS <= call.group; g += ROWS)
            add_values_of_rows<ROWS>(
                acc + g * value_dim, value_dim, scores + g * STRIDE + at, STRIDE, values, call.head_dim, tokens
            );
        for (; g + 2 <= call.group; g += 2)
            add_values_of_rows<2>(
                acc + g * value_dim, value_dim, scores + g * STRIDE + at, STRIDE, values, call.head_dim, tokens
            );
        if (g < call.group)
            add_values_of_rows<1>(
                acc + g * value_dim, value_dim, scores + g * STRIDE + at, STRIDE, values, call.head_dim, tokens
            );
    }

    // Adds another span's state to this one.
    void merge(const float *partial) {
        const float *other_largest = partial + call.group * value_dim, *other_sum = other_largest + call.group;
        for (int64_t g = 0; g < call.group; g++) {
            const float now = std::max(largest[g], other_largest[g]);
            const float own = weight_of(largest[g], now), other = weight_of(other_largest[g], now);
            largest[g] = now;
            sum[g] = sum[g] * own + other_sum[g] * other;
            for (int64_t d = 0; d < value_dim; d++) {
                float *to = acc + g * value_dim + d;
                *to = *to * own + partial[g * value_dim + d] * other;
            }
        }
    }

    void finish(int64_t row, int64_t head) {
        for (int64_t g = 0; g < call.group; g++) {
            const int64_t h = head * call.group + g;
            float factor = 1, total = sum[g];
            if (call.sinks) {
                // A learned sink is a score without a value.
                const float sink = call.sinks[h];
                const float now = std::max(sink, largest[g]);
                factor = weight_of(largest[g], now);
                total = total * factor + weight_of(sink, now);
            }
            factor /= total;
            T *to = static_cast<T *>(call.out) + (row * call.num_kv_heads * call.group + h) * call.value_dim;
            float *own = acc + g * value_dim;
            int64_t d = 0;
            for (; d + LANES <= call.value_dim; d += LANES) store(to + d, load(own + d) * factor);
            for (; d < call.value_dim; d++) put(to + d, own[d] * factor);
        }
    }
};

template <typename T>
static void run(const DecodeCall &call) {
    const Sizes sizes(call);
    Span *spans = reinterpret_cast<Span *>(call.scratch);
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
    const int64_t partial = sizes.partial(call), heads = call.num_kv_heads;
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
        Item<T> state(call, sizes, of_threads + thread * sizes.thread_floats(call));
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
        Item<T> state(call, sizes, of_threads + thread * sizes.thread_floats(call));
        state.point(partials + (first[row] * heads + head) * partial);
        for (int64_t nth = first[row] + 1; nth < first[row + 1]; nth++)
            state.merge(partials + (nth * heads + head) * partial);
        state.finish(row, head);
    };
    const int threads = int(call.threads);
    threads::parallel(threads, threads, [&](int thread) { compute(thread); });
    bool is_split = false;
    for (int64_t row = 0; row < call.num_rows; row++) is_split = is_split || !is_whole(row);
    if (!is_split) return;
    threads::parallel(threads, threads, [&](int thread) {
        const int64_t all = call.num_rows * heads;
        for (int64_t at = all * thread / threads; at < all * (thread + 1) / threads; at++)
            merge(at / heads, at % heads, thread);
    });
}

}  // namespace decode
