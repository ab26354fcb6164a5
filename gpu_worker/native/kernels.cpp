// The kernels of a CPU as one library, which build.py compiles for the instruction set of the machine at hand.
// Functions take addresses and sizes; library.py declares them. Nothing here allocates memory that outlives a call, and
// nothing throws.
#include "prefill.h"
#include "simd.h"

extern "C" {

// Floats in a vector: shows which instruction set the library was built for.
int32_t tandem_lanes() {
    return LANES;
}

// Attention of prompt chunks; prefill.h has the shapes.
void tandem_prefill_float32(const prefill::Call *call) {
    prefill::run<float>(*call);
}

void tandem_prefill_bfloat16(const prefill::Call *call) {
    prefill::run<BFloat16>(*call);
}
}
