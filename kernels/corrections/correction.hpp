// SPDX-License-Identifier: Apache-2.0
// Corrections: named changes of a plan that repair a gradient, to be compared with one another. A correction is written
//   name[:argument[,argument…]][+name[:…]…]      "stable_max:7,1e-3"   "o_fp32_delta+zero_sum_uniform"
// and is data: applied to a plan it gives a plan, whose differences (plan/difference.hpp) say what it did.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/plan/plan.hpp>
#include <faultline/tensor/matrix.hpp>

namespace faultline {

/// What the arguments after the colon are.
enum class Arguments : unsigned char {
    none,
    numbers,  ///< parameters in order, each with a default; fewer may be given
    sites,    ///< one or more sites
    layers,   ///< layers in which the correction acts; none given: in all
};

/// A numeric parameter of a correction.
struct Parameter {
    std::string_view name;
    double standard;            ///< its value where none is given
    double minimum;             ///< exclusive
    std::string_view expected;  ///< what a value must be
};

/// One argument list as read.
struct CorrectionArguments {
    std::vector<double> numbers;  ///< one for each parameter
    std::vector<Site> sites;
    std::vector<std::string> layers;  ///< empty: all
};

/// A kind of correction: what `faultline attribute --help` lists.
struct CorrectionInfo {
    std::string_view name;
    std::string_view description;  ///< one line: what it does
    std::string_view source;       ///< where it is proposed
    std::string_view topic;        ///< what it decides on: two corrections of one topic exclude each other
    Arguments arguments = Arguments::none;
    std::vector<Parameter> parameters{};
    bool changes_function = false;  ///< the exact result is another one: truth must be computed on transform_inputs
    std::function<std::string(const RoundingPlan&)>
        problem{};  ///< why the plan cannot take it, or empty; may be missing
    std::function<void(RoundingPlan&, const CorrectionArguments&)> change;  ///< the plan, in place
};

/// All corrections by name, in the order in which they are listed.
[[nodiscard]] std::span<const CorrectionInfo> corrections();

struct CorrectionStep {
    const CorrectionInfo* info;  ///< into corrections()
    CorrectionArguments arguments;
};

/// One or several corrections, applied together in order.
struct Correction {
    std::string name;  ///< as it was written, without spaces
    std::vector<CorrectionStep> steps;

    /// Whether the exact result is another one.
    [[nodiscard]] bool changes_function() const;
    /// The layers that arguments name, without repetition; a caller checks that they exist.
    [[nodiscard]] std::vector<std::string> layers() const;
};

/// Throws RequestError: one sentence with the correction, the part at fault and what was expected.
[[nodiscard]] Correction parse_correction(std::string_view text);

/// The plan with the correction in this layer; its name is "PLAN+CORRECTION". Steps that are restricted to other layers
/// do nothing. Throws RequestError where the plan cannot take it, e.g. stochastic rounding at a site that does not round.
[[nodiscard]] RoundingPlan apply(const Correction& correction, const RoundingPlan& plan, std::string_view layer = {});

/// The corrections that are compared where none is asked for: each by itself with its standard arguments, stochastic
/// rounding at each of ds_cast and o_cast, and the pairs that repair both sources of the zero-sum violation; without those
/// that the plan cannot take, that change nothing in it or that change the function.
[[nodiscard]] std::vector<Correction> standard_corrections(const RoundingPlan& plan);

/// Whether the correction gives other results than the plan alone in some layer.
[[nodiscard]] bool changes_plan(const Correction& correction, const RoundingPlan& plan);

/// For a correction that changes the function: q [n_q, d] and k [n_k, d] as attention then receives them, each row over
/// its root mean square, rounded to the formats in which the model stores them. A row of zeros stays. Truth and kernels are
/// given the results; dq and dk are gradients with respect to them. Otherwise nothing happens.
void transform_inputs(const Correction& correction, Matrix& q, Matrix& k, const Format& q_format,
                      const Format& k_format);

}  // namespace faultline
