// SPDX-License-Identifier: Apache-2.0
// The text that is trained on where none is named.
#include <faultline/gpt/data.hpp>

#include <cstdlib>
#include <filesystem>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::gpt {
namespace {

namespace fs = std::filesystem;

// perl-doc 5.36.0 of Debian 12 (the same bytes in 5.36.0-7+deb12u3 and u4): 8.8 MB of technical English, the files *.pod of
// this folder joined in the order of their names, without perldiag.pod, which another package owns. Chosen because it is
// prose, one package that needs perl alone and runs no service, and outside /usr/share/doc, which slim images leave out.
constexpr std::string_view folder = "/usr/share/perl/5.36.0/pod";
constexpr std::string_view known_hash = "xxh3-128:1dafc3b485bfd5edc7bc12c8f3523874";

}  // namespace

std::string default_text_folder() {
    const char* named = std::getenv("FAULTLINE_TEXT");
    return named != nullptr && *named != '\0' ? std::string(named) : std::string(folder);
}

TokenData default_tokens() {
    const std::string path = default_text_folder();
    constexpr const char* missing =
        "{}: the default text is not installed: expected the Debian package perl-doc (cmake/install-packages build), or "
        "--data with a text of your own";
    std::error_code error;
    if (!fs::exists(fs::path(path) / "perlvar.pod", error))
        throw RequestError(fmt::format(missing, escaped(path, path.size())));
    TokenData data =
        read_text_files(path, [](const std::string& name) { return name.ends_with(".pod") && name != "perldiag.pod"; });
    if (const std::string& hash = data.inputs.at(0).hash; hash != known_hash)
        throw RequestError(fmt::format(
            "{}: hash {}: expected {} of perl-doc 5.36.0 in Debian 12; --data with this path takes it as it is",
            escaped(path, path.size()), hash, known_hash));
    return data;
}

}  // namespace faultline::gpt
