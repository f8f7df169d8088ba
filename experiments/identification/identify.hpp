// SPDX-License-Identifier: Apache-2.0
// Which plan is the kernel that left these outputs? Plans are ranked by how many output elements they reproduce bit for
// bit; then the neighbourhood of the best is searched, one change at a time and then pairs of those that help, for a plan
// that reproduces more, until no change helps. A change is believed when it makes more elements equal than chance would
// (McNemar's test on the elements that flip). It is looked for on every other head (of a single head, on every other row) and
// judged on those held out: of some hundred changes the best fits what it was picked on, and what no plan models besides. The
// rest says what the outputs cannot tell.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <faultline/attribution/capture.hpp>
#include <faultline/attribution/plan_origin.hpp>
#include <faultline/cpu/backend.hpp>
#include <faultline/identification/match.hpp>
#include <faultline/identification/neighbourhood.hpp>
#include <faultline/plan/plan.hpp>
#include <faultline/plan/storage.hpp>

namespace faultline {

/// A change counts when it wins more elements than it loses by this many standard deviations of as many coin flips. Some
/// hundred changes are tried a kernel, so that chance passes 4 once in three hundred kernels.
inline constexpr double believed_z = 4;

/// On the elements held out a change carries over from 2 standard deviations on (of chance, 2.3% one-sided) where it is the
/// only one that was tried, or where it loses none and leaves none that differs.
inline constexpr double carried_z = 2;
/// The same where the change is the best of so many: the chance of all of them together is that of one (Bonferroni), 3.6 of
/// 150. The rows of one head are no independent samples, so that what fits those searched fits those held out in part.
[[nodiscard]] double carried_z_of(std::size_t tried);

/// Of unrelated numbers in bf16 some are equal by chance: a plan that has no more elements, or no more of one output, is not
/// the kernel.
inline constexpr double more_than_chance = 0.1;

/// Share of the elements that what no plan models may decide: the order of atomic sums, last bits of library functions
/// (docs/kernels.md; on healthy layers 0.3% of dq and less, 0.1% of all outputs). Plans nearer to each other than that are not
/// told apart, and a change that gains no more is not stated, unless it makes every element equal.
inline constexpr double unmodelled_share = 1e-3;

/// A plan found with fewer of the elements is not the kernel. Of those that are, the one with fewest has 90.3% (math on the
/// collapsed layer of tests/data, whose dq hangs on the order of fp32 sums); of those that are not, on bf16 outputs of a
/// kernel with two rules of its own, about half.
inline constexpr double found_share = 0.8;

/// The same of each output by itself, since three that are right hide one that is not. dq of a collapsed layer hangs on the
/// order of fp32 sums: of the plans that are a kernel of the captures the one with fewest has 61.8% of dq, and 98.9% of any
/// other output (docs/kernels.md).
inline constexpr double found_share_of_dq = 0.6, found_share_of_others = 0.9;
[[nodiscard]] double found_share_of(Output output);

/// A kernel is looked for a rule or two away from a preset: a site's rule, or a field of the schedule. By more a search comes
/// near to a kernel that is none of its plans.
inline constexpr std::size_t most_rules_away = 2;
/// How many rules these differences are: format, rounding and accumulation of one site are one.
[[nodiscard]] std::size_t rules_in(const std::vector<Difference>& changes);

/// Plans whose lse is equal in shares further apart than this are told apart by it: what no plan models decides the last bit
/// of one row in some thousand (docs/kernels.md, the merge of splits).
inline constexpr double told_by_lse = 0.01;
/// How many rows of the lse are a plan's, where that tells plans apart: none of a plan that has fewer than found_share, since half
/// of the rows of an lse that is no plan's are some plan's by chance.
[[nodiscard]] Match telling_lse(const OutputMatches& match);

/// A plan of the ranking.
struct RankedPlan {
    std::string plan;                   ///< its name; of a preset that follows the file, as stored_as() names it
    OutputMatches match;                ///< over all layers
    std::vector<OutputMatches> layers;  ///< parallel to KernelIdentification::layers
};

/// What kind of rule changes: "schedule", "format", "rounding", "accumulation", "exact", several after each other.
[[nodiscard]] std::string rule_type(const std::vector<Difference>& changes);

/// A change that was tried on a plan.
struct Trial {
    std::string field;
    std::vector<Difference> changes;
    OutputMatches match;
    identification::Flips flips;  ///< against the plan that was changed
};

/// One of the two changes of a pair, and what it adds to the other: less than a change by itself has to.
struct IdleChange {
    std::vector<Difference> changes;
    identification::Flips searched, held_out;  ///< of the pair against the other alone
};

/// A change that the search found on the elements that it was given, and what it does to those held out.
struct FoundChange {
    std::vector<Difference> changes;
    identification::Flips searched, held_out;  ///< against the plan before it
    bool carries = false;                      ///< over to the elements held out; else it was not made
    std::optional<Output> spoils{};            ///< an output that is whole before it and not after it: not made either
    bool pair = false;                         ///< two changes, neither of which is idle
    /// Of a pair that carried over as one: the changes in it that were left out. Not made with some: the other alone is no
    /// change that is believed and carries over.
    std::vector<IdleChange> idle{};
};

/// What the outputs say of one site of the identified plan, by the plans tried that differ from it in the rule of this site
/// and in nothing else.
struct SiteEvidence {
    Site site = Site::q_cast;
    bool told = false;                               ///< making it exact loses elements, believably
    identification::Flips exact;                     ///< the site exact, against the identified plan
    std::vector<std::vector<Difference>> told_from;  ///< the other rules tried that lose elements, believably
    /// The rules tried, the exact one among them, that win elements, believably: by no more than what is not modelled may
    /// decide, or not on those held out, since the search did not make them.
    std::vector<std::vector<Difference>> better;
    std::size_t could_explain =
        0;  ///< of the elements that still differ, the most that one change at this site makes equal
    /// Whether no rule that was tried at this site is told from the plan's.
    [[nodiscard]] bool silent() const { return !told && told_from.empty() && better.empty(); }
};

/// One kernel on the layers of one head size. Where the best plan of the ranking is no nearer than chance, nothing is searched:
/// `plan` is that one, and is_near() says so.
struct KernelIdentification {
    std::string kernel;
    std::ptrdiff_t head_dim = 0;
    bool causal = true;
    std::vector<std::string> layers;
    StorageFormats storage;    ///< what the kernel's tensors are, in which presets are ranked
    std::string file_storage;  ///< the same in the file's words (described_in_file), empty where it is as presets are
    std::vector<RankedPlan> ranking;  ///< as order_ranking() has it

    // What the search found; without a search the best plan of the ranking, its sites not examined.
    RoundingPlan plan;    ///< settled for the head size; named identified-KERNEL
    std::string nearest;  ///< the plan of the ranking from which it has fewest changes; of equals the better
    std::vector<Difference> changes;  ///< from that plan to this
    /// The plans of the ranking with `changes` made in each, in its order; empty where nothing was changed.
    std::vector<RankedPlan> changed;
    std::vector<FoundChange> found;    ///< in the order in which the search found them, made or not
    bool rows_held_out = false;        ///< every other row was held out, there being one head; false: every other head
    OutputMatches searched, held_out;  ///< of `plan`, on the elements that the search saw, and on those that it did not
    OutputMatches match;               ///< on all
    std::vector<OutputMatches> layer_matches;  ///< of `plan`, parallel to layers
    std::vector<Trial> trials;        ///< every change tried on `plan` itself, in the order of the neighbourhood
    std::vector<SiteEvidence> sites;  ///< its rounding sites, schedule order
    std::vector<std::string>
        not_compared{};    ///< outputs of the kernel in layers without a gradient at the output, a sentence each
    std::string inputs{};  ///< mixed_inputs_remark() of the nearest plan

    std::vector<std::string> not_finite{};  ///< of the kernel's outputs, a sentence each (observed_kernels.hpp)

    /// Whether the best plan of the ranking has more elements than chance gives it.
    [[nodiscard]] bool is_near() const {
        return !ranking.empty() && ranking.front().match.all().share() >= more_than_chance;
    }
    /// Whether the plan found has so many of the elements that it may be called the kernel.
    [[nodiscard]] bool is_found() const { return is_near() && match.all().share() >= found_share && lacking().empty(); }
    /// Whether the plan found is more than most_rules_away from any that was ranked and does not have all of the elements: what
    /// it lacks may be that it is another plan, however few.
    [[nodiscard]] bool is_far() const;
    /// The outputs of which the plan found has less than found_share_of().
    [[nodiscard]] std::vector<Output> lacking() const;
    /// The output of which the plan found has least beyond found_share_of(); nothing where none was compared.
    [[nodiscard]] std::optional<Output> nearest_to_bound() const;
    /// The plans of the ranking behind the best that are within unmodelled_share of it, and not told from it by the lse.
    [[nodiscard]] std::vector<std::string> ranked_ties() const;
    /// The plans that are not told so from the one found, each with the changes of that one.
    [[nodiscard]] std::vector<std::string> near_ties() const;
    /// The outputs of which the plan found has no more than chance gives it.
    [[nodiscard]] std::vector<Output> unlike() const;
};

/// Best first: by equal elements, then rows of the lse that are equal, then elements within an ulp; of equals the one listed
/// first. Of the plans within unmodelled_share of the first, which the elements do not tell from it, one with more of the lse
/// by told_by_lse takes its place.
void order_ranking(std::vector<RankedPlan>& ranking);

struct Identification {
    std::string input;
    std::vector<KernelIdentification> kernels;  ///< in the order of their names, then head sizes
    bool complete = true;                       ///< false: interrupted; the kernels present are whole
    /// Candidates that were not ranked on the layers of a head size, since the back end has not the memory to run them.
    std::vector<LeftOutPlan> left_out{};
};

struct IdentifyOptions {
    std::vector<std::string> kernels;      ///< empty: all that the capture has
    std::vector<RoundingPlan> candidates;  ///< ranked first among equals, as they stand
    std::vector<std::string>
        presets;             ///< ranked behind them, each stored_as() the kernel's tensors are; both empty: all
    std::vector<int> heads;  ///< query heads; empty: all
    bool search = true;      ///< false: rank only
    int threads = 0;         ///< 0: one per hardware thread; results do not depend on it
    std::uint64_t seed = 0;  ///< of stochastic rounding
    const AttentionBackend* backend = &cpu_backend();  ///< where plans run; results do not depend on it
    /// Called from worker threads, serialised. `total` grows while the search goes on.
    std::function<void(std::size_t done, std::size_t total, const std::string& what)> progress;
    std::function<bool()> cancelled;  ///< polled between units of work
};

/// A candidate without room is left out; NoRoom where none is left. RequestError, one sentence: no layer has an observed output, a kernel that no layer has, a candidate that fits no layer,
/// a head that a layer does not have.
[[nodiscard]] Identification identify(const Capture& capture, const IdentifyOptions& options = {});

}  // namespace faultline
