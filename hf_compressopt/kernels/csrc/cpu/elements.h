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
