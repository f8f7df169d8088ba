// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/run_file.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>

#include <faultline/record/h5.hpp>
#include <faultline/record/record_reader.hpp>

#include "full_disk.hpp"
#include "support.hpp"

namespace faultline {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::work_error;
using ::testing::HasSubstr;

constexpr std::int64_t layers = 3;

/// A run of one scalar and one vector series; step i has loss i/2 and sigma (i, i+1, i+2).
struct Example {
    explicit Example(const std::string& path)
        : Example(RunFile::create(path, make_manifest("run", "faultline train", "", 1))) {}
    explicit Example(RunFile begun) : run(std::move(begun)) {
        const std::vector<std::string> names{"layer0", "layer1", "layer2"};
        run.coordinate("steps/layer", names);
        loss = run.series("loss", Dtype::f64, {}, {"training loss", "nat"});
        const std::vector<Axis> axes{{"layer", layers}};
        sigma = run.series("sigma", Dtype::f32, axes, {"largest singular value of W_Q", "1"});
        run.start();
    }
    void step(std::int64_t i) {
        run.set(loss, static_cast<double>(i) / 2);
        std::vector<float> values;
        for (std::int64_t l = 0; l < layers; ++l) values.push_back(static_cast<float>(i + l));
        run.set(sigma, std::span<const float>(values));
        run.end_step(10 * i);
    }
    RunFile run;
    RunFile::Series loss, sigma;
};

void expect_steps(const RecordReader& reader, std::int64_t count) {
    const auto step = reader.read("steps/step").to_double();
    const auto loss = reader.read("steps/loss").to_double();
    const auto sigma = reader.read("steps/sigma").to_double();
    ASSERT_GE(static_cast<std::int64_t>(step.size()), count);
    ASSERT_GE(loss.size(), step.size());  // the step number goes last
    ASSERT_GE(sigma.size(), step.size() * layers);
    for (std::size_t i = 0; i < step.size(); ++i) {
        ASSERT_EQ(step[i], 10.0 * static_cast<double>(i));
        ASSERT_EQ(loss[i], static_cast<double>(i) / 2);
        for (std::size_t l = 0; l < layers; ++l) ASSERT_EQ(sigma[i * layers + l], static_cast<double>(i + l));
    }
}

TEST(RunFile, CanBeWatchedWhileItGrows) {
    const Folder folder;
    Example example(folder / "run.h5");
    EXPECT_TRUE(fs::exists(folder / "run.h5"));
    EXPECT_FALSE(fs::exists(folder / "run.h5.partial"));
    for (std::int64_t i = 0; i < 20; ++i) {
        example.step(i);
        const RecordReader reader(folder / "run.h5");
        expect_steps(reader, i + 1);
        EXPECT_EQ(reader.manifest().kind, "run");
    }
    example.run.close();
    const RecordReader reader(folder / "run.h5");
    expect_steps(reader, 20);
    EXPECT_EQ(reader.axes("steps/sigma")[0].name, "step");
    EXPECT_EQ(reader.axes("steps/sigma")[1].name, "layer");
    EXPECT_EQ(reader.attribute("steps/loss", "units"), "nat");
}

TEST(RunFile, IsPartialUntilItStarts) {
    const Folder folder;
    { RunFile run = RunFile::create(folder / "run.h5", make_manifest("run", "", "", 0)); }
    EXPECT_TRUE(folder.empty());
}

TEST(RunFile, WhatAStepDoesNotSetIsNaN) {
    const Folder folder;
    RunFile run = RunFile::create(folder / "run.h5", make_manifest("run", "", "", 0));
    const auto real = run.series("real", Dtype::f64, {});
    const auto half = run.series("half", Dtype::bf16, {});
    const auto count = run.series("count", Dtype::i64, {});
    run.start();
    run.end_step(0);
    run.set(real, 1.0);
    run.set(half, std::uint16_t{0x3F80});
    run.set(count, std::int64_t{1});
    run.end_step(1);
    run.end_step(2);
    EXPECT_EQ(run.steps(), 3);
    run.close();
    const RecordReader reader(folder / "run.h5");
    for (const char* path : {"steps/real", "steps/half"}) {
        const auto values = reader.read(path).to_double();
        EXPECT_TRUE(std::isnan(values[0]) && values[1] == 1 && std::isnan(values[2])) << path;
    }
    EXPECT_EQ(reader.read("steps/count").to_double(), (std::vector<double>{0, 1, 0}));
}

TEST(RunFile, MistakesOfTheCallerAreSentences) {
    const Folder folder;
    Example example(folder / "run.h5");
    EXPECT_THAT(work_error([&] { (void)example.run.series("late", Dtype::f64, {}); }),
                HasSubstr("series \"late\": the run has started: expected it before start()"));
    EXPECT_THAT(work_error([&] { example.run.set(example.loss, 1.0f); }),
                HasSubstr("values are float32: expected float64"));
    const std::vector<float> two(2);
    EXPECT_THAT(work_error([&] { example.run.set(example.sigma, std::span<const float>(two)); }),
                HasSubstr("series \"steps/sigma\": 2 values: expected as many as shape [3] has"));
    RunFile run = RunFile::create(folder / "other.h5", make_manifest("run", "", "", 0));
    EXPECT_THAT(work_error([&] { run.end_step(0); }), HasSubstr("step 0: expected start() before it"));
}

/// Opens as a reader that knows nothing of SWMR.
bool opens_plainly(const std::string& path) {
    h5::silence();
    const h5::Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
    return file.valid();
}

TEST(RunFile, KilledRunKeepsEveryCompletedStep) {
    // Killed at different moments, in whatever it was doing.
    for (const int patience : {0, 300, 1000, 3000, 10000, 30000}) {
        const Folder folder;
        const std::string path = folder / "run.h5";
        int ends[2];
        ASSERT_EQ(::pipe(ends), 0);
        const pid_t child = ::fork();
        if (child == 0) {
            Example example(path);
            for (std::int64_t i = 0;; ++i) {
                example.step(i);
                if (::write(ends[1], &i, sizeof i) != sizeof i) ::_exit(1);
            }
        }
        ::close(ends[1]);
        std::int64_t completed = -1;
        ASSERT_EQ(::read(ends[0], &completed, sizeof completed), static_cast<ssize_t>(sizeof completed));
        ::usleep(static_cast<useconds_t>(patience));
        ::kill(child, SIGKILL);
        ::waitpid(child, nullptr, 0);
        for (std::int64_t i; ::read(ends[0], &i, sizeof i) == sizeof i;) completed = i;
        ::close(ends[0]);
        ASSERT_GE(completed, 0);
        expect_steps(RecordReader(path), completed + 1);
        mend_run(path);
        EXPECT_TRUE(opens_plainly(path));
        expect_steps(RecordReader(path), completed + 1);
    }
}

TEST(RunFile, AThrownErrorLeavesCompletedSteps) {
    const Folder folder;
    try {
        Example example(folder / "run.h5");
        example.step(0);
        throw std::runtime_error("the work failed");
    } catch (const std::runtime_error&) {
    }
    EXPECT_TRUE(opens_plainly(folder / "run.h5"));
    expect_steps(RecordReader(folder / "run.h5"), 1);
}

TEST(RunFile, MendLeavesALivingRunAlone) {
    const Folder folder;
    Example example(folder / "run.h5");
    example.step(0);
    EXPECT_EQ(work_error([&] { mend_run(folder / "run.h5"); }),
              (folder / "run.h5") + ": is being written or read: expected nobody to have it open");
    example.step(1);
    example.run.close();
    mend_run(folder / "run.h5");
    expect_steps(RecordReader(folder / "run.h5"), 2);
}

TEST(RunFile, FullDiskIsOneSentenceAndKeepsWhatThereIs) {
    const Folder folder;
    const std::string path = folder / "run.h5";
    const std::string said = test::with_file_limit(96 << 10, [&] {
        Example example(path);
        for (std::int64_t i = 0; i < 100000; ++i) example.step(i);
    });
    EXPECT_THAT(said, HasSubstr(path + ": cannot write "));
    EXPECT_THAT(said, HasSubstr("(File too large): expected a writable folder with room for it"));
    expect_steps(RecordReader(path), 1);
}

}  // namespace
}  // namespace faultline
