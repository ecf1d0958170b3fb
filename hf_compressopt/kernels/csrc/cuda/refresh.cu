// A refresh of the frozen variance: what it learns from averaged gradients, and codes that are rounded at random.
#include "../sketch_hash.h"
#include "integer.cuh"
#include "sums.cuh"
#include "variance.cuh"

namespace compressopt {
namespace {

// The gradients: as values, or as messages.
struct Values {
    const float* values;
    __device__ Quad at(int64_t i, Span span) const { return load(values + i, span); }
};

struct Messages {
    Integers y;
    __device__ Quad at(int64_t i, Span) const { return y.at(i); }
};

// v' of compressopt.h.
template <class Gradient, class Variance>
struct Learning {
    Gradient gradient;
    Variance exp_avg_sq;
    Real memory, rest;

    struct Learnt {
        Quad fresh, square;
    };

    __device__ Learnt at(const Run& run, int64_t i, Span span) const {
        const auto raw = exp_avg_sq.load_raw(run, i, span);
        const Quad g = gradient.at(i, span), square = g * g;
        return {exp_avg_sq.of(raw) * memory + square * rest, square};
    }
};

template <class Runs, class AnyLearning>
__global__ void __launch_bounds__(kThreads, 4)
    learning_items(const Runs __grid_constant__ runs, const AnyLearning __grid_constant__ learning,
                   double* __restrict__ of_item) {
    static_assert(sizeof(Runs) + sizeof(AnyLearning) + sizeof(double*) <= kMaxParameters);
    const Item item = find_item(runs);
    const Run& run = runs.entries[item.entry];
    double total = 0, most = 0, square = 0;
    for_quads(item, [&](int64_t i, Span span) {
        const auto learnt = learning.at(run, i, span);
#pragma unroll
        for (int k = 0; k < kQuad; ++k) {
            if (!span.has(k)) continue;
            total += static_cast<double>(learnt.fresh.of[k].value);
            most = Maximum()(most, learnt.fresh.of[k].value);
            square = Maximum()(square, learnt.square.of[k].value);
        }
    });
    keep_item<Maximum>(total, most, square, of_item);
}

struct StoreValues {
    float* values;
    __device__ void operator()(const Run&, int64_t i, const Quad& v, Span span) const { store(values + i, v, span); }
};

// Codes, rounded at random. What depends on the place in a tensor is the same however the tensor is cut.
struct StoreCodes {
    uint8_t* codes;
    const int32_t* tops;
    const float* factors;
    uint64_t key;  // of the call

    __device__ void operator()(const Run& run, int64_t i, const Quad& v, Span span) const {
        const unsigned random = random_bytes(run, i), top = static_cast<unsigned>(tops[run.index]);
        unsigned word = 0;
#pragma unroll
        for (int k = 0; k < kQuad; ++k) {
            const Real moved = v.of[k] * Real(factors[random >> (8 * k) & 0xffu]);
            word |= code_of(v.of[k].value, moved.value, top) << (8 * k);
        }
        uint8_t* const first = codes + i;
        if (in_one_access(first, span)) {
            *reinterpret_cast<unsigned*>(first) = word;
            return;
        }
#pragma unroll
        for (int k = 0; k < kQuad; ++k) {
            if (span.has(k)) first[k] = static_cast<uint8_t>(word >> (8 * k));
        }
    }

private:
    static constexpr int kZeroCode = 255, kLastCode = 254, kLowestTop = -126 * 8;

    // The random bytes of a quad, which may begin before its tensor does.
    __device__ unsigned random_bytes(const Run& run, int64_t i) const {
        const uint64_t of_tensor = mix((key ^ static_cast<uint64_t>(run.index)) + kGolden);
        const int64_t place = reinterpret_cast<intptr_t>(run.param) + (i - run.start);
        const uint64_t word = static_cast<uint64_t>(place >> 3);
        const int shift = static_cast<int>(8 * (place & 7));
        uint64_t bytes = mix(of_tensor + word * kGolden) >> shift;
        if (shift > 32) bytes |= mix(of_tensor + (word + 1) * kGolden) << (64 - shift);
        return static_cast<unsigned>(bytes);
    }

    // Nine points are near the mantissas of an octave; `bound` are the first ten bits from which on each is the nearest.
    __device__ static unsigned code_of(float value, float moved, unsigned top) {
        constexpr unsigned bounds[] = {45, 142, 248, 363, 488, 625, 774, 937};
        const unsigned bits = __float_as_uint(moved) >> 13, mantissa = bits & 1023u;
        int point = static_cast<int>(bits >> 10) * 8;
#pragma unroll
        for (unsigned bound : bounds) point += mantissa >= bound;
        const int from = static_cast<int>(top), lowest = from - kLowestTop;
        int code = from + 127 * 8 - point;
        code = code < 0 ? 0 : code > kLastCode ? kLastCode : code;
        code = code > lowest ? lowest : code;
        return static_cast<unsigned>(value == 0.0f ? kZeroCode : code);
    }
};

template <class AnyLearning, class Store>
struct Refresh {
    AnyLearning learning;
    const float* floors;
    Store store;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        const float floor = floors[run.index];
        if (isnan(floor)) return;
        const Quad fresh = learning.at(run, i, span).fresh;
        const Quad v = each([&](int k) {
            const float x = fresh.of[k].value;
            return Real(floor < x || x != x ? x : floor);
        });
        store(run, i, v, span);
    }
};

// ---- host ------------------------------------------------------------------------------------------------------------

co_status check_refresh(const co_refresh* refresh, const co_variance* exp_avg_sq, const co_segment* segments,
                        int64_t count) {
    CO_REQUIRE(refresh->y || refresh->values, "refresh has neither y nor values");
    CO_REQUIRE(segments, "segments is null");
    if (refresh->y) {
        CO_TRY(check_integers(refresh->y));
        CO_REQUIRE(refresh->y->numel == refresh->numel, "y has not the elements of the bucket");
    }
    CO_TRY(check_variance(exp_avg_sq));
    return check_segments(segments, count, refresh->numel, "segments");
}

// Call call(learning) with the forms of gradients and variance.
template <class Call>
co_status with_learning(const co_refresh& refresh, const co_variance& exp_avg_sq, Call call) {
    return with_variance(exp_avg_sq, [&](auto v) -> co_status {
        using Variance = decltype(v);
        const Real memory = refresh.memory, rest = refresh.rest;
        if (!refresh.y) return call(Learning<Values, Variance>{{refresh.values}, v, memory, rest});
        const co_integers& y = *refresh.y;
        const Messages messages = {Integers(y.messages, y.numel, y.world_size, y.bits, y.stride)};
        return call(Learning<Messages, Variance>{messages, v, memory, rest});
    });
}

StoreValues store_of(const FloatVariance&, float* values, const StoreCodes&) { return {values}; }
StoreCodes store_of(const LogVariance&, float*, const StoreCodes& codes) { return codes; }

}  // namespace
}  // namespace compressopt

using namespace compressopt;

int32_t co_variance_sums(const co_refresh* refresh, const co_variance* exp_avg_sq, const co_segment* segments,
                         int64_t count, double* sums, const co_exec* exec) {
    CO_REQUIRE(exec && refresh, "exec or refresh is null");
    CO_REQUIRE(refresh->numel >= 0, "numel < 0");
    if (refresh->numel == 0) return CO_OK;
    CO_TRY(check_refresh(refresh, exp_avg_sq, segments, count));
    CO_REQUIRE(sums, "sums is null");
    const Place place(*exec);
    return with_learning(*refresh, *exp_avg_sq, [&](const auto& learning) {
        const auto launch_items = [&](const auto& table, int64_t items, double* of_item) {
            using Runs = std::decay_t<decltype(table)>;
            return launch(learning_items<Runs, std::decay_t<decltype(learning)>>, items, place, table, learning, of_item);
        };
        return sum_tensors<Maximum>(segments, count, refresh->numel, sums, place, launch_items);
    });
}

int32_t co_refresh_variance(const co_refresh* refresh, const co_variance* exp_avg_sq, const co_segment* segments,
                            int64_t count, const float* floors, const int32_t* tops, const float* factors, uint64_t key,
                            const co_exec* exec) {
    CO_REQUIRE(exec && refresh, "exec or refresh is null");
    CO_REQUIRE(refresh->numel >= 0, "numel < 0");
    if (refresh->numel == 0) return CO_OK;
    CO_TRY(check_refresh(refresh, exp_avg_sq, segments, count));
    CO_REQUIRE(floors, "floors is null");
    CO_REQUIRE(!exp_avg_sq->codes || (tops && factors), "codes need tops and factors");
    const StoreCodes codes = {exp_avg_sq->codes, tops, factors, mix(key + kGolden)};
    return with_learning(*refresh, *exp_avg_sq, [&](const auto& learning) {
        const auto store = store_of(learning.exp_avg_sq, exp_avg_sq->values, codes);
        using Operation = Refresh<std::decay_t<decltype(learning)>, std::decay_t<decltype(store)>>;
        return run(Operation{learning, floors, store}, RunsOf(segments, nullptr, refresh->numel), count, Place(*exec));
    });
}
