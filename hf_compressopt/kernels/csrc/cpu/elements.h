/* Element types as they lie in memory. */
#ifndef COMPRESSOPT_CPU_ELEMENTS_H
#define COMPRESSOPT_CPU_ELEMENTS_H

#include <stdint.h>

namespace compressopt {

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

constexpr uint16_t kBfloat16NaN = 0x7fc0;

}  // namespace compressopt

#endif
