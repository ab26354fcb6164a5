// Decode attention: one query position per row, over pages of K and V.
//
// The positions that a row sees are divided into spans of at most SPAN positions at fixed boundaries. A span of a row and
// a KV head is one item of work, which reads K and V once for all query heads of the group: scores of up to CHUNK
// positions, then an online softmax (Milakov and Gimelshein, arXiv 1805.02867), then their values. Spans of a row are
// merged in their order (Flash-Decoding), so no result depends on the number of threads or on other rows.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simd.h"

// Mirrored in gpu_worker/cpu_attention/decode.py. Strides are in elements.
struct DecodeCall {
    const void *query, *keys, *values;  // [rows, H, key_dim], [K, N, head_dim] twice
    const float *sinks;                 // [H] or null
    void *out;                                  // [rows, H, value_dim], contiguous
    int64_t query_row_stride, query_head_stride, pool_head_stride;
    const int32_t *table;              // pages of each line, in logical order
    const int64_t *lines, *positions;  // [rows]: the line of each row, and the position of its query
    char *const *scratch;              // where the address of decode_scratch() bytes is
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
// Floats between the scores of two query rows.
constexpr int STRIDE = CHUNK + LANES;
// How far the prefetcher runs ahead, in bytes, and the level of cache that it reads to (2: level 2).
constexpr int64_t DISTANCE = 32768;
constexpr int HINT = 2;
constexpr float LOG2_E = 1.44269504088896341f;
// Tokens whose values are added to registers at once.
constexpr int VALUE_TILE = 32;
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
        query = call.group * round_up(call.key_dim, 32);
        acc = call.group * round_up(call.value_dim, 32);
        scores = call.group * STRIDE;
        for (int64_t row = 0; row < call.num_rows; row++)
            for_spans(call, call.positions[row], [&](int64_t, int64_t) { num_spans++; });
    }

    // Floats of one span and KV head: the accumulators, then maximum and sum of each query row.
    int64_t partial(const DecodeCall &call) const { return acc + 2 * call.group; }
    int64_t thread_floats(const DecodeCall &call) const { return round_up(query + scores * 3 / 2 + partial(call), 16) + 16; }
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

// Runs ahead of the chunks that are computed, in the order in which their memory is read. Lines go to the level 2 cache:
// a core waits for far more lines there than in level 1, so reads come close to the rate of memory read in order.
template <typename T>
struct Prefetcher {
    Chunks<T> chunks;
    Chunk<T> chunk;
    int piece;
    bool is_value;
    const char *at, *end;

    Prefetcher(const Chunks<T> &own) : chunks(own), piece(0), is_value(true), at(nullptr), end(nullptr) {
        chunk.num_pieces = 0;
        for (int64_t bytes = 0; bytes < DISTANCE; bytes += 4096) prefetch(next(4096), 4096);
    }

    static void prefetch(const char *from, int64_t bytes) {
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, HINT);
    }

    // Of each token in memory that `next` returned last, only the dimensions that are read.
    void prefetch_tokens(const char *from, int64_t bytes) const {
        const int64_t dim = is_value ? chunks.call.value_dim : chunks.call.key_dim;
        const int64_t stride = chunks.call.head_dim * int64_t(sizeof(T));
        for (int64_t begin = 0; begin < bytes; begin += stride) prefetch(from + begin, dim * int64_t(sizeof(T)));
    }

    void next_piece() {
        if (++piece >= chunk.num_pieces) {
            piece = 0;
            is_value = !is_value;
            if (!is_value && !chunks.next(chunk)) chunk.num_pieces = 0;
            if (chunk.num_pieces == 0) {
                is_value = true;
                return;
            }
        }
        const Piece<T> &next = chunk.pieces[piece];
        at = reinterpret_cast<const char *>(is_value ? next.values : next.keys);
        end = at + next.tokens * chunks.call.head_dim * int64_t(sizeof(T));
    }

    // The address of the next `bytes` bytes, for the caller to prefetch.
    const char *next(int64_t bytes) {
        while (end - at < bytes) {
            prefetch(at, end - at);
            bytes -= end - at;
            at = end;
            next_piece();
            // After the last piece the caller prefetches what has been read.
            if (at == end) return end - bytes;
        }
        at += bytes;
        return at - bytes;
    }
};

// Prefetches V vectors of LANES elements.
template <typename T, int V>
static inline void prefetch_vectors(const char *from) {
    for (int byte = 0; byte < V * LANES * int(sizeof(T)); byte += 64) __builtin_prefetch(from + byte, 0, HINT);
}

// Scores [R, tokens] of R query rows and up to LANES tokens, rounded up to a multiple of LANES / R; the last are
// undefined. With PREFETCHES as many bytes at `ahead` as the tokens have.
template <int R, bool PREFETCHES, typename T>
static inline void score_tile(
    const float *query, int64_t dim, const T *keys, int64_t key_stride, int tokens, float *scores, const char *ahead
) {
    constexpr int TOKENS = LANES / R;
    for (int begin = 0; begin < tokens; begin += TOKENS) {
        const T *key[TOKENS];
        for (int t = 0; t < TOKENS; t++) key[t] = keys + std::min(begin + t, tokens - 1) * key_stride;
        const char *next = ahead + begin * key_stride * int64_t(sizeof(T));
        Floats sums[LANES];
        for (auto &each : sums) each = broadcast(0);
        for (int64_t d = 0; d < dim; d += LANES) {
            if (PREFETCHES) {
                prefetch_vectors<T, TOKENS>(next);
                next += TOKENS * LANES * sizeof(T);
            }
            Floats k[TOKENS];
            for (int t = 0; t < TOKENS; t++) k[t] = load(key[t] + d);
            for (int r = 0; r < R; r++) {
                Floats q = load(query + r * dim + d);
                for (int t = 0; t < TOKENS; t++) sums[r * TOKENS + t] += q * k[t];
            }
        }
        float products[LANES];
        store(products, sums_of(sums));
        for (int r = 0; r < R; r++) std::memcpy(scores + r * STRIDE + begin, products + r * TOKENS, TOKENS * 4);
    }
}

// Adds the values of `tokens` tokens, weighted by [R, tokens], to [R, V * LANES] accumulators. With PREFETCHES as above.
template <int R, int V, bool PREFETCHES, typename T>
static inline void add_values(
    float *acc, int64_t dim, const float *weights, const T *values, int64_t value_stride, int tokens, const char *ahead
) {
    Floats sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = load(acc + r * dim + v * LANES);
    for (int t = 0; t < tokens; t++) {
        if (PREFETCHES) prefetch_vectors<T, V>(ahead + t * value_stride * int64_t(sizeof(T)));
        Floats value[V];
        for (int v = 0; v < V; v++) value[v] = load(values + t * value_stride + v * LANES);
        for (int r = 0; r < R; r++) {
            Floats weight = broadcast(weights[r * STRIDE + t]);
            for (int v = 0; v < V; v++) sums[r][v] += weight * value[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(acc + r * dim + v * LANES, sums[r][v]);
}

template <int R, bool PREFETCHES, typename T>
static inline void value_tile(
    float *acc, int64_t dim, const float *weights, const T *values, int64_t value_stride, int tokens, const char *ahead
) {
    int64_t d = 0;
    for (; d + VECTORS * LANES <= dim; d += VECTORS * LANES)
        add_values<R, VECTORS, PREFETCHES>(
            acc + d, dim, weights, values + d, value_stride, tokens, ahead + d * sizeof(T)
        );
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        add_values<R, 2, PREFETCHES>(acc + d, dim, weights, values + d, value_stride, tokens, ahead + d * sizeof(T));
    if (d < dim)
        add_values<R, 1, PREFETCHES>(acc + d, dim, weights, values + d, value_stride, tokens, ahead + d * sizeof(T));
}

#if defined(__AVX512BF16__)

// 32 elements, or 16 and zeros.
template <bool IS_HALF>
static inline __m512i load_pairs(const BFloat16 *from) {
    if (!IS_HALF) return _mm512_loadu_si512(from);
    return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

// Sums of products of pairs, added to `to`.
static inline Floats add_products(Floats to, __m512i a, __m512i b) {
    return Floats(_mm512_dpbf16_ps(__m512(to), (__m512bh)a, (__m512bh)b));
}

static inline __m512i broadcast_pair(const void *from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
}

// Keys of LANES tokens as vectors of one pair of dimensions each, so that the scores of a query row need no sums across
// a vector: cheaper from 3 query rows on.
struct TransposedKeys {
    static constexpr int MOST_DIM = 1024;
    Floats pairs[MOST_DIM / 2];

    // Rows of `dim` elements, a multiple of 16; prefetches as many bytes at `ahead`.
    template <bool PREFETCHES>
    void load(const BFloat16 *keys, int64_t stride, int tokens, int64_t dim, const char *ahead) {
        const BFloat16 *rows[LANES];
        for (int t = 0; t < LANES; t++) rows[t] = keys + std::min(t, tokens - 1) * stride;
        int64_t d = 0;
        for (; d + 32 <= dim; d += 32) load_part<false, PREFETCHES>(rows, d, ahead + d * LANES * 2);
        if (d < dim) load_part<true, PREFETCHES>(rows, d, ahead + d * LANES * 2);
    }

    template <bool IS_HALF, bool PREFETCHES>
    void load_part(const BFloat16 *const *from, int64_t d, const char *ahead) {
        Floats rows[LANES];
        for (int t = 0; t < LANES; t++) {
            if (PREFETCHES) __builtin_prefetch(ahead + t * 64, 0, HINT);
            rows[t] = Floats(load_pairs<IS_HALF>(from[t] + d));
        }
        transpose(rows);
        for (int t = 0; t < LANES; t++) pairs[d / 2 + t] = rows[t];
    }

    // Scores [R, LANES] of R query rows [R, dim / 2 pairs]; dim is a multiple of 32.
    template <int R>
    void scores(const float *query, int64_t dim, float *to) const {
        Floats even[R], odd[R];  // two sums, because one product waits for the one before
        for (int r = 0; r < R; r++) even[r] = odd[r] = broadcast(0);
        for (int64_t pair = 0; pair < dim / 2; pair += 2) {
            const __m512i first = __m512i(pairs[pair]), second = __m512i(pairs[pair + 1]);
            for (int r = 0; r < R; r++) {
                even[r] = add_products(even[r], first, broadcast_pair(query + r * (dim / 2) + pair));
                odd[r] = add_products(odd[r], second, broadcast_pair(query + r * (dim / 2) + pair + 1));
            }
        }
        for (int r = 0; r < R; r++) store(to + r * STRIDE, even[r] + odd[r]);
    }
};

// As add_values for 32 * U dimensions of pairs of tokens, whose last 16 may not exist. The 32 dimensions of a vector are
// two vectors of accumulators in the order of `in_order`.
template <int R, int U, bool IS_HALF, bool PREFETCHES>
static inline void add_pairs(
    float *acc, int64_t acc_stride, const BFloat16 *weights, const BFloat16 *values, int64_t stride, int tokens,
    const char *ahead
) {
    Floats low[R][U], high[R][U];
    for (int r = 0; r < R; r++)
        for (int u = 0; u < U; u++) {
            low[r][u] = load(acc + r * acc_stride + u * 32);
            high[r][u] = load(acc + r * acc_stride + u * 32 + LANES);
        }
    // Behind the last token are weights of the same row, or zeros.
    auto add = [&](int t, const __m512i(&first)[U], const __m512i(&second)[U]) {
        for (int r = 0; r < R; r++) {
            const __m512i weight = broadcast_pair(weights + r * STRIDE + t);
            for (int u = 0; u < U; u++) {
                low[r][u] = add_products(low[r][u], _mm512_unpacklo_epi16(first[u], second[u]), weight);
                high[r][u] = add_products(high[r][u], _mm512_unpackhi_epi16(first[u], second[u]), weight);
            }
        }
    };
    __m512i first[U], second[U];
    int t = 0;
    for (; t + 2 <= tokens; t += 2) {
        for (int u = 0; u < U; u++) {
            if (PREFETCHES) __builtin_prefetch(ahead + (t * stride + u * 32) * 2, 0, HINT);
            if (PREFETCHES) __builtin_prefetch(ahead + ((t + 1) * stride + u * 32) * 2, 0, HINT);
            first[u] = load_pairs<IS_HALF>(values + t * stride + u * 32);
            second[u] = load_pairs<IS_HALF>(values + (t + 1) * stride + u * 32);
        }
        add(t, first, second);
    }
    if (t < tokens) {
        for (int u = 0; u < U; u++) {
            first[u] = load_pairs<IS_HALF>(values + t * stride + u * 32);
            second[u] = _mm512_setzero_si512();
        }
        add(t, first, second);
    }
    for (int r = 0; r < R; r++)
        for (int u = 0; u < U; u++) {
            store(acc + r * acc_stride + u * 32, low[r][u]);
            store(acc + r * acc_stride + u * 32 + LANES, high[r][u]);
        }
}

template <int R, bool PREFETCHES>
static inline void value_tile_of_pairs(
    float *acc, int64_t acc_stride, const BFloat16 *weights, const BFloat16 *values, int64_t stride, int tokens,
    const char *ahead
) {
    int64_t at = 0;
    for (; at + 64 <= std::min(acc_stride, stride); at += 64)
        add_pairs<R, 2, false, PREFETCHES>(
            acc + at, acc_stride, weights, values + at, stride, tokens, ahead + at * 2
        );
    for (; at < acc_stride; at += 32) {
        if (at + 32 <= stride)
            add_pairs<R, 1, false, PREFETCHES>(
                acc + at, acc_stride, weights, values + at, stride, tokens, ahead + at * 2
            );
        else
            add_pairs<R, 1, true, PREFETCHES>(
                acc + at, acc_stride, weights, values + at, stride, tokens, ahead + at * 2
            );
    }
}

// Puts accumulators of add_pairs in the order of their dimensions.
static inline void in_order(float *acc, int64_t dim) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    for (int64_t d = 0; d < dim; d += 32) {
        const __m512 low = _mm512_loadu_ps(acc + d), high = _mm512_loadu_ps(acc + d + 16);
        _mm512_storeu_ps(acc + d, _mm512_permutex2var_ps(low, first, high));
        _mm512_storeu_ps(acc + d + 16, _mm512_permutex2var_ps(low, _mm512_add_epi32(first, _mm512_set1_epi32(8)), high));
    }
}
#endif

// The state of one item: the query, and the softmax so far. DOTS: products of pairs of bfloat16.
template <typename T, bool DOTS>
struct Item {
    const DecodeCall &call;
    int64_t key_dim, value_dim;  // rounded up
    float *query, *scores;       // [G, key_dim], [G, STRIDE]
    float *acc, *largest, *sum;  // [G, value_dim], [G], [G]
    // With DOTS: the keys of a tile, the weights [G, STRIDE]. A query is [G, key_dim] elements of bfloat16 then.
    BFloat16 *weights;
#if defined(__AVX512BF16__)
    TransposedKeys transposed;
#endif

    Item(const DecodeCall &call, const Sizes &sizes, float *scratch)
        : call(call), key_dim(round_up(call.key_dim, DOTS ? 32 : LANES)),
          value_dim(round_up(call.value_dim, DOTS ? 32 : LANES)) {
        query = scratch;
        scores = query + sizes.query;
        weights = reinterpret_cast<BFloat16 *>(scores + sizes.scores);
        point(scores + sizes.scores * 3 / 2);
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
            if constexpr (DOTS) {
                T *to = reinterpret_cast<T *>(query) + g * key_dim;
                std::memcpy(to, own, call.key_dim * sizeof(T));
                std::memset(to + call.key_dim, 0, (key_dim - call.key_dim) * sizeof(T));
            } else {
                for (int64_t d = 0; d < key_dim; d++)
                    query[g * key_dim + d] = d < call.key_dim ? to_float(own[d]) : 0.0f;
            }
            largest[g] = -INFINITY;
            sum[g] = 0;
        }
        std::fill(acc, acc + call.group * value_dim, 0.0f);
    }

    void add(const Chunk<T> &chunk, Prefetcher<T> &prefetcher) {
        int at = 0;
        for_tiles<LANES>(chunk, [&](const Piece<T> &piece, int first, int tokens) {
            const T *keys = piece.keys + first * call.head_dim;
            score(keys, tokens, at, ahead_of(tokens, prefetcher));
            at += tokens;
        });
        for (int64_t g = 0; g < call.group; g++) weigh(g, chunk.tokens);
        at = 0;
        for_tiles<VALUE_TILE>(chunk, [&](const Piece<T> &piece, int first, int tokens) {
            const T *values = piece.values + first * call.head_dim;
            value(values, tokens, at, ahead_of(tokens, prefetcher));
            at += tokens;
        });
    }

    template <int TILE, typename Use>
    static void for_tiles(const Chunk<T> &chunk, Use use) {
        for (int p = 0; p < chunk.num_pieces; p++)
            for (int first = 0; first < chunk.pieces[p].tokens; first += TILE)
                use(chunk.pieces[p], first, std::min(TILE, chunk.pieces[p].tokens - first));
    }

    // The memory that is to be prefetched between the operations on a tile; null if that was done at once, which is faster
    // for few query rows.
    const char *ahead_of(int tokens, Prefetcher<T> &prefetcher) const {
        const int64_t bytes = tokens * call.head_dim * int64_t(sizeof(T));
        const char *ahead = prefetcher.next(bytes);
        if (call.key_dim == call.value_dim) {
            if (DOTS || call.group >= ROWS) return ahead;
            prefetcher.prefetch(ahead, bytes);
            return nullptr;
        }
        // Operations on keys and on values touch different parts of a token.
        prefetcher.prefetch_tokens(ahead, bytes);
        return nullptr;
    }

    void score(const T *keys, int tokens, int at, const char *ahead) {
        for_rows<DOTS ? 8 : ROWS>(ahead, [&](auto rows, auto prefetches, int64_t g) {
            float *to = scores + g * STRIDE + at;
#if defined(__AVX512BF16__)
            if constexpr (DOTS) {
                const int64_t dim = std::min(key_dim, call.head_dim);
                if (g == 0) transposed.template load<prefetches>(keys, call.head_dim, tokens, dim, ahead);
                return transposed.template scores<rows>(query + g * key_dim / 2, key_dim, to);
            }
#endif
            score_tile<rows, prefetches>(query + g * key_dim, key_dim, keys, call.head_dim, tokens, to, ahead);
        });
    }

    void value(const T *values, int tokens, int at, const char *ahead) {
        for_rows<ROWS>(ahead, [&](auto rows, auto prefetches, int64_t g) {
            float *to = acc + g * value_dim;
#if defined(__AVX512BF16__)
            if constexpr (DOTS)
                return value_tile_of_pairs<rows, prefetches>(
                    to, value_dim, weights + g * STRIDE + at, values, call.head_dim, tokens, ahead
                );
#endif
            value_tile<rows, prefetches>(
                to, value_dim, scores + g * STRIDE + at, values, call.head_dim, tokens, ahead
            );
        });
    }

    // Calls `use` for blocks of query rows: their number, whether they prefetch (the first do, if there is memory ahead),
    // and the first of them.
    template <int MOST, typename Use>
    void for_rows(const char *ahead, Use use) {
        for (int64_t g = 0; g < call.group;) g += rows_at<MOST>(g, g == 0 && ahead, use);
    }

    template <int MOST, typename Use>
    int rows_at(int64_t g, bool prefetches, Use use) {
        if constexpr (MOST > 1)
            if (g + MOST > call.group) return rows_at<MOST / 2>(g, prefetches, use);
        if (prefetches)
            use(std::integral_constant<int, MOST>(), std::true_type(), g);
        else
            use(std::integral_constant<int, MOST>(), std::false_type(), g);
        return MOST;
    }

    // Scores of query row g become weights relative to the largest score so far. Scores are in units of ln 2.
    void weigh(int64_t g, int tokens) {
        float *own = scores + g * STRIDE;
        Floats found = broadcast(-INFINITY);
        const float scale = call.softcap ? call.scale / call.softcap : call.scale * LOG2_E;
        for (int t = 0; t < tokens; t += LANES) {
            Floats score = load(own + t) * scale;
            if (call.softcap) score = hyperbolic_tangent(score) * (call.softcap * LOG2_E);
            if (tokens - t < LANES) score = keep_first(score, tokens - t, -INFINITY);
            store(own + t, score);
            found = max(found, score);
        }
        const float now = std::max(::largest(found), largest[g]), factor = weight_of(largest[g], now);
        Floats total = {};
        for (int t = 0; t < tokens; t += LANES) {
            // Before the first finite score every weight is 0.
            Floats weight = power_of_two(load(own + t) - (now == -INFINITY ? 0 : now));
            if constexpr (DOTS)
                store(weights + g * STRIDE + t, weight);
            else
                store(own + t, weight);
            total += weight;
        }
        // A pair may have one element after the last vector.
        if constexpr (DOTS) weights[g * STRIDE + round_up(tokens, LANES)] = {0};
        sum[g] = sum[g] * factor + ::sum(total);
        largest[g] = now;
        for (int64_t d = 0; d < value_dim; d += LANES) {
            float *to = acc + g * value_dim + d;
            store(to, load(to) * factor);
        }
    }

    static float weight_of(float score, float largest) {
        return power_of_two(broadcast(score - (largest == -INFINITY ? 0 : largest)))[0];
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
                const float sink = call.sinks[h] * LOG2_E;
                const float now = std::max(sink, largest[g]);
                factor = weight_of(largest[g], now);
                total = total * factor + weight_of(sink, now);
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

template <typename T, bool DOTS>
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
        Item<T, DOTS> state(call, sizes, of_threads + thread * sizes.thread_floats(call));
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
        Item<T, DOTS> state(call, sizes, of_threads + thread * sizes.thread_floats(call));
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

template <typename T>
static void run(const DecodeCall &call) {
#if defined(__AVX512BF16__)
    // Few query rows are limited by memory, and need no rounding of their weights.
    if constexpr (sizeof(T) == 2)
        if (call.group >= 3) return run_all<T, true>(call);
#endif
    run_all<T, false>(call);
}

}  // namespace decode
