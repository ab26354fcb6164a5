// The kernels of a CPU as one library, which build.py compiles for the instruction set of the machine at hand.
// Functions take addresses and sizes; library.py declares them. Nothing here allocates memory that outlives a call, and
// nothing throws.
#include "operators.h"
#include "simd.h"

extern "C" {

// Floats in a vector: shows which instruction set the library was built for.
int32_t tandem_lanes() {
    return LANES;
}

// operators.h; is_bfloat16: the element type, otherwise float.

void tandem_rms_norm(const void *x, const float *weight, void *out, int64_t outer, int64_t inner, int64_t columns,
                     int64_t outer_stride, int64_t inner_stride, float epsilon, int32_t is_bfloat16, int32_t threads) {
    if (is_bfloat16)
        rms_norm((const BFloat16 *)x, weight, (BFloat16 *)out, outer, inner, columns, outer_stride, inner_stride,
                 epsilon, threads);
    else
        rms_norm((const float *)x, weight, (float *)out, outer, inner, columns, outer_stride, inner_stride, epsilon,
                 threads);
}

void tandem_rotary(const void *x, const void *cosine, const void *sine, void *out, int64_t tokens, int64_t heads,
                   int64_t dim, int64_t half, int64_t token_stride, int64_t head_stride, int64_t table_stride,
                   int32_t is_bfloat16, int32_t threads) {
    if (is_bfloat16)
        rotary((const BFloat16 *)x, (const BFloat16 *)cosine, (const BFloat16 *)sine, (BFloat16 *)out, tokens, heads,
               dim, half, token_stride, head_stride, table_stride, threads);
    else
        rotary((const float *)x, (const float *)cosine, (const float *)sine, (float *)out, tokens, heads, dim, half,
               token_stride, head_stride, table_stride, threads);
}

void tandem_gated(const void *gate, const void *up, void *out, int64_t rows, int64_t columns, int64_t gate_stride,
                  int64_t up_stride, int32_t activation, int32_t is_bfloat16, int32_t threads) {
    auto run = [=](auto type, auto compute) {
        using T = decltype(type);
        compute((const T *)gate, (const T *)up, (T *)out, rows, columns, gate_stride, up_stride, threads);
    };
    if (is_bfloat16)
        activation == SILU ? run(BFloat16{}, gated<BFloat16, SILU>) : run(BFloat16{}, gated<BFloat16, GELU_TANH>);
    else
        activation == SILU ? run(0.0f, gated<float, SILU>) : run(0.0f, gated<float, GELU_TANH>);
}

void tandem_greedy(const void *logits, int64_t *tokens, int64_t rows, int64_t columns, int64_t stride,
                   int32_t is_bfloat16, int32_t threads) {
    if (is_bfloat16)
        greedy((const BFloat16 *)logits, tokens, rows, columns, stride, threads);
    else
        greedy((const float *)logits, tokens, rows, columns, stride, threads);
}
}
