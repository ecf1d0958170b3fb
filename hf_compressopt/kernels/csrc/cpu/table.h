/* The table of one instruction set's kernels. */
#pragma once
#define CO_PASTE_(a, b) a##b
#define CO_PASTE(a, b) CO_PASTE_(a, b)

namespace compressopt {

const Kernels CO_PASTE(CO_VECTOR, _kernels) = {
    CO_VECTOR::kName,           CO_VECTOR::compress,     CO_VECTOR::average_compress, CO_VECTOR::decompress,
    CO_VECTOR::add_average,     CO_VECTOR::combine,      CO_VECTOR::sum_rows,
    CO_VECTOR::apply_adam,      CO_VECTOR::local_step,   CO_VECTOR::sync_parameters,
    CO_VECTOR::lamb_moments,    CO_VECTOR::lamb_apply,   CO_VECTOR::variance_sums,    CO_VECTOR::refresh_variance,
    CO_VECTOR::adam,            CO_VECTOR::square_sums,
    CO_VECTOR::copy,            CO_VECTOR::compress_integers, CO_VECTOR::average_integers,
    CO_VECTOR::mean_integers,   CO_VECTOR::add_integers,
    CO_VECTOR::decode_integers, CO_VECTOR::any_nan,      CO_VECTOR::sketch,
    CO_VECTOR::change_sizes,    CO_VECTOR::write_changes, CO_VECTOR::apply_changes,
};

}  // namespace compressopt
