// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/capture_request.hpp>

#include <algorithm>
#include <array>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/identification/observed_kernels.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {

void CaptureRequest::declare(Settings& settings) {
    settings.positional(
        "capture", capture,
        "Tensors LAYER.{q,k,v,do} and LAYER.KERNEL.{o,dq,dk,dv}: safetensors, a folder of .npy, or HDF5");
    settings.list("layers", layers, "A,B", "Only these layers");
    settings.list("heads", heads, "0,1", "Only these query heads, and those that share their keys");
    settings.choice("causal", causal,
                    "The mask; default: what the capture says, else causal unless there is a mask tensor");
    settings.positive_number("scale", scale, "X",
                             "Factor on q k^T; default: what the capture says, else 1/sqrt(head_dim)");
    settings.number("softcap", softcap, "C",
                    "Scores are C tanh(s/C); 0: none; default: what the capture says, else none");
    settings.list("allow", allow, "WHAT", "Take degenerate inputs: single-key, masked-rows, mask-min");
}

namespace {

/// A misspelt kernel or output would otherwise be missing from the table without a word.
void remark_unused(const Capture& capture) {
    constexpr std::size_t shown = 3;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < std::min(capture.unused.size(), shown); ++i)
        names.push_back(in_quotes(capture.unused[i]));
    if (names.empty()) return;
    remark(fmt::format(
        "{}: not used: {} tensor{} ({}{}): no name of theirs is LAYER.{{q,k,v,do,mask,softcap,sink,dropout,keep}} or LAYER.KERNEL.{{o,dq,dk,dv,lse}}",
        escaped(capture.path, capture.path.size()), capture.unused.size(), capture.unused.size() == 1 ? "" : "s",
        fmt::format("{}", fmt::join(names, ", ")), capture.unused.size() > shown ? ", ..." : ""));
}

}  // namespace

Allowances allowances(const std::vector<std::string>& allow, const Settings& settings) {
    Allowances allowed;
    for (const std::string& what : allow) {
        constexpr std::array<std::string_view, 3> known{"single-key", "masked-rows", "mask-min"};
        if (what == known[0])
            allowed.single_key = true;
        else if (what == known[1])
            allowed.masked_rows = true;
        else if (what == known[2])
            allowed.mask_min = true;
        else
            throw RequestError(
                fmt::format("{}: {}: {}", settings.where("allow"), in_quotes(what), expected_one_of(what, known)));
    }
    return allowed;
}

void expect_kernels(const Capture& capture, const std::vector<std::string>& kernels, const Settings& settings) {
    const std::vector<std::string> known = observed_kernels(capture);
    const std::vector<std::string_view> names(known.begin(), known.end());
    for (const std::string& kernel : kernels) {
        if (std::find(known.begin(), known.end(), kernel) != known.end()) continue;
        if (const std::string why = nothing_to_compare(capture, kernel); !why.empty())
            throw RequestError(fmt::format("{}: {}: {}: {}", settings.where("kernel"), in_quotes(kernel),
                                           escaped(capture.path, capture.path.size()), why));
        const std::string expected =
            known.empty() ? "expected tensors LAYER.KERNEL.{o,dq,dk,dv} of it, of which there are none of any kernel"
                          : expected_one_of(kernel, names);
        throw RequestError(fmt::format("{}: {}: {}: {}", settings.where("kernel"), in_quotes(kernel),
                                       escaped(capture.path, capture.path.size()), expected));
    }
}

void CaptureRequest::expect_valid(const Settings& settings) const {
    if (capture.empty())
        throw RequestError(
            "CAPTURE: is missing: expected a safetensors file, a folder of .npy files, or an HDF5 capture");
    if (softcap && !is_softcap(*softcap))
        throw RequestError(fmt::format("{}: {}: expected 0 for none, or a number from {} to {}",
                                       settings.where("softcap"), *softcap, least_softcap, most_softcap));
    (void)allowances(allow, settings);
}

Capture CaptureRequest::read(const Invocation& call) const {
    const Settings& settings = call.settings;
    expect_valid(settings);
    CaptureOptions options;
    options.layers = layers;
    options.causal = causal;
    options.scale = scale;
    options.softcap = softcap;
    options.allow = allowances(allow, settings);
    Capture read = read_capture(capture, options);
    for (const LayerCapture& layer : read.layers)
        for (const int head : heads)
            if (head < 0 || head >= layer.heads())
                throw RequestError(fmt::format("{}: {}: expected 0 to {}, the heads of {} in {}",
                                               settings.where("heads"), head, layer.heads() - 1, layer.name,
                                               escaped(read.path, read.path.size())));
    if (call.talks()) remark_unused(read);
    return read;
}

RoundingPlan plan_named(const std::string& name, const Settings& settings, std::string_view key) {
    try {
        return plan(name);
    } catch (const RequestError& error) {
        if (name.ends_with(".toml")) throw;  // names the file
        throw RequestError(fmt::format("{}: {}", settings.where(key), error.what()));
    }
}

}  // namespace faultline::cli
