// The checksum of a page of the KV pool; gpu_worker/shared_pool/guard.py defines it.
#pragma once

#include <cstdint>

// Mirrored in gpu_worker/shared_pool/guard.py. Distances are in words of 64 bits.
struct PageWords {
    const uint64_t *first;       // of head 0, page 0 of the first pool
    const uint64_t *of_words;    // [num_words]: weights of the words of a page
    const uint64_t *of_pools;    // [num_pools]: weights of the pools
    int64_t num_pools, pool_distance, num_heads, head_distance, num_words;
};

// Sums are modulo 2^64, so that their order does not matter.
static inline uint64_t page_sum(const PageWords &pages, int64_t page) {
    uint64_t sum = 0;
    for (int64_t pool = 0; pool < pages.num_pools; pool++) {
        const uint64_t *words = pages.first + pool * pages.pool_distance + page * pages.num_words;
        uint64_t of_pool = 0;
        int64_t head = 0;
        // Two heads share a multiplication.
        for (; head + 2 <= pages.num_heads; head += 2, words += 2 * pages.head_distance) {
            const uint64_t *next = words + pages.head_distance;
            for (int64_t i = 0; i < pages.num_words; i++) of_pool += (words[i] + next[i]) * pages.of_words[i];
        }
        if (head < pages.num_heads)
            for (int64_t i = 0; i < pages.num_words; i++) of_pool += words[i] * pages.of_words[i];
        sum += of_pool * pages.of_pools[pool];
    }
    return sum;
}
