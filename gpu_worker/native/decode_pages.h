// The positions that decode rows see, as items of work and as contiguous pieces of pages.
//
// The positions of a row are divided into spans of at most SPAN positions at fixed boundaries. A span of a row and a KV head
// is one item. Threads compute consecutive items, each in chunks of at most CHUNK positions.
#pragma once

#include <algorithm>

#include "attention.h"

struct DecodeCall : AttentionCall {
    const int64_t *lines, *positions;  // [rows]: the line of each row, and the position of its query
    char *const *scratch;              // where the address of decode_scratch() bytes is
    int64_t num_rows;
};

namespace decode {

constexpr int64_t SPAN = 512;
constexpr int CHUNK = 128;
// The number of positions with scores that are computed at once.
constexpr int TILE = 16;
constexpr int MAX_PIECES = CHUNK / TILE;

// Positions begin to end - 1 of a row.
struct Span {
    int64_t row, begin, end;
};

// The spans of one row in order; `add` is called with each.
template <typename Add>
static void for_spans(const DecodeCall &call, int64_t position, Add add) {
    int64_t first = call.window ? std::max<int64_t>(position - call.window + 1, 0) : 0;
    int64_t sinks_end = std::min(call.sink_tokens, first);
    const int64_t ranges[2][2] = {{0, sinks_end}, {first, position + 1}};
    for (auto &range : ranges)
        for (int64_t begin = range[0]; begin < range[1];) {
            int64_t end = std::min((begin / SPAN + 1) * SPAN, range[1]);
            add(begin, end);
            begin = end;
        }
}

// Contiguous tokens of one page.
template <typename T>
struct Piece {
    const T *keys, *values;
    int tokens;
};

// The next positions of an item whose scores are computed together. Each piece begins at a slot for scores that is a
// multiple of TILE; slots behind the tokens of a piece stay empty.
template <typename T>
struct Chunk {
    Piece<T> pieces[MAX_PIECES];
    int num_pieces, slots;
    int64_t item;
    bool ends_item;

    // Calls `use` with each piece, the first token of each part of at most TOKENS, their number and their slot.
    template <int TOKENS, typename Use>
    void for_parts(Use use) const {
        static_assert(TOKENS % TILE == 0, "parts begin where tiles do");
        int slot = 0;
        for (int p = 0; p < num_pieces; p++) {
            for (int first = 0; first < pieces[p].tokens; first += TOKENS)
                use(pieces[p], first, std::min(TOKENS, pieces[p].tokens - first), slot + first);
            slot += int(round_up(pieces[p].tokens, TILE));
        }
    }
};

// The chunks of items `item` to `item_end` - 1, in order. Items are spans, and within a span its KV heads.
template <typename T>
struct Chunks {
    const DecodeCall &call;
    const Span *spans;
    int64_t item, item_end, position;

    Chunks(const DecodeCall &call, const Span *spans, int64_t item, int64_t item_end)
        : call(call), spans(spans), item(item), item_end(item_end), position(-1) {}

    bool next(Chunk<T> &chunk) {
        if (item >= item_end) return false;
        const Span &span = spans[item / call.num_kv_heads];
        if (position < 0) position = span.begin;
        const int64_t head = item % call.num_kv_heads * call.pool_head_stride;
        const int32_t *pages = call.table + call.lines[span.row] * call.table_stride;
        chunk.num_pieces = chunk.slots = 0;
        chunk.item = item;
        while (position < span.end && chunk.slots < CHUNK) {
            int64_t offset = position % call.page_size;
            int64_t tokens = std::min({call.page_size - offset, span.end - position, int64_t(CHUNK - chunk.slots)});
            int64_t start = (pages[position / call.page_size] * call.page_size + offset) * call.head_dim + head;
            chunk.pieces[chunk.num_pieces++] = {static_cast<const T *>(call.keys) + start,
                                                static_cast<const T *>(call.values) + start, int(tokens)};
            chunk.slots += int(round_up(tokens, TILE));
            position += tokens;
        }
        chunk.ends_item = position == span.end;
        if (chunk.ends_item) item++, position = -1;
        return true;
    }
};

}  // namespace decode
