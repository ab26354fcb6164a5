// The kernels of a CPU as one library, which build.py compiles for the instruction set of the machine at hand.
// Functions take addresses and sizes; library.py declares them. Nothing here allocates memory that outlives a call, and
// nothing throws.
#include "decode.h"
#include "kv_write.h"
#include "linear.h"
#include "prefill.h"
#include "simd.h"

extern "C" {

// Floats in a vector: shows which instruction set the library was built for.
int32_t tandem_lanes() {
    return LANES;
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
}
