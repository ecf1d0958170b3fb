// Changes of 16-bit values, bit for bit, in blocks of 256 (see kernels/changes.py). A warp takes a block, each of its
// threads eight elements, whose bits are one byte of the map.
#include "library.h"
#include "threads.cuh"

namespace compressopt {
namespace {

constexpr int kBlock = 256;
constexpr int kEight = 8;  // elements of a thread
constexpr int kPlainBytes = 2 * kBlock;
constexpr int kHead = kBlock / 64;
constexpr int kMostSmall = 9;  // by which a change of 4 bits changes a key
constexpr int kWarps = kThreads / kWarp;
static_assert(kBlock == kWarp * kEight);

// The key of bits, or the bits of a key.
__device__ inline unsigned key(unsigned bits) { return bits & 0x8000u ? bits ^ 0x7fffu : bits; }
__device__ inline int change(unsigned from, unsigned to) {
    return static_cast<int16_t>(key(to)) - static_cast<int16_t>(key(from));
}

struct Eight {
    unsigned of[kEight];
};

// The elements of a thread, and 0 beyond the first n; n may be negative.
__device__ inline Eight load_eight(const uint16_t* first, int64_t n) {
    Eight values;
    if (n >= kEight && reinterpret_cast<uintptr_t>(first) % 16 == 0) {
        const uint4 a = load_four(first);
        const unsigned words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int k = 0; k < kEight; ++k) values.of[k] = words[k / 2] >> (16 * (k % 2)) & 0xffffu;
        return values;
    }
#pragma unroll
    for (int k = 0; k < kEight; ++k) values.of[k] = k < n ? first[k] : 0u;
    return values;
}

__device__ inline void store_eight(uint16_t* first, const Eight& values, int64_t n) {
    if (n >= kEight && reinterpret_cast<uintptr_t>(first) % 16 == 0) {
        return store_four(first, values.of[0] | values.of[1] << 16, values.of[2] | values.of[3] << 16,
                          values.of[4] | values.of[5] << 16, values.of[6] | values.of[7] << 16);
    }
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
        if (k < n) first[k] = static_cast<uint16_t>(values.of[k]);
    }
}

// Four counts in one word, which a scan adds together: bytes of the map, changes, and those of 4 and of 16 bits more.
struct Counts {
    uint64_t packed = 0;
    __device__ void add(int change) {
        const int size = change < 0 ? -change : change;
        if (size > 0) packed |= 1;
        if (size > 0) packed += uint64_t{1} << 16;
        if (size > 1 && size <= kMostSmall) packed += uint64_t{1} << 32;
        if (size > kMostSmall) packed += uint64_t{1} << 48;
    }
    __device__ int used() const { return static_cast<int>(packed & 0xffff); }
    __device__ int changes() const { return static_cast<int>(packed >> 16 & 0xffff); }
    __device__ int smalls() const { return static_cast<int>(packed >> 32 & 0xffff); }
    __device__ int wides() const { return static_cast<int>(packed >> 48); }
    __device__ int codes_at() const { return kHead + used(); }
    __device__ int smalls_at() const { return codes_at() + (changes() + 3) / 4; }
    __device__ int wides_at() const { return smalls_at() + (smalls() + 1) / 2; }
    __device__ int nbytes() const {
        const int all = wides_at() + 2 * wides();
        return used() == 0 ? 0 : all < kPlainBytes ? all : kPlainBytes;
    }
};

// The sum over the threads of a warp, and of those before this one. All threads of the warp call.
struct Scan {
    Counts total, before;
    __device__ explicit Scan(const Counts& mine) {
        const int lane = threadIdx.x % kWarp;
        uint64_t sum = mine.packed;
#pragma unroll
        for (int distance = 1; distance < kWarp; distance *= 2) {
            const uint64_t other = __shfl_sync(kAllLanes, sum, lane < distance ? lane : lane - distance);
            if (lane >= distance) sum += other;
        }
        before.packed = sum - mine.packed;
        total.packed = __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
};

// Where a thread works.
struct Where {
    int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int64_t block, first, left;  // of the thread's elements; how many there are from it on
    __device__ explicit Where(int64_t numel)
        : block(int64_t{blockIdx.x} * kWarps + warp), first(block * kBlock + lane * kEight), left(numel - first) {}
    __device__ bool exists(int64_t numel) const { return block * kBlock < numel; }
};

__device__ inline Counts counts_of(const Eight& from, const Eight& to) {
    Counts counts;
#pragma unroll
    for (int k = 0; k < kEight; ++k) counts.add(change(from.of[k], to.of[k]));
    return counts;
}

__global__ void __launch_bounds__(kThreads)
    find_sizes(const uint16_t* __restrict__ from, const uint16_t* __restrict__ to, const int64_t numel,
               int16_t* __restrict__ sizes) {
    const Where here(numel);
    const Counts mine = counts_of(load_eight(from + here.first, here.left), load_eight(to + here.first, here.left));
    const Scan scan(mine);
    if (here.lane == 0 && here.exists(numel)) sizes[here.block] = static_cast<int16_t>(scan.total.nbytes());
}

__global__ void __launch_bounds__(kThreads)
    write_blocks(const uint16_t* __restrict__ from, const uint16_t* __restrict__ to, const int64_t numel,
                 const int16_t* __restrict__ sizes, const int64_t* __restrict__ offsets, uint8_t* __restrict__ payload) {
    __shared__ uint8_t codes[kWarps][kBlock];  // a byte for each, until they are packed
    __shared__ uint8_t smalls[kWarps][kBlock];
    const Where here(numel);
    const Eight old = load_eight(from + here.first, here.left), now = load_eight(to + here.first, here.left);
    const Counts mine = counts_of(old, now);
    const Scan scan(mine);
    const int size = here.exists(numel) ? sizes[here.block] : 0;
    uint8_t* const out = size > 0 ? payload + offsets[here.block] : nullptr;
    const bool coded = size > 0 && size < kPlainBytes;
    unsigned head = mine.used() ? 1u << here.lane : 0u;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) head |= __shfl_xor_sync(kAllLanes, head, distance);
    if (coded) {
        unsigned map = 0;
        int code = scan.before.changes(), small = scan.before.smalls();
        uint8_t* wide = out + scan.total.wides_at() + 2 * scan.before.wides();
        for (int k = 0; k < kEight; ++k) {
            const int by = change(old.of[k], now.of[k]), length = by < 0 ? -by : by;
            if (length == 0) continue;
            map |= 1u << k;
            codes[here.warp][code++] = static_cast<uint8_t>(length > kMostSmall ? 3 : length > 1 ? 2 : by < 0);
            if (length > kMostSmall) {
                *wide++ = static_cast<uint8_t>(now.of[k]);
                *wide++ = static_cast<uint8_t>(now.of[k] >> 8);
            } else if (length > 1) {
                smalls[here.warp][small++] = static_cast<uint8_t>(length - 2 + (by < 0 ? 8 : 0));
            }
        }
        if (map) out[kHead + scan.before.used()] = static_cast<uint8_t>(map);
        if (here.lane < kHead) out[here.lane] = static_cast<uint8_t>(head >> 8 * here.lane);
    }
    __syncthreads();
    if (coded) {
        const int count = scan.total.changes(), few = scan.total.smalls();
        for (int i = here.lane; 4 * i < count; i += kWarp) {
            unsigned byte = 0;
            for (int k = 0; k < 4 && 4 * i + k < count; ++k) byte |= unsigned{codes[here.warp][4 * i + k]} << 2 * k;
            out[scan.total.codes_at() + i] = static_cast<uint8_t>(byte);
        }
        for (int i = here.lane; 2 * i < few; i += kWarp) {
            const unsigned high = 2 * i + 1 < few ? smalls[here.warp][2 * i + 1] : 0u;
            out[scan.total.smalls_at() + i] = static_cast<uint8_t>(smalls[here.warp][2 * i] | high << 4);
        }
    } else if (size > 0) {
        for (int k = 0; k < kEight; ++k) {
            out[2 * (here.lane * kEight + k)] = static_cast<uint8_t>(now.of[k]);
            out[2 * (here.lane * kEight + k) + 1] = static_cast<uint8_t>(now.of[k] >> 8);
        }
    }
}

__device__ inline unsigned two_bytes(const uint8_t* in) { return in[0] | unsigned{in[1]} << 8; }

__global__ void __launch_bounds__(kThreads)
    apply_blocks(const uint8_t* __restrict__ payload, const int16_t* __restrict__ sizes,
                 const int64_t* __restrict__ offsets, uint16_t* __restrict__ values, const int64_t numel) {
    const Where here(numel);
    const int size = here.exists(numel) ? sizes[here.block] : 0;
    const uint8_t* const in = size > 0 ? payload + offsets[here.block] : nullptr;
    const bool coded = size > 0 && size < kPlainBytes;
    Eight now = {};
    unsigned map = 0;
    Counts mine;
    if (coded) {
        const unsigned head = two_bytes(in) | two_bytes(in + 2) << 16;
        const bool used = head >> here.lane & 1u;
        const int rank = __popc(head & ((1u << here.lane) - 1u));
        map = used ? in[kHead + rank] : 0u;
        mine.packed = (uint64_t{used}) | uint64_t(__popc(map)) << 16;
    }
    const Scan first(mine);
    unsigned kinds = 0;  // of two bits each, in the order of the changes
    if (map) {
        const uint8_t* const codes = in + first.total.codes_at();
        int code = first.before.changes();
        for (int k = 0; k < __popc(map); ++k, ++code) {
            const unsigned kind = codes[code / 4] >> 2 * (code % 4) & 3u;
            kinds |= kind << 2 * k;
            if (kind == 2) mine.packed += uint64_t{1} << 32;
            if (kind == 3) mine.packed += uint64_t{1} << 48;
        }
    }
    const Scan scan(mine);
    if (size == kPlainBytes) {
        for (int k = 0; k < kEight; ++k) now.of[k] = two_bytes(in + 2 * (here.lane * kEight + k));
        return store_eight(values + here.first, now, here.left);
    }
    if (map == 0) return;
    now = load_eight(values + here.first, here.left);
    const uint8_t* wide = in + scan.total.wides_at() + 2 * scan.before.wides();
    const uint8_t* const smalls = in + scan.total.smalls_at();
    int small = scan.before.smalls();
    for (int k = 0; k < kEight; ++k) {
        if ((map >> k & 1u) == 0) continue;
        const unsigned kind = kinds & 3u;
        kinds >>= 2;
        if (kind == 3) {
            now.of[k] = two_bytes(wide);
            wide += 2;
            continue;
        }
        int by = kind == 0 ? 1 : -1;
        if (kind == 2) {
            const unsigned four = smalls[small / 2] >> 4 * (small % 2) & 15u;
            by = static_cast<int>(four & 7u) + 2;
            by = four > 7u ? -by : by;
            ++small;
        }
        now.of[k] = key(static_cast<unsigned>(static_cast<int>(key(now.of[k])) + by) & 0xffffu);
    }
    store_eight(values + here.first, now, here.left);
}

int64_t blocks_of_threads(int64_t numel) { return (numel + int64_t{kBlock} * kWarps - 1) / (int64_t{kBlock} * kWarps); }

co_status check_values(const void* values, int64_t numel, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_REQUIRE(numel >= 0, "numel < 0");
    CO_REQUIRE(numel == 0 || values, "the values are null");
    return CO_OK;
}

}  // namespace
}  // namespace compressopt

using namespace compressopt;

int32_t co_change_sizes(const uint16_t* from, const uint16_t* to, int64_t numel, int16_t* sizes, const co_exec* exec) {
    CO_TRY(check_values(from, numel, exec));
    if (numel == 0) return CO_OK;
    CO_REQUIRE(to && sizes, "to or sizes is null");
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    return launch(find_sizes, blocks_of_threads(numel), place, from, to, numel, sizes);
}

int32_t co_write_changes(const uint16_t* from, const uint16_t* to, int64_t numel, const int16_t* sizes,
                         const int64_t* offsets, uint8_t* payload, const co_exec* exec) {
    CO_TRY(check_values(from, numel, exec));
    if (numel == 0) return CO_OK;
    CO_REQUIRE(to && sizes && offsets, "to, sizes or offsets is null");
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    return launch(write_blocks, blocks_of_threads(numel), place, from, to, numel, sizes, offsets, payload);
}

int32_t co_apply_changes(const uint8_t* payload, const int16_t* sizes, const int64_t* offsets, uint16_t* values,
                         int64_t numel, const co_exec* exec) {
    CO_TRY(check_values(values, numel, exec));
    if (numel == 0) return CO_OK;
    CO_REQUIRE(sizes && offsets, "sizes or offsets is null");
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    return launch(apply_blocks, blocks_of_threads(numel), place, payload, sizes, offsets, values, numel);
}
