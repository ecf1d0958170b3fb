/* Changes of 16-bit values, bit for bit, in blocks of 256 (see kernels/changes.py). */
#pragma once
#include "common.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

constexpr int kChangeBlock = 256;
constexpr int kPlainBytes = 2 * kChangeBlock;
constexpr int kMapHead = kChangeBlock / 64;
constexpr int kMapBytes = kChangeBlock / 8;
constexpr int kMostSmall = 9; /* by which a change of 4 bits changes a key */
constexpr int64_t kBlocksAtOnce = 64;

/* The key of bits, or the bits of a key. */
inline uint16_t key(uint16_t bits) { return static_cast<uint16_t>(bits ^ ((bits & 0x8000) != 0 ? 0x7fff : 0)); }
inline int32_t change(uint16_t from, uint16_t to) {
    return static_cast<int16_t>(key(to)) - static_cast<int16_t>(key(from));
}

/* The elements of a block that change, a byte for each, and how many bytes the block has. */
struct ChangedBlock {
    alignas(64) uint8_t changed[kChangeBlock];
    int32_t nbytes;

    /* n <= 256 elements. */
    void read(const uint16_t *from, const uint16_t *to, int n) {
        nbytes = 0;
        if (memcmp(from, to, static_cast<size_t>(n) * 2) == 0) return;
        int32_t count = 0, more = 0, wide = 0, used = 0;
        if (n < kChangeBlock) memset(changed, 0, sizeof changed);
        for (int i = 0; i < n; ++i) {
            int32_t size = change(from[i], to[i]);
            size = size < 0 ? -size : size;
            changed[i] = size > 0;
            count += size > 0;
            more += size > 1;
            wide += size > kMostSmall;
        }
        for (int i = 0; i < kMapBytes; ++i) used += word(i) != 0;
        nbytes = kMapHead + used + (count + 3) / 4 + (more - wide + 1) / 2 + 2 * wide;
        if (nbytes > kPlainBytes) nbytes = kPlainBytes;
    }

    /* The bytes of eight elements. */
    uint64_t word(int i) const {
        uint64_t eight;
        memcpy(&eight, changed + 8 * i, 8);
        return eight;
    }
    /* A byte of the map. */
    static uint8_t bits(uint64_t eight) { return static_cast<uint8_t>(eight * 0x0102040810204080u >> 56); }
};

/* Appends numbers of kBits each, least significant first. */
template <int kBits>
class BitWriter {
  public:
    explicit BitWriter(uint8_t *out) : out_(out) {}
    void put(uint32_t value) {
        if (at_ == 0) *out_ = 0;
        *out_ = static_cast<uint8_t>(*out_ | value << at_);
        at_ += kBits;
        if (at_ == 8) {
            at_ = 0;
            ++out_;
        }
    }

  private:
    uint8_t *out_;
    int at_ = 0;
};

template <int kBits>
class BitReader {
  public:
    explicit BitReader(const uint8_t *in) : in_(in) {}
    uint32_t take() {
        uint32_t value = *in_ >> at_ & ((1u << kBits) - 1);
        at_ += kBits;
        if (at_ == 8) {
            at_ = 0;
            ++in_;
        }
        return value;
    }

  private:
    const uint8_t *in_;
    int at_ = 0;
};

inline void write_plain(const uint16_t *to, int n, uint8_t *out) {
    memcpy(out, to, static_cast<size_t>(n) * 2);
    memset(out + 2 * n, 0, static_cast<size_t>(kPlainBytes - 2 * n));
}

/* The third form of a block that changes. */
inline void write_block(const ChangedBlock &block, const uint16_t *from, const uint16_t *to, uint8_t *out) {
    int16_t small[kChangeBlock]; /* changes by more than 1 */
    uint16_t wide[kChangeBlock];
    int smalls = 0, wides = 0;
    uint32_t head = 0;
    uint8_t *map = out + kMapHead;
    for (int i = 0; i < kMapBytes; ++i) {
        uint64_t eight = block.word(i);
        if (eight == 0) continue;
        head |= 1u << i;
        *map++ = ChangedBlock::bits(eight);
    }
    memcpy(out, &head, kMapHead);
    uint8_t *codes = map;
    BitWriter<2> code(codes);
    int count = 0;
    for (const uint8_t *bits = out + kMapHead; head != 0; head &= head - 1, ++bits) {
        int first = 8 * __builtin_ctz(head);
        for (uint32_t rest = *bits; rest != 0; rest &= rest - 1, ++count) {
            int i = first + __builtin_ctz(rest);
            int32_t by = change(from[i], to[i]);
            if (by == 1 || by == -1) {
                code.put(by < 0);
            } else if (-kMostSmall <= by && by <= kMostSmall) {
                small[smalls++] = static_cast<int16_t>(by);
                code.put(2);
            } else {
                wide[wides++] = to[i];
                code.put(3);
            }
        }
    }
    uint8_t *nibbles = codes + (count + 3) / 4;
    BitWriter<4> nibble(nibbles);
    for (int k = 0; k < smalls; ++k) {
        nibble.put(static_cast<uint32_t>(small[k] < 0 ? 8 - small[k] - 2 : small[k] - 2));
    }
    memcpy(nibbles + (smalls + 1) / 2, wide, static_cast<size_t>(wides) * 2);
}

inline void apply_block(const uint8_t *in, uint16_t *values) {
    uint32_t head;
    memcpy(&head, in, kMapHead);
    const uint8_t *map = in + kMapHead, *codes = map + __builtin_popcount(head);
    int count = 0, smalls = 0;
    for (const uint8_t *bits = map; bits < codes; ++bits) count += __builtin_popcount(*bits);
    for (int k = 0; k < (count + 3) / 4; ++k) {
        uint32_t twos = codes[k] & ~(codes[k] << 1) & 0xaau; /* those of two bits that are 2 */
        smalls += __builtin_popcount(twos);
    }
    const uint8_t *nibbles = codes + (count + 3) / 4, *wide = nibbles + (smalls + 1) / 2;
    BitReader<2> code(codes);
    BitReader<4> nibble(nibbles);
    for (const uint8_t *bits = map; head != 0; head &= head - 1, ++bits) {
        int first = 8 * __builtin_ctz(head);
        for (uint32_t rest = *bits; rest != 0; rest &= rest - 1) {
            uint16_t &value = values[first + __builtin_ctz(rest)];
            uint32_t kind = code.take();
            if (kind == 3) {
                memcpy(&value, wide, 2);
                wide += 2;
                continue;
            }
            int32_t by = kind == 0 ? 1 : -1;
            if (kind == 2) {
                uint32_t four = nibble.take();
                by = static_cast<int32_t>(four & 7) + 2;
                by = four > 7 ? -by : by;
            }
            value = key(static_cast<uint16_t>(key(value) + by));
        }
    }
}

/* body(block, first element, elements) for every block. */
template <class Body>
inline void each_block(int64_t numel, int64_t bytes, const co_exec *exec, const Body &body) {
    parallel(exec, bytes * numel, ceil_div(numel, kChangeBlock), kBlocksAtOnce, [&](int64_t block) {
        int64_t begin = block * kChangeBlock;
        body(block, begin, static_cast<int>(least(kChangeBlock, numel - begin)));
    });
}

int32_t change_sizes(const uint16_t *from, const uint16_t *to, int64_t numel, int16_t *sizes, const co_exec *exec) {
    each_block(numel, 4, exec, [&](int64_t block, int64_t begin, int n) {
        ChangedBlock changed;
        changed.read(from + begin, to + begin, n);
        sizes[block] = static_cast<int16_t>(changed.nbytes);
    });
    return CO_OK;
}

int32_t write_changes(const uint16_t *from, const uint16_t *to, int64_t numel, const int16_t *sizes,
                      const int64_t *offsets, uint8_t *payload, const co_exec *exec) {
    each_block(numel, 8, exec, [&](int64_t block, int64_t begin, int n) {
        uint8_t *out = payload + offsets[block];
        if (sizes[block] == 0) return;
        if (sizes[block] == kPlainBytes) return write_plain(to + begin, n, out);
        ChangedBlock changed;
        changed.read(from + begin, to + begin, n);
        write_block(changed, from + begin, to + begin, out);
    });
    return CO_OK;
}

int32_t apply_changes(const uint8_t *payload, const int16_t *sizes, const int64_t *offsets, uint16_t *values,
                      int64_t numel, const co_exec *exec) {
    each_block(numel, 8, exec, [&](int64_t block, int64_t begin, int n) {
        const uint8_t *in = payload + offsets[block];
        if (sizes[block] == 0) return;
        if (sizes[block] == kPlainBytes) {
            memcpy(values + begin, in, static_cast<size_t>(n) * 2);
        } else {
            apply_block(in, values + begin);
        }
    });
    return CO_OK;
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt
