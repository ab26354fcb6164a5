// The products of decode attention: scores of a tile of keys, and weighted sums of values.
//
// Scores of a block of R query rows are computed without sums across vectors: the LANES lanes of a vector belong to R rows,
// W = LANES / R to each. W elements of a key are repeated for every row, which costs a load, and multiplied by vectors in
// which as many elements of each row's query lie side by side. What is left are sums of the W lanes of a row, in which W
// vectors of one token each become one of W tokens. So lane r * W + w of a vector of scores belongs to row r and token w,
// and a softmax over tokens needs no sums across vectors either until its end.
// An element is a float, or a pair of bfloat16 where the CPU multiplies pairs (AVX512_BF16).
#pragma once

#include "decode_prefetch.h"
#include "simd.h"

namespace decode {

// Where the score of a slot is, in elements from that of slot 0.
template <int R>
static inline unsigned slot_offset(unsigned slot) {
    return slot / (LANES / R) * LANES + slot % (LANES / R);
}

// Where the first score of a row is, in elements from that of row 0.
template <int R>
static constexpr int64_t row_offset(int64_t row) {
    return row / R * (CHUNK * R) + row % R * (LANES / R);
}

// W elements of 4 bytes, repeated.
template <int W>
static inline Floats repeat(const void *from) {
    const float *f = static_cast<const float *>(from);
#if defined(__AVX512F__)
    if constexpr (W == 16) return load(f);
    if constexpr (W == 8) return Floats(_mm512_broadcast_f32x8(_mm256_loadu_ps(f)));
    if constexpr (W == 4) return Floats(_mm512_broadcast_f32x4(_mm_loadu_ps(f)));
    if constexpr (W == 2) {
        double both;
        std::memcpy(&both, f, sizeof both);
        return Floats(_mm512_castpd_ps(_mm512_set1_pd(both)));
    }
#else
    if constexpr (W == 8) return load(f);
    if constexpr (W == 4) return Floats(_mm256_broadcast_ps(reinterpret_cast<const __m128 *>(f)));
    if constexpr (W == 2) {
        double both;
        std::memcpy(&both, f, sizeof both);
        return Floats(_mm256_castpd_ps(_mm256_set1_pd(both)));
    }
    if constexpr (W == 1) return broadcast(*f);
#endif
}

// Sums of lanes l and l + S of a (where l does not have bit S), and those of b in lanes l + S.
template <int S>
static inline Floats add_lanes(Floats x, Floats y) {
#if defined(__AVX512F__)
    const __m512 a = __m512(x), b = __m512(y);
    if constexpr (S == 1)
        return Floats(_mm512_add_ps(_mm512_mask_moveldup_ps(a, 0xaaaa, b), _mm512_mask_movehdup_ps(b, 0x5555, a)));
    if constexpr (S == 2)
        return Floats(_mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee)));
    if constexpr (S == 4)
        return Floats(_mm512_add_ps(
            _mm512_mask_shuffle_f32x4(a, 0xf0f0, b, b, 0xa0), _mm512_mask_shuffle_f32x4(b, 0x0f0f, a, a, 0xf5)
        ));
    if constexpr (S == 8)
        return Floats(_mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)));
#else
    const __m256 a = __m256(x), b = __m256(y);
    if constexpr (S == 1)
        return Floats(_mm256_add_ps(
            _mm256_blend_ps(a, _mm256_moveldup_ps(b), 0xaa), _mm256_blend_ps(_mm256_movehdup_ps(a), b, 0xaa)
        ));
    if constexpr (S == 2)
        return Floats(_mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee)));
    if constexpr (S == 4)
        return Floats(_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
#endif
}

// Vectors of one token each become vectors of W.
template <int W, int S = 1, int N>
static inline void add_lanes_of_rows(Floats (&sums)[N]) {
    if constexpr (S < W) {
#pragma GCC unroll 16
        for (int i = 0; i < N / (2 * S); i++) sums[i] = add_lanes<S>(sums[2 * i], sums[2 * i + 1]);
        add_lanes_of_rows<W, 2 * S>(sums);
    }
}

// The operation of every lane with all lanes of its row.
template <int W, typename Operation>
static inline Floats over_row(Floats x, Operation operation) {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int step = 1; step < W; step *= 2) x = operation(x, Floats(__builtin_shuffle(x, lane ^ step)));
    return x;
}

static inline Floats multiply_add(float, Floats a, Floats b, Floats to) {
    return to + a * b;
}

#if defined(__AVX512BF16__)
static inline Floats multiply_add(BFloat16, Floats a, Floats b, Floats to) {
    return Floats(_mm512_dpbf16_ps(__m512(to), (__m512bh)__m512i(a), (__m512bh)__m512i(b)));
}
#endif

// How a product becomes a score, in units of ln 2.
struct Scale {
    float scale, softcap;  // softcap 0: none

    Scale(const DecodeCall &call)
        : scale(call.softcap ? call.scale / call.softcap : call.scale * LOG2_E), softcap(call.softcap * LOG2_E) {}

    Floats operator()(Floats product) const {
        const Floats scaled = product * scale;
        return softcap ? hyperbolic_tangent(scaled) * softcap : scaled;
    }

    static constexpr float LOG2_E = 1.44269504088896341f;
};

// Scores of M blocks and up to TILE tokens; minus infinity behind them. query: [M, steps, R, W] elements; keys: rows of
// `stride`; scores: [M, CHUNK / W, R, W]. `found` [M, LANES] becomes the largest of itself and the scores in each lane.
template <int R, int M, bool PREFETCHES, typename E, typename T>
static inline void score_tile(
    const float *query, int64_t steps, const E *keys, int64_t stride, int tokens, const Scale scale, float *scores,
    float *found, Prefetcher<T> &prefetcher
) {
    // As many sums as there are registers for.
    constexpr int W = LANES / R, TOKENS = std::max(W, LANES == 16 ? 8 : 8 / M), BYTES = W * 4;
    Ints token;
    for (int i = 0; i < LANES; i++) token[i] = i % W;
    for (int begin = 0; begin < TILE; begin += TOKENS, scores += TOKENS * R) {
        const char *key[TOKENS];
        Floats sums[M][TOKENS];
#pragma GCC unroll 16
        for (int t = 0; t < TOKENS; t++) {
            key[t] = reinterpret_cast<const char *>(keys + std::min(begin + t, tokens - 1) * stride);
#pragma GCC unroll 2
            for (int m = 0; m < M; m++) sums[m][t] = broadcast(0);
        }
        for (int64_t step = 0; step < steps; step++) {
            if (PREFETCHES) prefetcher.template prefetch<TOKENS * BYTES>(step);
            Floats q[M];
#pragma GCC unroll 2
            for (int m = 0; m < M; m++) q[m] = load(query + (m * steps + step) * LANES);
#pragma GCC unroll 16
            for (int t = 0; t < TOKENS; t++) {
                const Floats elements = repeat<W>(key[t] + step * BYTES);
#pragma GCC unroll 2
                for (int m = 0; m < M; m++) sums[m][t] = multiply_add(E(), elements, q[m], sums[m][t]);
            }
        }
#pragma GCC unroll 2
        for (int m = 0; m < M; m++) {
            add_lanes_of_rows<W>(sums[m]);
            Floats most = load(found + m * LANES);
#pragma GCC unroll 16
            for (int v = 0; v < TOKENS / W; v++) {
                Floats score = scale(sums[m][v]);
                const int left = tokens - begin - v * W;
                if (left < W) score = token < Ints{} + left ? score : broadcast(-INFINITY);
                most = max(most, score);
                store(scores + m * CHUNK * R + v * LANES, score);
            }
            store(found + m * LANES, most);
        }
    }
}

// What one of `share` passes over the same `bytes` prefetches. Share 0: nothing.
static constexpr int part_of(int bytes, int share) {
    return share ? bytes / share : 0;
}

// Adds the values of `tokens` tokens from `slot`, weighted, to [R, V * LANES] accumulators. weights: as the
// scores of blocks of B rows, from those of the first row.
template <int R, int V, int B, int SHARE, typename T>
static inline void add_values(
    float *acc, int64_t dim, const float *weights, int slot, const float *values, int64_t stride, int tokens,
    Prefetcher<T> &prefetcher
) {
    Floats sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = load(acc + r * dim + v * LANES);
    for (int t = 0; t < tokens; t++) {
        prefetcher.template prefetch<part_of(V * LANES * 4, SHARE)>(t);
        const float *weight = weights + slot_offset<B>(slot + t);
        Floats value[V];
        for (int v = 0; v < V; v++) value[v] = load(values + t * stride + v * LANES);
        for (int r = 0; r < R; r++) {
            const Floats own = broadcast(weight[row_offset<B>(r)]);
            for (int v = 0; v < V; v++) sums[r][v] += own * value[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(acc + r * dim + v * LANES, sums[r][v]);
}

template <int R, int B, int SHARE, typename T>
static inline void value_tile(
    float *acc, int64_t dim, const float *weights, int slot, const float *values, int64_t stride, int tokens,
    Prefetcher<T> &prefetcher
) {
    int64_t d = 0;
    auto add = [&](auto vectors) {
        constexpr int V = vectors;
        for (; d + V * LANES <= dim; d += V * LANES)
            add_values<R, V, B, SHARE>(acc + d, dim, weights, slot, values + d, stride, tokens, prefetcher);
    };
    add(std::integral_constant<int, 4>());
    add(std::integral_constant<int, 2>());
    add(std::integral_constant<int, 1>());
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
    return multiply_add(BFloat16(), Floats(a), Floats(b), to);
}

static inline __m512i broadcast_pair(const void *from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
}

// As add_values for 32 * U dimensions of pairs of tokens, whose last 16 may not exist. The 32 dimensions of a vector are
// two vectors of accumulators in the order of `in_order`.
template <int R, int U, int B, bool IS_HALF, int SHARE>
static inline void add_pairs(
    float *acc, int64_t dim, const BFloat16 *weights, int slot, const BFloat16 *values, int64_t stride, int tokens,
    Prefetcher<BFloat16> &prefetcher
) {
    Floats low[R][U], high[R][U];
    for (int r = 0; r < R; r++)
        for (int u = 0; u < U; u++) {
            low[r][u] = load(acc + r * dim + u * 32);
            high[r][u] = load(acc + r * dim + u * 32 + LANES);
        }
    // The weight behind the last token is 0.
    auto add = [&](int t, const __m512i(&first)[U], const __m512i(&second)[U]) {
        const BFloat16 *weight = weights + slot_offset<B>(slot + t);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m512i own = broadcast_pair(weight + row_offset<B>(r));
            for (int u = 0; u < U; u++) {
                low[r][u] = add_products(low[r][u], _mm512_unpacklo_epi16(first[u], second[u]), own);
                high[r][u] = add_products(high[r][u], _mm512_unpackhi_epi16(first[u], second[u]), own);
            }
        }
    };
    __m512i first[U], second[U];
    int t = 0;
    for (; t + 2 <= tokens; t += 2) {
        prefetcher.template prefetch<part_of(2 * 64 * U, SHARE)>(t / 2);
        for (int u = 0; u < U; u++) {
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
            store(acc + r * dim + u * 32, low[r][u]);
            store(acc + r * dim + u * 32 + LANES, high[r][u]);
        }
}

template <int R, int B, int SHARE>
static inline void value_tile(
    float *acc, int64_t dim, const BFloat16 *weights, int slot, const BFloat16 *values, int64_t stride, int tokens,
    Prefetcher<BFloat16> &prefetcher
) {
    // As many accumulators as there are registers for.
    constexpr int U = R > 4 ? 1 : 2;
    int64_t d = 0;
    for (; d + 32 * U <= std::min(dim, stride); d += 32 * U)
        add_pairs<R, U, B, false, SHARE>(acc + d, dim, weights, slot, values + d, stride, tokens, prefetcher);
    if (U == 2 && d + 32 <= std::min(dim, stride)) {
        add_pairs<R, 1, B, false, SHARE>(acc + d, dim, weights, slot, values + d, stride, tokens, prefetcher);
        d += 32;
    }
    if (d < dim) add_pairs<R, 1, B, true, SHARE>(acc + d, dim, weights, slot, values + d, stride, tokens, prefetcher);
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

}  // namespace decode
