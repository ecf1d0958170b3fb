// Messages of b-bit integers, as kernels/integers.py describes them: where they lie, and how they are read.
#pragma once

#include "tile.cuh"

namespace compressopt {

constexpr int kIntegerBlock = kQuad * kWarp;
constexpr int kWarpTile = kTileQuads * kIntegerBlock;  // elements of a warp

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

    // The same of the quad at `inside` in a chunk, whose scales begin at `scales`.
    __device__ Quad quad(const uint8_t* message, const uint8_t* scales, int64_t inside) const {
        const unsigned half = reinterpret_cast<const uint16_t*>(scales)[inside / kIntegerBlock];
        const Real scale = __uint_as_float(half << 16);
        if (bits == 8) {
            const unsigned word = *reinterpret_cast<const unsigned*>(message + inside);
            return each([&](int k) {
                return Real(static_cast<float>(static_cast<int8_t>(word >> (8 * k) & 0xffu))) * scale;
            });
        }
        const unsigned word = *reinterpret_cast<const uint16_t*>(message + inside / 2);
        return each([&](int k) {
            return Real(static_cast<float>(static_cast<int>((word >> (4 * k) & 15u) ^ 8u) - 8)) * scale;
        });
    }
};

}  // namespace compressopt
