/* Element types as they lie in memory, and the bits of a float. */
#ifndef COMPRESSOPT_CPU_ELEMENTS_H
#define COMPRESSOPT_CPU_ELEMENTS_H

#include <stdint.h>
#include <string.h>

namespace compressopt {

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

constexpr uint16_t kBfloat16NaN = 0x7fc0;

/* Of variances in 8 bits: the patterns of the points 2^(k / 8), and the code of 0. See kernels/compact.py. */
#define CO_POINTS 0x3f800000, 0x3f8b95c2, 0x3f9837f0, 0x3fa5fed7, 0x3fb504f3, 0x3fc5672a, 0x3fd744fd, 0x3feac0c7
constexpr int kZeroCode = 255;
/* The patterns of the square roots of the points, and of those of the next octave. */
#define CO_LOW_ROOTS 0x3f800000, 0x3f85aac3, 0x3f8b95c2, 0x3f91c3d4, 0x3f9837f0, 0x3f9ef532, 0x3fa5fed7, 0x3fad583f
#define CO_HIGH_ROOTS 0x3fb504f3, 0x3fbd08a4, 0x3fc5672a, 0x3fce248c, 0x3fd744fd, 0x3fe0ccdf, 0x3feac0c7, 0x3ff5257d

namespace { /* each instruction set has its own */

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

}  // namespace

}  // namespace compressopt

#endif
