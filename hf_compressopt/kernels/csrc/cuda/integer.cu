// The kernels of b-bit integers. A warp takes four blocks of 128 elements, of which each thread keeps four consecutive
// ones in registers: one pass over memory.
#include "errors.cuh"

namespace compressopt {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kMessageGroup = 4;  // messages that are summed by themselves

// The messages of one chunk, of all ranks.
template <int kBits>
struct Received {
    static constexpr int bits = kBits;
    Integers first;
    int32_t world_size;

    // Call add(q, sum) with the sums of the groups, in order. load(message, scales): kQuads quads of a message, as they
    // lie in memory; those of a group are asked for together.
    template <int kQuads, class Load, class Add>
    __device__ void for_groups(Load load, Add add) const {
        const Integers integers = first.with_bits<kBits>();
        const int64_t scales = integers_nbytes(first.numel, kBits);
        const uint8_t* message = first.messages;
        for (int rank = 0; rank < world_size; rank += kMessageGroup) {
            decltype(load(integers, message, message)) raw[kMessageGroup];
#pragma unroll
            for (int r = 0; r < kMessageGroup; ++r, message += first.stride) {
                if (rank + r < world_size) raw[r] = load(integers, message, message + scales);
            }
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                Quad sum = same(0.0f);
#pragma unroll
                for (int r = 0; r < kMessageGroup; ++r) {
                    if (rank + r < world_size) sum = sum + integers.of(raw[r], q);
                }
                add(q, sum);
            }
        }
    }
};

// Their mean.
template <int kBits>
struct IntegerMean {
    static constexpr bool kSeveral = true;
    Received<kBits> received;
    Real inverse;

    __device__ void get(Quad (&z)[kTileQuads], const Tile<kWarp>& tile) const {
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) z[q] = same(0.0f);
        received.template for_groups<kTileQuads>(
            [&](const Integers& integers, const uint8_t* message, const uint8_t* scales) {
                return integers.load_raw(message, scales, tile);
            },
            [&](int q, const Quad& sum) { z[q] = z[q] + sum; });
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) z[q] = z[q] * inverse;
    }
};

// The tile of a warp, the n-th of all chunks; empty where the last chunk has fewer.
__device__ inline Tile<kWarp> warp_tile(const Integers& chunks, int64_t n, int64_t tiles_of_chunk) {
    const int64_t j = quotient(n, tiles_of_chunk), inside = (n - j * tiles_of_chunk) * kWarpTile;
    const int64_t left = chunks.size(j) - inside, length = left < kWarpTile ? left : kWarpTile;
    return {j * chunks.chunk + inside, j, inside, 0, static_cast<int>(length > 0 ? length : 0),
            static_cast<int>(kQuad * (threadIdx.x % kWarp))};
}

// Messages <- Q(u), and new_error <- u - Q(u) unless there is none. The tiles from `first` on, `count` of them.
template <class Source, class Errors>
__global__ void __launch_bounds__(kThreads, Source::kSeveral || Errors::kCompact ? 2 : 3)
    compress_tiles(const Source __grid_constant__ source, const Errors __grid_constant__ error,
                   const Errors __grid_constant__ new_error, const Integers __grid_constant__ to, const int64_t first,
                   const int64_t count, const int64_t tiles_of_chunk) {
    static_assert(sizeof(Source) + 2 * sizeof(Errors) + sizeof(Integers) + 3 * sizeof(int64_t) <= kMaxParameters);
    const int64_t number = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
    if (number >= count) return;  // the whole warp
    const Tile<kWarp> tile = warp_tile(to, first + number, tiles_of_chunk);
    if (tile.length == 0) return;
    Quad u[kTileQuads];
    const typename Errors::Raw raw = error.load_raw(tile);
    source.get(u, tile);
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
        if (tile.has(q)) u[q] = u[q] + error.at(raw, tile, q);
    }
    quantize(u, to, tile);
    if (!new_error.given()) return;
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) new_error.put(tile, q, u[q]);
    new_error.put_all(tile, u);
}

template <class Source, class Errors>
co_status compress_tiles_from(const Source& source, const Errors& error, const Errors& new_error, const Integers& to,
                              int64_t first, int64_t count, const Place& place) {
    return launch(compress_tiles<Source, Errors>, ceil_div(count, kWarps), place, source, error, new_error, to, first,
                  count, to.tiles_of_chunk());
}

// ---- gradients of many tensors ---------------------------------------------------------------------------------------

// Tables of runs, each of which covers whole tiles: a run that lies in two tables is in both.
class TablesOfTiles {
public:
    TablesOfTiles(const co_combination& z, const Integers& to) : grads_(z.grads), count_(z.count), to_(to) {}

    // Fill the next table. Returns the number of tiles that it covers from done() on; 0: there are no more.
    template <class Filled>
    int64_t fill(Filled& table) {
        table.count = 0;
        table.tile_bits = kTileBits;
        int64_t k = segment_, start = start_, stop = to_.numel;
        if (!grads_) {
            Run& run = table.entries[table.count++] = {};
            run.numel = to_.numel;
        } else {
            for (; k < count_ && table.count < Filled::capacity; start += grads_[k++].numel) {
                if (grads_[k].numel == 0) continue;
                Run& run = table.entries[table.count++];
                run = run_of(nullptr, grads_ + k);
                run.start = start;
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
        while (grads_ && segment_ < count_ && start_ + grads_[segment_].numel <= element) start_ += grads_[segment_++].numel;
    }

    int64_t done() const { return done_; }
    bool few() const { return !grads_ || count_ - segment_ <= FewRuns::capacity; }

private:
    int64_t tile_of(int64_t element) const {
        const int64_t j = element / to_.chunk;
        return j * to_.tiles_of_chunk() + (element - j * to_.chunk) / kWarpTile;
    }

    const co_segment* grads_;
    int64_t count_;
    const Integers& to_;
    int64_t segment_ = 0, start_ = 0, done_ = 0;
};

template <class Runs, class Launch>
co_status run_next(const co_combination& z, TablesOfTiles& tables, Launch& run) {
    Combination<Runs> source{FirstTerm(z), z.factors, z.alpha, z.beta, 0.0f, {}};
    const int64_t tiles = tables.fill(source.runs);
    if (tiles > 0) {
        CO_TRY(run(source, tables.done(), tiles));
        tables.advance(tiles);
    }
    return CO_OK;
}

// Call run(source, first, count) for all tiles.
template <class Launch>
co_status over_tiles(const co_combination& z, const Integers& to, Launch run) {
    TablesOfTiles tables(z, to);
    const int64_t all = to.chunks() * to.tiles_of_chunk();
    while (tables.done() < all) {
        CO_TRY(tables.few() ? run_next<FewRuns>(z, tables, run) : run_next<ManyRuns>(z, tables, run));
    }
    return CO_OK;
}

// ---- scales ----------------------------------------------------------------------------------------------------------

// found <- whether the scale of some block is not a number. One block of threads: scales are 2 bytes of 128 elements. They
// are read in vectors, which the message contains, beside them whatever is there; those of all chunks in one sequence, so
// that many chunks take no longer than one.
__global__ void __launch_bounds__(kThreads) find_nan(const Integers __grid_constant__ y, const int64_t chunks,
                                                     uint8_t* __restrict__ found) {
    constexpr int kAhead = 4, kHalves = 8;
    // vectors of a chunk at most, as the first chunk is the longest; its scales may begin inside a vector
    const int64_t each = chunks == 0 ? 1 : ceil_div(ceil_div(y.size(0), kIntegerBlock) + kHalves - 1, kHalves);
    const int64_t all = chunks * each;
    bool nan = false;
    for (int64_t t = threadIdx.x; t < all; t += kAhead * kThreads) {
        uint4 words[kAhead];
        int64_t first[kAhead], before[kAhead], stop[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const int64_t at = t + a * kThreads < all ? t + a * kThreads : t, j = at / each, v = at % each;
            const uint8_t* const scales = y.messages + j * y.stride + integers_nbytes(y.size(j), y.bits);
            before[a] = static_cast<int>(reinterpret_cast<uintptr_t>(scales) % 16 / 2);
            stop[a] = before[a] + ceil_div(y.size(j), kIntegerBlock);
            first[a] = v * kHalves;
            words[a] = first[a] < stop[a] ? load_four(scales - 2 * before[a] + 16 * v) : uint4{};
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const unsigned of[] = {words[a].x, words[a].y, words[a].z, words[a].w};
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
                const int64_t place = first[a] + h;
                const unsigned magnitude = of[h / 2] >> (16 * (h % 2)) & 0x7fffu;
                nan |= before[a] <= place && place < stop[a] && magnitude > 0x7f80u;
            }
        }
    }
    const double any = over_block(nan ? 1.0 : 0.0, Maximum());
    if (threadIdx.x == 0) *found = any != 0.0;
}

// ---- element by element ----------------------------------------------------------------------------------------------

struct DecodeIntegers {
    Integers y;
    float* out;
    __device__ void operator()(const Run&, int64_t i, Span span) const { store(out + i, y.at(i), span); }
};

// The sum of the messages of one chunk, times a factor, in the order of IntegerMean.
template <int kBits>
struct ScaledSum {
    Received<kBits> received;
    Real factor;
    float* out;

    __device__ void operator()(const Run&, int64_t i, Span span) const {
        Quad total = same(0.0f);
        received.template for_groups<1>(
            [&](const Integers& integers, const uint8_t* message, const uint8_t* scales) {
                return integers.load_raw(message, scales, i);
            },
            [&](int, const Quad& sum) { total = total + sum; });
        store(out + i, total * factor, span);
    }
};

struct AddIntegers {
    Integers y;
    Addition addition;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        addition.to(run, i, span, [&] { return y.at(i); });
    }
};

// ---- host ------------------------------------------------------------------------------------------------------------

// Call call(received) with the messages of one chunk, whose bits are a constant.
template <class Call>
co_status with_received(const uint8_t* messages, int64_t numel, int32_t bits, int32_t world_size, Call call) {
    const Integers first(messages, numel, 1, bits);
    return bits == 8 ? call(Received<8>{first, world_size}) : call(Received<4>{first, world_size});
}

}  // namespace
}  // namespace compressopt

using namespace compressopt;

int32_t co_compress_integers(const co_combination* z, const co_errors* error, const co_errors* new_error,
                             uint8_t* messages, int64_t numel, int32_t bits, int32_t world_size, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_integers(messages, numel, bits, world_size));
    CO_TRY(check_sending(z, numel, error));
    if (numel == 0) return CO_OK;
    if (new_error) CO_TRY(check_both_errors(error, new_error));
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Integers to(messages, numel, world_size, bits);
    return with_errors(*error, numel, world_size, [&](const auto& errors) {
        const auto left = new_error ? another(errors, *new_error) : no_errors(errors);
        return over_tiles(*z, to, [&](const auto& source, int64_t first, int64_t count) {
            return compress_tiles_from(source, errors, left, to, first, count, place);
        });
    });
}

int32_t co_average_integers(const uint8_t* messages, const co_errors* error, const co_errors* new_error, uint8_t* out,
                            int64_t numel, int32_t bits, int32_t world_size, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_integers(messages, numel, bits, world_size));
    CO_TRY(check_integers(out, numel, bits, 1));
    if (numel == 0) return CO_OK;
    CO_TRY(check_both_errors(error, new_error));
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Integers to(out, numel, 1, bits);
    return with_received(messages, numel, bits, world_size, [&](const auto& received) {
        const IntegerMean<std::decay_t<decltype(received)>::bits> mean = {received, static_cast<float>(1.0 / world_size)};
        return with_errors(*error, numel, 1, [&](const auto& old) {
            return compress_tiles_from(mean, old, another(old, *new_error), to, 0, to.tiles_of_chunk(), place);
        });
    });
}

int32_t co_mean_integers(const uint8_t* messages, float* out, int64_t numel, int32_t bits, int32_t world_size,
                         float factor, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_integers(messages, numel, bits, world_size));
    if (numel == 0) return CO_OK;
    CO_REQUIRE(out, "out is null");
    return with_received(messages, numel, bits, world_size, [&](const auto& received) {
        const ScaledSum<std::decay_t<decltype(received)>::bits> sum = {received, factor, out};
        return run(sum, RunsOf(nullptr, nullptr, numel), 0, Place(*exec));
    });
}

int32_t co_add_integers(const co_integers* y, const co_segment* outputs, int64_t count, float decay, float scale,
                        const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_integers(y));
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(outputs, "outputs is null");
    CO_TRY(check_segments(outputs, count, y->numel, "outputs"));
    const Integers values(y->messages, y->numel, y->world_size, y->bits, y->stride);
    return run(AddIntegers{values, Addition(decay, scale)}, RunsOf(outputs, nullptr, y->numel), count, Place(*exec));
}

int32_t co_decode_integers(const co_integers* y, float* out, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_integers(y));
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(out, "out is null");
    return run(DecodeIntegers{Integers(y->messages, y->numel, y->world_size, y->bits, y->stride), out},
               RunsOf(nullptr, nullptr, y->numel), 0, Place(*exec));
}

int32_t co_any_nan(const co_integers* y, uint8_t* found, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_integers(y));
    CO_REQUIRE(found, "found is null");
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Integers values(y->messages, y->numel, y->world_size, y->bits, y->stride);
    return launch(find_nan, 1, place, values, y->numel == 0 ? int64_t{0} : values.chunks(), found);
}
