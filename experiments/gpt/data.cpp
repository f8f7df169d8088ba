// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/data.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt/memory_room.hpp>
#include <faultline/tensor/input.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::gpt {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t held_out_block = 65536;
constexpr std::size_t held_out_every = 16;

std::string shown(const std::string& path) { return escaped(path, path.size()); }

std::vector<std::byte> read_all(const std::string& path) {
    const FileInput input(path);
    std::vector<std::byte> bytes(static_cast<std::size_t>(input.size()));
    input.read(0, bytes);
    return bytes;
}

/// The regular files below a folder, by their path as bytes; those whose name begins with a dot are left out.
std::vector<std::string> files_below(const std::string& folder) {
    std::vector<std::string> files;
    std::error_code error;
    fs::recursive_directory_iterator walk(folder, error);
    if (error)
        throw RequestError(fmt::format("{}: cannot be read ({}): expected a folder", shown(folder), error.message()));
    for (; walk != fs::recursive_directory_iterator(); walk.increment(error)) {
        if (error) throw RequestError(fmt::format("{}: cannot be read ({})", shown(folder), error.message()));
        if (walk->path().filename().string().starts_with(".")) continue;
        if (walk->is_regular_file(error)) files.push_back(walk->path().string());
    }
    std::ranges::sort(files);
    return files;
}

void split_text(std::span<const std::byte> text, TokenData& data) {
    data.training.reserve(text.size());
    data.validation.reserve(text.size() / held_out_every);
    for (std::size_t i = 0; i < text.size(); ++i) {
        const bool held_out = i / held_out_block % held_out_every == held_out_every - 1;
        (held_out ? data.validation : data.training).push_back(static_cast<std::int32_t>(text[i]));
    }
    if (!data.validation.empty()) return;
    // No sixteenth block: the last sixteenth.
    const std::size_t kept = text.size() - text.size() / held_out_every;
    data.validation.assign(data.training.begin() + static_cast<std::ptrdiff_t>(kept), data.training.end());
    data.training.resize(kept);
}

/// Of the files' names and hashes, in order.
std::string joint_hash(const std::vector<InputHash>& files) {
    std::string all;
    for (const InputHash& file : files) all += fs::path(file.path).filename().string() + " " + file.hash + "\n";
    const XXH128_hash_t hash = XXH3_128bits(all.data(), all.size());
    return fmt::format("xxh3-128:{:016x}{:016x}", hash.high64, hash.low64);
}

/// WorkError where files of this size, `factor` times that much as they are read, are more than there is room for.
void expect_room_for(const std::string& path, const std::vector<std::string>& files, std::uint64_t factor) {
    std::uint64_t bytes = 0;
    for (const std::string& file : files) {
        std::error_code unknown;
        const std::uintmax_t size = fs::file_size(file, unknown);
        if (!unknown) bytes += size;
    }
    const MemoryRoom room = memory_room();
    if (bytes <= room.bytes / factor) return;
    throw WorkError(fmt::format("{}: not enough memory: {} as token ids need {}: expected at most the {} {}",
                                shown(path), size_text(bytes), size_text(factor * bytes), size_text(room.bytes),
                                room.of));
}

TokenData read_text(const std::string& path, const std::vector<std::string>& files) {
    expect_room_for(path, files, 1 + sizeof(std::int32_t));  // a byte is a token
    TokenData data;
    data.source = path;
    std::vector<std::byte> text;
    for (const std::string& file : files) {
        const std::vector<std::byte> bytes = read_all(file);
        text.insert(text.end(), bytes.begin(), bytes.end());
        data.inputs.push_back({file, hash_file(file)});
    }
    if (files.size() > 1) data.inputs = {{path, joint_hash(data.inputs)}};
    split_text(text, data);
    return data;
}

constexpr std::int32_t magic_gpt2 = 20240520, magic_llama3 = 20240801;
constexpr std::size_t llmc_header = 256 * sizeof(std::int32_t);

bool has_llmc_magic(const std::string& file) {
    const FileInput input(file);
    std::int32_t magic = 0;
    if (input.size() < sizeof magic) return false;
    input.read(0, std::as_writable_bytes(std::span(&magic, 1)));
    return magic == magic_gpt2 || magic == magic_llama3;
}

template <class Id>
void append_ids(std::span<const std::byte> bytes, std::vector<std::int32_t>& to) {
    const std::size_t count = bytes.size() / sizeof(Id);
    to.reserve(to.size() + count);
    for (std::size_t i = 0; i < count; ++i) {
        Id id;
        std::memcpy(&id, bytes.data() + i * sizeof(Id), sizeof(Id));
        to.push_back(static_cast<std::int32_t>(std::min<std::uint64_t>(id, 0x7fffffff)));
    }
}

void read_llmc_shard(const std::string& file, TokenData& data, std::vector<std::int32_t>& to) {
    const std::vector<std::byte> bytes = read_all(file);
    if (bytes.size() < llmc_header)
        throw RequestError(
            fmt::format("{}: {} bytes: expected a header of 1024 bytes as llm.c writes it", shown(file), bytes.size()));
    std::int32_t header[3];
    std::memcpy(header, bytes.data(), sizeof header);
    if (header[0] != magic_gpt2 && header[0] != magic_llama3)
        throw RequestError(fmt::format("{}: magic {}: expected {} (GPT-2 ids) or {} (Llama 3 ids) of an llm.c shard",
                                       shown(file), header[0], magic_gpt2, magic_llama3));
    const bool wide = header[0] == magic_llama3;
    if (header[1] != (wide ? 7 : 1))
        throw RequestError(
            fmt::format("{}: version {}: expected {} with magic {}", shown(file), header[1], wide ? 7 : 1, header[0]));
    const std::size_t id_bytes = wide ? 4 : 2;
    const std::size_t held = (bytes.size() - llmc_header) / id_bytes;
    if (header[2] < 0)
        throw RequestError(
            fmt::format("{}: length: the header says {} tokens: expected 0 or more", shown(file), header[2]));
    if (static_cast<std::size_t>(header[2]) != held || (bytes.size() - llmc_header) % id_bytes != 0)
        throw RequestError(fmt::format("{}: length: the header says {} tokens and {} bytes follow it: expected {}",
                                       shown(file), header[2], bytes.size() - llmc_header,
                                       id_bytes * static_cast<std::size_t>(header[2])));
    const int vocabulary = wide ? 128256 : 50257;
    if (!data.inputs.empty() && data.vocabulary != vocabulary)
        throw RequestError(fmt::format("{}: has ids of another tokenizer than {}: expected one kind of shards",
                                       shown(file), shown(data.inputs.front().path)));
    data.vocabulary = vocabulary;
    const std::span<const std::byte> ids = std::span(bytes).subspan(llmc_header);
    if (wide)
        append_ids<std::uint32_t>(ids, to);
    else
        append_ids<std::uint16_t>(ids, to);
    data.inputs.push_back({file, hash_file(file)});
}

void hold_out_the_last_sixteenth(TokenData& data) {
    if (!data.validation.empty()) return;
    const std::size_t kept = data.training.size() - data.training.size() / held_out_every;
    data.validation.assign(data.training.begin() + static_cast<std::ptrdiff_t>(kept), data.training.end());
    data.training.resize(kept);
}

/// `folder`: of shards that stand in one, those with "val" in their name are held out; one that is named itself is trained on.
TokenData read_llmc(const std::string& path, const std::vector<std::string>& files, bool folder) {
    expect_room_for(path, files, 2);  // ids of two bytes or four; a shard is read at a time
    TokenData data;
    data.source = path;
    for (const std::string& file : files) {
        const bool validation = fs::path(file).filename().string().find("val") != std::string::npos;
        read_llmc_shard(file, data, validation && folder ? data.validation : data.training);
    }
    if (data.training.empty() && !data.validation.empty())
        throw RequestError(fmt::format(
            "{}: every shard has val in its name, which holds it out: expected one to train on", shown(path)));
    hold_out_the_last_sixteenth(data);
    return data;
}

std::vector<std::int32_t> read_nanogpt_file(const std::string& file, TokenData& data) {
    const std::vector<std::byte> bytes = read_all(file);
    if (bytes.size() % 2 != 0)
        throw RequestError(fmt::format("{}: length {}: expected an even number of bytes, two for each token",
                                       shown(file), bytes.size()));
    std::vector<std::int32_t> ids;
    append_ids<std::uint16_t>(bytes, ids);
    data.inputs.push_back({file, hash_file(file)});
    return ids;
}

TokenData read_nanogpt(const std::string& path) {
    TokenData data;
    data.source = path;
    data.vocabulary = 50257;
    const fs::path folder = fs::is_directory(path) ? fs::path(path) : fs::path(path).parent_path();
    const fs::path train = fs::is_directory(path) ? folder / "train.bin" : fs::path(path);
    expect_room_for(path, {train.string(), (folder / "val.bin").string()}, 3);
    data.training = read_nanogpt_file(train.string(), data);
    if (const fs::path val = folder / "val.bin"; val != train && fs::exists(val)) {
        data.validation = read_nanogpt_file(val.string(), data);
        if (data.validation.empty())
            throw RequestError(fmt::format("{}: is empty: expected the tokens that are held out, or no such file",
                                           shown(val.string())));
    } else {
        data.remark = fmt::format("{}: no val.bin is beside it: its last sixteenth is held out", shown(train.string()));
    }
    hold_out_the_last_sixteenth(data);
    return data;
}

bool is_bin(const std::string& file) { return file.ends_with(".bin"); }

/// RequestError where one of the files, among which there are others, is a shard: as text it would be its header and the bytes of
/// its ids.
void expect_no_shard(const std::string& path, const std::vector<std::string>& files) {
    const auto found =
        std::ranges::find_if(files, [](const auto& file) { return is_bin(file) && has_llmc_magic(file); });
    if (found == files.end()) return;
    const auto other = std::ranges::find_if_not(files, is_bin);
    if (other == files.end()) return;
    const auto name = [](const std::string& file) { return shown(fs::path(file).filename().string()); };
    throw RequestError(fmt::format(
        "{}: holds a shard of llm.c, {}, and another file, {}: expected one kind of files, or data-format = "
        "\"llmc\" for the shards alone, or \"text\" for the bytes of all",
        shown(path), name(*found), name(*other)));
}

}  // namespace

TokenData tokens_of_text(std::string_view text) {
    TokenData data;
    data.source = "text";
    split_text(std::as_bytes(std::span(text.data(), text.size())), data);
    return data;
}

TokenData read_text_files(const std::string& folder, const std::function<bool(const std::string&)>& take) {
    std::vector<std::string> files = files_below(folder);
    std::erase_if(files, [&](const std::string& file) { return !take(fs::path(file).filename().string()); });
    return read_text(folder, files);
}

TokenData read_tokens(const std::string& path, DataFormat format) {
    std::error_code error;
    const bool folder = fs::is_directory(path, error);
    const std::vector<std::string> files = folder ? files_below(path) : std::vector<std::string>{path};
    if (files.empty()) throw RequestError(fmt::format("{}: is empty: expected files of text or tokens", shown(path)));
    if (format == DataFormat::automatic) {
        if (folder && fs::exists(fs::path(path) / "train.bin"))
            format = has_llmc_magic((fs::path(path) / "train.bin").string()) ? DataFormat::llmc : DataFormat::nanogpt;
        else if (expect_no_shard(path, files); !std::ranges::all_of(files, is_bin))
            format = DataFormat::text;
        else if (has_llmc_magic(files.front()))
            format = DataFormat::llmc;
        else if (const std::string file = fs::path(path).filename().string(); file == "train.bin")
            format = DataFormat::nanogpt;
        else
            throw RequestError(fmt::format(
                "{}: does not begin with the magic of an llm.c shard ({} or {}): expected one, or data-format = \"nanogpt\" "
                "for uint16 ids without a header, or \"text\" for bytes",
                shown(files.front()), magic_gpt2, magic_llama3));
    }
    switch (format) {
        case DataFormat::llmc: {
            std::vector<std::string> shards;
            std::ranges::copy_if(files, std::back_inserter(shards), is_bin);
            if (shards.empty())
                throw RequestError(fmt::format("{}: holds no .bin file: expected llm.c shards", shown(path)));
            return read_llmc(path, shards, folder);
        }
        case DataFormat::nanogpt:
            return read_nanogpt(path);
        default:
            return read_text(path, files);
    }
}

void check_tokens(const TokenData& data, int vocabulary, int length) {
    const std::string name = shown(data.source);
    const bool sixteenth = data.validation.size() == (data.training.size() + data.validation.size()) / held_out_every;
    const std::string in_all = fmt::format(", so {} tokens or more in all, of which the last sixteenth is held out",
                                           held_out_every * (static_cast<std::size_t>(length) + 1));
    const auto check = [&](const std::vector<std::int32_t>& tokens, const char* split) {
        if (tokens.size() <= static_cast<std::size_t>(length))
            throw RequestError(fmt::format("{}: {} split: {} tokens: expected more than the context of {}{}", name,
                                           split, tokens.size(), length, sixteenth ? in_all : ""));
        const auto over = std::ranges::find_if(tokens, [&](std::int32_t id) { return id < 0 || id >= vocabulary; });
        if (over != tokens.end())
            throw RequestError(
                fmt::format("{}: {} split: token {} at position {}: expected ids below the vocabulary of {}", name,
                            split, *over, over - tokens.begin(), vocabulary));
    };
    check(data.training, "training");
    check(data.validation, "validation");
}

Windows windows_at(std::span<const std::int32_t> tokens, std::span<const std::int64_t> offsets, int length) {
    Windows windows;
    for (const std::int64_t offset : offsets) {
        const auto from = tokens.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(length) + 1);
        windows.tokens.insert(windows.tokens.end(), from.begin(), from.end() - 1);
        windows.targets.insert(windows.targets.end(), from.begin() + 1, from.end());
    }
    return windows;
}

}  // namespace faultline::gpt
