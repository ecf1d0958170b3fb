// Sums over tensors: squares of elements, and what 1-bit LAMB needs.
#include "message.cuh"
#include "sums.cuh"
#include "variance.cuh"

namespace compressopt {
namespace {

template <class Runs>
__global__ void __launch_bounds__(kThreads, 4)
    square_items(const Runs __grid_constant__ runs, double* __restrict__ of_item) {
    const Item item = find_item(runs);
    const Run& run = runs.entries[item.entry];
    double squares = 0;
    for_quads_ahead<4>(
        item, [&](int64_t i, Span span) { return run.load_param(i, span); },
        [&](const RawQuad& raw, int64_t, Span span) { squares += square_sum(run.param_of(raw), span); });
    squares = over_block(squares, Sum());
    if (threadIdx.x == 0) of_item[blockIdx.x] = squares;
}

template <class Runs>
__global__ void __launch_bounds__(kThreads)
    square_runs(const Runs __grid_constant__ runs, const double* __restrict__ of_item, double* __restrict__ sums) {
    const int run = blockIdx.x;
    const double squares = fold_items(runs, run, of_item, 1, 0, Sum());
    if (threadIdx.x == 0) sums[runs.entries[run].index] = squares;
}

template <class Variance>
struct LambMoments {
    Average y;
    float *exp_avg, *fresh;
    Variance exp_avg_sq;
    const float* factors;
    co_lamb_options options;

    __device__ Quad denominator(const Quad& v) const {
        const Real eps = options.eps;
        return options.eps_inside_sqrt ? square_root(v + eps) : square_root(v) + eps;
    }
};

template <class Runs, class Variance>
__global__ void __launch_bounds__(kThreads, 3)
    lamb_items(const Runs __grid_constant__ runs, const LambMoments<Variance> __grid_constant__ lamb, double* of_item) {
    static_assert(sizeof(Runs) + sizeof(LambMoments<Variance>) + sizeof(double*) <= kMaxParameters);
    const Item item = find_item(runs);
    const Run& run = runs.entries[item.entry];
    const co_lamb_options& options = lamb.options;
    const bool decays = run.param && options.weight_decay != 0.0f;
    double directions = 0, updates = 0, ratio = run.still ? 1.0 : 0.0;
    for_quads(item, [&](int64_t i, Span span) {
        const Quad old = load(lamb.exp_avg + i, span);
        const auto v = lamb.exp_avg_sq.load_raw(run, i, span);
        Quad fresh = load(lamb.fresh + i, span);
        RawQuad p = {};
        if (decays) p = run.load_param(i, span);
        const Quad m = run.still ? same(0.0f) : lamb.y.at(i, span) / Real(lamb.factors[run.index]);
        const Quad g = (m - old * Real(options.beta1)) / Real(options.one_minus_beta1);
        fresh = fresh * Real(options.beta2) + g * g * Real(options.one_minus_beta2);
        store(lamb.fresh + i, fresh, span);
        store(lamb.exp_avg + i, m, span);
        const Quad frozen = lamb.denominator(lamb.exp_avg_sq.of(v));
        const Quad direction = run.still ? same(0.0f) : bounded(m / frozen, options.bound);
        directions += square_sum(direction, span);
        updates += square_sum(decays ? direction + run.param_of(p) * Real(options.weight_decay) : direction, span);
        if (run.still) return;
        const Quad ratios = frozen / lamb.denominator(fresh);
#pragma unroll
        for (int k = 0; k < kQuad; ++k) {
            if (span.has(k)) ratio = Maximum()(ratio, ratios.of[k].value);
        }
    });
    keep_item<Sum>(directions, updates, ratio, of_item);
}

}  // namespace
}  // namespace compressopt

using namespace compressopt;

int32_t co_square_sums(const co_segment* segments, int64_t count, double* sums, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_REQUIRE(count >= 0, "count < 0");
    if (count == 0) return CO_OK;
    CO_REQUIRE(segments && sums, "segments or sums is null");
    CO_TRY(check_segments(segments, count, -1, "segments"));
    for (int64_t k = 0; k < count; ++k) {
        CO_REQUIRE(segments[k].data || segments[k].numel == 0, "a segment with elements has no data");
    }
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Scratch scratch(place, scratch_nbytes(1));
    CO_TRY(scratch.status());
    const auto run_at = [&](int64_t k) {
        Run run = {};
        run.param = segments[k].data;
        run.param_dtype = static_cast<int8_t>(segments[k].dtype);
        run.numel = segments[k].numel;
        run.index = static_cast<int32_t>(k);
        return run;
    };
    double* const of_item = scratch.as<double>();
    return for_tables<FewRuns, ManyRuns>(
        count, tile_bits_for(segments, count), run_at, [&](const auto& table, int64_t items) -> co_status {
            using Runs = std::decay_t<decltype(table)>;
            if (items > 0) CO_TRY(launch(square_items<Runs>, items, place, table, of_item));
            return launch(square_runs<Runs>, table.count, place, table, of_item, sums);
        });
}

int32_t co_lamb_moments(const co_average* y, float* exp_avg, float* fresh, const co_variance* exp_avg_sq,
                        const co_segment* params, int64_t count, const float* factors, double* sums,
                        const co_lamb_options* options, const co_exec* exec) {
    CO_REQUIRE(exec && options, "exec or options is null");
    CO_TRY(check_average(y));
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(exp_avg && fresh && params && factors && sums,
               "exp_avg, fresh, params, factors or sums is null");
    CO_TRY(check_variance(exp_avg_sq));
    CO_TRY(check_segments(params, count, y->numel, "params"));
    const Place place(*exec);
    return with_variance(*exp_avg_sq, [&](auto v) {
        const LambMoments<decltype(v)> lamb = {Average(*y), exp_avg, fresh, v, factors, *options};
        const auto launch_items = [&](const auto& table, int64_t items, double* of_item) {
            return launch(lamb_items<std::decay_t<decltype(table)>, decltype(v)>, items, place, table, lamb, of_item);
        };
        return sum_tensors<Sum>(params, count, y->numel, sums, place, launch_items);
    });
}
