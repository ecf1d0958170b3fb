// Element by element, in one pass: decompress, combine, and what the optimizers do with the average.
#include "message.cuh"

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

struct Combine {
    const float *x, *factors;
    Real alpha, beta;
    bool add;
    float* out;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        RawQuad g = {};
        if (run.grad) g = run.load_grad(i, span);
        Quad z = x ? load(x + i, span) * alpha : same(0.0f);
        if (run.grad) z = z + run.grad_of(g) * beta;
        if (factors) z = z * Real(factors[run.index]);
        if (add) z = z + load(out + i, span);
        store(out + i, z, span);
    }
};

struct ApplyAdam {
    Average y;
    float* exp_avg;
    const float *exp_avg_sq, *corrections;
    Real beta;
    Descent descent;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        RawQuad p = {};
        Quad v = same(0.0f), old = v;
        if (run.param) {
            v = load(exp_avg_sq + i, span);
            p = run.load_param(i, span);
        }
        const bool lerp = beta.value != 1.0f;
        if (lerp) old = load(exp_avg + i, span);
        Quad m = y.at(i, span);
        if (lerp) m = old + (m - old) * beta;
        if (run.still) m = same(0.0f);
        store(exp_avg + i, m, span);
        if (!run.param) return;
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

struct LocalStep {
    float* exp_avg;
    const float* exp_avg_sq;
    float* local_update;
    Real alpha, beta;
    bool with_grads;
    Descent descent;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        RawQuad g = {}, p = {};
        Quad m = load(exp_avg + i, span), v = same(0.0f);
        const Quad u = load(local_update + i, span);
        if (run.grad) g = run.load_grad(i, span);
        if (run.param) {
            v = load(exp_avg_sq + i, span);
            p = run.load_param(i, span);
        }
        if (with_grads) {
            m = m * alpha;
            if (run.grad) m = m + run.grad_of(g) * beta;
            store(exp_avg + i, m, span);
        }
        store(local_update + i, u + m * descent.lr, span);
        if (run.param) descent.move(run, i, span, run.param_of(p), m / descent.denominator.of(v));
    }
};

struct SyncParameters {
    Average y;
    float *exp_avg, *anchor;
    const float* exp_avg_sq;
    float* local_update;
    Real lr_sum, decay, bound;
    Denominator denominator;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        const Quad value = y.at(i, span);
        Quad v = same(0.0f), own = v;
        if (run.param) {
            v = load(exp_avg_sq + i, span);
            own = load(anchor + i, span);
        }
        store(exp_avg + i, run.still ? same(0.0f) : value / lr_sum, span);
        store(local_update + i, same(0.0f), span);
        if (!run.param) return;
        own = own * decay - (run.still ? same(0.0f) : bounded(value / denominator.of(v), bound));
        store(anchor + i, own, span);
        run.store_param(i, own, span);
    }
};

struct LambApply {
    const float *exp_avg, *exp_avg_sq, *rates;
    Real weight_decay;
    Denominator denominator;

    __device__ void operator()(const Run& run, int64_t i, Span span) const {
        if (!run.param) return;
        const RawQuad raw = run.load_param(i, span);
        Quad update = same(0.0f);
        if (!run.still) {
            const Quad m = load(exp_avg + i, span), v = load(exp_avg_sq + i, span);
            update = m / denominator.of(v);
        }
        const Quad p = run.param_of(raw);
        if (weight_decay.value != 0.0f) update = update + p * weight_decay;
        run.store_param(i, p - update * Real(rates[run.index]), span);
    }
};

}  // namespace

co_status combine(const co_combination& z, float* out, int64_t numel, bool add, const Place& place) {
    return run(Combine{z.x, z.factors, z.alpha, z.beta, add, out}, RunsOf(nullptr, z.grads, numel), z.count, place);
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

int32_t co_combine(const co_combination* z, float* out, int64_t numel, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_combination(z, numel));
    if (numel == 0) return CO_OK;
    CO_REQUIRE(out, "out is null");
    return combine(*z, out, numel, false, Place(*exec));
}

int32_t co_apply_adam(const co_average* y, float* exp_avg, const float* exp_avg_sq, const co_segment* params,
                      int64_t count, const float* corrections, float beta, const co_descent* descent,
                      const co_exec* exec) {
    CO_REQUIRE(exec && descent, "exec or descent is null");
    CO_TRY(check_average(y));
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(exp_avg && exp_avg_sq && params, "exp_avg, exp_avg_sq or params is null");
    CO_TRY(check_segments(params, count, y->numel, "params"));
    return run(ApplyAdam{Average(*y), exp_avg, exp_avg_sq, corrections, beta, Descent(*descent)},
               RunsOf(params, nullptr, y->numel), count, Place(*exec));
}

int32_t co_local_step(float* exp_avg, const float* exp_avg_sq, float* local_update, const co_segment* grads,
                      const co_segment* params, int64_t count, int64_t numel, float alpha, float beta,
                      const co_descent* descent, const co_exec* exec) {
    CO_REQUIRE(exec && descent, "exec or descent is null");
    CO_REQUIRE(numel >= 0, "numel < 0");
    if (numel == 0) return CO_OK;
    CO_REQUIRE(exp_avg && exp_avg_sq && local_update && params, "exp_avg, exp_avg_sq, local_update or params is null");
    CO_TRY(check_segments(params, count, numel, "params"));
    if (grads) CO_TRY(check_segments(grads, count, numel, "grads"));
    for (int64_t k = 0; grads && k < count; ++k) {
        CO_REQUIRE(grads[k].numel == params[k].numel, "grads and params are cut at different places");
    }
    return run(LocalStep{exp_avg, exp_avg_sq, local_update, alpha, beta, grads != nullptr, Descent(*descent)},
               RunsOf(params, grads, numel), count, Place(*exec));
}

int32_t co_sync_parameters(const co_average* y, float* exp_avg, float* anchor, const float* exp_avg_sq,
                           float* local_update, const co_segment* params, int64_t count, float lr_sum,
                           const co_descent* descent, const co_exec* exec) {
    CO_REQUIRE(exec && descent, "exec or descent is null");
    CO_TRY(check_average(y));
    if (y->numel == 0) return CO_OK;
    CO_REQUIRE(exp_avg && anchor && exp_avg_sq && local_update && params,
               "exp_avg, anchor, exp_avg_sq, local_update or params is null");
    CO_TRY(check_segments(params, count, y->numel, "params"));
    const Descent with(*descent);
    return run(SyncParameters{Average(*y), exp_avg, anchor, exp_avg_sq, local_update, lr_sum, with.decay,
                              with.bound, with.denominator},
               RunsOf(params, nullptr, y->numel), count, Place(*exec));
}

int32_t co_lamb_apply(const float* exp_avg, const float* exp_avg_sq, const co_segment* params, int64_t count,
                      int64_t numel, const float* rates, const co_lamb_options* options, const co_exec* exec) {
    CO_REQUIRE(exec && options, "exec or options is null");
    CO_REQUIRE(numel >= 0, "numel < 0");
    if (numel == 0) return CO_OK;
    CO_REQUIRE(exp_avg && exp_avg_sq && params && rates, "exp_avg, exp_avg_sq, params or rates is null");
    CO_TRY(check_segments(params, count, numel, "params"));
    return run(LambApply{exp_avg, exp_avg_sq, rates, options->weight_decay,
                         Denominator{options->eps, options->eps_inside_sqrt != 0}},
               RunsOf(params, nullptr, numel), count, Place(*exec));
}
