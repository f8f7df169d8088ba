# SPDX-License-Identifier: Apache-2.0
# cmake -DOUTPUT=file.cpp -DPRESETS=name;name -DDIRECTORY=presets -P embed.cmake: the preset files as string literals.
set(entries "")
foreach(name IN LISTS PRESETS)
  file(READ ${DIRECTORY}/${name}.toml text)
  string(APPEND entries "    {\"${name}\", R\"PRESET(${text})PRESET\"},\n")
endforeach()
file(WRITE ${OUTPUT} "// Written by kernels/plan/embed.cmake from kernels/plan/presets.
#include <array>
#include <span>
#include <string_view>
namespace faultline {
struct PresetFile {
    std::string_view name;
    std::string_view toml;
};
extern const std::span<const PresetFile> preset_files;
static constexpr auto files = std::to_array<PresetFile>({
${entries}});
constinit const std::span<const PresetFile> preset_files = files;
}  // namespace faultline
")
