/* Messages of b-bit integers, as kernels/messages.py describes them: where they lie, and one block of them. */
#pragma once
#include "messages.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

constexpr int64_t kIntegerBlock = 128;
constexpr int64_t kIntegerTile = 1024;      /* elements that stay in the first-level cache */
constexpr int64_t kTileBlocks = kIntegerTile / kIntegerBlock;
constexpr uint32_t kHugePattern = 0x7f000000; /* of 2^127: beyond it a block counts as not finite */
constexpr float kTinyScale = 0x1p-120f;     /* below it a block counts as zero */
static_assert(kPiece % kIntegerTile == 0 && kIntegerTile % kIntegerBlock == 0);

/* ---- where things lie -------------------------------------------------------------------------------------------- */

/* Bytes of the integers of a chunk, whose scales follow. */
inline int64_t integers_nbytes(int64_t numel, int bits) { return ceil_div(numel, 8) * bits; }

inline int64_t integer_message_nbytes(int64_t numel, int bits) {
    int64_t used = integers_nbytes(numel, bits) + 2 * ceil_div(numel, kIntegerBlock);
    return ceil_div(used, 16) * 16;
}

inline float load_bfloat16(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return float_of(static_cast<uint32_t>(bits) << 16);
}

/* The first of nbytes bytes from elsewhere, and zeros behind them. Returns where they are. */
inline void *copy_part(void *to, int64_t nbytes, const void *from, int64_t some) {
    memcpy(to, from, static_cast<size_t>(some));
    memset(static_cast<uint8_t *>(to) + some, 0, static_cast<size_t>(nbytes - some));
    return to;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* What the largest pattern of a block makes of it. inverse == 0: all integers are 0. */
struct BlockScale {
    float scale, inverse;
    template <int kBits>
    static BlockScale of(uint32_t most) {
        float largest = float_of(most), exact = largest / (kBits == 4 ? 49.0f : 127.0f);
        float scale = float_of((bits_of(exact) + 0x8000) & 0xffff0000);
        /* Nothing is beyond L steps: scale is largest / L but for a factor between 1 - 2^-8 and 1 + 2^-8, so that
         * |u * inverse| is less than L + 1/2; and the largest rounds to L. */
        float inverse = 1.0f / scale;
        bool huge = most > kHugePattern, empty = !(scale >= kTinyScale);
        return {huge ? __builtin_nanf("") : empty ? 0.0f : scale, huge || empty ? 0.0f : inverse};
    }
    bool finite() const { return scale == scale; }
    uint16_t bits() const { return finite() ? static_cast<uint16_t>(bits_of(scale) >> 16) : kBfloat16NaN; }
};

/* ---- messages ---------------------------------------------------------------------------------------------------- */

/* A message, from one of its blocks on. */
template <int kBits>
struct Message {
    static constexpr int64_t kBlockBytes = kIntegerBlock * kBits / 8;
    uint8_t *integers, *scales;

    /* out <- the values of n elements. */
    void decode(int64_t n, float *out, bool past_caches = false) const {
        past_caches = past_caches && reinterpret_cast<uintptr_t>(out) % 64 == 0;
        for (int64_t b = 0; b * kIntegerBlock < n; ++b) {
            int64_t some = least(kIntegerBlock, n - b * kIntegerBlock);
            const uint8_t *from = integers + b * kBlockBytes;
            float *to = out + b * kIntegerBlock, scale = load_bfloat16(scales + 2 * b);
            if (some == kIntegerBlock && past_caches) {
                sum_of_integers<kBits>(from, 0, 1, &scale, [to](int i, Vec x) { stream(to + i, x); });
            } else if (some == kIntegerBlock) {
                sum_of_integers<kBits>(from, 0, 1, &scale, [to](int i, Vec x) { store(to + i, x); });
            } else {
                uint8_t part[kBlockBytes];
                float values[kIntegerBlock];
                copy_part(part, kBlockBytes, from, integers_nbytes(some, kBits));
                sum_of_integers<kBits>(part, 0, 1, &scale, [&values](int i, Vec x) { store(values + i, x); });
                memcpy(to, values, static_cast<size_t>(some) * 4);
            }
        }
    }
};

/* The messages of a bucket, one for each chunk. */
template <int kBits>
struct IntegerMessages {
    uint8_t *messages;
    Chunks chunks;
    int64_t stride;

    /* The message of chunk j, from the block of its element at on. */
    Message<kBits> from(int64_t j, int64_t at = 0) const {
        uint8_t *message = messages + j * stride;
        return {message + at * kBits / 8, message + integers_nbytes(chunks.size(j), kBits) + at / kIntegerBlock * 2};
    }

    /* Adds the integers from an element of the bucket on. */
    void add_stream(int64_t first, Ahead *ahead) const {
        int64_t j = first / chunks.chunk;
        ahead->add(from(j, first - j * chunks.chunk).integers, kBits / 8);
    }

    void write_padding() const {
        for (int64_t j = 0; j < chunks.count; ++j) {
            int64_t n = chunks.size(j), used = integers_nbytes(n, kBits) + 2 * ceil_div(n, kIntegerBlock);
            memset(messages + j * stride + used, 0, static_cast<size_t>(integer_message_nbytes(n, kBits) - used));
        }
    }

    /* body(chunk, first and last element in it) of tiles, on the threads; first is a multiple of kIntegerTile. */
    template <class Body>
    void each_tile(const co_exec *exec, int64_t bytes, const Body &body) const {
        int64_t steps = ceil_div(chunks.chunk, kIntegerTile);
        parallel(exec, bytes, chunks.count * steps, kPiece / kIntegerTile, [&](int64_t tile) {
            int64_t j = tile / steps, begin = tile % steps * kIntegerTile;
            int64_t end = least(begin + kIntegerTile, chunks.size(j));
            if (begin < end) body(j, begin, end);
        });
    }
};

template <int kBits>
inline IntegerMessages<kBits> integer_messages(const uint8_t *messages, int64_t numel, int64_t world_size,
                                               int64_t stride = 0) {
    Chunks chunks(numel, world_size);
    if (stride == 0) stride = integer_message_nbytes(chunks.chunk, kBits);
    return {const_cast<uint8_t *>(messages), chunks, stride};
}

/* A block that is shorter, or not finite, as write_blocks writes it. */
template <int kBits>
inline void write_slowly(const float *u, BlockScale by, uint8_t *integers, float *rest, int64_t n) {
    alignas(64) float left[kIntegerBlock];
    alignas(64) uint8_t part[kIntegerBlock * kBits / 8] = {};
    if (by.finite()) {
        quantize<kBits, Rest::kStored>(u, by.inverse, by.scale, part, left);
    } else {
        for (float &x : left) x = by.scale;
    }
    memcpy(integers, part, static_cast<size_t>(integers_nbytes(n, kBits)));
    if (rest != nullptr) memcpy(rest, left, static_cast<size_t>(n) * 4);
}

/* Writes the message of n <= kIntegerTile elements. u is aligned to 64 bytes, and has room for whole blocks.
 * rest: where u - Q(u) goes, unless nowhere. */
template <Rest kRest, int kBits>
inline void write_blocks(float *u, Message<kBits> message, int64_t n, float *rest, const Ahead &ahead = Ahead()) {
    int64_t blocks = ceil_div(n, kIntegerBlock), whole = n / kIntegerBlock;
    if (whole < blocks) memset(u + n, 0, static_cast<size_t>(blocks * kIntegerBlock - n) * 4);
    uint32_t most[kTileBlocks];
    BlockScale by[kTileBlocks];
    /* in loops of their own, so that nothing waits for a division */
    for (int64_t b = 0; b < blocks; ++b) most[b] = largest_pattern(u + b * kIntegerBlock);
    for (int64_t b = 0; b < blocks; ++b) by[b] = BlockScale::of<kBits>(most[b]);
    for (int64_t b = 0; b < blocks; ++b) {
        uint16_t bits = by[b].bits();
        memcpy(message.scales + 2 * b, &bits, 2);
        for (int64_t i = 0; i < kIntegerBlock; i += 2 * kLanes) ahead.fetch_half(b * kIntegerBlock + i);
        const float *from = u + b * kIntegerBlock;
        uint8_t *to = message.integers + b * message.kBlockBytes;
        float *left = kRest == Rest::kNone ? nullptr : rest + b * kIntegerBlock;
        if (b < whole && by[b].finite()) {
            quantize<kBits, kRest>(from, by[b].inverse, by[b].scale, to, left);
        } else {
            write_slowly<kBits>(from, by[b], to, left, least(kIntegerBlock, n - b * kIntegerBlock));
        }
    }
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt
