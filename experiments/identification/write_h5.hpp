// SPDX-License-Identifier: Apache-2.0
// An identification as HDF5 (kind "identification"): all that the table and its --full print. Below a group for each kernel,
// named as it is (where it has layers of several head sizes or masks: NAME, NAME_2, …), with attributes for what it is:
//   candidates/{equal,within_one_ulp,total}    over (plan, output): elements; output: o, dq, dk, dv, all of them, lse
//   candidates/near_tie                        over (plan)
//   found/{equal,within_one_ulp,total}         over (part, output): the plan found on all elements, those searched, held out
//   changes/{from,to}                          over (field): from the nearest candidate to the plan found
//   trials/{rule,from,to,won,lost,z}           over (trial), equal over (trial, output): each change tried on the plan found
//   steps/{rule,level,won,lost,held_out_won,held_out_lost,made,left_out}  over (step): what the search found on its way
//   sites/{told,silent,exact_won,exact_lost,could_explain,told_from,better} over (site)
// A rule is a word: schedule, format, rounding, accumulation, exact, or several ("format, schedule"); the level of a step is
// how many changes it is of, 1 or 2.
#pragma once

#include <faultline/identification/identify.hpp>
#include <faultline/record/record_file.hpp>

namespace faultline {

/// Into a file that is open; commit() is the caller's. WorkError when the disk refuses.
void write(const Identification& identification, RecordFile& file);

}  // namespace faultline
