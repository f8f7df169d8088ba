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
            result_.found.push_back({0, true, {}});
            result_.smallest = true;
            result_.method = "by size";
            return std::move(result_);
        }
        if (n_ > 0 && !by_size()) beyond();
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

    /// The things, those whose trial alone changes the distance most (either way) first.
    std::vector<int> by_effect() const {
        const double without = result_.tried.at(0).distance;
        std::vector<int> order;
        std::vector<double> effect;
        for (int i = 0; i < n_; ++i) {
            order.push_back(i);
            const double change = std::abs(result_.tried.at(SiteMask{1} << i).distance - without);
            effect.push_back(std::isnan(change) ? std::numeric_limits<double>::infinity() : change);
        }
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
            return effect[static_cast<std::size_t>(a)] > effect[static_cast<std::size_t>(b)];
        });
        return order;
    }

    /// Whether a set was found.
    bool by_size() {
        std::size_t spent = 0;
        bool smaller_complete = true;
        for (int k = 1; k <= std::min(options_.largest_size, n_); ++k) {
            const std::size_t left = options_.budget > spent ? options_.budget - spent : 0;
            std::vector<int> things;
            for (int i = 0; i < n_; ++i) things.push_back(i);
            // Single things are always tried: whatever follows needs their order.
            if (k > 1 && combinations(n_, k) > left) {
                things = by_effect();
                int m = n_;
                while (m >= k && combinations(m, k) > left) --m;
                if (m < k) break;
                things.resize(static_cast<std::size_t>(m));
                std::sort(things.begin(), things.end());
            }
            const std::vector<SiteMask> sets = subsets(things, k);
            ask(sets);
            spent += sets.size();
            SizeTried size{k, combinations(n_, k), sets.size(), static_cast<int>(things.size()), 0};
            std::vector<SiteMask> met;
            for (const SiteMask set : sets)
                if (result_.tried.at(set).met) met.push_back(set);
            size.met = met.size();
            result_.sizes.push_back(size);
            if (!met.empty()) {
                result_.smallest = smaller_complete;
                result_.method = "by size";
                keep(met);
                return true;
            }
            smaller_complete = smaller_complete && size.complete();
        }
        return false;
    }

    /// Best first; the removals of the best few are tried, and sets that are not minimal then lead to smaller ones.
    void keep(std::vector<SiteMask> sets) {
        std::stable_sort(sets.begin(), sets.end(), [&](SiteMask a, SiteMask b) {
            return result_.tried.at(a).distance < result_.tried.at(b).distance;
        });
        for (std::size_t i = 0; i < sets.size(); ++i) {
            FoundSet found{sets[i], false, {}};
            if (i < sets_examined) examine(found);
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
        // No set is smaller where all sets below its size were tried.
        result_.smallest = true;
        for (int k = 1; k < size_of(best->first); ++k)
            result_.smallest = result_.smallest && k <= static_cast<int>(result_.sizes.size()) &&
                               result_.sizes[static_cast<std::size_t>(k - 1)].complete();
        keep({best->first});
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
