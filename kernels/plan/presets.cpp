// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/presets.hpp>

#include <algorithm>
#include <string>

#include <faultline/base/error.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/storage.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {

/// The files of presets/ in the order of CMakeLists.txt: written by embed.cmake.
struct PresetFile {
    std::string_view name;
    std::string_view toml;
};
extern const std::span<const PresetFile> preset_files;

namespace {

std::vector<RoundingPlan> read_presets() {
    std::vector<RoundingPlan> plans;
    plans.reserve(preset_files.size());
    for (const PresetFile& file : preset_files)  // a preset may be based on those before it
        plans.push_back(parse_plan(file.toml, "preset " + std::string(file.name), plans));
    return plans;
}

[[noreturn]] void unknown(std::string_view name) {
    throw RequestError("plan " + in_quotes(name) +
                       ": no such preset and not a file ending in .toml: " + expected_one_of(name, preset_names()));
}

}  // namespace

std::span<const RoundingPlan> presets() {
    static const std::vector<RoundingPlan> plans = read_presets();
    return plans;
}

std::vector<std::string_view> preset_names() {
    std::vector<std::string_view> names;
    for (const PresetFile& file : preset_files) names.push_back(file.name);
    return names;
}

std::string_view preset_toml(std::string_view name) {
    for (const PresetFile& file : preset_files)
        if (file.name == name) return file.toml;
    unknown(name);
}

RoundingPlan plan(std::string_view name_or_path) {
    if (name_or_path.ends_with(".toml")) return read_plan(name_or_path);
    for (const RoundingPlan& preset : presets())
        if (preset.name == name_or_path) return preset;
    for (const RoundingPlan& preset : presets()) {
        if (!name_or_path.starts_with(preset.name)) continue;
        const auto storage = find_storage(name_or_path.substr(preset.name.size()));
        if (!storage) continue;
        RoundingPlan stored = stored_as(preset, *storage);
        if (stored.name == name_or_path) return stored;
    }
    unknown(name_or_path);
}

}  // namespace faultline
