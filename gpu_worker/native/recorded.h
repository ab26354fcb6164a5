// Calls of kernels that were recorded, and are repeated with the same arguments. library.py records them.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace recorded {

struct Call {
    void (*function)(const int64_t *arguments);
    const int64_t *arguments;
};

// FUNCTION as a function of one word for each argument; the argument is in the word's first bytes.
template <auto FUNCTION>
struct OfWords;

template <class... Arguments, void (*FUNCTION)(Arguments...)>
struct OfWords<FUNCTION> {
    static void call(const int64_t *words) { call_with(words, std::index_sequence_for<Arguments...>{}); }

  private:
    template <size_t... INDEX>
    static void call_with(const int64_t *words, std::index_sequence<INDEX...>) {
        FUNCTION(argument<Arguments>(words + INDEX)...);
    }

    template <class Argument>
    static Argument argument(const int64_t *word) {
        Argument value;
        std::memcpy(&value, word, sizeof(Argument));
        return value;
    }
};

}  // namespace recorded

// Exports the function of words, under the name of the function with `_recorded` behind it.
#define RECORDED(name) \
    void name##_recorded(const int64_t *words) { recorded::OfWords<name>::call(words); }
