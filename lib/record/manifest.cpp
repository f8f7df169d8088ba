// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/manifest.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string_view>

#include <fmt/chrono.h>
#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <faultline/record/root.hpp>
#include <faultline/tensor/input.hpp>
#include <faultline/tensor/text.hpp>

#include "build_info.hpp"
#include "git_commit.hpp"

namespace faultline {
namespace {

std::string cpu_name() {
    std::ifstream in("/proc/cpuinfo");
    for (std::string line; std::getline(in, line);) {
        if (line.starts_with("model name")) return line.substr(std::min(line.find(':') + 2, line.size()));
    }
    return "unknown";
}

/// Text that HDF5 takes as UTF-8 without a NUL: what is not is escaped. A command line may hold any bytes.
std::string attribute_text(const std::string& text) {
    for (std::size_t i = 0; i < text.size();) {
        const std::size_t length = utf8_character(std::string_view(text).substr(i));
        if (length == 0 || text[i] == '\0') return escaped(text, text.size());
        i += length;
    }
    return text;
}

}  // namespace

Manifest make_manifest(std::string kind, std::string command_line, std::string config_toml, std::uint64_t seed) {
    Manifest manifest;
    manifest.schema = "faultline." + kind;
    manifest.kind = std::move(kind);
    manifest.created_utc = fmt::format("{:%Y-%m-%dT%H:%M:%S}Z", fmt::gmtime(std::time(nullptr)));
    manifest.command_line = std::move(command_line);
    manifest.config_toml = std::move(config_toml);
    manifest.git_commit = detail::git_commit;
    manifest.build = detail::build_text;
    manifest.cpu = cpu_name();
    manifest.seed = seed;
    return manifest;
}

std::string shell_line(int argc, const char* const* argv) {
    constexpr std::string_view plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
    std::string line;
    for (int i = 0; i < argc; ++i) {
        const std::string_view word = argv[i];
        if (i > 0) line += ' ';
        if (!word.empty() && word.find_first_not_of(plain) == std::string_view::npos) {
            line += word;
            continue;
        }
        line += '\'';
        for (const char c : word) {
            if (c == '\'')
                line += "'\\''";
            else
                line += c;
        }
        line += '\'';
    }
    return line;
}

std::string hash_text(std::string_view text) {
    const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
    return fmt::format("xxh3-128:{:016x}{:016x}", hash.high64, hash.low64);
}

std::string hash_file(const std::string& path) {
    const FileInput in(path);
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    std::vector<std::byte> block(std::min<std::uint64_t>(in.size(), 1u << 20));
    for (std::uint64_t at = 0; at < in.size(); at += block.size()) {
        const auto part =
            std::span(block).first(static_cast<std::size_t>(std::min<std::uint64_t>(block.size(), in.size() - at)));
        in.read(at, part);
        XXH3_128bits_update(&state, part.data(), part.size());
    }
    const XXH128_hash_t hash = XXH3_128bits_digest(&state);
    return fmt::format("xxh3-128:{:016x}{:016x}", hash.high64, hash.low64);
}

std::vector<InputHash> hash_inputs(const std::string& path) {
    namespace fs = std::filesystem;
    if (!fs::is_directory(path)) return {{path, hash_file(path)}};
    std::vector<InputHash> inputs;
    for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
        if (entry.path().extension() == ".npy")
            inputs.push_back({entry.path().string(), hash_file(entry.path().string())});
    }
    std::sort(inputs.begin(), inputs.end(), [](const InputHash& a, const InputHash& b) { return a.path < b.path; });
    return inputs;
}

h5::Handle h5::create_file(const std::string& path, const std::string& file_name) {
    const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
    // 1.10's format: SWMR needs its superblock and chunk indices, and it has no 64 KiB limit on attributes, which the
    // list of datasets on a much-used dimension would meet.
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_LATEST);
    const Handle creation(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
    H5Pset_obj_track_times(creation, false);
    H5Pset_link_creation_order(creation, H5P_CRT_ORDER_TRACKED | H5P_CRT_ORDER_INDEXED);
    return {wrote(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation, access), file_name, "the file"), H5Fclose};
}

void h5::write_manifest(hid_t file, const Manifest& manifest, const std::string& file_name) {
    const auto text = [&](const char* name, const std::string& value) {
        write_attribute(file, name, attribute_text(value), file_name);
    };
    text("schema", manifest.schema);
    write_attribute(file, "schema_version", H5T_NATIVE_INT, &manifest.schema_version, file_name);
    text("kind", manifest.kind);
    text("created_utc", manifest.created_utc);
    text("command_line", manifest.command_line);
    text("config_toml", manifest.config_toml);
    text("git_commit", manifest.git_commit);
    text("build", manifest.build);
    text("cpu", manifest.cpu);
    text("gpu", manifest.gpu);
    if (manifest.ranks > 0) {
        write_attribute(file, "ranks", H5T_NATIVE_INT, &manifest.ranks, file_name);
        text("reductions", manifest.reductions);
    }
    write_attribute(file, "seed", H5T_NATIVE_UINT64, &manifest.seed, file_name);
    std::vector<std::string> paths, hashes;
    for (const InputHash& input : manifest.inputs) {
        paths.push_back(attribute_text(input.path));
        hashes.push_back(input.hash);
    }
    write_attribute(file, "inputs", paths, file_name);
    write_attribute(file, "input_hashes", hashes, file_name);
}

}  // namespace faultline
