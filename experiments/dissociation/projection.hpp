// SPDX-License-Identifier: Apache-2.0
// Taking something out of an update: the part along a weight's leading singular directions, or as much energy somewhere
// else. After the abstract of arXiv 2608.02091 ("every update projected off the current leading 3 singular directions of
// the QK weights; removing equal energy elsewhere"); what is written here is our reading, since its body is not known.
#pragma once

#include <cstdint>
#include <string_view>

#include <Eigen/Core>

#include <faultline/gpt/removed_energy.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {

/// What is removed in its place, in a control.
enum class Removal : unsigned char {
    leading,    ///< the part itself
    elsewhere,  ///< as much energy from directions orthogonal to all leading ones: random ones, a new draw in each step,
                ///< whole components one after another, and of the last as much as is missing
    shrink,     ///< as much energy by making the whole update smaller
    overshoot,  ///< the component along k random orthogonal directions, times what gives it the norm of the part. This
                ///< adds energy to the update where that component is smaller than the part, as it nearly always is: it
                ///< reverses the component. Kept for comparison: it is what "a component of the
                ///< same norm" says when taken by the letter.
};

[[nodiscard]] std::string_view name(Sides sides);
[[nodiscard]] std::string_view name(Removal removal);

/// The part of D along U and V.
[[nodiscard]] Eigen::MatrixXd part_along(const Eigen::MatrixXd& d, const Eigen::MatrixXd& u, const Eigen::MatrixXd& v,
                                         Sides sides);

/// Changes D in place. `stream` names the random directions of `elsewhere` and `overshoot`.
RemovedEnergy remove(Eigen::MatrixXd& d, const Eigen::MatrixXd& u, const Eigen::MatrixXd& v, Sides sides,
                     Removal removal, const RandomStream& stream);

}  // namespace faultline
