/* What the optimizers do with the average. */
#pragma once
#include "sources.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

constexpr int64_t kParamsAhead = 2048; /* elements */

struct Denominator {
    Vec eps;
    bool inside;
    Denominator(float e, int32_t eps_inside_sqrt) : eps(set1(e)), inside(eps_inside_sqrt != 0) {}
    Vec operator()(Vec v) const { return inside ? square_root(v + eps) : square_root(v) + eps; }
    /* That of variances in 8 bits. */
    Vec operator()(const uint8_t *codes, int32_t top) const {
        return inside ? square_root(decode_variance(codes, top) + eps) : decode_root(codes, top) + eps;
    }
};

struct Bound {
    Vec low, high;
    explicit Bound(float bound) : low(set1(-bound)), high(set1(bound)) {}
    Vec operator()(Vec direction) const { return bounded(direction, low, high); }
};

/* A parameter's part of a tile, as each_part hands it out. */
struct PartOfTile {
    const co_segment &segment;
    void *param;   /* its first element here, or NULL */
    int64_t begin; /* where it lies in the bucket */
    int64_t n;
    bool still() const { return (segment.flags & CO_STILL) != 0; }
};

template <class Body>
inline void each_part(const Segments &params, int64_t begin, int64_t end, const Body &body) {
    params.each(begin, end, [&](const co_segment &segment, int64_t offset, int64_t start, int64_t n) {
        void *param = segment.data == nullptr ? nullptr : element(segment.data, segment.dtype, offset);
        body(PartOfTile{segment, param, start, n});
    });
}

/* v of compressopt.h. */
struct Variance {
    const co_variance &v;
    explicit Variance(const co_variance *variance) : v(*variance) {}
    int64_t bytes() const { return v.codes == nullptr ? 4 : 1; }

    /* use(value), value(i, lanes) being of(v) of the elements of a part from i on; of takes values, or codes and a top. */
    template <class Of, class Use>
    void each(const PartOfTile &part, const Of &of, const Use &use) const {
        if (v.codes == nullptr) {
            const float *values = v.values + part.begin;
            use([values, of](int64_t i, auto lanes) { return of(lanes.get(values + i)); });
            return;
        }
        const uint8_t *codes = v.codes + part.begin;
        int32_t top = v.tops[part.segment.index];
        use([codes, top, of](int64_t i, auto lanes) {
            uint8_t few[kLanes];
            return of(sixteen(codes + i, lanes, few), top);
        });
    }

  private:
    static const uint8_t *sixteen(const uint8_t *codes, Full, uint8_t *) { return codes; }
    static const uint8_t *sixteen(const uint8_t *codes, Part part, uint8_t *few) {
        memset(few, kZeroCode, kLanes);
        memcpy(few, codes, static_cast<size_t>(part.n));
        return few;
    }
};

/* The denominator of v / by. */
struct Corrected {
    Denominator denominator;
    Vec by;
    Vec operator()(Vec v) const { return denominator(v / by); }
    Vec operator()(const uint8_t *codes, int32_t top) const { return denominator(decode_variance(codes, top) / by); }
};

/* p <- p * decay - lr * direction(i, lanes) */
template <class Direction>
inline void descend(const PartOfTile &part, const co_descent &descent, const Direction &direction) {
    if (part.param == nullptr) return;
    Vec decay = set1(descent.decay), lr = set1(descent.lr);
    with_dtype(part.segment.dtype, [&](auto type) {
        auto *p = static_cast<typename decltype(type)::type *>(part.param);
        each_vector(part.n, [=](int64_t i, auto lanes) {
            prefetch_far(p + i + kParamsAhead);
            lanes.put(p + i, lanes.get(p + i) * decay - lr * direction(i, lanes));
        });
    });
}

/* The same with m(i, lanes) / denominator(v), bounded. m is ignored where the tensor keeps still. */
template <class Momentum>
inline void descend(const PartOfTile &part, const co_descent &descent, const Momentum &m, const Variance &v,
                    const float *corrections) {
    if (part.param == nullptr) return;
    Denominator denominator(descent.eps, descent.eps_inside_sqrt);
    Bound bound(descent.bound);
    if (part.still() || (corrections != nullptr && __builtin_isinf(corrections[2 * part.segment.index]))) {
        descend(part, descent, [](int64_t, auto) { return set1(0.0f); });
    } else if (corrections == nullptr) {
        v.each(part, denominator, [&](const auto &below) {
            descend(part, descent, [=](int64_t i, auto lanes) { return bound(m(i, lanes) / below(i, lanes)); });
        });
    } else {
        Vec first = set1(corrections[2 * part.segment.index]), second = set1(corrections[2 * part.segment.index + 1]);
        v.each(part, Corrected{denominator, second}, [&](const auto &below) {
            descend(part, descent,
                    [=](int64_t i, auto lanes) { return bound(m(i, lanes) / first / below(i, lanes)); });
        });
    }
}

/* m <- y, or m + beta (y - m), or 0 where the tensor keeps still. */
inline void update_momentum(float *m, const float *y, int64_t n, float beta, bool still, bool past_caches) {
    if (still) {
        memset(m, 0, static_cast<size_t>(n) * 4);
    } else if (beta != 1.0f) {
        Vec b = set1(beta);
        each_vector(n, [&](int64_t i, auto lanes) {
            Vec old = lanes.get(m + i);
            lanes.put(m + i, old + b * (lanes.get(y + i) - old));
        });
    } else if (past_caches) {
        stream_copy(m, y, n);
    } else if (m != y) {
        each_vector(n, [&](int64_t i, auto lanes) { lanes.put(m + i, lanes.get(y + i)); });
    }
}

int32_t apply_adam(const co_average *average, float *exp_avg, const co_variance *exp_avg_sq, const co_segment *params,
                   int64_t count, const float *corrections, float beta, const co_descent *descent,
                   const co_exec *exec) {
    Segments segments(params, count);
    if (segments.missing()) return out_of_memory();
    Average y(*average);
    Variance variance(exp_avg_sq);
    bool past_caches = 4 * average->numel >= kStreamBytes && average->values != exp_avg;
    int64_t bytes = average->numel * (8 + (exp_avg == nullptr ? 0 : 4) + variance.bytes() + y.bytes());
    parallel_tiles(exec, bytes, average->numel, [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[kTile];
        each_part(segments, begin, end, [&](const PartOfTile &part) {
            if (exp_avg == nullptr && average->messages != nullptr && part.begin % 8 == 0) {
                Average::Run same = y.run_from(part.begin);
                if (same.n >= part.n) { /* decoded in registers */
                    descend(part, *descent, SignedScale{Scale(same.scale), same.signs}, variance, corrections);
                    return;
                }
            }
            int64_t before = part.begin % 8;
            const float *m = y.read(part.begin - before, part.begin + part.n, scratch) + before;
            if (exp_avg != nullptr) {
                float *own = exp_avg + part.begin;
                update_momentum(own, m, part.n, beta, part.still(), past_caches);
                if (beta != 1.0f) m = own;
            }
            descend(part, *descent, Lying{m}, variance, corrections);
        });
    });
    return CO_OK;
}

int32_t local_step(float *exp_avg, const co_variance *exp_avg_sq, float *local_update, const co_segment *grads,
                   const co_segment *params, int64_t count, int64_t numel, float alpha, float beta,
                   const co_descent *descent, const co_exec *exec) {
    co_combination z{exp_avg, nullptr, grads, count, nullptr, alpha, beta};
    Combination momentum(z);
    Segments segments(params, count);
    if (momentum.missing() || segments.missing()) return out_of_memory();
    Variance variance(exp_avg_sq);
    Vec lr = set1(descent->lr);
    parallel_tiles(exec, numel * (24 + variance.bytes()), numel, [&](int64_t begin, int64_t end) {
        if (grads != nullptr) momentum.write(begin, end, exp_avg + begin, false);
        each_part(segments, begin, end, [&](const PartOfTile &part) {
            descend(part, *descent, Lying{exp_avg + part.begin}, variance, nullptr);
        });
        const float *m = exp_avg + begin;
        float *sum = local_update + begin;
        each_vector(end - begin,
                    [&](int64_t i, auto lanes) { lanes.put(sum + i, lanes.get(sum + i) + lr * lanes.get(m + i)); });
    });
    return CO_OK;
}

int32_t sync_parameters(const co_average *average, float *exp_avg, float *anchor, const co_variance *exp_avg_sq,
                        float *local_update, const co_segment *params, int64_t count, float lr_sum,
                        const co_descent *descent, const co_exec *exec) {
    Segments segments(params, count);
    if (segments.missing()) return out_of_memory();
    Average y(*average);
    Denominator denominator(descent->eps, descent->eps_inside_sqrt);
    Bound bound(descent->bound);
    Variance variance(exp_avg_sq);
    Vec decay = set1(descent->decay), rates = set1(lr_sum);
    parallel_tiles(exec, average->numel * (24 + variance.bytes()), average->numel, [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[kTile];
        const float *values = y.read(begin, end, scratch);
        each_part(segments, begin, end, [&](const PartOfTile &part) {
            bool still = part.still();
            const float *mine = values + (part.begin - begin);
            float *m = exp_avg + part.begin, *from = anchor + part.begin;
            each_vector(part.n, [&](int64_t i, auto lanes) {
                lanes.put(m + i, still ? set1(0.0f) : lanes.get(mine + i) / rates);
            });
            if (part.param == nullptr) return;
            with_dtype(part.segment.dtype, [&](auto type) {
                auto *p = static_cast<typename decltype(type)::type *>(part.param);
                variance.each(part, denominator, [&](const auto &below) {
                    each_vector(part.n, [&](int64_t i, auto lanes) {
                        Vec step = still ? set1(0.0f) : bound(lanes.get(mine + i) / below(i, lanes));
                        Vec now = lanes.get(from + i) * decay - step;
                        lanes.put(from + i, now);
                        lanes.put(p + i, now);
                    });
                });
            });
        });
        memset(local_update + begin, 0, static_cast<size_t>(end - begin) * 4); /* may be what values point to */
    });
    return CO_OK;
}

/* ---- LAMB -------------------------------------------------------------------------------------------------------- */

/* What a part of a tensor adds to its sums. */
struct LambSums {
    double direction, update, ratio;
};

inline float greatest(Vec a) {
    float lanes[kLanes];
    store(lanes, a);
    float most = 0.0f;
    for (float x : lanes) most = most < x || x != x ? x : most;
    return most;
}

/* below: the denominators of v, as Variance gives them */
template <class T, class Below>
inline LambSums lamb_part(const PartOfTile &part, const T *p, const float *y, float *m, float *fresh,
                          const Below &below, const Denominator &denominator, float factor,
                          const co_lamb_options &o) {
    Vec beta1 = set1(o.beta1), rest1 = set1(o.one_minus_beta1), beta2 = set1(o.beta2), rest2 = set1(o.one_minus_beta2);
    Vec f = set1(factor), decay = set1(o.weight_decay), zero = set1(0.0f), most = zero;
    bool still = part.still(), decays = p != nullptr && o.weight_decay != 0;
    NormSum directions, updates;
    Bound bound(o.bound);
    each_vector(part.n, [&](int64_t i, auto lanes) {
        Vec now = still ? zero : lanes.get(y + i) / f;
        Vec gradient = (now - beta1 * lanes.get(m + i)) / rest1;
        Vec learnt = beta2 * lanes.get(fresh + i) + rest2 * (gradient * gradient);
        lanes.put(m + i, now);
        lanes.put(fresh + i, learnt);
        Vec frozen = below(i, lanes), direction = still ? zero : bound(now / frozen);
        Vec update = decays ? direction + decay * lanes.get(p + i) : direction;
        Vec ratio = frozen / denominator(learnt);
        directions.add(lanes.only(direction));
        updates.add(lanes.only(update));
        most = nan_or_greater(most, lanes.only(ratio));
    });
    return {directions.total(), updates.total(), still ? 1.0 : static_cast<double>(greatest(most))};
}

int32_t lamb_moments(const co_average *average, float *exp_avg, float *fresh, const co_variance *exp_avg_sq,
                     const co_segment *params, int64_t count, const float *factors, double *sums,
                     const co_lamb_options *options, const co_exec *exec) {
    Segments segments(params, count);
    Array<LambSums, 64> parts(ceil_div(average->numel, kTile) + count); /* of tile t and segment s: t + s */
    if (segments.missing() || parts.data == nullptr) return out_of_memory();
    Average y(*average);
    Variance variance(exp_avg_sq);
    Denominator denominator(options->eps, options->eps_inside_sqrt);
    auto number = [&](int64_t begin, const PartOfTile &part) { return begin / kTile + (&part.segment - params); };
    parallel_tiles(exec, average->numel * (24 + variance.bytes()), average->numel, [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[kTile];
        const float *values = y.read(begin, end, scratch);
        each_part(segments, begin, end, [&](const PartOfTile &part) {
            float factor = factors[part.segment.index];
            with_dtype(part.segment.dtype, [&](auto type) {
                const auto *p = static_cast<const typename decltype(type)::type *>(part.param);
                variance.each(part, denominator, [&](const auto &below) {
                    parts[number(begin, part)] =
                        lamb_part(part, p, values + (part.begin - begin), exp_avg + part.begin, fresh + part.begin,
                                  below, denominator, factor, *options);
                });
            });
        });
    });
    for (int64_t begin = 0; begin < average->numel; begin += kTile) {
        each_part(segments, begin, least(begin + kTile, average->numel), [&](const PartOfTile &part) {
            const LambSums &add = parts[number(begin, part)];
            double *sum = sums + 3 * static_cast<int64_t>(part.segment.index);
            sum[0] += add.direction;
            sum[1] += add.update;
            sum[2] = sum[2] < add.ratio || add.ratio != add.ratio ? add.ratio : sum[2];
        });
    }
    return CO_OK;
}

int32_t lamb_apply(const float *exp_avg, const co_variance *exp_avg_sq, const co_segment *params, int64_t count,
                   int64_t numel, const float *rates, const co_lamb_options *options, const co_exec *exec) {
    Segments segments(params, count);
    if (segments.missing()) return out_of_memory();
    Denominator denominator(options->eps, options->eps_inside_sqrt);
    Variance variance(exp_avg_sq);
    Vec decay = set1(options->weight_decay);
    Bound bound(options->bound);
    parallel_tiles(exec, numel * (12 + variance.bytes()), numel, [&](int64_t begin, int64_t end) {
        each_part(segments, begin, end, [&](const PartOfTile &part) {
            if (part.param == nullptr) return;
            Vec rate = set1(rates[part.segment.index]);
            const float *m = exp_avg + part.begin;
            with_dtype(part.segment.dtype, [&](auto type) {
                auto *p = static_cast<typename decltype(type)::type *>(part.param);
                variance.each(part, denominator, [&](const auto &below) {
                    each_vector(part.n, [&](int64_t i, auto lanes) {
                        Vec old = lanes.get(p + i);
                        Vec direction = part.still() ? set1(0.0f) : bound(lanes.get(m + i) / below(i, lanes));
                        Vec update = options->weight_decay != 0 ? direction + decay * old : direction;
                        lanes.put(p + i, old - rate * update);
                    });
                });
            });
        });
    });
    return CO_OK;
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt
