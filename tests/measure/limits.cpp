// The limits of this machine's cores: bytes read in order per second, and multiply-adds per second. Compiled by limits.py
// with the flags of the worker's kernels.
#include "linear.h"

using linear::Arithmetic;

// A multiply-add takes 4 cycles (6 in bfloat16), and a core begins up to 2 in each: more sums than that, in registers.
constexpr int SUMS = LANES == 16 ? 24 : 12;

// `rounds` multiply-adds of every sum, by each thread. Returns their number of floating-point operations.
template <class Element>
static int64_t multiply_add(int64_t rounds, int32_t threads, float *result) {
#pragma omp parallel for num_threads(threads)
    for (int32_t i = 0; i < threads; i++) {
        Floats sums[SUMS], x = broadcast(result[0]), w = broadcast(result[1]);
#pragma GCC unroll 24
        for (int k = 0; k < SUMS; k++) sums[k] = broadcast(float(k));
        for (int64_t j = 0; j < rounds; j++) {
            // The compiler may not compute products ahead.
#if defined(__AVX512F__)
            asm volatile("" : "+v"(x), "+v"(w));
#else
            asm volatile("" : "+x"(x), "+x"(w));
#endif
#pragma GCC unroll 24
            for (int k = 0; k < SUMS; k++) sums[k] = Arithmetic<Element>::multiply_add(x, w, sums[k]);
        }
        Floats total{};
#pragma GCC unroll 24
        for (int k = 0; k < SUMS; k++) total += sums[k];
        result[2 + i] = sum(total);
    }
    return rounds * threads * SUMS * LANES * 2 * Arithmetic<Element>::PER_UNIT;
}

extern "C" {

// Reads `bytes` bytes, in as many parts as there are threads. Returns a sum, so that nothing is left out.
float limits_read(const float *from, int64_t bytes, int32_t threads) {
    float total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total)
    for (int32_t i = 0; i < threads; i++) {
        const int64_t vectors = bytes / (threads * int64_t(sizeof(Floats)));
        const float *part = from + i * vectors * LANES;
        Floats sums[4] = {};
        for (int64_t j = 0; j + 4 <= vectors; j += 4)
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) sums[k] += load(part + (j + k) * LANES);
        total += sum(sums[0] + sums[1] + sums[2] + sums[3]);
    }
    return total;
}

// result [2 + threads]: two factors, which may have any value, and a result of each thread.
int64_t limits_float32(int64_t rounds, int32_t threads, float *result) {
    return multiply_add<float>(rounds, threads, result);
}

#if defined(__AVX512BF16__)
int64_t limits_bfloat16(int64_t rounds, int32_t threads, float *result) {
    return multiply_add<BFloat16>(rounds, threads, result);
}
#endif
}
