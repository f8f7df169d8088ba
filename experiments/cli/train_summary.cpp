// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/train_summary.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <faultline/gpt/trainer.hpp>

namespace faultline::cli {
namespace {

double largest(const std::vector<double>& values) {
    double best = std::nan("");
    for (const double v : values) best = std::isnan(best) || v > best ? v : best;
    return best;
}

nlohmann::json number(double value) { return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(nullptr); }

}  // namespace

std::string step_text(const gpt::StepReport& r) {
    const std::string logit = r.max_logit.empty() ? "" : fmt::format(", max logit {:.3g}", largest(r.max_logit));
    return fmt::format("loss {:.3f}, |grad| {:.2g}{}", r.loss, r.grad_norm, logit);
}

std::string summary(const gpt::Training& trainer, const gpt::RunOutcome& outcome, std::int64_t steps_done, bool json) {
    const gpt::StepReport& r = trainer.report();
    const gpt::TrainConfig& c = trainer.config();
    const double tokens = static_cast<double>(steps_done) * c.batch * c.accumulate * c.model.context;
    const double rate = tokens / std::max(outcome.seconds, 1e-9);
    const auto& failure = trainer.failure();
    constexpr std::array ends{"finished", "interrupted", "not_finite"};
    const char* end = ends[static_cast<std::size_t>(outcome.end)];
    if (json) {
        const bool any = trainer.next_step() > 0;
        const double none = std::nan("");
        nlohmann::json out{{"schema", "faultline.training/1"},
                           {"end", end},
                           {"steps", trainer.next_step()},
                           {"parameters", trainer.parameters()},
                           {"loss", number(any ? r.loss : none)},
                           {"validation_loss", number(any ? r.validation_loss : none)},
                           {"grad_norm", number(any ? r.grad_norm : none)},
                           {"max_logit", number(largest(r.max_logit))},
                           {"sigma_q", number(largest(r.sigma_q))},
                           {"sigma_k", number(largest(r.sigma_k))},
                           {"tokens_per_second", number(rate)}};
        if (const auto times = trainer.spectra_times())
            out["spectra"] = {{"found", times->found},
                              {"seconds_each", number(times->seconds)},
                              {"threads", times->threads},
                              {"seconds_waited", number(times->steps_waited)}};
        if (failure)
            out["first_not_finite"] = {
                {"step", failure->step}, {"site", failure->site}, {"row", failure->row}, {"column", failure->column}};
        return out.dump(2) + "\n";
    }
    // What a run that ended in its first step has not, is not printed as 0.
    if (trainer.next_step() == 0) return fmt::format("0 of {} steps\n", c.steps);
    // A run that is resumed at its end, or beyond it.
    if (steps_done == 0 && !failure)
        return fmt::format("{} steps were done before: nothing is left to do of {}\n", trainer.next_step(), c.steps);
    std::string text = fmt::format("{} of {} steps{}, {:.0f} tokens/s, {:.1f} steps/s\n", trainer.next_step(), c.steps,
                                   outcome.end == gpt::RunEnd::interrupted ? " (interrupted)" : "", rate,
                                   static_cast<double>(steps_done) / std::max(outcome.seconds, 1e-9));
    text += fmt::format("  loss              {:.4f} nat per token\n", r.loss);
    if (std::isfinite(r.validation_loss)) text += fmt::format("  validation loss   {:.4f}\n", r.validation_loss);
    text += fmt::format("  gradient norm     {:.3g}\n", r.grad_norm);
    if (!r.max_logit.empty()) text += fmt::format("  max logit         {:.4g}\n", largest(r.max_logit));
    if (!std::isnan(largest(r.sigma_q)))
        text +=
            fmt::format("  sigma_max         {:.3g} of W_Q, {:.3g} of W_K\n", largest(r.sigma_q), largest(r.sigma_k));
    return text;
}

}  // namespace faultline::cli
