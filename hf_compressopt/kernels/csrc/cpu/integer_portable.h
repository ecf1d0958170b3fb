/* Blocks of 128 b-bit integers: what the versions with registers compute, and the code for every other machine, in
 * loops that a compiler can turn into vectors. */
#pragma once
#include "common.h"

namespace compressopt {
namespace portable {
namespace {

/* The largest bit pattern of a block without the signs, so that NaN > infinity > numbers. */
inline uint32_t largest_pattern(const float *u) {
    int32_t most[16] = {};
    for (int k = 0; k < 128; k += 16) {
        for (int i = 0; i < 16; ++i) {
            int32_t pattern = static_cast<int32_t>(bits_of(u[k + i]) & 0x7fffffff);
            most[i] = most[i] < pattern ? pattern : most[i];
        }
    }
    int32_t all = 0;
    for (int32_t pattern : most) all = all < pattern ? pattern : all;
    return static_cast<uint32_t>(all);
}

/* The steps that an integer stands for. */
template <int kBits>
inline float value(int32_t q) {
    return static_cast<float>(kBits == 8 ? q : q < 0 ? -q * q : q * q);
}

/* 16 kBits bytes of integers: the steps u * inverse, to nearest, ties to even, or the nearest to their root if kBits is
 * 4; rest <- u - value, unless there is none. u is aligned to 64 bytes. */
template <int kBits, Rest kRest>
inline void quantize(const float *u, float inverse, float scale, uint8_t *out, float *rest) {
    constexpr float kMagic = 12582912.0f; /* 1.5 * 2^23: added to a small number it leaves its rounded value below */
    int32_t q[128];
    for (int i = 0; i < 128; ++i) {
        int32_t steps = static_cast<int32_t>(bits_of(u[i] * inverse + kMagic) - bits_of(kMagic));
        q[i] = kBits == 8 ? steps : root(steps);
        if (kRest != Rest::kNone) rest[i] = u[i] - value<kBits>(q[i]) * scale;
    }
    if (kBits == 8) {
        for (int i = 0; i < 128; ++i) out[i] = static_cast<uint8_t>(q[i]);
    } else {
        for (int i = 0; i < 64; ++i) out[i] = static_cast<uint8_t>((q[2 * i] & 15) | q[2 * i + 1] * 16);
    }
}

/* use(i, the sums of the elements from i on) for every sixteen elements of a block: the sums of the blocks of count
 * messages, in order. Message j: integers at q + j * stride, times scales[j]. */
template <int kBits, class Use>
inline void sum_of_integers(const uint8_t *q, int64_t stride, int count, const float *scales, const Use &use) {
    float sum[128] = {};
    for (int j = 0; j < count; ++j, q += stride) {
        float scale = scales[j];
        if (kBits == 8) {
            for (int i = 0; i < 128; ++i) sum[i] += static_cast<float>(static_cast<int8_t>(q[i])) * scale;
        } else {
            for (int i = 0; i < 64; ++i) { /* the sign is the fourth bit */
                sum[2 * i] += value<4>(((q[i] & 15) ^ 8) - 8) * scale;
                sum[2 * i + 1] += value<4>(((q[i] >> 4) ^ 8) - 8) * scale;
            }
        }
    }
    for (int i = 0; i < 128; i += 16) use(i, load(sum + i));
}

}  // namespace
}  // namespace portable
}  // namespace compressopt
