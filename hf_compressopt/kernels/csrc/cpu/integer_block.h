/* Messages of b-bit integers, as kernels/integers.py describes them: where they lie, and one block of them. */
#pragma once
#include "compression.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

constexpr int64_t kIntegerBlock = 128;
constexpr int64_t kIntegerTile = 1024;      /* elements of a commit that stay in the first-level cache */
constexpr int64_t kIntegerAhead = 2048;    /* elements */
constexpr int64_t kIntegerPiece = 32768;    /* elements that a thread takes at a time */
constexpr uint32_t kHugePattern = 0x7f000000; /* of 2^127: beyond it a block counts as not finite */
constexpr float kTinyScale = 0x1p-120f;     /* below it a block counts as zero */
static_assert(kIntegerPiece % kIntegerTile == 0 && kIntegerTile % kIntegerBlock == 0);

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
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

/* ---- one block --------------------------------------------------------------------------------------------------- */

/* What the largest pattern of a block makes of it. inverse == 0: all integers are 0. */
struct BlockScale {
    float scale, inverse;
    template <int kBits>
    static BlockScale of(uint32_t most) {
        if (most > kHugePattern) return {__builtin_nanf(""), 0.0f};
        float largest, scale;
        memcpy(&largest, &most, 4);
        float exact = largest / static_cast<float>((1 << (kBits - 1)) - 1);
        uint32_t up;
        memcpy(&up, &exact, 4);
        up = (up + 0xffff) & 0xffff0000;
        memcpy(&scale, &up, 4);
        if (!(scale >= kTinyScale)) return {0.0f, 0.0f};
        /* No integer is beyond the limits L: scale is at least largest / L less half a unit in the last place, and with
         * the roundings of inverse and of the product |u * inverse| <= L (1 + 2^-22), which rounds to L at most. */
        return {scale, 1.0f / scale};
    }
    uint16_t bits() const {
        uint32_t wide;
        memcpy(&wide, &scale, 4);
        return scale != scale ? kBfloat16NaN : static_cast<uint16_t>(wide >> 16);
    }
};

inline Block load_block(const float *from) {
    Block u;
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) u.v[k] = load(from + kLanes * k);
    return u;
}

inline void store_block(float *to, const Block &u) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) store(to + kLanes * k, u.v[k]);
}

inline void stream_block(float *to, const Block &u) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) stream(to + kLanes * k, u.v[k]);
}

/* n elements of a block that may be shorter; 0 where there is none. */
inline Block load_some(const float *from, int64_t n) {
    if (n == kIntegerBlock) return load_block(from);
    alignas(64) float part[kIntegerBlock] = {};
    memcpy(part, from, static_cast<size_t>(n) * 4);
    return load_block(part);
}

inline void store_some(float *to, const Block &u, int64_t n) {
    if (n == kIntegerBlock) return store_block(to, u);
    alignas(64) float part[kIntegerBlock];
    store_block(part, u);
    memcpy(to, part, static_cast<size_t>(n) * 4);
}

/* The messages of a bucket, one for each chunk. */
struct Message {
    uint8_t *integers, *scales;
};

template <int kBits>
struct IntegerMessages {
    static constexpr int64_t kBlockBytes = kIntegerBlock * kBits / 8;
    uint8_t *messages;
    Chunks chunks;
    int64_t stride;

    Message chunk(int64_t j) const {
        uint8_t *message = messages + j * stride;
        return {message, message + integers_nbytes(chunks.size(j), kBits)};
    }

    void write_padding(int64_t j) const {
        int64_t n = chunks.size(j), used = integers_nbytes(n, kBits) + 2 * ceil_div(n, kIntegerBlock);
        memset(messages + j * stride + used, 0, static_cast<size_t>(integer_message_nbytes(n, kBits) - used));
    }

    /* Block b of a message, of n elements. */
    static Block read(const Message &from, int64_t b, int64_t n) {
        float scale = load_bfloat16(from.scales + 2 * b);
        const uint8_t *integers = from.integers + b * kBlockBytes;
        if (n == kIntegerBlock) return sum_of_integers<kBits>(integers, 0, 1, &scale);
        alignas(64) uint8_t part[kBlockBytes] = {};
        memcpy(part, integers, static_cast<size_t>(integers_nbytes(n, kBits)));
        return sum_of_integers<kBits>(part, 0, 1, &scale);
    }

    /* body(chunk, first and last element in it) on the threads; first is a multiple of kIntegerPiece. */
    template <class Body>
    void each_piece(const co_exec *exec, int64_t bytes, const Body &body) const {
        int64_t steps = ceil_div(chunks.chunk, kIntegerPiece);
        parallel(exec, bytes, chunks.count * steps, 1, [&](int64_t piece) {
            int64_t j = piece / steps, begin = piece % steps * kIntegerPiece;
            int64_t end = least(begin + kIntegerPiece, chunks.size(j));
            if (begin < end) body(j, begin, end);
        });
    }
};

/* Writes the blocks of one message. A block is quantized when the next one arrives, so that the two divisions that make
 * its scale need not be waited for. */
template <int kBits>
class BlockWriter {
  public:
    explicit BlockWriter(const Message &to) : to_(to) {}

    /* Block b, of n elements; u is 0 beyond them. rest: where u - Q(u) of them goes, or NULL. */
    template <bool kRest>
    void add(int64_t b, int64_t n, const Block &u, float *rest = nullptr, bool past_caches = false) {
        BlockScale scale = BlockScale::of<kBits>(largest_pattern(u));
        uint16_t bits = scale.bits();
        memcpy(to_.scales + 2 * b, &bits, 2);
        flush<kRest>();
        u_ = u;
        scale_ = scale;
        integers_ = to_.integers + b * IntegerMessages<kBits>::kBlockBytes;
        rest_ = rest;
        n_ = n;
        past_caches_ = past_caches;
    }

    template <bool kRest>
    void flush() {
        if (n_ == kIntegerBlock && scale_.inverse != 0.0f) {
            quantize<kBits, kRest>(u_, scale_.inverse, scale_.scale, integers_);
            if (kRest && past_caches_) {
                stream_block(rest_, u_);
            } else if (kRest) {
                store_block(rest_, u_);
            }
        } else if (n_ > 0) {
            flush_slowly<kRest>();
        }
    }

  private:
    template <bool kRest>
    void flush_slowly() {
        alignas(64) uint8_t part[IntegerMessages<kBits>::kBlockBytes] = {};
        Block u = u_;
        if (scale_.inverse != 0.0f) {
            quantize<kBits, kRest>(u, scale_.inverse, scale_.scale, part);
        } else if (scale_.scale != scale_.scale) {
            for (Vec &x : u.v) x = x - set1(scale_.scale);
        }
        memcpy(integers_, part, static_cast<size_t>(integers_nbytes(n_, kBits)));
        if (kRest) store_some(rest_, u, n_);
    }

    Message to_;
    Block u_;
    BlockScale scale_ = {0.0f, 0.0f};
    uint8_t *integers_ = nullptr;
    float *rest_ = nullptr;
    int64_t n_ = 0;
    bool past_caches_ = false;
};

template <int kBits>
inline IntegerMessages<kBits> integer_messages(const uint8_t *messages, int64_t numel, int64_t world_size,
                                               int64_t stride = 0) {
    Chunks chunks(numel, world_size);
    if (stride == 0) stride = integer_message_nbytes(chunks.chunk, kBits);
    return {const_cast<uint8_t *>(messages), chunks, stride};
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt
