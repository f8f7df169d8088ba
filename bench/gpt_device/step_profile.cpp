// SPDX-License-Identifier: Apache-2.0
// What a step of a run on the device is made of, kernel by kernel as they ran, CUDA graphs included (CUPTI's activity records).
// The CUDA driver loads the library that a variable names into the process:
//
//     CUDA_INJECTION64_PATH=$PWD/build/cuda/bench/gpt_device/libgpt_device_profile.so
//     faultline train --device cuda --config experiments/configs/gpt2-124m.toml --data FOLDER --steps 40 …
//
// At the end it prints, of the last twenty steps but one, the time of a step, of its kernels, and of the gaps between them; then
// every kernel with its share. PROFILE_OUT=FILE writes there; PROFILE_ORDER=N adds the last N steps kernel by kernel, with start,
// gap before and length in microseconds and the stream. A step ends where PROFILE_MARK runs (finish_squares: once a step).
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <cxxabi.h>

#include <cupti.h>

namespace {

struct Record {
    std::uint64_t start, end;  ///< ns
    std::uint32_t name, stream;
};

/// Of the process; never destroyed, because CUPTI hands over records until it ends.
struct Profile {
    std::mutex mutex;
    std::vector<Record> records;
    std::vector<std::string> names;
    std::map<std::string, std::uint32_t> ids;

    void add(std::uint64_t start, std::uint64_t end, const char* name, std::uint32_t stream) {
        const auto [at, is_new] = ids.emplace(name, static_cast<std::uint32_t>(names.size()));
        if (is_new) names.emplace_back(name);
        records.push_back({start, end, at->second, stream});
    }
};
Profile& profile() {
    static auto* of_process = new Profile;
    return *of_process;
}

std::string readable(const std::string& name) {
    int status = 0;
    const std::unique_ptr<char, void (*)(void*)> plain(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status),
                                                       std::free);
    std::string text = plain ? plain.get() : name;
    for (const char* const prefix : {"faultline::", "gpt::on_device::", "(anonymous namespace)::"})
        for (std::size_t at = 0; (at = text.find(prefix)) != std::string::npos;)
            text.erase(at, std::string(prefix).size());
    return text.substr(0, text.find('('));
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* most_records) {
    *size = std::size_t{8} << 20;
    *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(16, *size));
    *most_records = 0;
}

void CUPTIAPI take_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t bytes) {
    Profile& to = profile();
    const std::lock_guard lock(to.mutex);
    CUpti_Activity* record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, bytes, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const auto* k = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
            to.add(k->start, k->end, k->name != nullptr ? k->name : "?", k->streamId);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            const auto* k = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
            to.add(k->start, k->end, "[memcpy]", k->streamId);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            const auto* k = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
            to.add(k->start, k->end, "[memset]", k->streamId);
        }
    }
    std::free(buffer);
}

double ms(std::uint64_t ns) { return static_cast<double>(ns) * 1e-6; }

void print_sums(std::FILE* to, const Profile& of, std::size_t first, std::size_t last, int steps) {
    struct Sum {
        double ms = 0;
        int count = 0;
    };
    std::map<std::uint32_t, Sum> sums;
    std::uint64_t until = of.records[first].start;  // something ran all the time, but for the gaps
    double busy = 0, gaps = 0;
    constexpr double short_gap = 0.01;  // ms: longer ones are the host's
    for (std::size_t i = first; i < last; ++i) {
        const Record& r = of.records[i];
        sums[r.name].ms += ms(r.end - r.start);
        ++sums[r.name].count;
        busy += ms(r.end - r.start);
        if (r.start > until && ms(r.start - until) < short_gap) gaps += ms(r.start - until);
        until = std::max(until, r.end);
    }
    std::fprintf(to, "a step %.3f ms: kernels %.3f, gaps under 10 us %.3f, %.0f kernels\n",
                 ms(of.records[last].start - of.records[first].start) / steps, busy / steps, gaps / steps,
                 static_cast<double>(last - first) / steps);
    std::vector<std::pair<double, std::uint32_t>> order;
    for (const auto& [name, sum] : sums) order.emplace_back(sum.ms, name);
    std::sort(order.rbegin(), order.rend());
    for (const auto& [of_name, name] : order) {
        const Sum& sum = sums[name];
        std::fprintf(to, "%9.3f ms %7.1f x %9.2f us  %s\n", of_name / steps, static_cast<double>(sum.count) / steps,
                     1e3 * of_name / sum.count, readable(of.names[name]).c_str());
    }
}

void print_order(std::FILE* to, const Profile& of, std::size_t first, std::size_t last) {
    std::uint64_t before = of.records[first].start;
    for (std::size_t i = first; i <= last; ++i) {
        const Record& r = of.records[i];
        std::fprintf(to, "%9.1f %+7.1f %8.1f stream %u  %s\n", 1e3 * ms(r.start - of.records[first].start),
                     1e-3 * (static_cast<double>(r.start) - static_cast<double>(before)), 1e3 * ms(r.end - r.start),
                     r.stream, readable(of.names[r.name]).c_str());
        before = r.end;
    }
}

void finish() {
    (void)cuptiActivityFlushAll(1);
    Profile& of = profile();
    const std::lock_guard lock(of.mutex);
    std::sort(of.records.begin(), of.records.end(), [](const Record& a, const Record& b) { return a.start < b.start; });
    const char *mark = std::getenv("PROFILE_MARK"), *path = std::getenv("PROFILE_OUT"),
               *order = std::getenv("PROFILE_ORDER");
    std::vector<std::size_t> marks;
    for (std::size_t i = 0; i < of.records.size(); ++i)
        if (of.names[of.records[i].name].find(mark != nullptr ? mark : "finish_squares") != std::string::npos)
            marks.push_back(i);
    std::FILE* to = path != nullptr ? std::fopen(path, "w") : stdout;
    if (to == nullptr) to = stdout;
    if (marks.size() < 4) {
        std::fprintf(to, "profile: %zu kernels in %zu steps: expected four steps or more\n", of.records.size(),
                     marks.size());
    } else {
        const std::size_t last = marks.size() - 2, steps = std::min<std::size_t>(20, last);
        print_sums(to, of, marks[last - steps], marks[last], static_cast<int>(steps));
        if (order != nullptr && std::atoi(order) > 0)
            print_order(to, of, marks[last - std::min<std::size_t>(static_cast<std::size_t>(std::atoi(order)), last)],
                        marks[last]);
    }
    if (to != stdout) (void)std::fclose(to);
}

}  // namespace

/// What the driver calls when it has loaded the library. 0 where it is of no use.
extern "C" int InitializeInjection() {
    if (cuptiActivityRegisterCallbacks(give_buffer, take_buffer) != CUPTI_SUCCESS) return 0;
    for (const CUpti_ActivityKind kind :
         {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET})
        if (cuptiActivityEnable(kind) != CUPTI_SUCCESS) return 0;
    return std::atexit(finish) == 0 ? 1 : 0;
}
