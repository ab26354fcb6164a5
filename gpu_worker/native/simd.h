// A vector of LANES floats for the instruction set that this library is compiled for, and the operations that kernels
// share. GCC's vector extensions are used where they compile to one instruction, intrinsics elsewhere.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8;
#else
#error "the kernels need AVX2 with FMA, or AVX-512"
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

// The upper 16 bits of a float.
struct BFloat16 {
    uint16_t bits;
};

static inline Floats broadcast(float x) {
#if defined(__AVX512F__)
    return Floats(_mm512_set1_ps(x));
#else
    return Floats(_mm256_set1_ps(x));
#endif
}

static inline float to_float(float x) {
    return x;
}

static inline float to_float(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline Floats load(const float *from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

static inline Floats load(const BFloat16 *from) {
#if defined(__AVX512F__)
    __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    return Floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#else
    __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return Floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#endif
}

static inline void store(float *to, Floats x) {
    std::memcpy(to, &x, sizeof x);
}

// Rounds to the nearest, ties to even, as torch does; NaN stays NaN.
static inline BFloat16 to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return {uint16_t((bits >> 16) | 0x40)};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

static inline void store(BFloat16 *to, Floats x) {
#if defined(__AVX512BF16__)
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(__m512(x));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), half);
    return;
#endif
    alignas(64) float values[LANES];
    store(values, x);
    for (int i = 0; i < LANES; i++) to[i] = to_bfloat16(values[i]);
}

static inline void put(float *to, float x) {
    *to = x;
}

static inline void put(BFloat16 *to, float x) {
    *to = to_bfloat16(x);
}

static inline Floats max(Floats a, Floats b) {
    return a > b ? a : b;
}

static inline Floats min(Floats a, Floats b) {
    return a < b ? a : b;
}

static inline float sum(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(__m512(x));
#else
    __m128 low = _mm_add_ps(_mm256_castps256_ps128(__m256(x)), _mm256_extractf128_ps(__m256(x), 1));
    low = _mm_add_ps(low, _mm_movehl_ps(low, low));
    return _mm_cvtss_f32(_mm_add_ss(low, _mm_movehdup_ps(low)));
#endif
}

// 1 / x; with AVX-512 to 14 bits.
static inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
    return Floats(_mm512_rcp14_ps(__m512(x)));
#else
    return 1.0f / x;
#endif
}

// 2^x; 0 below -150, infinity from 129, NaN stays NaN. A polynomial of the fraction of x, fitted to the least relative
// error: that of degree 5 is below 2e-7 with rounding, that of degree 3 below 1e-4.
template <int DEGREE = 5>
static inline Floats power_of_two(Floats x) {
    static_assert(DEGREE == 3 || DEGREE == 5, "no polynomial of this degree");
#if defined(__AVX512F__)
    const Floats fraction = Floats(_mm512_reduce_ps(__m512(x), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
#else
    x = broadcast(-160.0f) > x ? broadcast(-160.0f) : x;
    x = broadcast(129.0f) < x ? broadcast(129.0f) : x;
    const Floats whole = Floats(_mm256_floor_ps(__m256(x))), fraction = x - whole;
#endif
    Floats p;
    if (DEGREE == 3) {
        p = broadcast(7.7067039907e-02f);
        p = p * fraction + 2.2764499485e-01f;
        p = p * fraction + 6.9511675835e-01f;
    } else {
        p = broadcast(1.8671300495e-03f);
        p = p * fraction + 9.0170307085e-03f;
        p = p * fraction + 5.5799912661e-02f;
        p = p * fraction + 2.4016444385e-01f;
        p = p * fraction + 6.9315129519e-01f;
    }
    p = p * fraction + 1.0f;
#if defined(__AVX512F__)
    return Floats(_mm512_scalef_ps(__m512(p), __m512(x)));
#else
    // Two factors, because 2^-150 is not a float.
    const Ints power = Ints(_mm256_cvtps_epi32(__m256(whole))), half = Ints(_mm256_srai_epi32(__m256i(power), 1));
    return p * Floats((half + 127) << 23) * Floats((power - half + 127) << 23);
#endif
}

// tanh with an error below 2e-7 of the result: Cephes' tanhf. NaN stays NaN.
static inline Floats hyperbolic_tangent(Floats x) {
    Floats square = x * x;
    Floats near = broadcast(-5.70498872745e-3f);
    near = near * square + 2.06390887954e-2f;
    near = near * square - 5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square - 3.33332819422e-1f;
    near = near * square * x + x;
    Floats size = x < Floats{} ? -x : x;
    Floats far = 1.0f - 2.0f / (power_of_two(min(size, broadcast(20.0f)) * 2.88539008177792681f) + 1.0f);
    far = x < Floats{} ? -far : far;
    return size > broadcast(0.625f) ? far : near;
}

// Element j of row i becomes element i of row j.
static inline void transpose(Floats (&rows)[LANES]) {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        // Lanes from the second operand have numbers from LANES.
        const Ints is_upper = (lane & step) != 0;
        const Ints low = is_upper ? lane - step + LANES : lane, high = is_upper ? lane + LANES : lane + step;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & step) continue;
            const Floats a = rows[i], b = rows[i + step];
            rows[i] = __builtin_shuffle(a, b, low);
            rows[i + step] = __builtin_shuffle(a, b, high);
        }
    }
}
