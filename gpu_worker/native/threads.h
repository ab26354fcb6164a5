// Threads that share the parts of a call: `parallel(threads, parts, body)` calls body(part) for every part once.
//
// An OpenMP region ends when every thread of its team has arrived, also one that has nothing to do. Where a worker shares its
// cores with the scheduler, front ends and clients, a region then waits for a thread that is not running: with two threads
// on two loaded cores a step of 30 ms took 235. Here a thread that does not run takes no part, and the caller computes the
// parts that nobody has taken. It waits for parts that have begun, no longer.
//
// A helper looks for the next call for SPIN_US, which covers the pauses inside a step, then sleeps. While it looks it offers
// its core to others all the time: without that, a step beside a busy process takes 56 ms instead of 32.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace threads {

constexpr int SPIN_US = 2000;
// Pauses of a waiting caller after which it offers its core, some 20 us.
constexpr int PAUSES = 1000;

class Pool {
public:
    // It lives as long as the process, because its threads do.
    static Pool &instance() {
        static Pool *pool = new Pool();
        return *pool;
    }

    // False if another thread is using the pool: the caller computes alone.
    bool run(int threads, int parts, void (*body)(const void *, int), const void *argument) {
        std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock()) return false;
        grow(threads - 1);
        body_ = body;
        argument_ = argument;
        limit_.store(threads - 1);
        ended_.store(0);
        const uint32_t number = call_.load() + 1;
        left_.store(uint64_t(number) << 32 | uint32_t(parts));
        call_.store(number);
        if (sleeping_.load()) wake();
        take(number);
        for (int pauses = 0; ended_.load(std::memory_order_acquire) != parts; pauses++) {
            _mm_pause();
            if (pauses >= PAUSES) std::this_thread::yield();
        }
        return true;
    }

private:
    // Takes parts of this call until none is left. A part can be taken only while its call runs, because the number of the
    // call and the parts that are left are one word.
    void take(uint32_t number) {
        uint64_t left = left_.load(std::memory_order_acquire);
        while (uint32_t(left >> 32) == number && uint32_t(left) > 0) {
            if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
            body_(argument_, int(uint32_t(left) - 1));
            ended_.fetch_add(1, std::memory_order_release);
            left = left_.load(std::memory_order_acquire);
        }
    }

    void help(int helper) {
        uint32_t seen = 0;
        while (true) {
            wait_for_call(seen);
            seen = call_.load();
            if (helper < limit_.load()) take(seen);
        }
    }

    // Returns when a call has begun since number `seen`, perhaps also without one.
    void wait_for_call(uint32_t seen) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(SPIN_US);
        do {
            for (int pauses = 0; pauses < 32; pauses++) {
                if (call_.load(std::memory_order_acquire) != seen) return;
                _mm_pause();
            }
            std::this_thread::yield();
        } while (std::chrono::steady_clock::now() < end);
        // The caller writes the number before it looks for sleeping helpers; this one says that it sleeps before the
        // kernel compares the number.
        sleeping_.fetch_add(1);
        syscall(SYS_futex, &call_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleeping_.fetch_sub(1);
    }

    void wake() { syscall(SYS_futex, &call_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

    void grow(int helpers) {
        try {
            for (; helpers_ < helpers; helpers_++) std::thread(&Pool::help, this, helpers_).detach();
        } catch (const std::system_error &) {
            // The machine has no more threads; those that exist compute.
        }
    }

    std::mutex mutex_;
    int helpers_ = 0;
    void (*body_)(const void *, int) = nullptr;
    const void *argument_ = nullptr;
    // Helpers that may take parts.
    std::atomic<int> limit_{0}, sleeping_{0}, ended_{0};
    // The number of the latest call, and, in the low half, its parts that nobody has taken.
    alignas(64) std::atomic<uint64_t> left_{0};
    alignas(64) std::atomic<uint32_t> call_{0};
};

template <typename Body>
static inline void parallel(int threads, int parts, const Body &body) {
    auto call = [](const void *argument, int part) { (*static_cast<const Body *>(argument))(part); };
    if (threads > 1 && parts > 1 && Pool::instance().run(threads, parts, call, &body)) return;
    for (int part = 0; part < parts; part++) body(part);
}

}  // namespace threads
