// SPDX-License-Identifier: Apache-2.0
// The vectors of a report by name, for checkpoints: those that are NaN where not due come back as they were.
#pragma once

#include <faultline/gpt/hooks.hpp>

namespace faultline::gpt {

/// f(name, vector) of each; Report: StepReport or a const one.
template <class Report, class F>
void for_vectors_of(Report& r, F&& f) {
    f("max_logit", r.max_logit);
    f("qk_rms", r.qk_rms);
    f("sigma_q", r.sigma_q);
    f("sigma_k", r.sigma_k);
    f("singular_q", r.singular_q);
    f("singular_k", r.singular_k);
    f("singular_qk", r.singular_qk);
    f("zero_sum", r.zero_sum);
    f("zero_sum_abs", r.zero_sum_abs);
    f("zero_sum_total", r.zero_sum_total);
    f("saturated", r.saturated);
    f("entropy", r.entropy);
}

}  // namespace faultline::gpt
