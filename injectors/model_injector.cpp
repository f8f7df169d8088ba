// SPDX-License-Identifier: Apache-2.0
#include <faultline/injectors/model_injector.hpp>

#include <algorithm>

#include <fmt/format.h>

#include <faultline/base/error.hpp>

namespace faultline {
namespace {

ModelSite site_of_model(const Fault& fault) {
    if (const ModelSite* site = std::get_if<ModelSite>(&fault.site)) return *site;
    throw RequestError(fmt::format("fault \"{}\": {} is in the attention kernel: expected a site of the model",
                                   to_string(fault), site_name(fault)));
}

/// FNV-1a, 64 bits: a number for a parameter's name that is the same on every machine.
std::uint64_t number_of(std::string_view name) {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    return hash;
}

}  // namespace

std::uint64_t model_tile(const ModelAt& where) {
    // Rows and parts are small numbers; a name stands for an update, which has neither.
    return number_of(where.name) ^
           (static_cast<std::uint64_t>(where.row0) << 8 | static_cast<std::uint64_t>(where.part) << 4) ^
           static_cast<std::uint64_t>(where.micro_step) << 48;
}

template <class T>
Realised inject(const Fault& fault, std::int64_t step, int layer, int heads, std::uint64_t tile, MatrixView<T> values,
                Format format) {
    const ModelSite site = site_of_model(fault);
    if (!fault.active(step, layer)) return {};
    if (fault.column >= values.cols)
        throw RequestError(fmt::format("fault \"{}\": column {}: expected less than the {} columns of {}",
                                       to_string(fault), fault.column, values.cols, name(site)));
    FaultPlace place;
    place.step = step;
    place.layer = layer;
    place.heads = heads;
    place.tile = tile;
    const bool by_column = site == ModelSite::layer_norm_statistics;
    if (!by_column && fault.column < 0) return apply_fault(fault, place, format, values);
    Realised found;
    for (std::ptrdiff_t j = 0; j < values.cols; ++j) {
        if (fault.column >= 0 && j != fault.column) continue;
        place.batch = static_cast<int>(j);  // another stream for each column
        place.heads = 1;
        found.join(apply_fault(fault, place, format, MatrixView<T>(values.data + j, values.rows, 1, values.stride)));
    }
    return found;
}

template Realised inject(const Fault&, std::int64_t, int, int, std::uint64_t, MatrixView<double>, Format);
template Realised inject(const Fault&, std::int64_t, int, int, std::uint64_t, MatrixView<float>, Format);

ModelInjector::ModelInjector(const Fault& fault, int heads, Format format)
    : fault_(fault), site_(site_of_model(fault)), heads_(heads), format_(format) {
    if (fault_.unit == Fault::Unit::ulps && is_exact(fault_.format.value_or(format_)))
        throw RequestError(fmt::format(
            "fault \"{}\": is in ulps: expected format=NAME, or a magnitude relative to the rms", to_string(fault)));
}

bool ModelInjector::watches(ModelSite site, int layer) const {
    return site == site_ && (fault_.layers.empty() ||
                             std::find(fault_.layers.begin(), fault_.layers.end(), layer) != fault_.layers.end());
}

void ModelInjector::at(ModelSite, const ModelAt& where, MatrixView<float> value,
                       std::span<const MatrixView<const float>>) {
    const int blocks = heads_ > 0 && value.cols % heads_ == 0 ? heads_ : 1;
    const Realised found = inject(fault_, where.step, where.layer, blocks, model_tile(where), value, format_);
    const std::lock_guard lock(mutex_);
    realised_[{where.layer, where.micro_step, model_tile(where)}].join(found);
}

Realised ModelInjector::total() const {
    Realised all;
    for (const auto& [place, found] : realised_) all.join(found);
    return all;
}

Realised ModelInjector::of_layer(int layer) const {
    Realised all;
    for (const auto& [place, found] : realised_)
        if (std::get<0>(place) == layer) all.join(found);
    return all;
}

void ModelInjector::reset() { realised_.clear(); }

}  // namespace faultline
