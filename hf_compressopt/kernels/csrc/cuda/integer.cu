// The kernels of b-bit integers. A warp takes four blocks of 128 elements, of which each thread keeps four consecutive
// ones in registers: one pass over memory.
#include "integer.cuh"

namespace compressopt {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kHugePattern = 0x7f000000u;  // of 2^127: beyond it a block counts as not finite
constexpr float kTinyScale = 0x1p-120f;         // below it a block counts as zero
constexpr unsigned kNaNPattern = 0x7fc00000u;
constexpr int kMessageGroup = 4;  // messages that are summed by themselves

// The mean of the messages of one chunk.
struct IntegerMean {
    Integers first;
    int32_t world_size;
    Real inverse;

    __device__ void get(Quad (&z)[kTileQuads], const Tile<kWarp>& tile) const {
        const int64_t scales = integers_nbytes(first.numel, first.bits);
        const uint8_t* message = first.messages;
        Quad sum[kTileQuads];  // of a group
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) z[q] = sum[q] = same(0.0f);
        for (int rank = 0; rank < world_size; ++rank, message += first.stride) {
            const bool ends = rank % kMessageGroup == kMessageGroup - 1 || rank == world_size - 1;
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) {
                if (tile.has(q)) sum[q] = sum[q] + first.quad(message, message + scales, tile.inside + tile.offset(q));
            }
            if (!ends) continue;
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) {
                z[q] = z[q] + sum[q];
                sum[q] = same(0.0f);
            }
        }
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) z[q] = z[q] * inverse;
    }
};

struct BlockScale {
    Real scale, inverse;  // inverse == 0: all integers are 0
};

// most: the largest pattern of the block, without sign; limit: the largest integer.
__device__ inline BlockScale block_scale(unsigned most, Real limit) {
    if (most > kHugePattern) return {__uint_as_float(kNaNPattern), 0.0f};
    const Real exact = Real(__uint_as_float(most)) / limit;
    const Real scale = __uint_as_float((__float_as_uint(exact.value) + 0xffffu) & 0xffff0000u);
    if (scale.value < kTinyScale) return {0.0f, 0.0f};
    return {scale, Real(1.0f) / scale};
}

__device__ inline unsigned largest_pattern(const Quad& u) {
    unsigned most = 0;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
        const unsigned pattern = __float_as_uint(u.of[k].value) & 0x7fffffffu;
        most = most < pattern ? pattern : most;
    }
    return most;
}

// Messages <- Q(u), and new_error <- u - Q(u) unless that is null. The tiles from `first` on, `count` of them.
template <class Source>
__global__ void __launch_bounds__(kThreads, 3)
    compress_tiles(const Source __grid_constant__ source, const float* error, float* new_error,
                   const Integers __grid_constant__ to, const int64_t first, const int64_t count,
                   const int64_t tiles_of_chunk) {
    static_assert(sizeof(Source) + sizeof(Integers) + 5 * sizeof(int64_t) <= kMaxParameters);
    const int lane = threadIdx.x % kWarp;
    const int64_t number = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
    if (number >= count) return;  // the whole warp
    const int64_t j = quotient(first + number, tiles_of_chunk), size = to.size(j);
    const int64_t inside = (first + number - j * tiles_of_chunk) * kWarpTile, left = size - inside;
    if (left <= 0) return;  // the last chunk is shorter
    const Tile<kWarp> tile = {j * to.chunk + inside, inside, 0, static_cast<int>(left < kWarpTile ? left : kWarpTile),
                              kQuad * lane};
    Quad u[kTileQuads];
    source.get(u, tile);
    unsigned most[kTileQuads];
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
        const Span span = tile.has(q) ? tile.span(q) : Span{0, 0};
        if (tile.has(q)) u[q] = u[q] + load(error + tile.start + tile.offset(q), span);
        u[q] = each([&](int k) { return span.has(k) ? u[q].of[k] : Real(0.0f); });
        most[q] = largest_pattern(u[q]);
    }
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) {
            const unsigned other = __shfl_xor_sync(kAllLanes, most[q], distance);
            most[q] = most[q] < other ? other : most[q];
        }
    }
    uint8_t* const message = to.messages + j * to.stride;
    uint8_t* const scales = message + integers_nbytes(size, to.bits);
    const Real limit = to.bits == 8 ? 127.0f : 7.0f;
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
        const int offset = tile.offset(q);
        if (offset - kQuad * lane >= tile.length) continue;  // no such block
        const BlockScale scale = block_scale(most[q], limit);
        const int64_t place = inside + offset;
        if (lane == 0) {
            reinterpret_cast<uint16_t*>(scales)[place / kIntegerBlock] =
                static_cast<uint16_t>(__float_as_uint(scale.scale.value) >> 16);
        }
        unsigned word = 0;
        const Quad rest = each([&](int k) {
            const int integer = scale.inverse.value == 0.0f ? 0 : __float2int_rn((u[q].of[k] * scale.inverse).value);
            word |= to.bits == 8 ? (static_cast<unsigned>(integer) & 0xffu) << (8 * k)
                                 : (static_cast<unsigned>(integer) & 15u) << (4 * k);
            return u[q].of[k] - Real(static_cast<float>(integer)) * scale.scale;
        });
        if (offset < (tile.length + 7) / 8 * 8) { /* the integers of eight elements are written together */
            if (to.bits == 8) {
                *reinterpret_cast<unsigned*>(message + place) = word;
            } else {
                *reinterpret_cast<uint16_t*>(message + place / 2) = static_cast<uint16_t>(word);
            }
        }
        if (new_error && tile.has(q)) store(new_error + tile.start + offset, rest, tile.span(q));
    }
    if (inside + tile.length == size) {
        const int64_t used = integers_nbytes(size, to.bits) + 2 * ceil_div(size, kIntegerBlock);
        if (used + lane < integer_message_nbytes(size, to.bits)) message[used + lane] = 0;
    }
}

template <class Source>
co_status compress_tiles_from(const Source& source, const float* error, float* new_error, const Integers& to,
                              int64_t first, int64_t count, const Place& place) {
    return launch(compress_tiles<Source>, ceil_div(count, kWarps), place, source, error, new_error, to, first, count,
                  to.tiles_of_chunk());
}

// ---- gradients of many tensors ---------------------------------------------------------------------------------------

// Tables of runs, each of which covers whole tiles: a run that lies in two tables is in both.
class TablesOfTiles {
public:
    TablesOfTiles(const co_combination& z, const Integers& to) : z_(z), to_(to) {}

    // Fill the next table. Returns the number of tiles that it covers from done() on; 0: there are no more.
    template <class Filled>
    int64_t fill(Filled& table) {
        table.count = 0;
        table.tile_bits = kTileBits;
        int64_t k = segment_, start = start_, stop = to_.numel;
        if (!z_.grads) {
            table.entries[table.count++] = Run{nullptr, nullptr, 0, to_.numel, 0, 0, 0, false};
        } else {
            for (; k < z_.count && table.count < Filled::capacity; start += z_.grads[k++].numel) {
                const co_segment& segment = z_.grads[k];
                if (segment.numel == 0) continue;
                table.entries[table.count++] =
                    Run{nullptr, segment.data, start, segment.numel, segment.index, 0,
                        static_cast<int8_t>(segment.dtype), false};
            }
            if (start < to_.numel) stop = start;
        }
        const int64_t tiles = (stop == to_.numel ? to_.chunks() * to_.tiles_of_chunk() : tile_of(stop)) - done_;
        return tiles;
    }

    // Go on after these tiles.
    void advance(int64_t tiles) {
        done_ += tiles;
        const int64_t j = done_ / to_.tiles_of_chunk();
        const int64_t element = j * to_.chunk + (done_ - j * to_.tiles_of_chunk()) * kWarpTile;
        while (z_.grads && segment_ < z_.count && start_ + z_.grads[segment_].numel <= element) {
            start_ += z_.grads[segment_++].numel;
        }
    }

    int64_t done() const { return done_; }
    bool few() const { return !z_.grads || z_.count - segment_ <= FewRuns::capacity; }

private:
    int64_t tile_of(int64_t element) const {
        const int64_t j = element / to_.chunk;
        return j * to_.tiles_of_chunk() + (element - j * to_.chunk) / kWarpTile;
    }

    const co_combination& z_;
    const Integers& to_;
    int64_t segment_ = 0, start_ = 0, done_ = 0;
};

template <class Runs>
co_status compress_next(const co_combination& z, const float* error, const Integers& to, TablesOfTiles& tables,
                        const Place& place) {
    Combination<Runs> source{z.x, z.factors, z.alpha, z.beta, 0.0f, {}};
    const int64_t tiles = tables.fill(source.runs);
    if (tiles > 0) {
        CO_TRY(compress_tiles_from(source, error, nullptr, to, tables.done(), tiles, place));
        tables.advance(tiles);
    }
    return CO_OK;
}

// ---- element by element ----------------------------------------------------------------------------------------------

struct DecodeIntegers {
    Integers y;
    float* out;
    __device__ void operator()(const Run&, int64_t i, Span span) const { store(out + i, y.at(i), span); }
};

struct CommitIntegers {
    const float *x, *factors;
    Real alpha, beta;
    float* error;
    Integers own, average;
    Real output_scale;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        RawQuad g = {};
        if (run.grad) g = run.load_grad(i, span);
        Quad z = x ? load(x + i, span) * alpha : same(0.0f);
        const Quad old = load(error + i, span), sent = own.at(i);
        if (run.grad) z = z + run.grad_of(g) * beta;
        if (factors) z = z * Real(factors[run.index]);
        store(error + i, z + old - sent, span);
        if (run.param) run.store_param(i, average.at(i) * output_scale, span);
    }
};

// ---- host ------------------------------------------------------------------------------------------------------------

co_status check_integers(const void* messages, int64_t numel, int32_t bits, int32_t world_size) {
    CO_REQUIRE(numel >= 0, "numel < 0");
    CO_REQUIRE(bits == 4 || bits == 8, "bits is neither 4 nor 8");
    CO_REQUIRE(world_size >= 1, "world_size < 1");
    CO_REQUIRE(numel == 0 || messages, "the messages are null");
    CO_REQUIRE(reinterpret_cast<uintptr_t>(messages) % kAlignment == 0, "messages are not aligned to 16 bytes");
    return CO_OK;
}

co_status check_integers(const co_integers* y) {
    CO_REQUIRE(y != nullptr, "y is null");
    CO_TRY(check_integers(y->messages, y->numel, y->bits, y->world_size));
    CO_REQUIRE(y->stride >= 0 && y->stride % kAlignment == 0, "y: stride is no multiple of 16");
    return CO_OK;
}

}  // namespace
}  // namespace compressopt

using namespace compressopt;

int32_t co_compress_integers(const co_combination* z, const float* error, uint8_t* messages, int64_t numel,
                             int32_t bits, int32_t world_size, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_integers(messages, numel, bits, world_size));
    CO_TRY(check_combination(z, numel));
    if (numel == 0) return CO_OK;
    CO_REQUIRE(error, "error is null");
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Integers to(messages, numel, world_size, bits);
    TablesOfTiles tables(*z, to);
    const int64_t all = to.chunks() * to.tiles_of_chunk();
    while (tables.done() < all) {
        CO_TRY(tables.few() ? compress_next<FewRuns>(*z, error, to, tables, place)
                            : compress_next<ManyRuns>(*z, error, to, tables, place));
    }
    return CO_OK;
}

int32_t co_average_integers(const uint8_t* messages, const float* error, float* new_error, uint8_t* out, int64_t numel,
                            int32_t bits, int32_t world_size, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_integers(messages, numel, bits, world_size));
    CO_TRY(check_integers(out, numel, bits, 1));
    if (numel == 0) return CO_OK;
    CO_REQUIRE(error && new_error, "error or new_error is null");
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const IntegerMean mean = {Integers(messages, numel, 1, bits), world_size, static_cast<float>(1.0 / world_size)};
    const Integers to(out, numel, 1, bits);
    return compress_tiles_from(mean, error, new_error, to, 0, to.tiles_of_chunk(), place);
}

int32_t co_decode_integers(const co_integers* y, float* out, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_integers(y));
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(out, "out is null");
    return run(DecodeIntegers{Integers(y->messages, y->numel, y->world_size, y->bits, y->stride), out},
               RunsOf(nullptr, nullptr, y->numel), 0, Place(*exec));
}

int32_t co_commit_integers(const co_combination* z, float* error, const uint8_t* own, const co_integers* y,
                           const co_segment* outputs, int64_t count, float output_scale, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_integers(y));
    CO_TRY(check_combination(z, y->numel));
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(error && own && outputs, "error, own or outputs is null");
    CO_REQUIRE(reinterpret_cast<uintptr_t>(own) % kAlignment == 0, "own messages are not aligned to 16 bytes");
    CO_TRY(check_segments(outputs, count, y->numel, "outputs"));
    CO_REQUIRE(!z->grads || z->count == count, "outputs and gradients are cut at different places");
    for (int64_t k = 0; z->grads && k < count; ++k) {
        CO_REQUIRE(z->grads[k].numel == outputs[k].numel && z->grads[k].index == outputs[k].index,
                   "outputs and gradients are cut at different places, or have different indices");
    }
    const CommitIntegers commit = {z->x, z->factors, z->alpha, z->beta, error,
                                   Integers(own, y->numel, y->world_size, y->bits),
                                   Integers(y->messages, y->numel, y->world_size, y->bits, y->stride), output_scale};
    return run(commit, RunsOf(outputs, z->grads, y->numel), count, Place(*exec));
}
