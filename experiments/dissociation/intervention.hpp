// SPDX-License-Identifier: Apache-2.0
// What is done to the QK route of a run while a fault is at work, as data: one word, read and printed.
//
//   none                                   nothing
//   project:sides=both:k=3                 every update of W_Q and W_K loses its part along their leading 3 directions
//   project:removal=elsewhere:sides=both   the control: the same energy from elsewhere
//   qk_norm                                parameter-free QK normalisation from the start
//   guard:action=qk_norm:monitor=max_logit:threshold=100
//                                          dormant until the monitor crosses; then the action, once and for good
//   qk_clip:tau=100                        W_Q, W_K of a head scaled down where its largest logit passes tau (arXiv 2507.20534)
//   repair:from=500                        the fault ends at that step: correction at the source
//
// The guard's other actions are the placebos (lower_rate, tighter_clip, reset_optimizer, fp32_ffn) and repair, all at the
// trigger at which QK normalisation would come.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <faultline/dissociation/projection.hpp>

namespace faultline {

/// What a guard does when it is triggered.
enum class GuardAction : unsigned char {
    qk_norm,          ///< parameter-free QK normalisation
    qk_clip,          ///< QK-clip with `tau`
    repair,           ///< the fault ends
    lower_rate,       ///< learning rate times `factor`
    tighter_clip,     ///< clip threshold times `factor`
    reset_optimizer,  ///< moments to zero, once
    fp32_ffn,         ///< the feed-forward's products in fp32
};
[[nodiscard]] std::string_view name(GuardAction action);

/// What a guard watches, the largest over layers and heads.
enum class Monitor : unsigned char {
    max_logit,  ///< largest scaled score of the step
    sigma_q,    ///< largest singular value of W_Q, in steps that report it
    grad_norm,  ///< before clipping
    saturated,  ///< fraction of rows with p_max > 1 - 2^-9, in steps that report it
};
[[nodiscard]] std::string_view name(Monitor monitor);

struct Intervention {
    enum class Kind : unsigned char { none, project, qk_norm, guard, qk_clip, repair };
    Kind kind = Kind::none;
    // project
    Sides sides = Sides::both;
    Removal removal = Removal::leading;
    int k = 3;
    // guard
    GuardAction action = GuardAction::qk_norm;
    Monitor monitor = Monitor::max_logit;
    double threshold = 100;  ///< healthy small models reach some 50 (docs/results/dissociation.md); QK-clip has 100 too
    bool continuous = true;  ///< logit scale that keeps the logits' size at the switch, else 1/sqrt(head_dim)
    double factor = 0.1;     ///< lower_rate, tighter_clip
    double tau = 100;        ///< qk_clip; 100 is Kimi K2's
    // repair
    std::int64_t from = 0;

    friend bool operator==(const Intervention&, const Intervention&) = default;
};

/// RequestError says what was expected.
[[nodiscard]] Intervention parse_intervention(std::string_view text);
/// The word that reads back to the same value; defaults are left out.
[[nodiscard]] std::string to_string(const Intervention& intervention);

}  // namespace faultline
