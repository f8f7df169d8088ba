// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/match.hpp>

#include <bit>
#include <cmath>

#include <faultline/attribution/same_element.hpp>

namespace faultline {

void Match::add(const Match& other) {
    equal += other.equal;
    within_one_ulp += other.within_one_ulp;
    total += other.total;
}

Match OutputMatches::all() const {
    Match sum;
    for (const Match& output : outputs) sum.add(output);
    return sum;
}

void OutputMatches::add(const OutputMatches& other) {
    for (std::size_t o = 0; o < outputs.size(); ++o) outputs[o].add(other.outputs[o]);
    lse.add(other.lse);
}

namespace identification {
namespace {

struct Comparison {
    attribution::SameElement same;
    Match match;
    bool operator()(double ours, double theirs) {
        const auto [equal, near] = same.of_stored(ours, theirs);
        ++match.total;
        match.equal += equal;
        match.within_one_ulp += near;
        return equal;
    }
};

}  // namespace

OutputMatches compare(const Unit& unit, const attribution::RunOutputs& run, const ObservedKernel& kernel,
                      EqualFlags* flags) {
    OutputMatches matches;
    const attribution::Group& group = unit.group;
    const auto query_heads = static_cast<std::ptrdiff_t>(group.query_heads());
    for (const Output output : all_outputs) {
        const std::vector<Matrix>& ours = run[output];
        const auto& observed = kernel[output];
        if (!observed || ours.empty()) continue;
        Comparison comparison{attribution::SameElement(observed->dtype), {}};
        const bool per_query_head = output == Output::o || output == Output::dq;
        std::vector<std::uint64_t>* words = flags == nullptr ? nullptr : &(*flags)[static_cast<std::size_t>(output)];
        std::vector<double> row;
        for (std::size_t i = 0; i < ours.size(); ++i) {
            const std::ptrdiff_t head =
                per_query_head ? group.kv_head * query_heads + static_cast<std::ptrdiff_t>(i) : group.kv_head;
            const MatrixView<const double> theirs = (*observed)(group.batch, head);
            const std::ptrdiff_t step = unit.rows == Rows::all ? 1 : 2;
            for (std::ptrdiff_t r = unit.rows == Rows::odd ? 1 : 0; r < theirs.rows; r += step) {
                const double* from = ours[i].view().row(r);
                row.assign(from, from + theirs.cols);
                comparison.same.store(row);
                for (std::ptrdiff_t c = 0; c < theirs.cols; ++c) {
                    const std::size_t bit = comparison.match.total % 64;
                    const bool equal = comparison(row[static_cast<std::size_t>(c)], theirs(r, c));
                    if (words == nullptr) continue;
                    if (bit == 0) words->push_back(0);
                    words->back() |= static_cast<std::uint64_t>(equal) << bit;
                }
            }
        }
        matches.outputs[static_cast<std::size_t>(output)] = comparison.match;
    }
    if (kernel.lse && !run.lse.empty()) {
        // +inf and -inf both stand for a row that sees no key.
        Comparison comparison{attribution::SameElement(kernel.lse->dtype), {}};
        std::vector<double> lse;
        for (std::size_t i = 0; i < run.lse.size(); ++i) {
            const MatrixView<const double> theirs =
                (*kernel.lse)(group.batch, group.kv_head * query_heads + static_cast<std::ptrdiff_t>(i));
            lse = run.lse[i].values;
            comparison.same.store(lse);
            for (std::ptrdiff_t r = 0; r < theirs.rows; ++r)
                if (std::isfinite(theirs(r, 0)) && std::isfinite(run.lse[i](r, 0)))
                    comparison(lse[static_cast<std::size_t>(r)], theirs(r, 0));
        }
        matches.lse = comparison.match;
    }
    return matches;
}

double Flips::z() const {
    if (none()) return 0;
    return (static_cast<double>(won) - static_cast<double>(lost)) / std::sqrt(static_cast<double>(won + lost));
}

Flips flips(const EqualFlags& before, const EqualFlags& after) {
    Flips sum;
    for (std::size_t o = 0; o < before.size(); ++o)
        for (std::size_t i = 0; i < before[o].size(); ++i) {
            sum.won += static_cast<std::size_t>(std::popcount(~before[o][i] & after[o][i]));
            sum.lost += static_cast<std::size_t>(std::popcount(before[o][i] & ~after[o][i]));
        }
    return sum;
}

}  // namespace identification
}  // namespace faultline
