// Linear layers: y = x W^T + b for float32, and for bfloat16 where the CPU multiplies its pairs (AVX512_BF16).
//
// Shapes: x [rows, K], y [rows, N], b float32 [panels * PANEL] or null. W is packed in panels of PANEL columns of y: a
// panel is [units][PANEL] words of 32 bits, and a word has one float, or two bfloat16 of successive k; zeros pad N and K.
//
// Each element of y is one chain of fused multiply-adds over k in ascending order, for any number of rows and
// threads, so a token's bits do not depend on its batch.
//
// The loops are those of Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, 2008), with W as the
// operand that stays in L2: a block of BLOCK_UNITS x PANEL words is multiplied with every tile of up to TILE_ROWS rows.
// Every tile also prefetches its part of the next block, so that memory is read evenly while the block is computed.
#pragma once

#include <omp.h>

#include <algorithm>

#include "simd.h"

namespace linear {

constexpr int TILE_ROWS = 6;
// 24 sums fill the 32 registers of AVX-512, 12 the 16 of AVX2. Tiles of 12 rows by 2 vectors read W once for up
// to 12 rows, and yet are up to 25 % slower there (Zen 4).
constexpr int TILE_VECTORS = LANES == 16 ? 4 : 2;
constexpr int64_t PANEL = TILE_VECTORS * LANES;
// 128 KB with AVX-512: two blocks and the rows of x fit 1 MB of L2. 256 and 1,024 units are up to 5 % slower.
constexpr int64_t BLOCK_UNITS = 512;
// 384 KB of x in a block's units.
constexpr int64_t BLOCK_ROWS = 192;
// Multiply-adds below which another thread costs more than it saves.
constexpr int64_t LEAST_DIVIDED = 1 << 16;
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
    return broadcast(*static_cast<const Word *>(from));
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

// ROWS rows of x, from `row`, by units [begin, end) of a panel.
struct Tile {
    int64_t row, panel, begin, end;
    // [ROWS][PANEL]: the sums before, if begin > 0; gets those after, unless the last unit is reached.
    float *partial;
    // This tile's part of the next block, and the bytes of it for each unit.
    const char *ahead;
    int64_t ahead_step;
};

template <class Element>
using TileFunction = void (*)(const Problem<Element> &, const Tile &);

template <class Element, int ROWS, int PREFETCHES>
static void multiply_tile(const Problem<Element> &problem, const Tile &tile) {
    using Math = Arithmetic<Element>;
    const int64_t units = problem.units(), stride = problem.K * sizeof(Element);
    const char *x = reinterpret_cast<const char *>(problem.x + tile.row * problem.K) + tile.begin * sizeof(float);
    const float *w = problem.weights + (tile.panel * units + tile.begin) * PANEL;
    Floats sums[ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++)
            sums[r][v] = tile.begin == 0 ? Floats{} : load(tile.partial + r * PANEL + v * LANES);

    // If K is odd, the last word of bfloat16 has one element of x.
    const int64_t whole = std::min(tile.end, problem.K / Math::PER_UNIT) - tile.begin;
    const char *ahead = tile.ahead;
    for (int64_t unit = 0; unit < whole; unit++) {
#pragma GCC unroll 2
        for (int i = 0; i < PREFETCHES; i++) __builtin_prefetch(ahead + i * LINE, 0, 2);
        ahead += tile.ahead_step;
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
    if (tile.begin + whole < tile.end) {
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
    if (tile.end < units) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) store(tile.partial + r * PANEL + v * LANES, sums[r][v]);
        return;
    }
    const int64_t column = tile.panel * PANEL;
    Element *y = problem.y + tile.row * problem.N + column;
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++) {
        Floats bias = problem.bias ? load(problem.bias + column + v * LANES) : Floats{};
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
            store_columns(y + r * problem.N + v * LANES, sums[r][v] + bias, problem.N - column - v * LANES);
    }
}

// A single tile reads W once, in order, which the CPU prefetches best by itself: 28 GB/s with 1 to 6 rows, and 20 to 28
// with prefetches at any distance from 1 to 128 KB.
template <class Element>
static TileFunction<Element> tile_function(int64_t rows, int64_t tiles) {
    static constexpr TileFunction<Element> SINGLE[] = {
        multiply_tile<Element, 1, 0>, multiply_tile<Element, 2, 0>, multiply_tile<Element, 3, 0>,
        multiply_tile<Element, 4, 0>, multiply_tile<Element, 5, 0>, multiply_tile<Element, 6, 0>,
    };
    // Tiles of almost equal size: two or three have at least 3 rows, more have at least 4.
    static constexpr TileFunction<Element> FEW[] = {
        multiply_tile<Element, 3, 2>, multiply_tile<Element, 4, 2>,
        multiply_tile<Element, 5, 2>, multiply_tile<Element, 6, 2>,
    };
    static constexpr TileFunction<Element> MANY[] = {
        multiply_tile<Element, 4, 1>, multiply_tile<Element, 5, 1>, multiply_tile<Element, 6, 1>,
    };
    return tiles == 1 ? SINGLE[rows - 1] : tiles < 4 ? FEW[rows - 3] : MANY[rows - 4];
}

// Rows [first, last), at most BLOCK_ROWS, by panels [panel, end_panel).
template <class Element>
static void multiply_block(
    const Problem<Element> &problem, int64_t first, int64_t last, int64_t panel, int64_t end_panel
) {
    alignas(64) float partial[BLOCK_ROWS * PANEL];
    const int64_t units = problem.units(), rows = last - first, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t block = tiles == 1 ? units : BLOCK_UNITS;
    for (; panel < end_panel; panel++) {
        for (int64_t begin = 0; begin < units; begin += block) {
            const int64_t end = std::min(units, begin + block), bytes = (end - begin) * PANEL * sizeof(float);
            const char *next = reinterpret_cast<const char *>(problem.weights + (panel * units + end) * PANEL);
            for (int64_t i = 0; i < tiles; i++) {
                // Tiles of almost equal size: a tile of one or two rows would wait for W.
                const int64_t row = rows * i / tiles, count = rows * (i + 1) / tiles - row;
                tile_function<Element>(count, tiles)(
                    problem,
                    {first + row, panel, begin, end, partial + row * PANEL, next + bytes * i / tiles,
                     (PANEL * int64_t(sizeof(float)) + tiles - 1) / tiles}
                );
            }
        }
    }
}

template <class Element>
static void multiply_part(
    const Problem<Element> &problem, int64_t first, int64_t last, int64_t panel, int64_t end_panel
) {
    const int64_t rows = last - first, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (int64_t i = 0; i < blocks; i++)
        multiply_block(problem, first + rows * i / blocks, first + rows * (i + 1) / blocks, panel, end_panel);
}

// Into how many groups of rows, a divisor of `threads`, the work is divided so that the largest part is least; each
// group's threads share the panels. Fewer groups read W less often.
static inline int64_t row_groups(int64_t rows, int64_t panels, int64_t threads) {
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t best = 1, least = INT64_MAX;
    for (int64_t groups = 1; groups <= threads; groups++) {
        if (threads % groups) continue;
        const int64_t shares = threads / groups;
        const int64_t largest = (panels + shares - 1) / shares * ((tiles + groups - 1) / groups);
        if (largest < least) best = groups, least = largest;
    }
    return best;
}

template <class Element>
static void multiply(const Problem<Element> &problem, int threads) {
    const int64_t panels = problem.panels(), rows = problem.rows;
    if (threads == 1 || rows * problem.K * problem.N < LEAST_DIVIDED) return multiply_part(problem, 0, rows, 0, panels);
#pragma omp parallel num_threads(threads)
    {
        const int64_t count = omp_get_num_threads(), groups = row_groups(rows, panels, count), shares = count / groups;
        const int64_t group = omp_get_thread_num() / shares, share = omp_get_thread_num() % shares;
        multiply_part(
            problem, rows * group / groups, rows * (group + 1) / groups, panels * share / shares,
            panels * (share + 1) / shares
        );
    }
}

}  // namespace linear
