// SPDX-License-Identifier: Apache-2.0
// faultline check: a verdict on what a kernel returned, for a kernel's CI.
#include <algorithm>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/cli/capture_request.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/plan_choice.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/cli/written_file.hpp>
#include <faultline/identification/observed_kernels.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/tensor/text.hpp>
#include <faultline/verdict/check.hpp>
#include <faultline/verdict/report.hpp>

namespace faultline::cli {
namespace {

/// The kernel's name that stands for the only one there is.
constexpr const char* only_kernel = "auto";

struct CheckSettings {
    CaptureRequest request;
    std::string plan{automatic_plan}, kernel{only_kernel}, junit;
    std::vector<std::string> outputs;
    std::optional<double> alpha = CheckOptions{}.alpha, slack = CheckOptions{}.slack;
    std::int64_t runs = 32, seed = 0;
    bool full = false;
};

/// Fewer runs than this make thresholds that no fault reaches: t with 8 degrees of freedom at p = 1e-7 is 18.
constexpr std::int64_t least_runs = 8;
/// More than this tell no more.
constexpr std::int64_t most_runs = 10000;
/// Student's t of the fewest runs reaches p = 1e-12 over some thousand tests only beyond 500.
constexpr double least_alpha = 1e-12;

CheckOptions options_of(const CheckSettings& own, const Invocation& call) {
    CheckOptions options;
    options.kernel = own.kernel == only_kernel ? "" : own.kernel;
    if (!own.outputs.empty()) {
        options.outputs.clear();
        options.lse = false;
        options.by_name = true;
    }
    for (const std::string& given : own.outputs) {
        if (given == "lse") {
            options.lse = true;
            continue;
        }
        const auto output = find_output(given);
        if (!output) {
            constexpr std::array<std::string_view, 5> known{"o", "dq", "dk", "dv", "lse"};
            throw RequestError(fmt::format("{}: {}: {}", call.settings.where("outputs"), in_quotes(given),
                                           expected_one_of(given, known)));
        }
        if (std::count(options.outputs.begin(), options.outputs.end(), *output) == 0)
            options.outputs.push_back(*output);
    }
    std::sort(options.outputs.begin(), options.outputs.end());
    options.alpha = own.alpha.value_or(options.alpha);
    if (!(options.alpha >= least_alpha && options.alpha < 1))
        throw RequestError(fmt::format("{}: {}: expected a probability from {} to below 1",
                                       call.settings.where("alpha"), options.alpha, least_alpha));
    options.slack = own.slack.value_or(options.slack);
    if (!(options.slack >= 1))
        throw RequestError(
            fmt::format("{}: {}: expected a factor of 1 or more", call.settings.where("slack"), options.slack));
    options.runs = static_cast<int>(own.runs);
    options.heads = own.request.heads;
    options.threads = static_cast<int>(call.common.threads);
    options.seed = static_cast<std::uint64_t>(own.seed);
    return options;
}

/// The one named, else the only one there is; empty where check() has a sentence for what there is, and where the kernel left
/// an lse alone, by which no preset is told from another.
std::string kernel_to_judge(const Capture& capture, const CheckOptions& options) {
    const std::vector<std::string> known = observed_kernels(capture);
    const std::string kernel = options.kernel.empty() && known.size() == 1 ? known.front() : options.kernel;
    return std::find(known.begin(), known.end(), kernel) == known.end() ? "" : kernel;
}

/// Whether so many elements of every output are the plan's that no preset can be clearly nearer to the kernel.
bool is_its_plan(const Check& result) {
    for (const LayerCheck& layer : result.layers)
        for (const OutputCheck& output : layer.outputs)
            if (!output.lse && 1 - output.bit_equal_to_plan > unmodelled_share) return false;
    return true;
}

Status run(const CheckSettings& own, const Invocation& call) {
    watch_for_interrupts();
    CheckOptions options = options_of(own, call);
    own.request.expect_valid(call.settings);
    PlanChoice choice(own.plan, call.settings);
    options.backend = &backend_of(call);
    const Capture capture = own.request.read(call);

    std::optional<RecordFile> file;
    if (!call.common.output.empty()) {
        Manifest manifest = call.manifest("check", options.seed);
        manifest.inputs = hash_inputs(own.request.capture);
        file = RecordFile::create(call.common.output, manifest);
    }
    WrittenText junit(call, "junit", own.junit);

    const AttributionOptions ranking = ranking_of(options);
    const std::string kernel = kernel_to_judge(capture, options);
    choice.choose(capture, kernel, ranking, call);
    Progress line(call.talks());
    options.progress = [&](std::size_t done, std::size_t total, const std::string& what) {
        line.update(done, total, what);
    };
    options.cancelled = interrupted;
    Check result = check(capture, choice.plan, options);
    line.clear();
    if (!result.complete) {
        remark(fmt::format("faultline check: interrupted after {} of {} layers: no verdict, nothing written",
                           result.layers.size(), capture.layers.size()));
        return Status::failed;
    }
    if (!choice.origin.automatic && !kernel.empty() && !is_its_plan(result))
        choice.compare(capture, kernel, ranking, call);
    result.origin = choice.origin;
    std::erase_if(result.origin.nearer, [&](const NearerPlan& n) {
        return n.kernel != kernel || n.bit_equal - n.bit_equal_to_asked <= unmodelled_share;
    });
    const auto write_files = [&] {
        junit.commit(to_junit(result));
        if (!file) return;
        write(result, *file);
        file->commit();
    };
    for (const LayerCheck& layer : result.layers)
        if (!layer.unjudged.empty())
            remark(fmt::format("faultline check: {}: {}", escaped(layer.name), unjudged_text(layer)));
    print_after(write_files, call.common.json ? to_json(result) : table(result, own.full));
    return result.verdict() == Verdict::within_rounding ? Status::done : Status::failed;
}

}  // namespace

Command check_command() {
    return {"check", "Judge what a kernel returned: within its rounding (exit 0), biased or wrong (exit 1)",
            "  faultline check run7.safetensors --plan fa2 --kernel flash\n"
            "  faultline check run7.safetensors --plan mine.toml --kernel mine --junit check.xml --quiet",
            [](Settings& settings) -> Run {
                const auto own = std::make_shared<CheckSettings>();
                own->request.declare(settings);
                declare_plan(settings, own->plan, "What the kernel is to compute");
                settings.text("kernel", own->kernel, "NAME",
                              "The kernel to judge; auto (the default): the only one there is");
                settings.list("outputs", own->outputs, "o,dq,dk,dv,lse", "Only these outputs");
                settings.number("alpha", own->alpha, "P",
                                "Chance that a right kernel fails, all tests together; default 0.001");
                settings.number("slack", own->slack, "X",
                                "How many times larger than the plan's rounding an error may be; default 1.5");
                settings.integer("runs", own->runs, least_runs, "N",
                                 "Runs of the plan with random signs that the verdict rests on; default 32", most_runs);
                settings.integer("seed", own->seed, 0, "N", "Of those signs");
                settings.text("junit", own->junit, "FILE.xml", "Write the verdict as JUnit XML");
                settings.flag("full", own->full, "Every finding in the table");
                return [own](const Invocation& call) { return run(*own, call); };
            }};
}

}  // namespace faultline::cli
