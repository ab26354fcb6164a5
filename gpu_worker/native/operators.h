// The small operators of a decoder layer, each in one pass: RMS norm, rotary embedding, gated activation, and the greedy
// choice of tokens. Every row is computed by itself and in one order, so its bits depend neither on the number of threads
// nor on other rows. Arithmetic is float32 for any element type, and a result is rounded once.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace operators {

// Calls run with a value of the type of elements.
template <typename Run>
static void with_type(bool is_bfloat16, Run run) {
    if (is_bfloat16)
        run(BFloat16{});
    else
        run(0.0f);
}

// Elements per thread from which a second thread gains: an OpenMP region costs some 5 us, in which a thread computes 30,000
// elements (Zen 4, two cores).
constexpr int64_t LEAST_PER_THREAD = 32768;

static inline int threads_for(int64_t rows, int64_t columns, int threads) {
    int64_t most = rows * columns / LEAST_PER_THREAD;
    if (most > rows) most = rows;
    return most < 2 ? 1 : most < threads ? int(most) : threads;
}

// Calls body(row) for every row.
template <typename Body>
static inline void for_rows(int64_t rows, int64_t columns, int threads, Body body) {
    threads = threads_for(rows, columns, threads);
    if (threads == 1) {
        for (int64_t row = 0; row < rows; row++) body(row);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) body(row);
}

// The first `num` elements, then zeros.
template <typename T>
static inline Floats load_first(const T *from, int64_t num) {
    alignas(64) float values[LANES] = {};
    for (int64_t i = 0; i < num; i++) values[i] = to_float(from[i]);
    return load(values);
}

template <typename T>
static inline void store_first(T *to, Floats x, int64_t num) {
    alignas(64) float values[LANES];
    store(values, x);
    for (int64_t i = 0; i < num; i++) put(to + i, values[i]);
}

// out = x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019) for rows of `columns` elements. x has
// outer x inner rows with these strides in elements, out has them one after another; weight [columns].
template <typename T>
static void rms_norm(const T *x, const float *weight, T *out, int64_t outer, int64_t inner, int64_t columns,
                     int64_t outer_stride, int64_t inner_stride, float epsilon, int threads) {
    const int64_t whole = columns - columns % (4 * LANES);
    for_rows(outer * inner, columns, threads, [=](int64_t row) {
        const T *from = x + row / inner * outer_stride + row % inner * inner_stride;
        T *to = out + row * columns;
        // Four sums, because one would wait for each addition.
        Floats squares[4] = {};
        for (int64_t i = 0; i < whole; i += 4 * LANES)
            for (int part = 0; part < 4; part++) {
                Floats value = load(from + i + part * LANES);
                squares[part] += value * value;
            }
        for (int64_t i = whole; i < columns; i += LANES) {
            Floats value = columns - i < LANES ? load_first(from + i, columns - i) : load(from + i);
            squares[0] += value * value;
        }
        float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / float(columns);
        const Floats scale = broadcast(1.0f / std::sqrt(mean + epsilon));
        int64_t i = 0;
        for (; i + LANES <= columns; i += LANES) store(to + i, load(from + i) * scale * load(weight + i));
        if (i < columns) {
            const int64_t num = columns - i;
            store_first(to + i, load_first(from + i, num) * scale * load_first(weight + i, num), num);
        }
    });
}

// Rotates pairs (i, i + half) of the first 2 half elements of each head by the angles of its token, and copies the other
// elements (Su et al. 2021, in the order of GPT-NeoX). x [tokens, heads, dim] with strides, out contiguous; cosine and sine
// [tokens, 2 half] with a stride.
template <typename T>
static void rotary(const T *x, const T *cosine, const T *sine, T *out, int64_t tokens, int64_t heads, int64_t dim,
                   int64_t half, int64_t token_stride, int64_t head_stride, int64_t table_stride, int threads) {
    for_rows(tokens, heads * dim, threads, [=](int64_t token) {
        const T *cos_of = cosine + token * table_stride, *sin_of = sine + token * table_stride;
        for (int64_t head = 0; head < heads; head++) {
            const T *from = x + token * token_stride + head * head_stride;
            T *to = out + (token * heads + head) * dim;
            int64_t i = 0;
            for (; i + LANES <= half; i += LANES) {
                Floats first = load(from + i), second = load(from + half + i);
                store(to + i, first * load(cos_of + i) - second * load(sin_of + i));
                store(to + half + i, second * load(cos_of + half + i) + first * load(sin_of + half + i));
            }
            if (i < half) {
                const int64_t num = half - i;
                Floats first = load_first(from + i, num), second = load_first(from + half + i, num);
                Floats cos_1 = load_first(cos_of + i, num), sin_1 = load_first(sin_of + i, num);
                Floats cos_2 = load_first(cos_of + half + i, num), sin_2 = load_first(sin_of + half + i, num);
                store_first(to + i, first * cos_1 - second * sin_1, num);
                store_first(to + half + i, second * cos_2 + first * sin_2, num);
            }
            if (2 * half < dim) std::memcpy(to + 2 * half, from + 2 * half, size_t(dim - 2 * half) * sizeof(T));
        }
    });
}

enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

// x sigmoid(y). The error is below 4e-7 |x|, or 2e-4 of a result that is then rounded to bfloat16, which itself errs by
// up to 4e-3.
template <typename T>
static inline Floats times_sigmoid(Floats x, Floats y) {
    constexpr float MINUS_LOG2_E = -1.44269504088896341f;
    if constexpr (sizeof(T) == 2) return x * reciprocal(1.0f + power_of_two<3>(y * MINUS_LOG2_E));
    return x / (1.0f + power_of_two(y * MINUS_LOG2_E));
}

// SiLU is x sigmoid(x); GELU with the approximation by tanh is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), because
// (1 + tanh(y)) / 2 = sigmoid(2 y) (Hendrycks and Gimpel 2016).
template <typename T, Activation ACTIVATION>
static inline Floats activated(Floats x) {
    return times_sigmoid<T>(
        x, ACTIVATION == SILU ? x : x * (1.5957691216057308f + 0.07135481282753477f * x * x)
    );
}

// out = activation(gate) * up for rows of `columns` elements; gate and up with a stride between rows, out contiguous.
template <typename T, Activation ACTIVATION>
static void gated(const T *gate, const T *up, T *out, int64_t rows, int64_t columns, int64_t gate_stride,
                  int64_t up_stride, int threads) {
    for_rows(rows, columns, threads, [=](int64_t row) {
        const T *gate_of = gate + row * gate_stride, *up_of = up + row * up_stride;
        T *to = out + row * columns;
        int64_t i = 0;
        for (; i + LANES <= columns; i += LANES)
            store(to + i, activated<T, ACTIVATION>(load(gate_of + i)) * load(up_of + i));
        if (i < columns) {
            const int64_t num = columns - i;
            Floats product = activated<T, ACTIVATION>(load_first(gate_of + i, num)) * load_first(up_of + i, num);
            store_first(to + i, product, num);
        }
    });
}

// out = x + y for `count` elements.
template <typename T>
static void add(const T *x, const T *y, T *out, int64_t count, int threads) {
    const int64_t part = LEAST_PER_THREAD;
    for_rows((count + part - 1) / part, part, threads, [=](int64_t index) {
        const int64_t end = std::min(count, (index + 1) * part);
        int64_t i = index * part;
        for (; i + LANES <= end; i += LANES) store(out + i, load(x + i) + load(y + i));
        if (i < end) store_first(out + i, load_first(x + i, end - i) + load_first(y + i, end - i), end - i);
    });
}

// The index of the largest of `columns` logits of each row, the first one of equal ones; -1 if a logit is not finite.
// Vectors keep the largest value of each lane and where it was; 0 x is NaN exactly where x is not finite.
template <typename T>
static void greedy(const T *logits, int64_t *tokens, int64_t rows, int64_t columns, int64_t stride, int threads) {
    for_rows(rows, columns, threads, [=](int64_t row) {
        const T *from = logits + row * stride;
        Floats best = broadcast(-INFINITY), broken = {};
        Ints at = {}, index, step = Ints{} + LANES;
        for (int lane = 0; lane < LANES; lane++) index[lane] = lane;
        int64_t i = 0;
        for (; i + LANES <= columns; i += LANES) {
            Floats value = load(from + i);
            broken += value * 0.0f;
            Ints larger = value > best;
            best = larger ? value : best;
            at = larger ? index : at;
            index += step;
        }
        float largest_value = -INFINITY, not_finite = sum(broken);
        int64_t token = columns;
        for (int lane = 0; lane < LANES; lane++)
            if (best[lane] > largest_value || (best[lane] == largest_value && at[lane] < token)) {
                largest_value = best[lane];
                token = at[lane];
            }
        for (; i < columns; i++) {
            float value = to_float(from[i]);
            not_finite += value * 0.0f;
            if (value > largest_value) {
                largest_value = value;
                token = i;
            }
        }
        tokens[row] = not_finite == 0.0f ? token : -1;
    });
}

}  // namespace operators
