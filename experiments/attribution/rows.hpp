// SPDX-License-Identifier: Apache-2.0
// Row statistics of a layer: saturation of the true softmax; repeated maxima, zero sum and delta error of the plan.
#pragma once

#include <vector>

#include <faultline/attribution/attribution.hpp>
#include <faultline/attribution/group_run.hpp>

namespace faultline::attribution {

/// Appends the rows of a group's query heads.
void append_rows(const Group& group, const GroupTruth& truth, const std::vector<RecordedRows>& recorded,
                 RowStatistics& rows);
/// Fills the fractions from the rows.
void summarize(RowStatistics& rows);

/// The inputs of a group changed by a correction that changes the function, with the storage that the group's views need.
struct TransformedGroup {
    std::vector<Matrix> q;
    Matrix k;
    Group group;
    /// Formats: those in which the model stores q and k, rounded to after the change.
    TransformedGroup(const Group& original, const Correction& correction, const Format& q_format,
                     const Format& k_format);
    TransformedGroup(const TransformedGroup&) = delete;  // the group views the matrices beside it
};

}  // namespace faultline::attribution
