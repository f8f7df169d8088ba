// SPDX-License-Identifier: Apache-2.0
#include <faultline/bisection/search.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <set>

namespace faultline::bisection {
namespace {

constexpr std::size_t sets_examined = 8;  // of equally small sets, so many have their removals tried

SiteMask all_of(int n) { return n == 64 ? ~SiteMask{0} : (SiteMask{1} << n) - 1; }
int size_of(SiteMask set) { return std::popcount(set); }

std::vector<int> members(SiteMask set) {
    std::vector<int> list;
    for (; set != 0; set &= set - 1) list.push_back(std::countr_zero(set));
    return list;
}

/// All sets of k of these things, in lexicographic order of their places in `things`.
std::vector<SiteMask> subsets(const std::vector<int>& things, int k) {
    std::vector<SiteMask> sets;
    std::vector<std::size_t> at(static_cast<std::size_t>(k));
    for (std::size_t i = 0; i < at.size(); ++i) at[i] = i;
    const std::size_t n = things.size();
    while (true) {
        SiteMask set = 0;
        for (const std::size_t i : at) set |= SiteMask{1} << things[i];
        sets.push_back(set);
        std::size_t i = at.size();
        while (i > 0 && at[i - 1] == n - at.size() + i - 1) --i;
        if (i == 0) return sets;
        ++at[i - 1];
        for (; i < at.size(); ++i) at[i] = at[i - 1] + 1;
    }
}

class Searcher {
  public:
    Searcher(int n, const Try& attempt, const SearchOptions& options) : n_(n), attempt_(attempt), options_(options) {}

    SearchResult run() {
        ask({0, all_of(n_)});
        result_.none_met = result_.tried.at(0).met;
        result_.all_met = result_.tried.at(all_of(n_)).met;
        if (result_.none_met) {
            result_.method = "by size";
        } else if (n_ > 0 && !by_size()) {
            beyond();
            if (options_.beyond) up_to_found();
        }
        settle();
        return std::move(result_);
    }

  private:
    /// Tries those sets that were not tried yet.
    void ask(const std::vector<SiteMask>& sets) {
        std::vector<SiteMask> fresh;
        std::set<SiteMask> seen;
        for (const SiteMask set : sets)
            if (result_.tried.count(set) == 0 && seen.insert(set).second) fresh.push_back(set);
        if (fresh.empty()) return;
        const std::vector<Trial> answers = attempt_(fresh);
        for (std::size_t i = 0; i < fresh.size(); ++i) result_.tried.emplace(fresh[i], answers[i]);
    }
    const Trial& trial(SiteMask set) {
        ask({set});
        return result_.tried.at(set);
    }

    /// The things, those whose trial alone changes the distance most (either way) first; or whose removal from all of them
    /// does, where that was tried.
    std::vector<int> by_effect() const {
        std::vector<int> order;
        std::vector<double> effect;
        const auto change = [&](SiteMask set, SiteMask from) {
            const auto trial = result_.tried.find(set);
            if (trial == result_.tried.end()) return 0.0;
            const double x = std::abs(trial->second.distance - result_.tried.at(from).distance);
            return std::isnan(x) ? std::numeric_limits<double>::infinity() : x;
        };
        for (int i = 0; i < n_; ++i) {
            order.push_back(i);
            const SiteMask one = SiteMask{1} << i, all = all_of(n_);
            effect.push_back(std::max(change(one, 0), change(all & ~one, all)));
        }
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
            return effect[static_cast<std::size_t>(a)] > effect[static_cast<std::size_t>(b)];
        });
        return order;
    }

    /// Whether a set was found.
    bool by_size() {
        std::size_t spent = 0;
        for (int k = 1; k <= std::min(options_.largest_size, n_); ++k) {
            const std::size_t left = options_.budget > spent ? options_.budget - spent : 0;
            std::vector<int> things;
            for (int i = 0; i < n_; ++i) things.push_back(i);
            // Single things are always tried: whatever follows needs their order.
            if (k > 1 && combinations(n_, k) > left) things = first_of(by_effect(), k, left);
            if (static_cast<int>(things.size()) < k) break;
            spent += try_size(k, things, false);
            if (result_.sizes.back().met == 0) continue;
            result_.method = "by size";
            return true;
        }
        return false;
    }

    /// As many of these things, the first ones, as have at most so many sets of k.
    static std::vector<int> first_of(std::vector<int> things, int k, std::size_t sets) {
        auto m = static_cast<int>(things.size());
        while (m >= k && combinations(m, k) > sets) --m;
        things.resize(static_cast<std::size_t>(m));
        std::sort(things.begin(), things.end());
        return things;
    }

    /// All sets of k of these things; their number.
    std::size_t try_size(int k, const std::vector<int>& things, bool behind) {
        const std::vector<SiteMask> sets = subsets(things, k);
        ask(sets);
        SizeTried size{k, combinations(n_, k), sets.size(), static_cast<int>(things.size()), 0, behind};
        for (const SiteMask set : sets) size.met += result_.tried.at(set).met ? 1 : 0;
        result_.sizes.push_back(size);
        return sets.size();
    }

    /// The smallest size of a set that was tried and met; -1 where there is none.
    [[nodiscard]] int smallest_met() const {
        int size = -1;
        for (const auto& [set, trial] : result_.tried)
            if (trial.met && (size < 0 || size_of(set) < size)) size = size_of(set);
        return size;
    }

    /// Where ddmin and the climb found a set beyond the sizes searched: whether it is the only one, and whether a size between has
    /// one. Its things stand first, then those that change most, alone or taken out of all of them.
    void up_to_found() {
        const int found = smallest_met();
        const int from = result_.sizes.empty() ? 1 : result_.sizes.back().size + 1;
        if (found < from) return;
        std::vector<SiteMask> without;
        for (int i = 0; i < n_; ++i) without.push_back(all_of(n_) & ~(SiteMask{1} << i));
        ask(without);
        const std::vector<int> order = found_first(by_effect(), found);
        std::size_t spent = 0;
        for (int k = from; k <= found; ++k) {
            const std::size_t left = options_.budget > spent ? options_.budget - spent : 0;
            const std::vector<int> things = first_of(order, k, left);
            if (static_cast<int>(things.size()) < k) return;
            spent += try_size(k, things, true);
            if (result_.sizes.back().met == 0 || k == found) continue;
            result_.method = "by size";
            return;
        }
    }
    [[nodiscard]] std::vector<int> found_first(std::vector<int> order, int size) const {
        SiteMask found = 0;
        for (const auto& [set, trial] : result_.tried)
            if (trial.met && size_of(set) == size) found |= set;
        std::stable_partition(order.begin(), order.end(), [&](int i) { return (found >> i & 1) != 0; });
        return order;
    }

    /// The answer, from all that was tried.
    void settle() {
        int size = smallest_met();
        while (true) {
            if (size < 0) return;
            keep(size);
            const int smaller = smallest_met();  // a removal may meet it
            if (smaller == size) break;
            size = smaller;
        }
        std::map<int, std::size_t> tried;
        for (const auto& [set, trial] : result_.tried) ++tried[size_of(set)];
        result_.smallest = result_.all_found = true;
        for (int k = 0; k <= size; ++k) {
            const std::size_t left = combinations(n_, k) - tried[k];
            if (left == 0) continue;
            result_.untried.push_back({k, left});
            (k == size ? result_.all_found : result_.smallest) = false;
        }
    }

    /// The sets of this size that meet the target, best first; the removals of the best few are tried.
    void keep(int size) {
        std::vector<SiteMask> sets;
        for (const auto& [set, trial] : result_.tried)
            if (trial.met && size_of(set) == size) sets.push_back(set);
        std::stable_sort(sets.begin(), sets.end(), [&](SiteMask a, SiteMask b) {
            return result_.tried.at(a).distance < result_.tried.at(b).distance;
        });
        result_.found.clear();
        for (std::size_t i = 0; i < sets.size(); ++i) {
            FoundSet found{sets[i], size == 0, {}};
            if (i < sets_examined && size > 0) examine(found);
            result_.found.push_back(std::move(found));
        }
    }

    void examine(FoundSet& found) {
        for (const int thing : members(found.set)) found.removals.push_back(found.set & ~(SiteMask{1} << thing));
        ask(found.removals);
        found.minimal = std::none_of(found.removals.begin(), found.removals.end(),
                                     [&](SiteMask set) { return result_.tried.at(set).met; });
    }

    void beyond() {
        std::vector<std::pair<SiteMask, std::string>> sets;
        const SiteMask climbed = climb();
        if (climbed != 0) sets.emplace_back(reduced(climbed), "climb");
        if (result_.all_met) sets.emplace_back(reduced(ddmin(all_of(n_))), "ddmin");
        if (sets.empty()) return;
        const auto best = std::min_element(
            sets.begin(), sets.end(), [](const auto& a, const auto& b) { return size_of(a.first) < size_of(b.first); });
        result_.method = best->second;
    }

    /// Adds the thing that brings the target nearest until it is met; 0 where all things are in and it is not.
    SiteMask climb() {
        SiteMask set = 0;
        while (set != all_of(n_)) {
            std::vector<SiteMask> next;
            for (int i = 0; i < n_; ++i)
                if ((set >> i & 1) == 0) next.push_back(set | SiteMask{1} << i);
            ask(next);
            SiteMask best = next.front();
            for (const SiteMask candidate : next)
                if (better(result_.tried.at(candidate), result_.tried.at(best))) best = candidate;
            set = best;
            if (result_.tried.at(set).met) return set;
        }
        return 0;
    }
    static bool better(const Trial& a, const Trial& b) { return a.met != b.met ? a.met : a.distance < b.distance; }

    /// ddmin: parts alone, then their complements, then finer parts.
    SiteMask ddmin(SiteMask set) {
        std::size_t parts = 2;
        while (size_of(set) >= 2) {
            const std::vector<int> things = members(set);
            parts = std::min(parts, things.size());
            std::vector<SiteMask> alone, without;
            for (std::size_t p = 0; p < parts; ++p) {
                SiteMask part = 0;
                for (std::size_t i = p * things.size() / parts; i < (p + 1) * things.size() / parts; ++i)
                    part |= SiteMask{1} << things[i];
                alone.push_back(part);
                without.push_back(set & ~part);
            }
            const SiteMask part = first_met(alone);
            if (part != 0) {
                set = part;
                parts = 2;
                continue;
            }
            const SiteMask rest = parts == 2 ? 0 : first_met(without);  // of two parts the complements are the parts
            if (rest != 0) {
                set = rest;
                parts = std::max<std::size_t>(parts - 1, 2);
                continue;
            }
            if (parts == things.size()) return set;
            parts = std::min(2 * parts, things.size());
        }
        return set;
    }

    SiteMask first_met(const std::vector<SiteMask>& sets) {
        ask(sets);
        for (const SiteMask set : sets)
            if (result_.tried.at(set).met) return set;
        return 0;
    }

    /// Removes one thing at a time while the target stays met: 1-minimal at the end.
    SiteMask reduced(SiteMask set) {
        while (true) {
            std::vector<SiteMask> next;
            for (const int thing : members(set)) next.push_back(set & ~(SiteMask{1} << thing));
            const SiteMask smaller = first_met(next);
            if (smaller == 0) return set;
            set = smaller;
        }
    }

    int n_;
    const Try& attempt_;
    SearchOptions options_;
    SearchResult result_;
};

}  // namespace

std::size_t combinations(int n, int k) {
    if (k < 0 || k > n) return 0;
    unsigned __int128 count = 1;
    for (int i = 1; i <= k; ++i) {
        count = count * static_cast<unsigned>(n - k + i) / static_cast<unsigned>(i);
        if (count > std::numeric_limits<std::size_t>::max()) return std::numeric_limits<std::size_t>::max();
    }
    return static_cast<std::size_t>(count);
}

SearchResult search(int things, const Try& attempt, const SearchOptions& options) {
    return Searcher(things, attempt, options).run();
}

}  // namespace faultline::bisection
