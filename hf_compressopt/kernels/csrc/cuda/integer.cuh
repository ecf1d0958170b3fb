// Messages of b-bit integers, as kernels/messages.py describes them: where they lie, and how they are read and written.
#pragma once

#include "tile.cuh"

namespace compressopt {

constexpr int kIntegerBlock = kQuad * kWarp;
constexpr int kWarpTile = kTileQuads * kIntegerBlock;  // elements of a warp
constexpr unsigned kHugePattern = 0x7f000000u;         // of 2^127: beyond it a block counts as not finite
constexpr float kTinyScale = 0x1p-120f;                // below it a block counts as zero
constexpr unsigned kNaNPattern = 0x7fc00000u;

__host__ __device__ inline int64_t integers_nbytes(int64_t numel, int bits) { return ceil_div(numel, 8) * bits; }

__host__ __device__ inline int64_t integer_message_nbytes(int64_t numel, int bits) {
    return ceil_div(integers_nbytes(numel, bits) + 2 * ceil_div(numel, kIntegerBlock), kAlignment) * kAlignment;
}

// The chunks of a bucket, each with its message.
struct Integers {
    uint8_t* messages;
    int64_t numel, chunk, stride;
    int32_t bits;

    Integers(const uint8_t* messages_, int64_t numel_, int64_t world_size, int bits_, int64_t stride_ = 0)
        : messages(const_cast<uint8_t*>(messages_)),
          numel(numel_),
          chunk(chunk_numel(numel, world_size)),
          stride(stride_ ? stride_ : integer_message_nbytes(chunk, bits_)),
          bits(bits_) {}
    int64_t chunks() const { return ceil_div(numel, chunk); }
    int64_t tiles_of_chunk() const { return ceil_div(chunk, kWarpTile); }

    __device__ int64_t size(int64_t j) const { return numel - j * chunk < chunk ? numel - j * chunk : chunk; }

    // The values of the quad at i, of whose elements at least the first is there.
    __device__ Quad at(int64_t i) const {
        const int64_t j = quotient(i, chunk), inside = i - j * chunk;
        const uint8_t* const message = messages + j * stride;
        return quad(message, message + integers_nbytes(size(j), bits), inside);
    }

    // A quad as it lies in memory: several are asked for before of() looks at the first.
    struct Raw {
        unsigned word, scale;
    };
    struct RawTile {
        Raw quads[kTileQuads];
    };

    // The quad at `inside` in a chunk, whose scales begin at `scales`.
    __device__ Raw load_raw(const uint8_t* message, const uint8_t* scales, int64_t inside) const {
        return {bits == 8 ? *reinterpret_cast<const unsigned*>(message + inside)
                          : *reinterpret_cast<const uint16_t*>(message + inside / 2),
                reinterpret_cast<const uint16_t*>(scales)[inside / kIntegerBlock]};
    }

    // The quads of a tile that are there: the message may be written where others lie.
    template <int kGroup>
    __device__ RawTile load_raw(const uint8_t* message, const uint8_t* scales, const Tile<kGroup>& tile) const {
        RawTile raw = {};
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) {
            if (tile.has(q)) raw.quads[q] = load_raw(message, scales, tile.inside + tile.offset(q));
        }
        return raw;
    }

    template <int kGroup>
    __device__ RawTile load_raw(const Tile<kGroup>& tile) const {
        const uint8_t* const message = messages + tile.chunk * stride;
        return load_raw(message, message + integers_nbytes(size(tile.chunk), bits), tile);
    }

    // Their number as a constant.
    template <int kBits>
    __device__ Integers with_bits() const {
        Integers result = *this;
        result.bits = kBits;
        return result;
    }

    __device__ Quad quad(const uint8_t* message, const uint8_t* scales, int64_t inside) const {
        return of(load_raw(message, scales, inside));
    }

    __device__ Quad of(const RawTile& raw, int q) const { return of(raw.quads[q]); }

    __device__ Quad of(const Raw& raw, int = 0) const {
        const unsigned word = raw.word;
        const Real scale = __uint_as_float(raw.scale << 16);
        if (bits == 8) {
            return each([&](int k) {
                return Real(static_cast<float>(static_cast<int8_t>(word >> (8 * k) & 0xffu))) * scale;
            });
        }
        return each([&](int k) {
            const Real integer = static_cast<float>(static_cast<int>((word >> (4 * k) & 15u) ^ 8u) - 8);
            return integer * Real(fabsf(integer.value)) * scale;
        });
    }
};

// ---- quantizing ------------------------------------------------------------------------------------------------------

struct BlockScale {
    Real scale, inverse;  // inverse == 0: all integers are 0
};

// most: the largest pattern of the block, without sign; limit: its steps.
__device__ inline BlockScale block_scale(unsigned most, Real limit) {
    if (most > kHugePattern) return {__uint_as_float(kNaNPattern), 0.0f};
    const Real exact = Real(__uint_as_float(most)) / limit;
    const Real scale = __uint_as_float((__float_as_uint(exact.value) + 0x8000u) & 0xffff0000u);
    if (scale.value < kTinyScale) return {0.0f, 0.0f};
    return {scale, Real(1.0f) / scale};
}

__device__ inline unsigned largest_pattern(const Quad& u) {
    unsigned most = 0;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
        const unsigned pattern = __float_as_uint(u.of[k].value) & 0x7fffffffu;
        most = most < pattern ? pattern : most;
    }
    return most;
}

// Write Q(u) of a tile to its chunk's message, with what follows the last scale where the chunk ends, and leave u - Q(u)
// in u. The tile begins with a block: the quads of a warp with the same q are one, and all lanes call.
template <int kGroup>
__device__ inline void quantize(Quad (&u)[kTileQuads], const Integers& to, const Tile<kGroup>& tile) {
    const int lane = threadIdx.x % kWarp;
    unsigned most[kTileQuads];
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
        const Span span = tile.has(q) ? tile.span(q) : Span{0, 0};
        u[q] = each([&](int k) { return span.has(k) ? u[q].of[k] : Real(0.0f); });
        most[q] = largest_pattern(u[q]);
    }
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) {
            const unsigned other = __shfl_xor_sync(kAllLanes, most[q], distance);
            most[q] = most[q] < other ? other : most[q];
        }
    }
    const int64_t size = to.size(tile.chunk);
    uint8_t* const message = to.messages + tile.chunk * to.stride;
    uint8_t* const scales = message + integers_nbytes(size, to.bits);
    const Real limit = to.bits == 8 ? 127.0f : 49.0f;
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
        const int offset = tile.offset(q);
        if (offset - kQuad * lane >= tile.length) continue;  // no such block
        const BlockScale scale = block_scale(most[q], limit);
        const int64_t place = tile.inside + offset;
        if (lane == 0) {
            reinterpret_cast<uint16_t*>(scales)[place / kIntegerBlock] =
                static_cast<uint16_t>(__float_as_uint(scale.scale.value) >> 16);
        }
        unsigned word = 0;
        u[q] = each([&](int k) {
            const int steps = scale.inverse.value == 0.0f ? 0 : __float2int_rn((u[q].of[k] * scale.inverse).value);
            const Real size = fabsf(static_cast<float>(steps));
            const int root = __float2int_rn(square_root(size).value), integer = to.bits == 8 ? steps : steps < 0 ? -root : root;
            word |= to.bits == 8 ? (static_cast<unsigned>(integer) & 0xffu) << (8 * k)
                                 : (static_cast<unsigned>(integer) & 15u) << (4 * k);
            return u[q].of[k] - Real(static_cast<float>(to.bits == 8 ? integer : integer * abs(integer))) * scale.scale;
        });
        if (offset < (tile.length + 7) / 8 * 8) { /* the integers of eight elements are written together */
            if (to.bits == 8) {
                *reinterpret_cast<unsigned*>(message + place) = word;
            } else {
                *reinterpret_cast<uint16_t*>(message + place / 2) = static_cast<uint16_t>(word);
            }
        }
    }
    if (tile.inside + tile.length == size) {
        const int64_t used = integers_nbytes(size, to.bits) + 2 * ceil_div(size, kIntegerBlock);
        const int thread = tile.first / kQuad;
        if (used + thread < integer_message_nbytes(size, to.bits)) message[used + thread] = 0;
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

inline co_status check_integers(const void* messages, int64_t numel, int32_t bits, int32_t world_size) {
    CO_REQUIRE(bits == 4 || bits == 8, "bits is neither 4 nor 8");
    return check_messages(messages, numel, world_size);
}

inline co_status check_integers(const co_integers* y) {
    CO_REQUIRE(y != nullptr, "y is null");
    CO_TRY(check_integers(y->messages, y->numel, y->bits, y->world_size));
    CO_REQUIRE(y->stride >= 0 && y->stride % kAlignment == 0, "y: stride is no multiple of 16");
    return CO_OK;
}

}  // namespace compressopt
