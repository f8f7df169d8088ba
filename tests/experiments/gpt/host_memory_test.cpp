// SPDX-License-Identifier: Apache-2.0
// The memory of a run on the CPU, planned from its shapes, against what a run allocates: every operator new of this program is
// counted. (Eigen's matrices are not; they are smaller than a step's other scratch.)
#include <faultline/gpt/host_memory.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <new>
#include <thread>

#include <faultline/base/error.hpp>
#include <faultline/gpt/run.hpp>
#include <faultline/gpt/trainer.hpp>
#include <faultline/plan/presets.hpp>

#include "../../lib/tensor/support.hpp"
#include "texts.hpp"

namespace {

std::atomic<std::int64_t> held{0}, most_held{0};

void* counted(void* block) {
    if (block == nullptr) throw std::bad_alloc();
    const std::int64_t now = held += static_cast<std::int64_t>(malloc_usable_size(block));
    std::int64_t most = most_held;
    while (now > most && !most_held.compare_exchange_weak(most, now)) {
    }
    return block;
}

void release(void* block) {
    if (block != nullptr) held -= static_cast<std::int64_t>(malloc_usable_size(block));
    std::free(block);
}

}  // namespace

void* operator new(std::size_t size) { return counted(std::malloc(size > 0 ? size : 1)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
    const auto align = static_cast<std::size_t>(alignment);
    return counted(std::aligned_alloc(align, (size + align - 1) / align * align));
}
void operator delete(void* block) noexcept { release(block); }
void operator delete(void* block, std::size_t) noexcept { release(block); }
void operator delete(void* block, std::align_val_t) noexcept { release(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { release(block); }

namespace faultline::gpt {
namespace {

using test::Folder;
using testing::HasSubstr;
using testing::StartsWith;

TrainConfig small() {
    TrainConfig c;
    c.model = {.layers = 3, .width = 48, .heads = 3, .context = 128, .vocabulary = 300};
    c.batch = 7;  // four chunks, the last of one sequence
    c.steps = 1;
    c.schedule = {.learning_rate = 1e-3, .warmup = 2};
    c.monitor_every = 1;
    c.validate_every = 1;
    c.validation_batches = 1;
    return c;
}

/// The most that a run holds at once beyond its data, in bytes.
std::int64_t allocated(const TrainConfig& c, const std::set<std::int64_t>& capture = {}, bool writes = false) {
    static const TokenData data = tokens_of_text(test::text_of_squares(900));
    const Folder folder;
    const WindowOrder order(c.seed);
    RunFiles files;
    if (writes) files.output = folder / "run.h5";
    files.capture = capture;
    files.capture_sequences = 3;
    files.manifest.kind = "run";
    std::int64_t most = 0;
    const auto work = [&] {
        const std::int64_t before = held;
        most_held = before;
        Trainer trainer(c, data, order);
        (void)run(trainer, files, {}, {});
        most = most_held - before;
    };
    static const bool warm = (work(), true);  // what a program allocates once
    EXPECT_TRUE(warm);
    std::thread(work).join();  // with a thread's own
    return most;
}

/// What is planned is what is allocated, but for names, streams and a row of the record, and not a twentieth more.
void expect_planned(const TrainConfig& c, const HostNeeds& needs = {}) {
    const std::set<std::int64_t> capture = needs.captured > 0 ? std::set<std::int64_t>{0} : std::set<std::int64_t>{};
    const std::int64_t held_by_run = allocated(c, capture, needs.checkpoints);
    const HostMemory plan = host_memory(c, needs);
    constexpr std::int64_t without_shape = 65536;
    EXPECT_GE(static_cast<std::int64_t>(plan.bytes()) + without_shape, held_by_run) << plan.text();
    EXPECT_LE(static_cast<double>(plan.bytes()), 1.05 * static_cast<double>(held_by_run)) << plan.text();
}

TEST(HostMemory, IsWhatARunAllocates) {
    TrainConfig c = small();
    for (const int threads : {1, 3}) {
        SCOPED_TRACE(threads);
        c.threads = threads;
        expect_planned(c);
    }
    c.threads = 2;
    c.model.bf16 = false;
    c.optimizer.kind = OptimizerKind::sgd;
    c.accumulate = 2;
    c.validate_every = 0;
    expect_planned(c);
}
TEST(HostMemory, OfMuonAndEveryOptionOfTheModel) {
    TrainConfig c = small();
    c.optimizer.kind = OptimizerKind::muon;
    c.model.bias = c.model.output_gate = c.model.sigma_reparam = true;
    c.model.qk_norm = QkNorm::learned;
    c.model.softcap = 20;
    expect_planned(c);
}
TEST(HostMemory, OfCapturesAndCheckpoints) {
    expect_planned(small(), {.checkpoints = true});
    TrainConfig c = small();
    c.batch = 30;
    expect_planned(c, {.checkpoints = true, .captured = 3});
}
TEST(HostMemory, OfEmulatedHeads) {
    for (const char* name : {"fa2", "math"}) {
        SCOPED_TRACE(name);
        TrainConfig c = small();
        c.model.attention.push_back({-1, {}, std::make_shared<const RoundingPlan>(plan(name))});
        expect_planned(c);
    }
}

TEST(HostMemory, CountsParametersAsTheLayoutDoes) {
    for (const QkNorm norm : {QkNorm::none, QkNorm::learned})
        for (int options = 0; options < 8; ++options) {
            ModelConfig m{.layers = 3, .width = 40, .heads = 5, .context = 7, .vocabulary = 11};
            m.qk_norm = norm;
            m.bias = (options & 1) != 0;
            m.output_gate = (options & 2) != 0;
            m.sigma_reparam = (options & 4) != 0;
            EXPECT_EQ(parameter_count(m), static_cast<std::uint64_t>(ParameterLayout(m).size())) << options;
        }
    EXPECT_EQ(
        parameter_count({.layers = 12, .width = 768, .heads = 12, .context = 1024, .vocabulary = 50257, .bias = true}),
        124'439'808U);  // GPT-2 124M
}

TEST(HostMemory, OfSizesBeyondCountingIsTheLargestNumber) {
    constexpr int most = 1 << 30;
    TrainConfig c;
    c.model = {.layers = most, .width = most, .heads = most, .context = most, .vocabulary = most};
    c.batch = c.accumulate = most;
    EXPECT_EQ(parameter_count(c.model), std::numeric_limits<std::uint64_t>::max());
    EXPECT_EQ(host_memory(c, {}).bytes(), std::numeric_limits<std::uint64_t>::max());
    EXPECT_EQ(host_memory(c, {}).text(), "more than 16 EiB");
    EXPECT_THROW(expect_room("the run needs", host_memory(c, {}), 3, {std::uint64_t{1} << 40, "that are free"}),
                 WorkError);
}

TEST(HostMemory, IsRefusedInASentenceWhereThereIsLess) {
    HostMemory memory;
    memory.parts = {{"weights", std::uint64_t{1} << 29}, {"scratch", std::uint64_t{1} << 28}};
    EXPECT_EQ(memory.text(), "768.0 MiB: weights 512.0, scratch 256.0");
    expect_room("the run needs", memory, 2, {std::uint64_t{3} << 29, "that are free"});
    try {
        expect_room("a run needs", memory, 3, {std::uint64_t{2} << 30, "that are free"});
        FAIL();
    } catch (const WorkError& error) {
        EXPECT_STREQ(error.what(),
                     "not enough memory: a run needs 768.0 MiB: weights 512.0, scratch 256.0, and 3 at a time "
                     "2.25 GiB: expected at most the 2.00 GiB that are free");
    }
}

TEST(HostMemory, AsManyRunsAtOnceAsThereIsRoomFor) {
    HostMemory one;
    one.parts = {{"weights", 10}};
    const MemoryRoom room{35, "that are free"};
    EXPECT_EQ(runs_with_room("a run needs", one, 3, true, room), 3);
    EXPECT_EQ(runs_with_room("a run needs", one, 8, false, room), 3);  // a number that nobody asked for
    EXPECT_EQ(runs_with_room("a run needs", one, 2, false, room), 2);
    EXPECT_THROW((void)runs_with_room("a run needs", one, 4, true, room), WorkError);
    EXPECT_THROW((void)runs_with_room("a run needs", one, 1, false, {9, "that are free"}), WorkError);
    EXPECT_EQ(runs_with_room("a run needs", {}, 8, true, room), 8);
}

/// A system's files.
class System {
  public:
    System() {
        std::filesystem::create_directories(files.proc + "/self");
        write(files.proc + "/meminfo", "MemTotal:  9000 kB\nMemAvailable:   8000 kB\nSwapFree: 7 kB\n");
    }
    void write(const std::string& path, const std::string& text) {
        std::filesystem::create_directories(std::filesystem::path(path).parent_path());
        std::ofstream(path) << text;
    }
    Folder folder;
    MemoryFiles files{folder / "proc", folder / "cgroup"};
};

TEST(MemoryRoom, IsWhatTheSystemSaysIsFree) {
    const System system;
    const MemoryRoom room = memory_room(system.files);
    EXPECT_EQ(room.bytes, 8000U << 10);
    EXPECT_EQ(room.of, "that are free");
}
TEST(MemoryRoom, IsWhatTheTightestControlGroupLeaves) {
    System system;
    const std::string& root = system.files.cgroup;
    system.write(system.files.proc + "/self/cgroup", "0::/outer/inner\n");
    system.write(root + "/outer/memory.max", "5000000\n");
    system.write(root + "/outer/memory.current", "3000000\n");
    system.write(root + "/outer/memory.stat", "anon 1\ninactive_file 700000\nactive_file 300000\n");
    system.write(root + "/outer/inner/memory.max", "max\n");
    system.write(root + "/outer/inner/memory.current", "2900000\n");
    EXPECT_EQ(memory_room(system.files).bytes, 3000000U);  // 5000000 - (3000000 - 1000000)
    EXPECT_THAT(memory_room(system.files).of, HasSubstr("control group"));
    system.write(root + "/outer/inner/memory.max", "2000000\n");
    EXPECT_EQ(memory_room(system.files).bytes, 0U);
}
TEST(MemoryRoom, ReadsTheFirstVersionOfControlGroupsToo) {
    System system;
    const std::string root = system.files.cgroup + "/memory";
    system.write(system.files.proc + "/self/cgroup", "7:cpu,cpuacct:/x\n4:memory:/docker/of-the-host\n");
    system.write(root + "/memory.limit_in_bytes", "4000000\n");
    system.write(root + "/memory.usage_in_bytes", "1500000\n");
    system.write(root + "/memory.stat", "inactive_file 1\ntotal_inactive_file 400000\ntotal_active_file 100000\n");
    EXPECT_EQ(memory_room(system.files).bytes, 3000000U);
}
TEST(MemoryRoom, IsWhatTheEnvironmentAllows) {
    const System system;
    (void)setenv("FAULTLINE_MEMORY_MIB", "3", 1);
    EXPECT_EQ(memory_room(system.files).bytes, 3U << 20);
    EXPECT_THAT(memory_room(system.files).of, HasSubstr("FAULTLINE_MEMORY_MIB"));
    for (const char* text : {"0", "-1", "3x", " 3", "99999999999999999999"}) {
        (void)setenv("FAULTLINE_MEMORY_MIB", text, 1);
        EXPECT_THROW((void)memory_room(system.files), RequestError) << text;
    }
    (void)setenv("FAULTLINE_MEMORY_MIB", "", 1);
    EXPECT_EQ(memory_room(system.files).bytes, 8000U << 10);
    (void)unsetenv("FAULTLINE_MEMORY_MIB");
}
TEST(MemoryRoom, OfThisProcessIsSome) {
    const MemoryRoom room = memory_room();
    EXPECT_GT(room.bytes, 1U << 20);
    EXPECT_THAT(room.of, StartsWith("that"));
}

}  // namespace
}  // namespace faultline::gpt
