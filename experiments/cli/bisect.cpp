// SPDX-License-Identifier: Apache-2.0
// faultline bisect: which sets of roundings it takes to make a fault, or to repair it.
#include <algorithm>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/bisection/bisect.hpp>
#include <faultline/bisection/report.hpp>
#include <faultline/cli/capture_request.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/plan_choice.hpp>
#include <faultline/cli/terminal.hpp>

namespace faultline::cli {
namespace {

struct BisectSettings {
    CaptureRequest request;
    std::string plan{automatic_plan};
    std::vector<std::string> until, reproduce;
    std::optional<double> within;
    std::int64_t runs = 1000, size = 0, seed = 0;
};

std::vector<Target> targets(const std::vector<std::string>& texts, const Capture& capture, const Settings& settings,
                            const char* key, std::optional<double> tolerance) {
    std::vector<std::string> layers;
    for (const LayerCapture& layer : capture.layers) layers.push_back(layer.name);
    std::vector<Target> list;
    for (const std::string& text : texts) {
        try {
            list.push_back(parse_target(text, layers, tolerance));
        } catch (const RequestError& error) {
            throw RequestError(fmt::format("{}: {}", settings.where(key), error.what()));
        }
    }
    try {
        expect_compatible(list);
    } catch (const RequestError& error) {
        throw RequestError(fmt::format("{}: {}", settings.where(key), error.what()));
    }
    return list;
}

Status run(const BisectSettings& own, const Invocation& call) {
    watch_for_interrupts();
    if (own.until.empty() && own.reproduce.empty())
        throw RequestError(
            "--until: is missing: expected a target for repairs, as in --until 'layer1.dq.rel_error < 1e-2', or "
            "--reproduce layer1.dq.rel_error");
    if (own.within && !(*own.within >= 0))
        throw RequestError(fmt::format("{}: {}: expected 0 or more, as 0.1 for within 10% of the plan's value",
                                       call.settings.where("within"), *own.within));
    own.request.expect_valid(call.settings);
    PlanChoice choice(own.plan, call.settings);
    BisectionOptions options;
    options.backend = &backend_of(call);
    const Capture capture = own.request.read(call);
    options.until = targets(own.until, capture, call.settings, "until", std::nullopt);
    options.reproduce = targets(own.reproduce, capture, call.settings, "reproduce", own.within.value_or(0.1));
    if (std::none_of(options.reproduce.begin(), options.reproduce.end(),
                     [](const Target& t) { return t.relation == Target::Relation::near_plan; }))
        call.settings.refuse_unread({"within"}, "where no --reproduce is a measure alone, as dq.rel_error is");
    options.search.budget = static_cast<std::size_t>(own.runs);
    if (own.size > 0) {
        options.search.largest_size = static_cast<int>(std::min<std::int64_t>(own.size, 42));
        options.search.beyond = false;
    }
    options.heads = own.request.heads;
    options.threads = static_cast<int>(call.common.threads);
    options.seed = static_cast<std::uint64_t>(own.seed);

    std::optional<RecordFile> file;
    if (!call.common.output.empty()) {
        Manifest manifest = call.manifest("bisection", options.seed);
        manifest.inputs = hash_inputs(own.request.capture);
        file = RecordFile::create(call.common.output, manifest);
    }
    choice.choose(capture, kernel_asked_about(capture), ranking_of(options), call);
    if (!draws(choice.plan)) call.settings.refuse_unread({"seed"}, "where the plan rounds nothing stochastically");
    Progress line(call.talks());
    options.progress = [&](std::size_t done, std::size_t total, const std::string& what) {
        line.update(done, total, what);
    };
    options.cancelled = interrupted;
    Bisection result = bisect(capture, choice.plan, options);
    result.origin = choice.origin;
    result.origin.nearer.clear();  // of kernels that the question is not about
    line.clear();
    if (!result.complete) {
        if (!result.answers.empty()) print(call.common.json ? to_json(result) : table(result));
        remark(fmt::format(
            "faultline bisect: interrupted{}; the questions that were answered are above, and fewer --runs or --heads take less time",
            file ? ", nothing written" : ""));
        return Status::failed;
    }
    const auto write_file = [&] {
        if (!file) return;
        write(result, *file);
        file->commit();
    };
    print_after(write_file, call.common.json ? to_json(result) : table(result));
    if (all_met(result)) return Status::done;
    remark(fmt::format("faultline bisect: {}", unmet(result)));
    return Status::failed;
}

}  // namespace

Command bisect_command() {
    return {
        "bisect", "Find the smallest sets of roundings whose repair meets a target, or that alone make the fault",
        "  faultline bisect run7.safetensors --until 'layer1.dq.rel_error < 1e-2'\n"
        "  faultline bisect run7.safetensors --reproduce layer1.dq.rel_error --within 0.1 -o bisection.h5",
        [](Settings& settings) -> Run {
            const auto own = std::make_shared<BisectSettings>();
            own->request.declare(settings);
            declare_plan(settings, own->plan, "The kernel's numerics");
            settings.items("until", own->until, "TARGET",
                           "LAYER.OUTPUT.MEASURE < NUMBER, to be met by repairs; again for more, all to be met");
            settings.items("reproduce", own->reproduce, "TARGET",
                           "The same, to be met by sites that round alone; a measure alone: near the plan's value");
            settings.number("within", own->within, "X",
                            "How near a measure alone is to be, of the plan's value; default 0.1");
            settings.means_nothing_without("within", "reproduce");
            settings.integer(
                "runs", own->runs, 1, "N",
                "Sets that the search by size may try; single sites always are, and delta debugging comes on top; default "
                "1000");
            settings.integer(
                "size", own->size, 1, "N",
                "Largest size that is searched set by set; default 3, and the size of what delta debugging finds");
            settings.integer("seed", own->seed, 0, "N", "Of stochastic rounding");
            return [own](const Invocation& call) { return run(*own, call); };
        }};
}

}  // namespace faultline::cli
