/* The C interface of the native kernels: one header, two libraries.
 *
 * compressopt_cpu   x86-64 and others; AVX-512, AVX2 or portable code, chosen when it is loaded
 * compressopt_cuda  NVIDIA GPUs; pointers are device pointers unless a comment says "host"
 *
 * Both export every function below, under the same name, unless a comment says "CPU only".
 * hf_compressopt/kernels/reference.py is the specification: what a function computes is written there, and the bits are
 * the same, but for sums over many elements (scales, norms), which are within 2 ulp. Every operation on an element is
 * rounded on its own (no fused multiply-add), in the order written here, so that all instruction sets, GPUs and the
 * reference leave the same bits in parameters and states.
 *
 * All counts are 64-bit. Buffers do not overlap unless said. float and int32 pointers are aligned to 4 bytes, messages
 * to 16; nothing else is asked of alignment. A function returns 0, or a code of co_status and writes nothing, and
 * co_last_error() says in words what was wrong. numel == 0 is legal everywhere, and does nothing.
 */
#ifndef COMPRESSOPT_H
#define COMPRESSOPT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define CO_API __declspec(dllexport)
#else
#define CO_API __attribute__((visibility("default")))
#endif

#define CO_ABI_VERSION 13

typedef enum {
    CO_OK = 0,
    CO_BAD_ARGUMENT = 1,   /* a null pointer, a negative count, an unknown dtype, ... */
    CO_NO_DEVICE = 2,      /* no driver, no GPU, or none that this library has code for */
    CO_DEVICE_ERROR = 3,   /* the driver reported an error */
} co_status;

typedef enum { CO_FLOAT32 = 0, CO_BFLOAT16 = 1, CO_FLOAT16 = 2 } co_dtype;

/* CUDA: memory of at least nbytes on the device, aligned to 16 bytes, that nobody else uses until the work is done that the
 * call enqueues; NULL: there is none. Called at most once by a call, on its thread. */
typedef void *(*co_allocate)(int32_t device, int64_t nbytes);

typedef struct {
    int32_t threads; /* CPU: most threads to use, >= 1. A process that was forked starts threads of its own. */
    int32_t device;  /* CUDA: the device of the pointers */
    void *stream;    /* CUDA: a cudaStream_t; the calls only enqueue, and may be captured in a graph. CPU: GOMP_parallel of
                      * the host's OpenMP runtime, on whose threads to work; NULL: on threads of the library's own */
    co_allocate allocate; /* CUDA: where the little memory comes from that some functions need; not used on the CPU */
} co_exec;

/* A run of consecutive elements of one tensor. The segments of a bucket, in order, cover it without gaps. Tables of
 * segments are host memory, and may be reused as soon as the call has returned. */
typedef struct {
    void *data;     /* the first element of the run; NULL as described by each function */
    int64_t numel;
    int32_t dtype;  /* co_dtype */
    int32_t index;  /* which entry of the per-tensor arrays (factors, corrections, rates, sums) is the tensor's */
    int32_t flags;  /* CO_STILL */
    int32_t unused;
} co_segment;

#define CO_STILL 1 /* the tensor has no variance: y counts as 0, m becomes 0, and so is its direction */

/* The averaged bucket as it comes back: W messages, the j-th at messages + j * stride (see kernels/__init__.py), or the
 * values themselves. */
typedef struct {
    const uint8_t *messages; /* NULL: read values */
    const float *values;     /* [numel]; read where messages is NULL */
    int64_t numel;
    int64_t scale_block;     /* a positive multiple of 8; 0: one scale per message */
    int64_t stride;          /* a multiple of 16 */
    int32_t world_size;
    int32_t unused;
} co_average;

/* The errors of numel elements, in one of two forms. One of the pointers is NULL. */
typedef struct {
    float *values;     /* [numel] */
    uint8_t *messages; /* the errors of each of world_size chunks as a message of 8-bit integers, one after another, as
                        * co_compress_integers writes them (see kernels/compact.py); world_size is 1 on a server */
} co_errors;

/* The frozen variance of a bucket, in one of two forms. One of values and codes is NULL. */
typedef struct {
    float *values;         /* [numel]; co_refresh_variance alone writes them, or the codes */
    uint8_t *codes;        /* [numel]: with k = tops[index] - code, v is 2^(k/8), that is float32(2^((k & 7) / 8)) times
                            * 2^(k >> 3), a normal number; 0 where the code is 255 (see kernels/compact.py) */
    const int32_t *tops;   /* [tensors], by the index of the segments; NULL where codes is */
} co_variance;

/* What a rank wants to send of a bucket: z = (alpha x + beta g) * factor, each operation rounded to float32.
 * A term that is left out counts as +0. */
typedef struct {
    const float *x;           /* [numel], or NULL: x is what last stands for */
    const co_average *last;   /* host; messages of numel elements, of which x is the values, or 0 where a segment of
                               * grads has CO_STILL; read where x is NULL; NULL as well: the term is left out */
    const co_segment *grads;  /* host; data == NULL: no gradient, the term is left out; NULL: for the whole bucket */
    int64_t count;            /* segments */
    const float *factors;     /* [tensors], or NULL: no factor */
    float alpha;              /* 1: x itself */
    float beta;               /* 1: g itself */
} co_combination;

/* ---- about the library ------------------------------------------------------------------------------------------- */

CO_API int32_t co_abi_version(void);
/* Host string: "avx512_gfni", "avx512", "avx2", "portable"; of the CUDA library the architectures it has code for, such as
 * "sm_75 sm_80 ... compute_120". */
CO_API const char *co_instruction_set(void);
/* CPU: use one of these that the machine has from now on (for tests). CUDA: CO_BAD_ARGUMENT. */
CO_API int32_t co_use_instruction_set(const char *name);
/* CUDA: whether kernels can run on this device; co_last_error() says why not (no driver; a driver too old, and which is
 * needed; no code for this GPU). CPU: 0. */
CO_API int32_t co_check_device(int32_t device);
/* Host string, of the calling thread's last failure. */
CO_API const char *co_last_error(void);

/* ---- compression ------------------------------------------------------------------------------------------------- */

/* u = z + error; messages <- Q(u), world_size messages one after another, padding included; error <- u - Q(u), for errors
 * in messages rounded to them. scale_block == 0: all messages share the RMS of the whole bucket. */
CO_API int32_t co_compress(const co_combination *z, const co_errors *error, uint8_t *messages, int64_t numel,
                           int64_t scale_block, int32_t world_size, const co_exec *exec);

/* a = (the sum of world_size decompressed messages) * (1 / world_size) + error; out <- Q(a), padding included;
 * error <- a - Q(a). The messages are of one chunk of numel elements, one after another. Groups of four messages are
 * summed, in order, and then the groups' sums, in order: (((m0 + m1) + m2) + m3) + (((m4 + m5) + m6) + m7) + ... */
CO_API int32_t co_average_compress(const uint8_t *messages, const co_errors *error, uint8_t *out, int64_t numel,
                                   int64_t scale_block, int32_t world_size, const co_exec *exec);

/* out <- y. */
CO_API int32_t co_decompress(const co_average *y, float *out, const co_exec *exec);

/* outputs <- outputs * decay + y * scale, each operation rounded to float32, and the result to their dtype; where decay
 * is 0 outputs <- y * scale, and are not read. outputs: data == NULL leaves the output alone. */
CO_API int32_t co_add_average(const co_average *y, const co_segment *outputs, int64_t count, float decay, float scale,
                              const co_exec *exec);

/* out <- z. */
CO_API int32_t co_combine(const co_combination *z, float *out, int64_t numel, const co_exec *exec);

/* out <- (((r0 + r1) + r2) + ...) * factor, of `count` >= 1 rows of numel elements of a co_dtype, one after another; each
 * operation is rounded to float32. */
CO_API int32_t co_sum_rows(const void *rows, int32_t dtype, int64_t count, float *out, int64_t numel, float factor,
                           const co_exec *exec);

/* ---- messages of b-bit integers ---------------------------------------------------------------------------------- */

/* W messages of b-bit integers, the j-th at messages + j * stride (see kernels/messages.py). */
typedef struct {
    const uint8_t *messages;
    int64_t numel;      /* of the bucket */
    int64_t stride;     /* a multiple of 16 */
    int32_t world_size;
    int32_t bits;       /* 4 or 8 */
} co_integers;

/* u = z + error; messages <- Q(u), world_size messages one after another, padding included; new_error <- u - Q(u), unless
 * it is NULL. new_error is of error's form, and may be error. */
CO_API int32_t co_compress_integers(const co_combination *z, const co_errors *error, const co_errors *new_error,
                                    uint8_t *messages, int64_t numel, int32_t bits, int32_t world_size,
                                    const co_exec *exec);

/* a = (the sum of world_size decoded messages, in co_average_compress's order) * (1 / world_size) + error;
 * out <- Q(a), padding included; new_error <- a - Q(a). new_error is of error's form, and may be error. */
CO_API int32_t co_average_integers(const uint8_t *messages, const co_errors *error, const co_errors *new_error,
                                   uint8_t *out, int64_t numel, int32_t bits, int32_t world_size, const co_exec *exec);

/* out <- (the sum of world_size decoded messages, in co_average_compress's order) * factor. */
CO_API int32_t co_mean_integers(const uint8_t *messages, float *out, int64_t numel, int32_t bits, int32_t world_size,
                                float factor, const co_exec *exec);

/* outputs <- outputs * decay + y * scale, as co_add_average. */
CO_API int32_t co_add_integers(const co_integers *y, const co_segment *outputs, int64_t count, float decay, float scale,
                               const co_exec *exec);

/* out <- y. */
CO_API int32_t co_decode_integers(const co_integers *y, float *out, const co_exec *exec);

/* found[0] <- 1 if some block of y is not finite, by its scale alone, else 0; also where y->numel is 0. */
CO_API int32_t co_any_nan(const co_integers *y, uint8_t *found, const co_exec *exec);

/* ---- what the optimizers do with the average --------------------------------------------------------------------- */

typedef struct {
    float lr;
    float decay; /* 1 - lr * weight_decay; exactly 1: p is not multiplied */
    float eps;
    int32_t eps_inside_sqrt; /* denominator(v) = sqrt(v + eps) instead of sqrt(v) + eps */
    float bound; /* > 0; bounded(d) = d > bound ? bound : d < -bound ? -bound : d, so that NaN stays NaN */
} co_descent;

/* m <- y where beta == 1, else m <- m + beta (y - m)   [torch's lerp for beta < 0.5: m + beta * (y - m)]
 * m^ = m / corrections[2 index], v^ = v / corrections[2 index + 1]; corrections == NULL: m and v themselves; a first
 * correction of infinity: the direction is 0.
 * p <- p * decay - lr * bounded(m^ / denominator(v^))
 * params: data == NULL leaves the parameter alone, m is written all the same.
 * exp_avg == NULL, with beta == 1: m is y, and is not written. */
CO_API int32_t co_apply_adam(const co_average *y, float *exp_avg, const co_variance *exp_avg_sq, const co_segment *params,
                             int64_t count, const float *corrections, float beta, const co_descent *descent,
                             const co_exec *exec);

/* 0/1 Adam, one step of one rank alone: m <- alpha m + beta g (z of co_compress without factors; grads == NULL: m stays);
 * p <- p * decay - lr * bounded(m / denominator(v)); local_update <- local_update + lr * m. */
CO_API int32_t co_local_step(float *exp_avg, const co_variance *exp_avg_sq, float *local_update, const co_segment *grads,
                             const co_segment *params, int64_t count, int64_t numel, float alpha, float beta,
                             const co_descent *descent, const co_exec *exec);

/* 0/1 Adam, a sync: m <- y / lr_sum; anchor <- anchor * decay - bounded(y / denominator(v)); p <- anchor;
 * local_update <- 0.
 * decay is descent->decay (the product over the interval), always multiplied; lr is not used.
 * params: data == NULL leaves anchor and parameter alone. */
CO_API int32_t co_sync_parameters(const co_average *y, float *exp_avg, float *anchor, const co_variance *exp_avg_sq,
                                  float *local_update, const co_segment *params, int64_t count, float lr_sum,
                                  const co_descent *descent, const co_exec *exec);

/* 1-bit LAMB, first pass: m' = y / factors[index]; g' = (m' - beta1 m) / (1 - beta1), with one_minus_beta1;
 * fresh <- beta2 fresh + one_minus_beta2 (g' g'); m <- m'; and per tensor, into sums[3 index ...] (double, which the
 * caller sets to 0 before a tensor's first segment; a tensor may be split over several calls):
 *   [0] += sum d^2, [1] += sum (d + weight_decay p)^2, with d = bounded(m' / denominator(v)) as in co_descent,
 *   [2] = max([2], max denominator(v) / denominator(fresh)), with 1 for a tensor that keeps still.
 * params: data == NULL counts as p = 0, and so does every p where weight_decay is 0.
 * Sums are of float32 terms squared in double, in an order that depends on the segments only. */
typedef struct {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay;
    int32_t eps_inside_sqrt;
    float bound; /* > 0 */
} co_lamb_options;
CO_API int32_t co_lamb_moments(const co_average *y, float *exp_avg, float *fresh, const co_variance *exp_avg_sq,
                               const co_segment *params, int64_t count, const float *factors, double *sums,
                               const co_lamb_options *options, const co_exec *exec);

/* 1-bit LAMB, second pass: p <- p - rates[index] * (bounded(m / denominator(v)) + weight_decay p). */
CO_API int32_t co_lamb_apply(const float *exp_avg, const co_variance *exp_avg_sq, const co_segment *params, int64_t count,
                             int64_t numel, const float *rates, const co_lamb_options *options, const co_exec *exec);

/* ---- a refresh of the frozen variance ---------------------------------------------------------------------------- */

/* v' = memory v + rest (g g), each operation rounded to float32; g is the mean gradient of a bucket: what y stands for, or
 * values. The data of a segment is no address here, but the place of its first element in its tensor. */
typedef struct {
    const co_integers *y; /* host; NULL: read values */
    const float *values;  /* [numel]; read where y is NULL */
    int64_t numel;
    float memory, rest;
} co_refresh;

/* First pass: per tensor, into sums[3 index ...] (double, which the caller sets to 0 before a tensor's first segment; a
 * tensor may be split over several calls): [0] += sum v', [1] = max([1], max v'), [2] = max([2], max g g). NaN stays in a
 * maximum. Sums are of float32 terms in double, in an order that depends on the segments and the messages only. */
CO_API int32_t co_variance_sums(const co_refresh *refresh, const co_variance *exp_avg_sq, const co_segment *segments,
                                int64_t count, double *sums, const co_exec *exec);

/* Second pass: v <- max(v', floors[index]), but where this floor is NaN v stays. The codes of exp_avg_sq, of which v' is
 * made as always, become those from tops[index] on, rounded at random. With `word` the place in the tensor / 8, the byte
 * `place % 8` of h = mix(mix((mix(key + G) ^ index) + G) + word G), mix and G = kGolden of sketch_hash.h, chooses one of
 * the [256] factors, and v' times it is rounded to the nearest point, by the first ten bits of its mantissa (see
 * kernels/compact.py). tops, factors: NULL where exp_avg_sq has values. */
CO_API int32_t co_refresh_variance(const co_refresh *refresh, const co_variance *exp_avg_sq, const co_segment *segments,
                                   int64_t count, const float *floors, const int32_t *tops, const float *factors,
                                   uint64_t key, const co_exec *exec);

/* ---- FusedAdam, and norms ---------------------------------------------------------------------------------------- */

typedef struct {
    void *param;      /* updated; where master is given, written only */
    void *grad;       /* read; written back unscaled and clipped where write_grads is set */
    void *exp_avg;    /* float32, or the parameter's dtype */
    void *exp_avg_sq; /* as exp_avg */
    float *master;    /* float32 weights, updated instead of param, or NULL */
    void *copy;       /* gets the new parameter too, or NULL */
    float *step;      /* CPU: host; CUDA: device. Counted up, unless the step is skipped */
    int64_t numel;
    int32_t param_dtype, grad_dtype, moment_dtype, copy_dtype;
} co_adam_tensor;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    const float *lr_pointer;       /* [1], read instead of lr, or NULL */
    const float *grad_scale;       /* [1], gradients are divided by it, or NULL */
    const float *found_inf;        /* [1], not 0: nothing is changed, or NULL */
    const float *clip_factor;      /* [1], gradients are multiplied by it, or NULL */
    int32_t adam_w_mode;           /* 1: decoupled decay (AdamW); 0: L2 (Adam) */
    int32_t bias_correction, maximize, write_grads;
} co_adam_options;

/* Adam or AdamW over many tensors, numbers as torch's: per tensor step += 1; g <- g / grad_scale * clip_factor, negated
 * where maximize; L2: g <- g + weight_decay p; AdamW: p <- p * (1 - lr weight_decay);
 * m <- m + (1 - beta1) (g - m); v <- beta2 v + (1 - beta2) g g;
 * p <- p - (lr / (1 - beta1^step)) m / (sqrt(v) / sqrt(1 - beta2^step) + eps). */
CO_API int32_t co_adam(const co_adam_tensor *tensors, int64_t count, const co_adam_options *options,
                       const co_exec *exec);

/* sums[i] <- the sum of the squares of segment i (double; squares of float32 values are exact in it; not finite where an
 * element is not). Segments need not belong together; data == NULL only where numel == 0. */
CO_API int32_t co_square_sums(const co_segment *segments, int64_t count, double *sums, const co_exec *exec);

/* y <- y + the sketch of the segments (see kernels/reference.py), and squares[0] <- squares[0] + the sum of their squares
 * (double). y has 4096 numbers. The segments, in order, are the elements from offset >= 0 on of a group; data == NULL:
 * these elements count as 0. The bits of y are the same everywhere; the sum is one of doubles in an order that depends on
 * the segments and on the device only. */
CO_API int32_t co_sketch(const co_segment *segments, int64_t count, int64_t offset, uint64_t seed, float *y,
                         double *squares, const co_exec *exec);

/* ---- changes of 16-bit values ------------------------------------------------------------------------------------- */

/* Blocks of 256 elements, and their bytes where they stand for the changes of values (see kernels/changes.py). Values are
 * bit patterns of 16 bits, aligned to 2 bytes; sizes and offsets have an entry per block; payload has no alignment. */

/* sizes <- the bytes of each block. */
CO_API int32_t co_change_sizes(const uint16_t *from, const uint16_t *to, int64_t numel, int16_t *sizes,
                               const co_exec *exec);

/* payload <- the blocks, each from offsets[block] on; sizes are those of co_change_sizes. */
CO_API int32_t co_write_changes(const uint16_t *from, const uint16_t *to, int64_t numel, const int16_t *sizes,
                                const int64_t *offsets, uint8_t *payload, const co_exec *exec);

/* values, which are `from` of co_write_changes, <- `to`. */
CO_API int32_t co_apply_changes(const uint8_t *payload, const int16_t *sizes, const int64_t *offsets, uint16_t *values,
                                int64_t numel, const co_exec *exec);

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* CPU: out <- in, of numel floats, past the caches: for copies that nobody reads soon. CUDA: CO_BAD_ARGUMENT. */
CO_API int32_t co_copy(const float *in, float *out, int64_t numel, const co_exec *exec);

#ifdef __cplusplus
}
#endif
#endif
