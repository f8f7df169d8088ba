// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <faultline/base/counted.hpp>
#include <faultline/dissociation/report.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

std::string number(double x) {
    if (std::isnan(x)) return "-";
    if (std::abs(x) >= 1e4) return fmt::format("{:.1e}", x);
    return fmt::format("{:.3g}", x);
}

std::string loss_text(double x) { return std::isnan(x) ? "-" : fmt::format("{:.3f}", x); }

/// "2.31", over several seeds "2.31 (2.28 to 2.35)".
template <class Format>
std::string spread_text(const Spread& s, std::size_t runs, Format&& format) {
    if (runs < 2 || std::isnan(s.median)) return format(s.median);
    return fmt::format("{} ({} to {})", format(s.median), format(s.least), format(s.greatest));
}

std::string verdict_text(const Cell& cell) {
    const auto runs = static_cast<int>(cell.runs.size());
    if (runs == 1) return std::string(cell.verdicts.front().text());
    if (cell.runaways() == 0 && cell.losses() == 0) return "healthy";
    std::string out;
    if (cell.runaways() > 0) out += fmt::format("runaway {}/{}", cell.runaways(), runs);
    if (cell.losses() > 0) out += fmt::format("{}loss {}/{}", out.empty() ? "" : ", ", cell.losses(), runs);
    return out;
}

/// What was done in the channel, in words.
std::string done_text(const Cell& cell) {
    const double removed = cell.over([](const RunResult& r) { return r.removed_fraction; }).median;
    const double missing = cell.over([](const RunResult& r) { return r.missing_fraction; }).median;
    std::vector<double> at;
    for (const RunResult* run : cell.runs)
        if (run->triggered_at >= 0) at.push_back(static_cast<double>(run->triggered_at));
    std::string out;
    if (removed != 0) out = fmt::format("{:.0f}% of energy", 100 * removed);
    if (missing > 0.005) out += fmt::format("{}{:.0f}% not found", out.empty() ? "" : ", ", 100 * missing);
    if (cell.intervention.starts_with("guard"))
        out = at.empty() ? "dormant" : fmt::format("at step {:.0f}", spread(at).median);
    return out;
}

using Row = std::vector<std::string>;

std::string aligned(const std::vector<Row>& rows) {
    std::vector<std::size_t> widths;
    for (const Row& row : rows) {
        widths.resize(std::max(widths.size(), row.size()));
        for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    std::string out;
    for (const Row& row : rows) {
        std::string line;
        for (std::size_t i = 0; i < row.size(); ++i)
            line += i < 2 ? fmt::format("{:<{}}  ", row[i], widths[i]) : fmt::format("{:>{}}  ", row[i], widths[i]);
        line.erase(line.find_last_not_of(' ') + 1);
        out += line + "\n";
    }
    return out;
}

Row row_of(const Cell& cell) {
    const std::size_t n = cell.runs.size();
    std::vector<double> first, ratio;
    for (const RunVerdict& v : cell.verdicts) {
        if (v.first_step >= 0) first.push_back(static_cast<double>(v.first_step));
        ratio.push_back(v.sigma_ratio);
    }
    const auto steps = [](double x) { return std::isnan(x) ? std::string("-") : fmt::format("{:.0f}", x); };
    return {"  " + cell.intervention,
            verdict_text(cell),
            steps(spread(first).median),
            spread_text(cell.over([](const RunResult& r) { return r.last_sigma_q(); }), n, number),
            number(spread(ratio).median),
            spread_text(cell.over([](const RunResult& r) { return r.largest_logit(); }), n, number),
            spread_text(cell.over([](const RunResult& r) { return r.train_loss; }), n, loss_text),
            spread_text(cell.over([](const RunResult& r) { return r.validation_loss; }), n, loss_text),
            done_text(cell)};
}

std::string head_of(const RunMatrix& matrix) {
    const gpt::TrainConfig& t = matrix.config.train;
    return fmt::format(
        "{}, width {}, {}, context {}, batch {}, learning rate {} after {}; {}, {}\n\n"
        "runaway  sigma_max(W_Q) above {} times the matched control's, and still so at the last step; since: from which on\n"
        "loss     train loss (mean of the last 50 steps) above {} times the matched control's, or no number\n"
        "control  the same seed, data and intervention without the fault; without intervention where that was not run\n"
        "logit    the largest scaled score of the run\n",
        counted(t.model.layers, "layer", "layers"), t.model.width, counted(t.model.heads, "head", "heads"),
        t.model.context, t.batch, t.schedule.learning_rate, counted(t.schedule.warmup, "step", "steps"),
        counted(t.steps, "step", "steps"),
        counted(static_cast<std::int64_t>(matrix.config.seeds.size()), "seed", "seeds"), matrix.config.rule.sigma_ratio,
        matrix.config.rule.loss_ratio);
}

}  // namespace

std::string table(const RunMatrix& matrix) {
    std::vector<Row> rows{{"", "verdict", "since", "sigma(W_Q)", "x control", "logit", "train", "validation", "done"}};
    std::string source;
    for (const Cell& cell : cells(matrix)) {
        if (cell.source != source) {
            source = cell.source;
            const double rms = cell.over([](const RunResult& r) { return r.injected_rms; }).median;
            const double asked = cell.over([](const RunResult& r) { return r.injected_asked_rms; }).median;
            const double coherence = cell.over([](const RunResult& r) { return r.step_coherence; }).median;
            std::string title = source == "none" ? "no fault" : source;
            if (rms > 0)
                title += fmt::format("   ({:.3g}% of the rms, {:.3g}% asked; sign over steps {:.2f})", 100 * rms,
                                     100 * asked, coherence);
            rows.push_back({});
            rows.push_back({});
            rows.back().push_back(title);
        }
        rows.push_back(row_of(cell));
    }
    // Titles are as long as they like: they are set aside while the columns are measured.
    std::vector<Row> measured = rows;
    for (Row& row : measured)
        if (row.size() == 1) row.clear();
    const std::string text = aligned(measured);
    std::string out = head_of(matrix) + "\n";
    std::size_t at = 0;
    for (const Row& row : rows) {
        const std::size_t end = text.find('\n', at);
        out += (row.size() == 1 ? row.front() : text.substr(at, end - at)) + "\n";
        at = end + 1;
    }
    std::string stopped;
    for (const RunResult& run : matrix.runs)
        if (run.not_finite)
            stopped += fmt::format("{}, {}, seed {}: stopped, {} is not finite\n", run.source, run.intervention,
                                   run.seed, run.not_finite_where);
    if (!stopped.empty()) out += "\n" + stopped;
    if (!matrix.complete()) {
        const auto done =
            std::count_if(matrix.runs.begin(), matrix.runs.end(), [](const RunResult& run) { return run.finished; });
        out += fmt::format("\nnot complete: {} of {} runs are done\n", done, matrix.runs.size());
    }
    return out;
}

}  // namespace faultline
