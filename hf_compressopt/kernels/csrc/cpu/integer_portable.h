/* Blocks of b-bit integers: what the versions with registers compute, and the code for every other machine. */
#pragma once
#include "common.h"

namespace compressopt {
namespace portable {
namespace {

struct Block {
    Vec v[8];
};

/* The largest bit pattern of the block without the signs, so that NaN > infinity > numbers. */
inline uint32_t largest_pattern(const Block &u) {
    uint32_t most = 0;
    for (const Vec &vec : u.v) {
        for (float x : vec.v) {
            uint32_t pattern = bits_of(x) & 0x7fffffff;
            most = most < pattern ? pattern : most;
        }
    }
    return most;
}

/* 16 kBits bytes of integers: u * inverse, to nearest, ties to even. kRest: u <- u - integer * scale. */
template <int kBits, bool kRest>
inline void quantize(Block &u, float inverse, float scale, uint8_t *out) {
    constexpr float kMagic = 12582912.0f; /* 1.5 * 2^23: added to a small number it leaves its rounded value below */
    for (int k = 0; k < 8; ++k) {
        int32_t q[16];
        for (int i = 0; i < 16; ++i) {
            q[i] = static_cast<int32_t>(bits_of(u.v[k].v[i] * inverse + kMagic) - bits_of(kMagic));
            if (kRest) u.v[k].v[i] = u.v[k].v[i] - static_cast<float>(q[i]) * scale;
        }
        for (int i = 0; i < 2 * kBits; ++i) {
            out[2 * kBits * k + i] = kBits == 8 ? static_cast<uint8_t>(q[i])
                                                : static_cast<uint8_t>((q[2 * i] & 15) | (q[2 * i + 1] & 15) << 4);
        }
    }
}

/* The sum of the blocks of count messages, in order. Message j: integers at q + j * stride, times scales[j]. */
template <int kBits>
inline Block sum_of_integers(const uint8_t *q, int64_t stride, int count, const float *scales) {
    Block sum = {};
    for (int j = 0; j < count; ++j) {
        const uint8_t *bytes = q + j * stride;
        for (int i = 0; i < 128; ++i) {
            int32_t byte = bytes[i * kBits / 8];
            int32_t level = kBits == 8 ? static_cast<int8_t>(byte) : ((byte >> 4 * (i & 1) & 15) ^ 8) - 8;
            sum.v[i / 16].v[i % 16] += static_cast<float>(level) * scales[j];
        }
    }
    return sum;
}

}  // namespace
}  // namespace portable
}  // namespace compressopt
