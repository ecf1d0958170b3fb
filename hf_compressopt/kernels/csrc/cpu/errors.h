/* The errors of a bucket in their two forms: float32 values, and messages of 8-bit integers. */
#pragma once
#include "integer_block.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

/* The values of errors, which are worked on where they lie. A tile of chunk j has the elements [begin, end) of it. */
struct FloatErrors {
    float *values;
    int64_t chunk;
    static constexpr int64_t kBytes = 4; /* of an element */

    /* The errors of a tile: where they lie. */
    const float *read(int64_t j, int64_t begin, int64_t, float *) const { return values + j * chunk + begin; }
    /* Where to leave the new errors of a tile, before they are written. */
    float *place(int64_t j, int64_t begin, float *) const { return values + j * chunk + begin; }
    template <class Use>
    void with(int64_t j, int64_t begin, int64_t, const Use &use) const {
        use(Lying{values + j * chunk + begin});
    }
    void write(int64_t, int64_t, int64_t, float *) const {}
    void write_padding() const {}
    /* Adds the errors from an element of the bucket on. */
    void add_stream(int64_t first, Ahead *ahead) const { ahead->add(values + first, 4); }
    FloatErrors another(const co_errors &errors) const { return {errors.values, chunk}; } /* of the same bucket */
};

/* Errors as integers, from an element whose place in its block is known. No vector lies in two blocks. */
struct ErrorsAt {
    const int8_t *integers;
    const float *units; /* of the block of the first element, and of those after it */
    uint64_t place;
    template <class Lanes>
    Vec operator()(int64_t i, Lanes) const { /* a message has sixteen bytes to read from its last vector on */
        return load(integers + i) * set1(units[(place + static_cast<uint64_t>(i)) / kIntegerBlock]);
    }
};

/* use(error), error(i, lanes) being the errors of chunk j from the element begin + i on, of at most kIntegerTile
 * elements. begin is a multiple of kLanes. */
template <class Use>
inline void with_error(const IntegerMessages<8> &messages, int64_t j, int64_t begin, int64_t end, const Use &use) {
    Message<8> first = messages.from(j, begin);
    int64_t place = begin % kIntegerBlock, blocks = ceil_div(place + end - begin, kIntegerBlock);
    float units[kTileBlocks + 1];
    for (int64_t b = 0; b < blocks; ++b) units[b] = load_bfloat16(first.scales + 2 * b);
    use(ErrorsAt{reinterpret_cast<const int8_t *>(first.integers), units, static_cast<uint64_t>(place)});
}

/* Messages that stand for errors: tiles begin at multiples of kIntegerBlock, unless said. */
struct IntegerErrors {
    IntegerMessages<8> messages;
    static constexpr int64_t kBytes = 1;

    /* The errors of a tile, decoded to scratch. */
    const float *read(int64_t j, int64_t begin, int64_t end, float *scratch) const {
        messages.from(j, begin).decode(end - begin, scratch);
        return scratch;
    }
    template <class Use>
    void with(int64_t j, int64_t begin, int64_t end, const Use &use) const {
        with_error(messages, j, begin, end, use);
    }
    /* Scratch, aligned to 64 bytes, with room for whole blocks. */
    float *place(int64_t, int64_t, float *scratch) const { return scratch; }
    /* Writes what was left there, of at most kIntegerTile elements. */
    void write(int64_t j, int64_t begin, int64_t end, float *place) const {
        write_blocks<Rest::kNone>(place, messages.from(j, begin), end - begin, nullptr);
    }
    void write_padding() const { messages.write_padding(); }
    void add_stream(int64_t first, Ahead *ahead) const { messages.add_stream(first, ahead); }
    IntegerErrors another(const co_errors &errors) const {
        return {{errors.messages, messages.chunks, messages.stride}};
    }
};

constexpr int64_t kLeastAhead = 2048; /* elements between what is worked on and what is fetched */

/* What a source and errors are made of from an element on, unless it lies beyond the last. */
template <class Source, class Errors>
inline Ahead streams_from(const Source &source, const Errors &errors, int64_t next, int64_t numel) {
    Ahead ahead;
    if (next >= numel) return ahead;
    source.add_streams(next, &ahead);
    errors.add_stream(next, &ahead);
    return ahead;
}

/* use(the errors of a bucket of world_size chunks) */
template <class Use>
inline int32_t with_errors(const co_errors &errors, int64_t numel, int64_t world_size, const Use &use) {
    if (errors.values != nullptr) return use(FloatErrors{errors.values, Chunks(numel, world_size).chunk});
    return use(IntegerErrors{integer_messages<8>(errors.messages, numel, world_size)});
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt
