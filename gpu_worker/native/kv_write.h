// Writes keys and values of a step's tokens to their token slots in the pool.
#pragma once

#include <cstring>

#include "simd.h"

// Mirrored in gpu_worker/cpu/attention.py. Strides are in elements; the last dimension of every array is contiguous.
struct KvWrite {
    const void *key, *value;  // [K, T, key_dim] and [K, T, value_dim]
    void *keys, *values;      // [K, N, head_dim]
    const int64_t *slots;     // [T]
    int64_t key_head_stride, key_token_stride, value_head_stride, value_token_stride;
    int64_t pool_head_stride, head_dim, key_dim, value_dim, num_kv_heads, num_tokens, element_bytes;
};

static inline void write_kv(const KvWrite &call) {
    const int64_t size = call.element_bytes;
    const char *key = static_cast<const char *>(call.key), *value = static_cast<const char *>(call.value);
    char *keys = static_cast<char *>(call.keys), *values = static_cast<char *>(call.values);
    for (int64_t t = 0; t < call.num_tokens; t++)
        for (int64_t head = 0; head < call.num_kv_heads; head++) {
            int64_t to = (head * call.pool_head_stride + call.slots[t] * call.head_dim) * size;
            int64_t from_key = head * call.key_head_stride + t * call.key_token_stride;
            int64_t from_value = head * call.value_head_stride + t * call.value_token_stride;
            std::memcpy(keys + to, key + from_key * size, call.key_dim * size);
            std::memcpy(values + to, value + from_value * size, call.value_dim * size);
        }
}
