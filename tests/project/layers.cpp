// SPDX-License-Identifier: Apache-2.0
#include "layers.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <optional>
#include <regex>
#include <set>

namespace faultline::project {
namespace {

namespace fs = std::filesystem;

// Bottom first. Layers of equal rank know nothing of each other.
struct Layer {
    const char* name;
    int rank;
};
constexpr std::array<Layer, 5> layers{
    {{"lib", 0}, {"kernels", 1}, {"injectors", 2}, {"probes", 2}, {"experiments", 3}}};

// Within lib, a folder may use those before it. In the other layers any order goes that has no cycle.
constexpr std::array<const char*, 10> lib_order{"base",   "ranks", "random",      "format", "special",
                                                "tensor", "gemm",  "tensor_core", "record", "truth"};

// A folder of the tree that is one library: lib/format, or injectors itself where its headers stand directly in it.
struct Folder {
    std::string layer;
    std::string name;  // last path component, FOLDER in <faultline/FOLDER/name.hpp>
    auto operator<=>(const Folder&) const = default;
    [[nodiscard]] std::string path() const { return layer == name ? layer : layer + "/" + name; }
};

std::optional<int> rank_of(const std::string& layer) {
    for (const Layer& candidate : layers)
        if (layer == candidate.name) return candidate.rank;
    return std::nullopt;
}

std::ptrdiff_t position_in_lib(const std::string& name) {
    return std::find(lib_order.begin(), lib_order.end(), name) - lib_order.begin();
}

bool is_source(const fs::path& file) {
    static const std::set<std::string> extensions{".hpp", ".h", ".cpp", ".cc", ".c", ".cuh", ".cu"};
    return extensions.contains(file.extension().string());
}

std::vector<std::string> lines_of(const fs::path& file) {
    std::vector<std::string> lines;
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

// Files below root/below in a stable order, relative to root. Build folders and hidden ones are not ours.
std::vector<fs::path> files_below(const fs::path& root, const fs::path& below) {
    std::vector<fs::path> files;
    if (!fs::is_directory(root / below)) return files;
    for (auto entry = fs::recursive_directory_iterator(root / below); entry != fs::recursive_directory_iterator();
         ++entry) {
        const std::string name = entry->path().filename().string();
        if (entry->is_directory() && (name.starts_with(".") || name.starts_with("build") || name == "__pycache__"))
            entry.disable_recursion_pending();
        else if (entry->is_regular_file() && !entry->is_symlink())
            files.push_back(entry->path().lexically_relative(root));
    }
    std::sort(files.begin(), files.end());
    return files;
}

// The folder that a file (relative to the root) belongs to, if it stands in a layer.
std::optional<Folder> folder_of(const fs::path& file) {
    auto part = file.begin();
    const std::string layer = part->string();
    if (!rank_of(layer) || ++part == file.end()) return std::nullopt;
    const bool stands_directly = std::next(part) == file.end();
    return Folder{layer, stands_directly ? layer : part->string()};
}

// Names as includes and targets use them. Two folders of one name would share <faultline/NAME/>, so a name is unique.
using FoldersByName = std::map<std::string, Folder>;

FoldersByName folders_by_name(const fs::path& root, std::vector<Violation>& violations) {
    std::set<Folder> folders;
    for (const Layer& layer : layers)
        for (const fs::path& file : files_below(root, layer.name))
            if (is_source(file)) folders.insert(*folder_of(file));
    FoldersByName by_name;
    for (const Folder& folder : folders) {
        const auto [other, inserted] = by_name.emplace(folder.name, folder);
        if (!inserted)
            violations.push_back({folder.path(), 0,
                                  "shares its name with " + other->second.path() + ": <faultline/" + folder.name +
                                      "/...> would mean both"});
        if (folder.layer == "lib" && position_in_lib(folder.name) == std::ssize(lib_order))
            violations.push_back(
                {folder.path(), 0, "has no place in the order of lib's folders (tests/project/layers.cpp)"});
    }
    return by_name;
}

// Why `from` may not use `to`, or nothing.
std::optional<std::string> objection(const Folder& from, const Folder& to) {
    if (from == to) return std::nullopt;
    const int from_rank = *rank_of(from.layer);
    const int to_rank = *rank_of(to.layer);
    if (from.layer == to.layer) {
        if (from.layer == "lib" && position_in_lib(to.name) >= position_in_lib(from.name))
            return from.path() + " uses " + to.path() + ", which comes after it in lib";
        return std::nullopt;
    }
    if (to_rank > from_rank) return from.path() + " uses " + to.path() + ", which stands in a layer above it";
    if (to_rank == from_rank)
        return from.layer + " and " + to.layer + " know nothing of each other: " + from.path() + " uses " + to.path();
    return std::nullopt;
}

struct Use {
    Folder from, to;
    fs::path file;
    int line;
};

class Checker {
  public:
    explicit Checker(fs::path root) : root_(std::move(root)), folders_(folders_by_name(root_, violations_)) {}

    std::vector<Violation> run() {
        for (const Layer& layer : layers)
            for (const fs::path& file : files_below(root_, layer.name)) {
                if (is_source(file)) check_source(file);
                if (file.filename() == "CMakeLists.txt") check_cmake(file);
            }
        check_cycles();
        return std::move(violations_);
    }

  private:
    void check_source(const fs::path& file) {
        static const std::regex include(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"].*)");
        int number = 0;
        for (const std::string& line : lines_of(root_ / file)) {
            ++number;
            std::smatch match;
            if (!std::regex_match(line, match, include)) continue;
            const fs::path named = match[2].str();
            if (*named.begin() == "faultline")
                use_header(file, number, named);
            else if (match[1] == "\"")
                use_path(file, number, named);
        }
    }

    void use_header(const fs::path& file, int line, const fs::path& header) {
        const auto part = std::next(header.begin());
        if (std::next(part) == header.end()) {  // <faultline/name.hpp> gathers the whole library
            if (folder_of(file)->layer != "experiments")
                violations_.push_back({file, line, "<" + header.string() + "> gathers layers above this one"});
            return;
        }
        use_name(file, line, part->string());
    }

    void use_path(const fs::path& file, int line, const fs::path& named) {
        for (const fs::path& base : {file.parent_path(), fs::path()}) {
            const fs::path target = (base / named).lexically_normal();
            if (!fs::exists(root_ / target)) continue;
            if (const auto to = folder_of(target))
                use(file, line, *to);
            else
                violations_.push_back({file, line, "includes " + target.string() + ", which stands in no layer"});
            return;
        }
    }

    void check_cmake(const fs::path& file) {
        static const std::regex target(R"(faultline::(\w+))");
        int number = 0;
        for (std::string line : lines_of(root_ / file)) {
            ++number;
            line.resize(std::min(line.size(), line.find('#')));
            for (std::sregex_iterator match(line.begin(), line.end(), target), end; match != end; ++match)
                use_name(file, number, (*match)[1].str());
        }
    }

    void use_name(const fs::path& file, int line, const std::string& name) {
        const auto to = folders_.find(name);
        if (to == folders_.end())
            violations_.push_back({file, line, "names \"" + name + "\", which is no folder of the tree"});
        else
            use(file, line, to->second);
    }

    void use(const fs::path& file, int line, const Folder& to) {
        const Folder from = *folder_of(file);
        if (const auto why = objection(from, to)) violations_.push_back({file, line, *why});
        if (from.layer == to.layer && from != to) uses_.push_back({from, to, file, line});
    }

    [[nodiscard]] bool reaches(const Folder& from, const Folder& target) const {
        std::set<Folder> seen;
        std::vector<Folder> open{from};
        while (!open.empty()) {
            const Folder here = open.back();
            open.pop_back();
            if (here == target) return true;
            if (!seen.insert(here).second) continue;
            for (const Use& next : uses_)
                if (next.from == here) open.push_back(next.to);
        }
        return false;
    }

    void check_cycles() {
        for (const Use& edge : uses_)
            if (edge.from.layer != "lib" && reaches(edge.to, edge.from))  // lib's order already forbids cycles
                violations_.push_back(
                    {edge.file, edge.line, edge.from.path() + " and " + edge.to.path() + " use each other"});
    }

    fs::path root_;
    std::vector<Violation> violations_;
    FoldersByName folders_;
    std::vector<Use> uses_;
};

bool carries_licence(const fs::path& file) {
    static const std::set<std::string> extensions{".hpp", ".h",  ".cpp",   ".cc", ".c",
                                                  ".cuh", ".cu", ".cmake", ".py", ".toml"};
    static const std::set<std::string> names{"CMakeLists.txt", ".clang-format", ".clang-tidy"};
    return extensions.contains(file.extension().string()) || names.contains(file.filename().string());
}

}  // namespace

std::string Violation::text() const {
    std::string place = file.generic_string();
    if (line > 0) place.append(":").append(std::to_string(line));
    return place.append(": ").append(reason);
}

std::vector<Violation> layer_violations(const fs::path& root) { return Checker(root).run(); }

std::vector<Violation> licence_violations(const fs::path& root) {
    static const std::regex licence(R"(^(//|#) SPDX-License-Identifier: Apache-2\.0$)");
    std::vector<fs::path> files{"CMakeLists.txt", ".clang-format", ".clang-tidy"};
    for (const char* folder :
         {"lib", "kernels", "injectors", "probes", "experiments", "tests", "notebooks", "bench", "cmake", ".ci"})
        for (const fs::path& file : files_below(root, folder)) files.push_back(file);
    std::vector<Violation> violations;
    for (const fs::path& file : files) {
        const bool exists = fs::exists(root / file);
        const std::vector<std::string> lines = exists ? lines_of(root / file) : std::vector<std::string>{};
        const bool script = !lines.empty() && lines.front().starts_with("#!");
        if (!exists || (!carries_licence(file) && !script)) continue;
        const auto end = lines.begin() + std::min<std::ptrdiff_t>(3, std::ssize(lines));
        if (std::none_of(lines.begin(), end, [](const std::string& line) { return std::regex_match(line, licence); }))
            violations.push_back(
                {file, 0, "has no line \"SPDX-License-Identifier: Apache-2.0\" among its first three"});
    }
    return violations;
}

}  // namespace faultline::project
