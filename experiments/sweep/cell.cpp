// SPDX-License-Identifier: Apache-2.0
#include <faultline/sweep/cell.hpp>

#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <faultline/base/error.hpp>
#include <faultline/record/manifest.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::sweep {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

/// Cut where it is long: plans joined by + may have any length, and a name has 255 bytes with its ending.
std::string slug(const std::string& text, std::size_t most) {
    std::string out;
    for (const char c : text) {
        if (out.size() == most) break;
        const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '_';
        out += plain ? c : '-';
    }
    return out;
}

std::string list_of(const std::string& folder) { return (fs::path(folder) / "cells.json").string(); }

}  // namespace

std::string key_of(std::string_view identity) {
    constexpr std::size_t digits = 12;  // 48 bits: two of a million runs are the same with probability 2e-3
    const std::string hash = hash_text(identity);
    return hash.substr(hash.find(':') + 1, digits);
}

std::string name_of(const Cell& cell) {
    const std::string recipe = cell.recipe.empty() ? "" : slug(cell.recipe, 50) + "__";
    return fmt::format("{}{}__{}__seed{}__{}", recipe, slug(cell.source, 65), slug(cell.intervention, 40), cell.seed,
                       cell.key);
}

CellFiles files_of(const std::string& folder, const std::string& name) {
    const std::string stem = (fs::path(folder) / "runs" / name).string();
    return {stem + ".toml", stem + ".h5", stem + ".log", stem + ".lock", stem + ".json"};
}

void write_cells(const std::string& folder, const std::vector<Cell>& cells) {
    ordered_json list = ordered_json::array();
    for (const Cell& cell : cells)
        list.push_back({{"name", cell.name},
                        {"key", cell.key},
                        {"recipe", cell.recipe},
                        {"source", cell.source},
                        {"intervention", cell.intervention},
                        {"seed", cell.seed},
                        {"steps", cell.steps}});
    const ordered_json object{{"schema", "faultline.sweep-cells/1"}, {"cells", std::move(list)}};
    const std::string text = object.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
    PartialFile file(list_of(folder));
    file.write(std::as_bytes(std::span(text)));
    file.commit();
}

std::vector<Cell> read_cells(const std::string& folder) {
    const std::string path = list_of(folder);
    std::ifstream in(path, std::ios::binary);
    if (!in)
        throw RequestError(fmt::format("{}: has no cells.json: expected the folder of a sweep that was started",
                                       escaped(folder, folder.size())));
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    std::vector<Cell> cells;
    try {
        const ordered_json object = ordered_json::parse(text);
        for (const ordered_json& item : object.at("cells"))
            cells.push_back({item.at("recipe"), item.at("source"), item.at("intervention"), item.at("seed"),
                             item.at("steps"), item.at("key"), item.at("name")});
    } catch (const ordered_json::exception&) {
        throw RequestError(
            fmt::format("{}: is not the list of a sweep's runs: expected what faultline sweep wrote there",
                        escaped(path, path.size())));
    }
    return cells;
}

}  // namespace faultline::sweep
