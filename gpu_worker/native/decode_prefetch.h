// Keys and values on their way to the level 2 cache before they are used.
//
// The cores measured here (Zen 4) drop a prefetch to level 2 when as many lines as they can wait for are under way, and
// their own prefetchers need most of a page of keys to come to speed. So each line is asked for several times, far ahead
// and nearer, at an even pace between the operations on lines that have arrived: pieces of 32 KB in random order are then
// read as fast as memory in order, once each they come at two thirds of that.
#pragma once

#include "decode_pages.h"

namespace decode {

// Memory is prefetched in units of 4 lines.
constexpr int UNIT = 256;
// Units between what is computed and what is prefetched first; how many units later each is asked for again.
constexpr uint32_t AHEAD = 256;
constexpr uint32_t LATER[] = {0, 128, 192};
constexpr uint32_t MOST_LATER = 192;
// Larger than the units of a part of values of MOST_DIM floats, and MOST_LATER.
constexpr uint32_t RING = 1024;
constexpr int MOST_DIM = 1024;
// Of __builtin_prefetch: 2 is level 2.
constexpr int HINT = 2;

// Runs ahead of the chunks that are computed, in the order in which their memory is read.
template <typename T>
class Prefetcher {
  public:
    Prefetcher(const Chunks<T> &own)
        : chunks(own), piece(0), first(0), is_value(true), at(MOST_LATER), known(MOST_LATER), used(MOST_LATER) {
        chunk.num_pieces = 0;
        for (uint32_t i = 0; i < MOST_LATER; i++) ring[i] = static_cast<const char *>(own.call.query);
    }

    // Called before the operations on `tokens` tokens of a piece. Returns whether they shall prefetch as much as they read
    // first.
    bool begin(int tokens, bool of_values) {
        const uint32_t units = uint32_t(runs(tokens, of_values) * units_of_run(tokens, of_values));
        used += units;
        while (int32_t(known - (used + AHEAD)) < 0) learn();
        while (int32_t(used + AHEAD - (at + units)) > 0) prefetch_unit();
        return int32_t(used + AHEAD - at) > 0;
    }

    // Called in step `step` of operations that read BYTES in each: prefetches as much, a unit at least every few steps.
    template <int BYTES>
    void prefetch(int64_t step) {
        if constexpr (BYTES >= UNIT)
            for (int i = 0; i < BYTES / UNIT; i++) prefetch_unit();
        else if constexpr (BYTES > 0)
            if (step % (UNIT / BYTES) == 0) prefetch_unit();
    }

  private:
    Chunks<T> chunks;
    // Where the next units are: a piece of a chunk, and its first token.
    Chunk<T> chunk;
    int piece, first;
    bool is_value;
    // Numbers of units: the next to be prefetched, of those with a known address, of those that were used.
    uint32_t at, known, used;
    const char *ring[RING];

    // The next unit, and again those before.
    void prefetch_unit() {
        for (uint32_t later : LATER) {
            const char *unit = ring[(at - later) % RING];
            for (int byte = 0; byte < UNIT; byte += 64) __builtin_prefetch(unit + byte, 0, HINT);
        }
        at++;
    }

    int64_t dim(bool of_values) const { return of_values ? chunks.call.value_dim : chunks.call.key_dim; }

    // Contiguous runs of memory in `tokens` tokens: one, unless their heads are padded.
    int64_t runs(int tokens, bool of_values) const { return dim(of_values) == chunks.call.head_dim ? 1 : tokens; }

    int64_t units_of_run(int tokens, bool of_values) const {
        return (dim(of_values) * (tokens / runs(tokens, of_values)) * int64_t(sizeof(T)) + UNIT - 1) / UNIT;
    }

    // Finds the units of up to TILE tokens. After the last piece they are those of the last token again.
    void learn() {
        if (piece >= chunk.num_pieces) {
            piece = 0;
            is_value = !is_value;
            if (!is_value && !chunks.next(chunk)) {
                piece = chunk.num_pieces;
                is_value = true;
                ring[known % RING] = ring[(known - 1) % RING];
                known++;
                return;
            }
        }
        const Piece<T> &from = chunk.pieces[piece];
        const int tokens = std::min(TILE, from.tokens - first);
        const int64_t stride = chunks.call.head_dim, units = units_of_run(tokens, is_value);
        for (int64_t run = 0; run < runs(tokens, is_value); run++) {
            const T *begin = (is_value ? from.values : from.keys) + (first + run) * stride;
            for (int64_t unit = 0; unit < units; unit++)
                ring[known++ % RING] = reinterpret_cast<const char *>(begin) + unit * UNIT;
        }
        first += tokens;
        if (first == from.tokens) first = 0, piece++;
    }
};

}  // namespace decode
