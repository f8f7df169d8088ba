// SPDX-License-Identifier: Apache-2.0
#include <faultline/injectors/attention_injector.hpp>

#include <fmt/format.h>

#include <faultline/base/error.hpp>

namespace faultline {
namespace {

Site kernel_site(const Fault& fault) {
    if (const Site* site = std::get_if<Site>(&fault.site)) {
        if (fault.column < 0) return *site;
        throw RequestError(
            fmt::format("fault \"{}\": column: {} is in the attention kernel: expected a site of the model",
                        to_string(fault), site_name(fault)));
    }
    throw RequestError(fmt::format("fault \"{}\": {} is not in the attention kernel: expected a kernel site",
                                   to_string(fault), site_name(fault)));
}

}  // namespace

AttentionInjector::AttentionInjector(const Fault& fault, const RoundingPlan& plan, int heads, std::int64_t step)
    : fault_(fault),
      site_(kernel_site(fault)),
      format_(plan[site_].format),
      heads_(heads),
      step_(step),
      realised_(static_cast<std::size_t>(heads)) {
    if (fault_.unit == Fault::Unit::ulps && is_exact(fault_.format.value_or(format_)))
        throw RequestError(
            fmt::format("fault \"{}\": plan \"{}\" does not round at {}, so there is no ulp: expected a "
                        "magnitude relative to the rms, or format=NAME",
                        to_string(fault), plan.name, faultline::name(site_)));
}

Realised AttentionInjector::change(const TileAt& where, MatrixView<double> value) const {
    const int head = where.head % heads_;
    if (!fault_.active(step_, where.layer) || !fault_.touches_head(head)) return {};
    FaultPlace place;
    place.step = step_;
    place.layer = where.layer;
    place.head = head;
    place.batch = where.head / heads_;
    place.tile = (static_cast<std::uint64_t>(where.query0) << 32) | static_cast<std::uint64_t>(where.key0);
    place.part = where.part;
    if (info(site_).shape == SiteShape::score_tile) {
        place.visible0 = where.visible0;
        place.skip_zeros = where.biased;
    }
    return apply_fault(fault_, place, format_, value);
}

void AttentionInjector::at(Site, const TileAt& where, MatrixView<double> value, MatrixView<const double>) {
    realised_[static_cast<std::size_t>(where.head % heads_)].join(change(where, value));
}

void AttentionInjector::at_again(Site, const TileAt& where, MatrixView<double> value, MatrixView<const double>) {
    (void)change(where, value);
}

void AttentionInjector::alterations(int layer, int head, std::vector<Alteration>& to) const {
    if (!fault_.active(step_, layer) || !fault_.touches_head(head % heads_)) return;
    FaultPlace place;
    place.step = step_;
    place.layer = layer;
    place.head = head % heads_;
    place.batch = head / heads_;
    Alteration change = alteration_of(fault_, place, format_);
    change.sites = std::uint64_t{1} << index(site_);
    change.at_repetitions = true;
    to.push_back(change);
}

Realised AttentionInjector::total() const {
    Realised all;
    for (const Realised& head : realised_) all.join(head);
    return all;
}

void AttentionInjector::reset() { realised_.assign(realised_.size(), Realised{}); }

}  // namespace faultline
