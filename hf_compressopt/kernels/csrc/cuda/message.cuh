// Messages: where scales and signs lie (see kernels/__init__.py), and how they are read.
#pragma once

#include "runs.cuh"

namespace compressopt {

constexpr int64_t kAlignment = 16;

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t chunk_numel(int64_t numel, int64_t world_size) { return ceil_div(numel, 8 * world_size) * 8; }

// Scales of a chunk of numel > 0 elements.
inline int64_t num_blocks(int64_t numel, int64_t scale_block) {
    return scale_block == 0 ? 1 : ceil_div(numel, scale_block);
}

inline int64_t message_nbytes(int64_t numel, int64_t scale_block) {
    return ceil_div(4 * num_blocks(numel, scale_block) + ceil_div(numel, 8), kAlignment) * kAlignment;
}

// The scale, negative where the lowest bit is set.
__device__ inline Real with_sign(float scale, unsigned bits) {
    return __uint_as_float(__float_as_uint(scale) ^ (bits << 31));
}

// The four signs, in the lowest bits, of the quad at element i >= 0.
template <class Index>
__device__ inline unsigned signs_at(const uint8_t* bits, Index i) {
    return bits[i >> 3] >> (i & 7);
}

__device__ inline float scale_at(const uint8_t* message, int64_t block) {
    return reinterpret_cast<const float*>(message)[block];
}

// The averaged bucket.
struct Average {
    const uint8_t* messages;
    const float* values;
    int64_t chunk, scale_block, stride;
    int64_t blocks, last_chunk, last_blocks;  // the last chunk may have fewer blocks

    Average() = default;
    explicit Average(const co_average& y)
        : messages(y.messages),
          values(y.values),
          chunk(chunk_numel(y.numel, y.messages ? y.world_size : 1)),
          scale_block(y.scale_block == 0 ? chunk : y.scale_block),
          stride(y.stride),
          blocks(ceil_div(chunk, scale_block)),
          last_chunk((y.numel - 1) / chunk),
          last_blocks(ceil_div(y.numel - last_chunk * chunk, scale_block)) {}

    // The elements of the span are meant; the others hold anything.
    __device__ Quad at(int64_t i, Span span) const {
        return messages ? decoded(i) : load(values + i, span);
    }

    // The same in two steps: what was loaded, and what it stands for.
    struct Raw {
        unsigned word[kQuad];  // values; of messages the byte with the signs, and the scale
    };

    __device__ Raw load_raw(int64_t i, Span span) const {
        Raw raw = {};
        if (messages) {
            const int64_t j = quotient(i, chunk), inside = i - j * chunk;
            const uint8_t* const message = messages + j * stride;
            raw.word[1] = __float_as_uint(scale_at(message, quotient(inside, scale_block)));
            raw.word[0] = message[4 * (j == last_chunk ? last_blocks : blocks) + (inside >> 3)];
        } else {
            const Quad quad = load(values + i, span);
#pragma unroll
            for (int k = 0; k < kQuad; ++k) raw.word[k] = __float_as_uint(quad.of[k].value);
        }
        return raw;
    }

    __device__ Quad of(const Raw& raw, int64_t i) const {
        const float scale = __uint_as_float(raw.word[1]);
        const unsigned signs = raw.word[0] >> (i & 7);  // a chunk begins at a multiple of 8
        if (messages) return each([&](int k) { return with_sign(scale, signs >> k); });
        return each([&](int k) { return Real(__uint_as_float(raw.word[k])); });
    }

    // The quad at i of messages.
    __device__ Quad decoded(int64_t i) const {
        const int64_t j = quotient(i, chunk), inside = i - j * chunk;
        const uint8_t* const message = messages + j * stride;
        const float scale = scale_at(message, quotient(inside, scale_block));
        const unsigned signs = signs_at(message + 4 * (j == last_chunk ? last_blocks : blocks), inside);
        return each([&](int k) { return with_sign(scale, signs >> k); });
    }
};

inline co_status check_average(const co_average* y) {
    CO_REQUIRE(y != nullptr, "y is null");
    CO_REQUIRE(y->numel >= 0, "y: numel < 0");
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(y->messages || y->values, "y: neither messages nor values");
    if (!y->messages) return CO_OK;
    CO_REQUIRE(y->world_size >= 1, "y: world_size < 1");
    CO_REQUIRE(y->scale_block >= 0 && y->scale_block % 8 == 0, "y: scale_block is no multiple of 8 and not 0");
    CO_REQUIRE(y->stride % kAlignment == 0, "y: stride is no multiple of 16");
    CO_REQUIRE(reinterpret_cast<uintptr_t>(y->messages) % kAlignment == 0, "y: messages are not aligned to 16 bytes");
    CO_REQUIRE(y->world_size == 1 || y->stride >= message_nbytes(chunk_numel(y->numel, y->world_size), y->scale_block),
               "y: stride is less than a message");
    return CO_OK;
}

// The first term of what is to be sent: values, what messages stand for, or nothing.
struct FirstTerm {
    const float* values;
    Average last;

    explicit FirstTerm(const co_combination& z)
        : values(z.x), last(z.x || !z.last ? Average{} : Average(*z.last)) {}
    __device__ bool given() const { return values || last.messages; }

    // What is given, of a quad that lies in the run.
    __device__ Quad at(const Run& run, int64_t i, Span span) const {
        if (values) return load(values + i, span);
        return run.grad_still ? same(0.0f) : last.decoded(i);
    }
};

// The same where it is no messages.
struct PlainTerm {
    const float* values;
    explicit PlainTerm(const co_combination& z) : values(z.x) {}
    __device__ bool given() const { return values; }
    __device__ Quad at(const Run&, int64_t i, Span span) const { return load(values + i, span); }
};

// out <- z, or out <- z + out where `add` is set. Arguments have been checked.
co_status combine(const co_combination& z, float* out, int64_t numel, bool add, const Place& place);

inline co_status check_messages(const void* messages, int64_t numel, int32_t world_size) {
    CO_REQUIRE(numel >= 0, "numel < 0");
    CO_REQUIRE(world_size >= 1, "world_size < 1");
    CO_REQUIRE(numel == 0 || messages, "the messages are null");
    CO_REQUIRE(reinterpret_cast<uintptr_t>(messages) % kAlignment == 0, "messages are not aligned to 16 bytes");
    return CO_OK;
}

inline co_status check_combination(const co_combination* z, int64_t numel) {
    CO_REQUIRE(z != nullptr, "z is null");
    CO_REQUIRE(numel >= 0, "numel < 0");
    if (numel == 0) return CO_OK;
    CO_REQUIRE(z->grads || !z->factors, "z: factors without segments that say whose they are");
    if (!z->x && z->last) {
        CO_TRY(check_average(z->last));
        CO_REQUIRE(z->last->messages, "z.last has no messages");
        CO_REQUIRE(z->last->numel == numel, "z.last has another number of elements");
    }
    return z->grads ? check_segments(z->grads, z->count, numel, "z.grads") : CO_OK;
}

}  // namespace compressopt
