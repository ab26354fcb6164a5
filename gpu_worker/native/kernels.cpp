// The kernels of a CPU as one library, which build.py compiles for the instruction set of the machine at hand.
// Functions take addresses and sizes; library.py declares them. Nothing here allocates memory that outlives a call, and
// nothing throws.
#include "crash.h"
#include "decode.h"
#include "kv_write.h"
#include "linear.h"
#include "operators.h"
#include "page_sum.h"
#include "prefill.h"
#include "recorded.h"
#include "simd.h"

extern "C" {

// Floats in a vector: shows which instruction set the library was built for.
int32_t tandem_lanes() {
    return LANES;
}

// The line, with its end, that this process writes to stderr if the signal ends it; crash.h has the signals.
void tandem_set_crash_line(int32_t number, const char *line) {
    crash::set_line(number, line);
}

// From now on the lines are written, each followed by the signal's usual end.
void tandem_install_crash_line() {
    crash::install();
}

// Bytes of scratch memory for these rows, in every layer of this kind.
int64_t tandem_decode_scratch(const DecodeCall *call) {
    return decode::Sizes(*call).bytes(*call);
}

void tandem_decode_float32(const DecodeCall *call) {
    decode::run<float>(*call);
}

void tandem_decode_bfloat16(const DecodeCall *call) {
    decode::run<BFloat16>(*call);
}

void tandem_write_kv(const KvWrite *call) {
    write_kv(*call);
}

uint64_t tandem_page_sum(const PageWords *pages, int64_t page) {
    return page_sum(*pages, page);
}

// Columns of y in a panel of packed weights.
int64_t tandem_linear_panel() {
    return linear::PANEL;
}

void tandem_linear_float32(
    const float *x, const void *weights, const float *bias, float *y, int64_t rows, int64_t K, int64_t N, int32_t threads
) {
    linear::multiply<float>({x, static_cast<const float *>(weights), bias, y, rows, K, N}, threads);
}

#if defined(__AVX512BF16__)
void tandem_linear_bfloat16(
    const BFloat16 *x, const void *weights, const float *bias, BFloat16 *y, int64_t rows, int64_t K, int64_t N,
    int32_t threads
) {
    linear::multiply<BFloat16>({x, static_cast<const float *>(weights), bias, y, rows, K, N}, threads);
}
#endif

// Attention of prompt chunks; prefill.h has the shapes.
void tandem_prefill_float32(const prefill::Call *call) {
    prefill::run<float>(*call);
}

void tandem_prefill_bfloat16(const prefill::Call *call) {
    prefill::run<BFloat16>(*call);
}

// operators.h has the shapes of these; is_bfloat16: the type of elements, otherwise float.
void tandem_rms_norm(
    const void *x, const float *weight, void *out, int64_t outer, int64_t inner, int64_t columns, int64_t outer_stride,
    int64_t inner_stride, float epsilon, int32_t is_bfloat16, int32_t threads
) {
    operators::with_type(is_bfloat16, [=](auto zero) {
        using T = decltype(zero);
        operators::rms_norm(
            (const T *)x, weight, (T *)out, outer, inner, columns, outer_stride, inner_stride, epsilon, threads
        );
    });
}

void tandem_rotary(
    const void *x, const void *cosine, const void *sine, void *out, int64_t tokens, int64_t heads, int64_t dim,
    int64_t half, int64_t token_stride, int64_t head_stride, int64_t table_stride, int32_t is_bfloat16, int32_t threads
) {
    operators::with_type(is_bfloat16, [=](auto zero) {
        using T = decltype(zero);
        operators::rotary(
            (const T *)x, (const T *)cosine, (const T *)sine, (T *)out, tokens, heads, dim, half, token_stride,
            head_stride, table_stride, threads
        );
    });
}

void tandem_gated(
    const void *gate, const void *up, void *out, int64_t rows, int64_t columns, int64_t gate_stride, int64_t up_stride,
    int32_t activation, int32_t is_bfloat16, int32_t threads
) {
    operators::with_type(is_bfloat16, [=](auto zero) {
        using T = decltype(zero);
        auto run = activation == operators::SILU ? operators::gated<T, operators::SILU>
                                                 : operators::gated<T, operators::GELU_TANH>;
        run((const T *)gate, (const T *)up, (T *)out, rows, columns, gate_stride, up_stride, threads);
    });
}

void tandem_add(const void *x, const void *y, void *out, int64_t count, int32_t is_bfloat16, int32_t threads) {
    operators::with_type(is_bfloat16, [=](auto zero) {
        using T = decltype(zero);
        operators::add((const T *)x, (const T *)y, (T *)out, count, threads);
    });
}

void tandem_greedy(
    const void *logits, int64_t *tokens, int64_t rows, int64_t columns, int64_t stride, int32_t is_bfloat16,
    int32_t threads
) {
    operators::with_type(is_bfloat16, [=](auto zero) {
        operators::greedy((const decltype(zero) *)logits, tokens, rows, columns, stride, threads);
    });
}

// Makes the calls in their order.
void tandem_repeat(const recorded::Call *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].arguments);
}

RECORDED(tandem_decode_float32)
RECORDED(tandem_decode_bfloat16)
RECORDED(tandem_prefill_float32)
RECORDED(tandem_prefill_bfloat16)
RECORDED(tandem_write_kv)
RECORDED(tandem_linear_float32)
#if defined(__AVX512BF16__)
RECORDED(tandem_linear_bfloat16)
#endif
RECORDED(tandem_rms_norm)
RECORDED(tandem_rotary)
RECORDED(tandem_gated)
RECORDED(tandem_add)
RECORDED(tandem_greedy)
}
