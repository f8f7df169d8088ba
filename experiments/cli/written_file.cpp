// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/written_file.hpp>

#include <filesystem>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {

void expect_writable(const Settings& settings, std::string_view key, const std::string& path, bool force) {
    if (path.empty()) return;
    if (path == "-")
        throw RequestError(
            fmt::format("{}: -: standard output takes the table or --json: expected a file's name (./- for "
                        "one of that name)",
                        settings.where(key)));
    std::error_code error;
    // What is read from must not be written over, by --force or by way of the partial file.
    for (const std::string& written : {path, path + ".partial"}) {
        if (!std::filesystem::exists(written, error)) continue;
        const std::string reads = settings.setting_that_names(written, std::string(key));
        if (reads.empty()) continue;
        const bool written_too = reads == "--output" || reads == "--report" || reads == "--junit";
        throw RequestError(fmt::format("{}: {}: is what {} {}: expected another file", settings.where(key),
                                       escaped(written, written.size()), reads, written_too ? "writes" : "reads"));
    }
    if (!force && std::filesystem::exists(path, error))
        throw RequestError(fmt::format("{}: {}: exists already: expected a new name, or --force to replace it",
                                       settings.where(key), escaped(path, path.size())));
}

void expect_writable_beside(const Settings& settings, std::string_view key, const std::vector<std::string>& there,
                            bool force) {
    for (const std::string& path : there) {
        expect_writable(settings, key, path, force);
        PartialName(path).abandon();
    }
}

namespace {

/// Whether two outputs would be written under one name, however it is spelled: whole, or until they are whole.
bool collide(const std::string& a, const std::string& b) {
    const auto resolved = [](const std::string& name) {
        std::error_code problem;
        const std::filesystem::path path =
            std::filesystem::weakly_canonical(std::filesystem::absolute(name, problem), problem);
        return problem ? std::filesystem::path(name) : path;
    };
    for (const std::string& one : {a, a + ".partial"})
        for (const std::string& other : {b, b + ".partial"})
            if (resolved(one) == resolved(other)) return true;
    return false;
}

}  // namespace

WrittenText::WrittenText(const Invocation& call, std::string_view key, const std::string& path) {
    if (!path.empty() && !call.common.output.empty() && collide(path, call.common.output))
        throw RequestError(fmt::format("{}: {}: is the file of -o too: expected another name", call.settings.where(key),
                                       escaped(path, path.size())));
    expect_writable(call.settings, key, path, call.common.force);
    if (path.empty()) return;
    file_.emplace(path);
}

void WrittenText::keep_partial(std::string_view text) {
    if (!file_) return;
    file_->write(std::as_bytes(std::span(text)));
    file_->keep();
}

void WrittenText::commit(std::string_view text) {
    if (!file_) return;
    file_->write(std::as_bytes(std::span(text)));
    file_->commit();
}

}  // namespace faultline::cli
