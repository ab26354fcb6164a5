// What the calls of both attention kernels have in common.
#pragma once

#include <cstdint>

// gpu_worker/cpu/attention.py declares the same fields, and those of the calls derived from it. Strides and dimensions
// count elements.
struct AttentionCall {
    const void *query, *keys, *values;  // [T, H, key_dim] with strides, [K, N, head_dim] twice
    const float *sinks;                 // [H], or null
    void *out;                          // [T, H, value_dim], contiguous
    const int32_t *table;               // [lines, table_stride]: the pages of each line in logical order
    int64_t table_stride, query_token_stride, query_head_stride, pool_head_stride;
    int64_t num_kv_heads, group, key_dim, value_dim, head_dim, page_size;
    int64_t window, sink_tokens;  // window 0: every position up to the query's own is seen
    int64_t threads;
    float scale, softcap;  // softcap 0: none
};

static inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}
