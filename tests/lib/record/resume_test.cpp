// SPDX-License-Identifier: Apache-2.0
// A run that is killed and goes on has the content of one that never stopped.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include <faultline/record/h5.hpp>
#include <faultline/record/record_file.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/record/run_file.hpp>

#include "support.hpp"

namespace faultline {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::request_error;
using test::work_error;
using ::testing::HasSubstr;

constexpr std::int64_t layers = 3;
constexpr std::int64_t stride = 10;  // of the steps' numbers: not every optimizer step is recorded
const std::vector<std::string> layer_names{"layer0", "layer1", "layer2"};

/// A run of series of several types and shapes, whose values depend on the step alone.
class Training {
  public:
    explicit Training(RunFile file, const std::vector<std::string>& names = layer_names) : file_(std::move(file)) {
        file_.coordinate("steps/layer", names);
        file_.coordinate("steps/position", std::vector<std::int64_t>{1, 2});
        file_.attribute("steps", "data", "synthetic");
        const std::vector<Axis> axes{{"layer", layers}};
        loss_ = file_.series("loss", Dtype::f64, {}, {"training loss", "nat"});
        sigma_ = file_.series("sigma", Dtype::f32, axes, {"largest singular value of W_Q", "1"});
        half_ = file_.series("half", Dtype::bf16, axes, {"a gradient", "1"});
        file_.start();
    }
    void step(std::int64_t i) {
        if (i % 3 != 0) file_.set(loss_, static_cast<double>(i) / 7);  // else NaN
        std::vector<float> sigma;
        std::vector<std::uint16_t> half;
        for (std::int64_t l = 0; l < layers; ++l) {
            sigma.push_back(static_cast<float>(i * layers + l));
            half.push_back(static_cast<std::uint16_t>(0x3F80 + i + l));
        }
        file_.set(sigma_, std::span<const float>(sigma));
        file_.set_bytes(half_, Dtype::bf16, std::as_bytes(std::span<const std::uint16_t>(half)));
        file_.end_step(stride * i);
    }
    RunFile& file() { return file_; }

  private:
    RunFile file_;
    RunFile::Series loss_, sigma_, half_;
};

Manifest manifest() {
    Manifest same = make_manifest("run", "faultline train", "seed = 1\n", 1);
    same.created_utc = "2026-11-30T00:00:00Z";  // in the writers that are forked, too: the files are compared
    return same;
}

/// Everything that a reader can see of a file.
std::string content(const std::string& path) {
    const RecordReader reader(path);
    std::string all;
    const auto attributes = [&](const std::string& object) {
        for (const std::string& name : reader.attributes(object))
            all += object + "@" + name + "=" + reader.attribute(object, name).value_or("?") + "\n";
    };
    attributes("");
    attributes("steps");
    for (const std::string& dataset : reader.datasets()) {
        all += dataset;
        for (const Axis& axis : reader.axes(dataset)) all += " " + axis.name + ":" + std::to_string(axis.size);
        all += "\n";
        attributes(dataset);
        if (dataset == "steps/layer") {
            for (const std::string& name : reader.read_strings(dataset)) all += name + "\n";
        } else {
            const Tensor values = reader.read(dataset);
            all += std::string(print_name(values.dtype)) + " ";
            all.append(reinterpret_cast<const char*>(values.bytes.data()), values.bytes.size());
        }
    }
    return all;
}

void expect_same(const std::string& a, const std::string& b) {
    EXPECT_TRUE(content(a) == content(b)) << a << " and " << b << " differ";
    if (std::system("command -v h5diff > /dev/null") != 0) return;
    EXPECT_EQ(std::system(("h5diff '" + a + "' '" + b + "'").c_str()), 0);  // an independent judge
}

void never_stopped(const std::string& path, std::int64_t steps) {
    Training run(RunFile::create(path, manifest()));
    for (std::int64_t i = 0; i < steps; ++i) run.step(i);
    run.file().close();
}

TEST(Resume, GoesOnAfterAnyStep) {
    constexpr std::int64_t steps = 1300;  // more than a chunk of every series has
    const Folder folder;
    never_stopped(folder / "whole.h5", steps);
    for (const std::int64_t kept : {0, 1, 500, 1300}) {
        SCOPED_TRACE(kept);
        fs::copy_file(folder / "whole.h5", folder / "part.h5", fs::copy_options::overwrite_existing);
        Training run(RunFile::resume(folder / "part.h5", stride * kept - 1));  // step `kept` has a larger number
        ASSERT_EQ(run.file().steps(), kept);
        EXPECT_EQ(run.file().last_step(), kept == 0 ? std::nullopt : std::optional(stride * (kept - 1)));
        EXPECT_EQ(RecordReader(folder / "part.h5").read("steps/step").shape[0], kept);  // readers watch it
        for (std::int64_t i = kept; i < steps; ++i) run.step(i);
        run.file().close();
        expect_same(folder / "whole.h5", folder / "part.h5");
    }
}

/// A process that writes (or resumes) until it is killed, telling each completed step.
pid_t start_writer(const std::string& path, std::int64_t after, int to) {
    const pid_t child = ::fork();
    if (child != 0) return child;
    try {
        Training run(after < 0 ? RunFile::create(path, manifest()) : RunFile::resume(path, stride * after));
        for (std::int64_t i = after + 1;; ++i) {
            run.step(i);
            if (::write(to, &i, sizeof i) != sizeof i) ::_exit(1);
        }
    } catch (const std::exception&) {
    }
    ::_exit(1);
}

TEST(Resume, KilledAgainAndAgain) {
    const Folder folder;
    const std::string path = folder / "run.h5";
    std::int64_t completed = -1;
    for (const int patience : {20000, 0, 500, 1000, 2000, 4000, 8000, 16000}) {
        SCOPED_TRACE(patience);
        int ends[2];
        ASSERT_EQ(::pipe(ends), 0);
        // A checkpoint that is older than the last step recorded.
        const std::int64_t checkpoint = completed < 0 ? -1 : completed - completed / 4;
        const pid_t child = start_writer(path, checkpoint, ends[1]);
        ::close(ends[1]);
        std::int64_t step = -1;
        if (checkpoint < 0) {
            ASSERT_EQ(::read(ends[0], &step, sizeof step), static_cast<ssize_t>(sizeof step));
            completed = step;
        }
        ::usleep(static_cast<useconds_t>(patience));
        ::kill(child, SIGKILL);
        ::waitpid(child, nullptr, 0);
        bool resumed = false;
        while (::read(ends[0], &step, sizeof step) == sizeof step) completed = step, resumed = true;
        ::close(ends[0]);
        // Killed before it had resumed, it lost nothing; afterwards every completed step is there.
        const auto steps = RecordReader(path).read("steps/step").to_double();
        const std::int64_t least = resumed || checkpoint < 0 ? completed : checkpoint;
        ASSERT_GE(static_cast<std::int64_t>(steps.size()), least + 1);
        completed = static_cast<std::int64_t>(steps.size()) - 1;
        for (std::size_t i = 0; i < steps.size(); ++i)
            ASSERT_EQ(steps[i], static_cast<double>(stride) * static_cast<double>(i));
    }
    const std::int64_t end = completed + 50;
    Training run(RunFile::resume(path, stride * completed));
    for (std::int64_t i = completed + 1; i < end; ++i) run.step(i);
    run.file().close();
    never_stopped(folder / "whole.h5", end);
    expect_same(folder / "whole.h5", path);
    EXPECT_FALSE(fs::exists(path + ".partial"));
}

TEST(Resume, RefusesWhatDoesNotFitAndLeavesTheRunAlone) {
    const Folder folder;
    const std::string path = folder / "run.h5";
    never_stopped(path, 3);
    const std::string before = test::read_file(path);
    EXPECT_THAT(
        request_error([&] {
            Training(RunFile::resume(path, 100), {"a", "b", "c"});
        }),
        HasSubstr("dataset \"steps/layer\": has other values: expected the coordinates that the run began with"));
    EXPECT_THAT(request_error([&] {
                    RunFile run = RunFile::resume(path, 100);
                    (void)run.series("loss", Dtype::f32, {});
                    run.start();
                }),
                HasSubstr("dataset \"steps/loss\": is of another type or shape: expected float32 over (step"));
    EXPECT_THAT(request_error([&] {
                    RunFile run = RunFile::resume(path, 100);
                    (void)run.series("loss", Dtype::f64, {});
                    run.start();
                }),
                HasSubstr("is in the run and was not declared"));
    EXPECT_THAT(request_error([&] {
                    RunFile run = RunFile::resume(path, 100);
                    (void)run.series("other", Dtype::f64, {});
                    run.start();
                }),
                HasSubstr("dataset \"steps/other\": is not in the run"));
    EXPECT_THAT(request_error([&] { (void)RunFile::resume(folder / "none.h5", 0); }), HasSubstr("none.h5"));
    RecordFile::create(folder / "other.h5", make_manifest("attribution", "", "", 0)).commit();
    EXPECT_THAT(request_error([&] { (void)RunFile::resume(folder / "other.h5", 0); }),
                HasSubstr("kind is \"attribution\": expected \"run\""));
    EXPECT_TRUE(test::read_file(path) == before);
    EXPECT_FALSE(fs::exists(path + ".partial"));
}

/// Where in the file the only chunk of a series lies.
std::size_t chunk_of(const std::string& path, const std::string& dataset) {
    h5::silence();
    const h5::Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
    const h5::Handle values(H5Dopen2(file, dataset.c_str(), H5P_DEFAULT), H5Dclose);
    const h5::Handle space(H5Dget_space(values), H5Sclose);
    haddr_t address = 0;
    EXPECT_GE(H5Dget_chunk_info(values, space, 0, nullptr, nullptr, &address, nullptr), 0) << dataset;
    return static_cast<std::size_t>(address);
}

TEST(Resume, ADamagedStepIsOneSentence) {
    const Folder folder;
    const std::string path = folder / "run.h5";
    never_stopped(path, 5);
    const std::string whole = test::read_file(path);
    const std::size_t widths[] = {8, 8, 4 * layers, 2 * layers};
    const char* const series[] = {"steps/step", "steps/loss", "steps/sigma", "steps/half"};
    for (std::size_t i = 0; i < std::size(series); ++i) {
        std::string bytes = whole;
        const std::size_t at = chunk_of(path, series[i]) + 2 * widths[i] + 1;  // in the third step
        bytes[at] = static_cast<char>(bytes[at] ^ 4);
        test::write_file(folder / "damaged.h5", bytes);
        const std::string expected = (folder / "damaged.h5") + ": dataset \"" + series[i] +
                                     "\": index 2 of the steps is damaged, its CRC-32 is ";
        EXPECT_THAT(request_error([&] { Training run(RunFile::resume(folder / "damaged.h5", 100)); }),
                    HasSubstr(expected));
        EXPECT_THAT(request_error([&] { (void)RecordReader(folder / "damaged.h5").read(series[i]); }),
                    HasSubstr(expected));
        EXPECT_TRUE(test::read_file(folder / "damaged.h5") == bytes);
        EXPECT_FALSE(fs::exists(folder / "damaged.h5.partial"));
    }
    std::string bytes = whole;
    bytes[chunk_of(path, "steps/checksum")] ^= 1;  // of the step numbers
    test::write_file(folder / "damaged.h5", bytes);
    EXPECT_THAT(request_error([&] { Training run(RunFile::resume(folder / "damaged.h5", 100)); }),
                HasSubstr("dataset \"steps/step\": index 0 of the steps is damaged"));
}

TEST(Resume, OfBeforeThereWereChecksums) {
    const Folder folder;
    never_stopped(folder / "whole.h5", 6);
    never_stopped(folder / "old.h5", 4);
    {
        h5::silence();
        const h5::Handle file(H5Fopen((folder / "old.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose);
        for (const char* path : {"steps/checksum", "steps/series"}) ASSERT_GE(H5Ldelete(file, path, H5P_DEFAULT), 0);
    }
    Training run(RunFile::resume(folder / "old.h5", 100));
    for (std::int64_t i = 4; i < 6; ++i) run.step(i);
    run.file().close();
    expect_same(folder / "whole.h5", folder / "old.h5");
}

TEST(Resume, LeavesALivingRunAlone) {
    const Folder folder;
    Training run(RunFile::create(folder / "run.h5", manifest()));
    run.step(0);
    EXPECT_THAT(work_error([&] { (void)RunFile::resume(folder / "run.h5", 0); }),
                HasSubstr("is being written or read: expected nobody to have it open"));
    run.step(1);
    EXPECT_EQ(run.file().steps(), 2);
}

}  // namespace
}  // namespace faultline
