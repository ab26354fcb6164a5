// Linear layers: y = x W^T + b for float32, and for bfloat16 where the CPU multiplies its pairs (AVX512_BF16).
//
// Shapes: x [rows, K], y [rows, N], b float32 [panels * PANEL] or null. W is packed in panels of PANEL columns of y: a
// panel is [units][PANEL] words of 32 bits, and a word has one float, or two bfloat16 of successive k; zeros pad N and K.
//
// Each element of y is one chain of fused multiply-adds over k in ascending order, whatever the number of rows and
// threads, so a token's bits do not depend on its batch.
//
// The loops are those of Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, 2008), with W as the
// operand that stays in L2: a block of BLOCK_UNITS x PANEL words is multiplied with every tile of up to TILE_ROWS rows.
// Every tile also prefetches its share of the next block, so that memory is read evenly while the block is computed.
#pragma once

#include <omp.h>

#include <algorithm>

#include "simd.h"

namespace linear {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = 4;
#else
constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = 2;
#endif
constexpr int64_t PANEL = TILE_VECTORS * LANES;
// 128 KB with AVX-512: two blocks and the rows of x fit 1 MB of L2.
constexpr int64_t BLOCK_UNITS = 512;
constexpr int64_t BLOCK_ROWS = 192;
// How far ahead a block that is read once is prefetched.
constexpr int64_t AHEAD_BYTES = 2048;
constexpr int64_t LINE = 64;

template <class Element>
struct Arithmetic;

template <>
struct Arithmetic<float> {
    static constexpr int64_t PER_UNIT = 1;
    static inline Floats multiply_add(Floats x, Floats w, Floats sum) {
#if defined(__AVX512F__)
        return Floats(_mm512_fmadd_ps(__m512(x), __m512(w), __m512(sum)));
#else
        return Floats(_mm256_fmadd_ps(__m256(x), __m256(w), __m256(sum)));
#endif
    }
};

#if defined(__AVX512BF16__)
template <>
struct Arithmetic<BFloat16> {
    static constexpr int64_t PER_UNIT = 2;
    static inline Floats multiply_add(Floats x, Floats w, Floats sum) {
        return Floats(_mm512_dpbf16_ps(__m512(sum), (__m512bh)(x), (__m512bh)(w)));
    }
};
#endif

// One word of x: a float, or two bfloat16. It may stand at any address.
typedef float Word __attribute__((aligned(1), may_alias));

static inline Floats broadcast_word(const void *from) {
#if defined(__AVX512F__)
    return Floats(_mm512_set1_ps(*static_cast<const Word *>(from)));
#else
    return Floats(_mm256_set1_ps(*static_cast<const Word *>(from)));
#endif
}

// Up to LANES columns of a row of y.
static inline void store_columns(float *to, Floats x, int64_t columns) {
    if (columns >= LANES) return store(to, x);
    float values[LANES];
    store(values, x);
    for (int64_t i = 0; i < columns; i++) to[i] = values[i];
}

#if defined(__AVX512BF16__)
static inline void store_columns(BFloat16 *to, Floats x, int64_t columns) {
    __m256i half = __m256i(_mm512_cvtneps_pbh(__m512(x)));
    __mmask16 mask = columns >= LANES ? 0xffff : (1u << (columns > 0 ? columns : 0)) - 1;
    _mm256_mask_storeu_epi16(to, mask, half);
}
#endif

template <class Element>
struct Problem {
    const Element *x;
    const float *weights;
    const float *bias;
    Element *y;
    int64_t rows, K, N;

    int64_t units() const { return (K + Arithmetic<Element>::PER_UNIT - 1) / Arithmetic<Element>::PER_UNIT; }
    int64_t panels() const { return (N + PANEL - 1) / PANEL; }
};

// A tile's part of the next block: PREFETCHES lines of every unit, beginning `step` bytes after those of the last.
struct Ahead {
    const char *from;
    int64_t step;
};

// ROWS rows of x by units [begin, end) of a panel. partial [ROWS][PANEL] has the sums before, if begin > 0, and gets
// those after, unless the last unit is reached.
template <class Element, int ROWS, int PREFETCHES>
static void multiply_tile(
    const Problem<Element> &problem, int64_t row, int64_t panel, int64_t begin, int64_t end, float *partial, Ahead ahead
) {
    using Math = Arithmetic<Element>;
    const int64_t units = problem.units(), stride = problem.K * sizeof(Element);
    const char *x = reinterpret_cast<const char *>(problem.x + row * problem.K) + begin * sizeof(float);
    const float *w = problem.weights + (panel * units + begin) * PANEL;
    Floats sums[ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++)
            sums[r][v] = begin == 0 ? Floats{} : load(partial + r * PANEL + v * LANES);

    // Of a word with one bfloat16, the last if K is odd, the other half is not x's.
    const int64_t whole = std::min(end, problem.K / Math::PER_UNIT) - begin;
    const char *prefetched = ahead.from;
    for (int64_t unit = 0; unit < whole; unit++) {
#pragma GCC unroll 4
        for (int i = 0; i < PREFETCHES; i++) __builtin_prefetch(prefetched + i * LINE, 0, 2);
        prefetched += ahead.step;
        Floats columns[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) columns[v] = load(w + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            Floats of_row = broadcast_word(x + r * stride);
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] = Math::multiply_add(of_row, columns[v], sums[r][v]);
        }
        x += sizeof(float);
        w += PANEL;
    }
    if (begin + whole < end) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            uint32_t word = 0;
            std::memcpy(&word, x + r * stride, sizeof(Element));
            Floats of_row = broadcast_word(&word);
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[r][v] = Math::multiply_add(of_row, load(w + v * LANES), sums[r][v]);
        }
    }
    if (end < units) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) store(partial + r * PANEL + v * LANES, sums[r][v]);
        return;
    }
    Element *y = problem.y + row * problem.N + panel * PANEL;
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++) {
        Floats bias = problem.bias ? load(problem.bias + panel * PANEL + v * LANES) : Floats{};
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
            store_columns(y + r * problem.N + v * LANES, sums[r][v] + bias, problem.N - panel * PANEL - v * LANES);
    }
}

template <class Element, int ROWS>
static void multiply_rows(
    const Problem<Element> &problem, int64_t row, int64_t panel, int64_t begin, int64_t end, float *partial, Ahead ahead,
    int prefetches
) {
    auto tile = prefetches == 4   ? multiply_tile<Element, ROWS, 4>
                : prefetches == 2 ? multiply_tile<Element, ROWS, 2>
                                  : multiply_tile<Element, ROWS, 1>;
    tile(problem, row, panel, begin, end, partial, ahead);
}

// Rows [first, last) by panels [panel, end_panel).
template <class Element>
static void multiply_block(const Problem<Element> &problem, int64_t first, int64_t last, int64_t panel, int64_t end_panel) {
    using Tile = decltype(&multiply_rows<Element, 1>);
    static constexpr Tile TILES[] = {
        multiply_rows<Element, 1>, multiply_rows<Element, 2>, multiply_rows<Element, 3>,
        multiply_rows<Element, 4>, multiply_rows<Element, 5>, multiply_rows<Element, 6>,
    };
    alignas(64) float partial[BLOCK_ROWS * PANEL];
    const int64_t units = problem.units(), rows = last - first, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t block = tiles == 1 ? units : BLOCK_UNITS;
    const int prefetches = tiles == 1 ? TILE_VECTORS : tiles < 4 ? 2 : 1;
    for (; panel < end_panel; panel++) {
        for (int64_t begin = 0; begin < units; begin += block) {
            const int64_t end = std::min(units, begin + block);
            const char *next = reinterpret_cast<const char *>(problem.weights + (panel * units + end) * PANEL);
            for (int64_t tile = 0; tile < tiles; tile++) {
                // Tiles of almost equal size: one of two rows would wait for W.
                const int64_t row = rows * tile / tiles, count = rows * (tile + 1) / tiles - row;
                Ahead ahead{next + (end - begin) * PANEL * 4 * tile / tiles, (PANEL * 4 + tiles - 1) / tiles};
                if (tiles == 1) ahead = {next - (end - begin) * PANEL * 4 + AHEAD_BYTES, PANEL * 4};
                TILES[count - 1](problem, first + row, panel, begin, end, partial + row * PANEL, ahead, prefetches);
            }
        }
    }
}

template <class Element>
static void multiply_part(const Problem<Element> &problem, int64_t first, int64_t last, int64_t panel, int64_t end_panel) {
    const int64_t blocks = (last - first + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t begin = first + (last - first) * i / blocks, end = first + (last - first) * (i + 1) / blocks;
        multiply_block(problem, begin, end, panel, end_panel);
    }
}

template <class Element>
static void multiply(const Problem<Element> &problem, int threads) {
    const int64_t panels = problem.panels();
    if (threads == 1) return multiply_part(problem, 0, problem.rows, 0, panels);
#pragma omp parallel num_threads(threads)
    {
        const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
        multiply_part(problem, 0, problem.rows, panels * thread / count, panels * (thread + 1) / count);
    }
}

}  // namespace linear
