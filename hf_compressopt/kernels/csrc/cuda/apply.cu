// Element by element, in one pass: decompress, add, combine, and what the optimizers do with the average.
#include "message.cuh"
#include "variance.cuh"

namespace compressopt {
namespace {

struct Denominator {
    Real eps;
    bool inside;
    __device__ Quad of(const Quad& v) const { return inside ? square_root(v + eps) : square_root(v) + eps; }
};

// p <- p * decay - lr * direction, bounded
struct Descent {
    Real lr, decay, bound;
    Denominator denominator;

    explicit Descent(const co_descent& descent)
        : lr(descent.lr),
          decay(descent.decay),
          bound(descent.bound),
          denominator{descent.eps, descent.eps_inside_sqrt != 0} {}

    __device__ void move(const Run& run, int64_t i, Span span, const Quad& p, const Quad& direction) const {
        const Quad shrunk = decay.value == 1.0f ? p : p * decay;
        run.store_param(i, run.still ? shrunk : shrunk - bounded(direction, bound) * lr, span);
    }
};

struct Decompress {
    Average y;
    float* out;
    __device__ void operator()(const Run&, int64_t i, Span span) const { store(out + i, y.at(i, span), span); }
};

struct AddAverage {
    Average y;
    Addition addition;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        addition.to(run, i, span, [&] { return y.at(i, span); });
    }
};

template <class First>
struct Combine {
    First first;
    const float* factors;
    Real alpha, beta;
    bool add;
    float* out;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        RawQuad g = {};
        if (run.grad) g = run.load_grad(i, span);
        Quad z = first.given() ? first.at(run, i, span) * alpha : same(0.0f);
        if (run.grad) z = z + run.grad_of(g) * beta;
        if (factors) z = z * Real(factors[run.index]);
        if (add) z = z + load(out + i, span);
        store(out + i, z, span);
    }
};

// The sum in the order of the rows, of which a few are asked for ahead.
struct SumRows {
    const char* rows;
    int dtype;
    int64_t count, nbytes;  // rows, and bytes of a row
    Real factor;
    float* out;

    __device__ void operator()(const Run&, int64_t i, Span span) const {
        constexpr int kAhead = 4;
        Quad total = {};
        for (int64_t k = 0; k < count; k += kAhead) {
            RawQuad raw[kAhead];
#pragma unroll
            for (int a = 0; a < kAhead; ++a) {
                const int64_t row = k + a < count ? k + a : k;  // no branch: a row is asked for twice
                raw[a] = load(rows + row * nbytes, dtype, i, span);
            }
#pragma unroll
            for (int a = 0; a < kAhead; ++a) {
                if (k + a >= count) continue;
                const Quad value = widened(raw[a], dtype);
                total = k + a == 0 ? value : total + value;  // of -0 too
            }
        }
        store(out + i, factor.value == 1.0f ? total : total * factor, span);
    }
};

template <class Variance>
struct ApplyAdam {
    Average y;
    float* exp_avg;  // or null: m is not kept
    Variance exp_avg_sq;
    const float* corrections;
    Real beta;
    Descent descent;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        RawQuad p = {};
        typename Variance::Raw raw = {};
        Quad old = same(0.0f);
        if (run.param) {
            raw = exp_avg_sq.load_raw(run, i, span);
            p = run.load_param(i, span);
        }
        if (beta.value != 1.0f) old = load(exp_avg + i, span);
        apply(run, i, span, raw, p, old, y.at(i, span));
    }

    struct Asked {
        typename Variance::Raw raw;
        RawQuad p;
        Quad old;
        Average::Raw y;
    };

    __device__ Asked ask(const Run& run, int64_t i, Span span) const {
        Asked asked = {};
        if (run.param) {
            asked.raw = exp_avg_sq.load_raw(run, i, span);
            asked.p = run.load_param(i, span);
        }
        if (beta.value != 1.0f) asked.old = load(exp_avg + i, span);
        asked.y = y.load_raw(i, span);
        return asked;
    }

    __device__ void operator()(const Run& run, int64_t i, Span span, const Asked& asked) const {
        apply(run, i, span, asked.raw, asked.p, asked.old, y.of(asked.y, i));
    }

private:
    __device__ void apply(const Run& run, int64_t i, Span span, const typename Variance::Raw& raw, const RawQuad& p,
                          const Quad& old, Quad m) const {
        if (beta.value != 1.0f) m = old + (m - old) * beta;
        if (run.still) m = same(0.0f);
        if (exp_avg) store(exp_avg + i, m, span);
        if (!run.param) return;
        Quad v = exp_avg_sq.of(raw);
        bool moves = true;
        if (corrections) {
            const float first = corrections[2 * run.index];
            moves = !isinf(first);
            m = m / Real(first);
            v = v / Real(corrections[2 * run.index + 1]);
        }
        descent.move(run, i, span, run.param_of(p), moves ? m / descent.denominator.of(v) : same(0.0f));
    }
};

template <class Variance>
struct LocalStep {
    float* exp_avg;
    Variance exp_avg_sq;
    float* local_update;
    Real alpha, beta;
    bool with_grads;
    Descent descent;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        RawQuad g = {}, p = {};
        typename Variance::Raw v = {};
        Quad m = load(exp_avg + i, span);
        const Quad u = load(local_update + i, span);
        if (run.grad) g = run.load_grad(i, span);
        if (run.param) {
            v = exp_avg_sq.load_raw(run, i, span);
            p = run.load_param(i, span);
        }
        if (with_grads) {
            m = m * alpha;
            if (run.grad) m = m + run.grad_of(g) * beta;
            store(exp_avg + i, m, span);
        }
        store(local_update + i, u + m * descent.lr, span);
        if (run.param) descent.move(run, i, span, run.param_of(p), m / descent.denominator.of(exp_avg_sq.of(v)));
    }
};

template <class Variance>
struct SyncParameters {
    Average y;
    float *exp_avg, *anchor;
    Variance exp_avg_sq;
    float* local_update;
    Real lr_sum, decay, bound;
    Denominator denominator;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        const Quad value = y.at(i, span);
        typename Variance::Raw v = {};
        Quad own = same(0.0f);
        if (run.param) {
            v = exp_avg_sq.load_raw(run, i, span);
            own = load(anchor + i, span);
        }
        store(exp_avg + i, run.still ? same(0.0f) : value / lr_sum, span);
        store(local_update + i, same(0.0f), span);
        if (!run.param) return;
        own = own * decay - (run.still ? same(0.0f) : bounded(value / denominator.of(exp_avg_sq.of(v)), bound));
        store(anchor + i, own, span);
        run.store_param(i, own, span);
    }
};

template <class Variance>
struct LambApply {
    const float* exp_avg;
    Variance exp_avg_sq;
    const float* rates;
    Real weight_decay, bound;
    Denominator denominator;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        if (!run.param) return;
        const RawQuad raw = run.load_param(i, span);
        Quad update = same(0.0f);
        if (!run.still) {
            const Quad m = load(exp_avg + i, span);
            update = bounded(m / denominator.of(exp_avg_sq.of(exp_avg_sq.load_raw(run, i, span))), bound);
        }
        const Quad p = run.param_of(raw);
        if (weight_decay.value != 0.0f) update = update + p * weight_decay;
        run.store_param(i, p - update * Real(rates[run.index]), span);
    }
};

co_status check_update(const co_variance* exp_avg_sq, const co_segment* params, int64_t count, int64_t numel) {
    CO_TRY(check_variance(exp_avg_sq));
    return check_segments(params, count, numel, "params");
}

}  // namespace

template <>
constexpr int kAheadOf<ApplyAdam<LogVariance>> = 2;  // what it reads is small

co_status combine(const co_combination& z, float* out, int64_t numel, bool add, const Place& place) {
    const RunsOf runs(nullptr, z.grads, numel);
    if (!z.x && z.last) {
        return run(Combine<FirstTerm>{FirstTerm(z), z.factors, z.alpha, z.beta, add, out}, runs, z.count, place);
    }
    return run(Combine<PlainTerm>{PlainTerm(z), z.factors, z.alpha, z.beta, add, out}, runs, z.count, place);
}

}  // namespace compressopt

using namespace compressopt;

int32_t co_decompress(const co_average* y, float* out, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_average(y));
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(out, "out is null");
    return run(Decompress{Average(*y), out}, RunsOf(nullptr, nullptr, y->numel), 0, Place(*exec));
}

int32_t co_add_average(const co_average* y, const co_segment* outputs, int64_t count, float decay, float scale,
                       const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_average(y));
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(outputs, "outputs is null");
    CO_TRY(check_segments(outputs, count, y->numel, "outputs"));
    return run(AddAverage{Average(*y), Addition(decay, scale)}, RunsOf(outputs, nullptr, y->numel), count, Place(*exec));
}

int32_t co_combine(const co_combination* z, float* out, int64_t numel, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_combination(z, numel));
    if (numel == 0) return CO_OK;
    CO_REQUIRE(out, "out is null");
    return combine(*z, out, numel, false, Place(*exec));
}

int32_t co_sum_rows(const void* rows, int32_t dtype, int64_t count, float* out, int64_t numel, float factor,
                    const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_REQUIRE(numel >= 0, "numel < 0");
    CO_REQUIRE(count >= 1, "count < 1");
    CO_REQUIRE(dtype >= CO_FLOAT32 && dtype <= CO_FLOAT16, "the dtype of rows is none of co_dtype");
    if (numel == 0) return CO_OK;
    CO_REQUIRE(rows && out, "rows or out is null");
    const int64_t nbytes = numel * (dtype == CO_FLOAT32 ? 4 : 2);
    return run(SumRows{static_cast<const char*>(rows), dtype, count, nbytes, factor, out}, RunsOf(nullptr, nullptr, numel),
               0, Place(*exec));
}

int32_t co_apply_adam(const co_average* y, float* exp_avg, const co_variance* exp_avg_sq, const co_segment* params,
                      int64_t count, const float* corrections, float beta, const co_descent* descent,
                      const co_exec* exec) {
    CO_REQUIRE(exec && descent, "exec or descent is null");
    CO_TRY(check_average(y));
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(params, "params is null");
    CO_REQUIRE(exp_avg || beta == 1.0f, "exp_avg is null, and beta is not 1");
    CO_TRY(check_update(exp_avg_sq, params, count, y->numel));
    return with_variance(*exp_avg_sq, [&](auto v) {
        return run(ApplyAdam<decltype(v)>{Average(*y), exp_avg, v, corrections, beta, Descent(*descent)},
                   RunsOf(params, nullptr, y->numel), count, Place(*exec));
    });
}

int32_t co_local_step(float* exp_avg, const co_variance* exp_avg_sq, float* local_update, const co_segment* grads,
                      const co_segment* params, int64_t count, int64_t numel, float alpha, float beta,
                      const co_descent* descent, const co_exec* exec) {
    CO_REQUIRE(exec && descent, "exec or descent is null");
    CO_REQUIRE(numel >= 0, "numel < 0");
    if (numel == 0) return CO_OK;
    CO_REQUIRE(exp_avg && local_update && params, "exp_avg, local_update or params is null");
    CO_TRY(check_update(exp_avg_sq, params, count, numel));
    if (grads) CO_TRY(check_segments(grads, count, numel, "grads"));
    for (int64_t k = 0; grads && k < count; ++k) {
        CO_REQUIRE(grads[k].numel == params[k].numel, "grads and params are cut at different places");
    }
    return with_variance(*exp_avg_sq, [&](auto v) {
        return run(LocalStep<decltype(v)>{exp_avg, v, local_update, alpha, beta, grads != nullptr, Descent(*descent)},
                   RunsOf(params, grads, numel), count, Place(*exec));
    });
}

int32_t co_sync_parameters(const co_average* y, float* exp_avg, float* anchor, const co_variance* exp_avg_sq,
                           float* local_update, const co_segment* params, int64_t count, float lr_sum,
                           const co_descent* descent, const co_exec* exec) {
    CO_REQUIRE(exec && descent, "exec or descent is null");
    CO_TRY(check_average(y));
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(exp_avg && anchor && local_update && params, "exp_avg, anchor, local_update or params is null");
    CO_TRY(check_update(exp_avg_sq, params, count, y->numel));
    const Descent with(*descent);
    return with_variance(*exp_avg_sq, [&](auto v) {
        return run(SyncParameters<decltype(v)>{Average(*y), exp_avg, anchor, v, local_update, lr_sum, with.decay,
                                               with.bound, with.denominator},
                   RunsOf(params, nullptr, y->numel), count, Place(*exec));
    });
}

int32_t co_lamb_apply(const float* exp_avg, const co_variance* exp_avg_sq, const co_segment* params, int64_t count,
                      int64_t numel, const float* rates, const co_lamb_options* options, const co_exec* exec) {
    CO_REQUIRE(exec && options, "exec or options is null");
    CO_REQUIRE(numel >= 0, "numel < 0");
    if (numel == 0) return CO_OK;
    CO_REQUIRE(exp_avg && params && rates, "exp_avg, params or rates is null");
    CO_TRY(check_update(exp_avg_sq, params, count, numel));
    return with_variance(*exp_avg_sq, [&](auto v) {
        return run(LambApply<decltype(v)>{exp_avg, v, rates, options->weight_decay, options->bound,
                                          Denominator{options->eps, options->eps_inside_sqrt != 0}},
                   RunsOf(params, nullptr, numel), count, Place(*exec));
    });
}
