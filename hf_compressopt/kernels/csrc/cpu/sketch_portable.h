/* Signs and rotations of rows of sixteen: what the versions with registers compute, and the code of other machines. */
#pragma once
#include "common.h"

namespace compressopt {
namespace portable {
namespace {

/* The sign of x is changed where the bit is set. */
inline Vec with_signs_changed(const Vec &x, uint32_t bits) {
    Vec r;
    for (int i = 0; i < 16; ++i) r.v[i] = float_of(bits_of(x.v[i]) ^ (bits >> i & 1) << 31);
    return r;
}

/* The signs of the four rows of a word. */
class WordSigns {
  public:
    explicit WordSigns(uint64_t word) : word_(word) {}
    template <int kRow>
    Vec change(const Vec &x) const {
        return with_signs_changed(x, static_cast<uint32_t>(word_ >> 16 * kRow & 0xffff));
    }

  private:
    uint64_t word_;
};

/* Lane i goes to lane (i + shift) % 16. */
struct LaneRotation {
    uint32_t shift;
    explicit LaneRotation(uint32_t by) : shift(by) {}
    Vec operator()(const Vec &x) const {
        Vec r;
        for (uint32_t i = 0; i < 16; ++i) r.v[(i + shift) & 15] = x.v[i];
        return r;
    }
};

}  // namespace
}  // namespace portable
}  // namespace compressopt
