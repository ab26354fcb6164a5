// The limits of this machine's cores: bytes read in order per second, and multiply-adds per second. Compiled by limits.py
// with the flags of the worker's kernels.
#include <immintrin.h>
#include <omp.h>

#include <cstdint>

#include "simd.h"

// Enough sums that no multiply-add waits for another: 4 cycles times 2 a cycle, and room for 6.
constexpr int SUMS = LANES == 16 ? 24 : 12;

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

// `rounds` multiply-adds of every sum, by each thread. Returns their number of floating-point operations.
int64_t limits_float32(int64_t rounds, int32_t threads, float *result) {
#pragma omp parallel for num_threads(threads)
    for (int32_t i = 0; i < threads; i++) {
        Floats sums[SUMS] = {}, x = broadcast(result[0]), w = broadcast(result[1]);
        for (int64_t j = 0; j < rounds; j++)
#pragma GCC unroll 24
            for (int k = 0; k < SUMS; k++) {
                sums[k] = x * w + sums[k];
                asm volatile("" : "+v"(sums[k]));
            }
        for (int k = 0; k < SUMS; k++) result[i] += sum(sums[k]);
    }
    return rounds * threads * SUMS * LANES * 2;
}

#if defined(__AVX512BF16__)
int64_t limits_bfloat16(int64_t rounds, int32_t threads, float *result) {
#pragma omp parallel for num_threads(threads)
    for (int32_t i = 0; i < threads; i++) {
        __m512 sums[SUMS] = {};
        const __m512bh x = __m512bh(__m512(broadcast(result[0]))), w = __m512bh(__m512(broadcast(result[1])));
        for (int64_t j = 0; j < rounds; j++)
#pragma GCC unroll 24
            for (int k = 0; k < SUMS; k++) {
                sums[k] = _mm512_dpbf16_ps(sums[k], x, w);
                asm volatile("" : "+v"(sums[k]));
            }
        for (int k = 0; k < SUMS; k++) result[i] += sum(Floats(sums[k]));
    }
    return rounds * threads * SUMS * LANES * 4;
}
#endif
}
