// SPDX-License-Identifier: Apache-2.0
// An attribution as HDF5 (kind "attribution"). Below a group for each layer:
//   tiles/SITE/{signed_mean,rms,value_rms,max_abs,count,nonfinite}   over (head, q_tile, k_tile): local error
//   rows/{p_max,repeated_max,zero_sum,zero_sum_relative,delta_error} over (head, row)
//   outputs/OUTPUT/{rel_error,error_norm,signed_bias,…}              over (source): the plan, its floor, observed kernels
//   outputs/OUTPUT/{type,source_level,at_level}                      over (source): its type and what a mark says of it
//   outputs/OUTPUT/{truth_norm,truth_bound,level,unexplained}        one number each
//   counterfactual/{alone,repaired,share,moved_squared,interaction,…} over (site, output)
//   corrections/{rel_error,signed_bias,level,at_level,…}             over (correction, output)
// with coordinates site, output, correction, source in each group that uses them, since xarray reads one group at a time.
// Errors and norms have NAME_mantissa and NAME_exponent2 beside them, for values that a double cannot hold.
#pragma once

#include <string>

#include <faultline/attribution/attribution.hpp>
#include <faultline/record/record_file.hpp>

namespace faultline {

/// Into a file that is open; commit() is the caller's. WorkError when the disk refuses.
void write(const Attribution& attribution, RecordFile& file);
/// The same in parts, for layers that are written when they are there: the head before the first, the end after the last.
void write_head(const Attribution& attribution, RecordFile& file);
void write_layer(const Attribution& attribution, std::size_t layer, RecordFile& file);
void write_end(const Attribution& attribution, RecordFile& file);
/// A whole file, with a manifest that has no command line.
void write(const Attribution& attribution, const std::string& path);

}  // namespace faultline
